"""The receiving half of a connector: its senders, what is wanted of them, and the payloads that arrived."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import torch
import trio

from ._afterwork import Afterwork
from ._arrival import Arrival, StockArrival
from ._buffer import ManagedBuffer
from ._config import ConnectorConfig, Endpoint
from ._errors import (
    ConnectorClosed,
    EngineMismatch,
    Expired,
    Gone,
    NoRoom,
    NotReady,
    PeerLost,
    PeerRestarted,
    TooBig,
    TransferFailed,
    TrioMoriError,
)
from ._gpu import current_stream, mark, wait_over, working_on
from ._heartbeat import Heartbeat
from ._keys import Keys
from ._lease import Lease
from ._link import QueuedLink
from ._payload import Restored, glance
from ._payload_gpu import make_on_gpu
from ._payload_types import PayloadTypes
from ._pool import INLINE_COPY, Pool
from ._protocol import interests as book
from ._protocol import wire
from ._protocol.extents import INBOUND, Extent
from ._protocol.inbox import Inbox
from ._protocol.interests import Channel, Interest, State
from ._protocol.keys import edge_of, names_of
from ._quarantine import Quarantined, QuarantineWatch
from ._stock import StockSender
from ._traffic import Traffic
from ._upstream import CHANGED_DIALECT, Upstream
from .abc import Engine, Landing

logger = logging.getLogger("trio_mori.receiver")

# A reason of `Interest.failure` beside those of the book.
_CLOSED = 300

# What a GPU copies within 0.2 ms, at the 2 TB/s of an H200; it is waited for in place.
INLINE_GPU = 256 << 20

# How long a close waits for senders to say that they have read everything. They answer within a round trip.
FAREWELL = 0.25


class Receiver:
    """Runs in the nursery of its connector, which has `heartbeat` go on; senders are dialled as they are named."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        engine: Engine,
        pool: Pool,
        nursery: trio.Nursery,
        deployment: wire.Deployment,
        payload_types: PayloadTypes,
        keys: Keys | None = None,
    ) -> None:
        size = pool.extents.size
        self.traffic = Traffic()
        self.upstreams: dict[Endpoint, Upstream] = {}
        self.book = Inbox(
            pool.extents,
            prepost_limit=int(size * config.prepost_fraction),
            quarantine_limit=int(size * config.quarantine_fraction),
        )
        self.config = config
        self.engine = engine
        self._pool = pool
        self.nursery = nursery
        self.deployment = deployment
        self.payload_types = payload_types
        self._device = None if config.payload_device == "pool" else torch.device(config.payload_device)
        self.keys = keys
        self.heartbeat = Heartbeat(config, beat=self._beat, is_at_rest=self._is_at_rest)
        self.cut_off = 0  # connections to senders, for messages without an end
        self._quarantine = QuarantineWatch(self._name_of)
        self._closing = False
        self._placing = False
        self._spinning = False
        self._settled = trio.Event()
        self._copied: list[Interest] = []  # their calls have returned, and their senders are yet to be told
        self._led: list[QueuedLink] = []  # whose messages a call has read that has returned
        self._afterwork = Afterwork(self._do_afterwork)
        pool.on_room = self._note_room
        pool.on_shortage = self.tidy

    # --- gets ---------------------------------------------------------------------------------------------

    async def get(self, endpoint: Endpoint, key: str, known: Mapping[str, object]) -> object:
        """The payload of a full key, in memory of its own; waits until the sender has it."""
        stream = self._callers_stream()
        return await self._collect(await self.take(endpoint, key, known), stream)

    def get_nowait(self, endpoint: Endpoint, key: str, known: Mapping[str, object]) -> object:
        """As `get`, if the payload is here; otherwise ask for it, and keep asking.

        Raises:
            NotReady: it has not come yet.
            NoRoom: it waits at the sender for room in this pool.
        """
        arrival = self.take_nowait(endpoint, key, known)
        try:
            value = arrival.restore()
        except BaseException:
            arrival.give_back()
            raise
        arrival.finish()
        return value

    async def take(self, endpoint: Endpoint, key: str, known: Mapping[str, object]) -> Arrival | StockArrival:
        """The payload of a full key, where it arrived."""
        while True:
            upstream = await self._ready_upstream(endpoint)
            interest = upstream.parked.pop(key, None)
            if interest is None and upstream.stock is not None:
                arrival = await upstream.stock.take(key, known)
                if arrival is None:
                    continue  # another sender has taken its place
                self.traffic.count(edge_of(key), arrival.size)
                return arrival
            if interest is None:
                interest = self.book.post(upstream.channel, key)
            if await self._wait(interest):
                return self._begin(interest)

    def take_nowait(self, endpoint: Endpoint, key: str, known: Mapping[str, object]) -> Arrival | StockArrival:
        """As `take`, if the payload is here; otherwise as `get_nowait`."""
        upstream = self._upstream(endpoint)
        interest = upstream.parked.get(key)
        if interest is None:
            if upstream.refusal is not None:
                raise upstream.refusal
            if upstream.stock is not None:
                arrival = upstream.stock.take_nowait(key, known)
                self.traffic.count(edge_of(key), arrival.size)
                return arrival
            interest = upstream.parked[key] = self.book.post(upstream.channel, key)
            self.flush()
        if interest.state is State.OFFERED:
            raise NoRoom(
                f"get of {key!r}: its {interest.needed} bytes wait at the sender, for this pool has no room now; "
                "release leases, get faster, or raise memory_pool_size",
                size=interest.needed,
                free=self._pool.extents.free_bytes,
                quarantined=self.book.quarantined,
            )
        if not interest.settled:
            raise NotReady(f"{key!r} has not come from {endpoint.address} yet; ask again later, or wait for it in get")
        del upstream.parked[key]
        self._check(interest)
        return self._begin(interest)

    def ask(self, endpoint: Endpoint, key: str, epoch: bytes | None) -> Ask:
        """Ask for a payload ahead of the time when it is waited for.

        Args:
            epoch: Only of this incarnation of the sender, if it is known.
        """
        upstream = self._upstream(endpoint)
        if upstream.stock is not None:
            if epoch is not None:
                raise _replaced(key, endpoint)
            return Ask(self, endpoint, key, None)
        if upstream.refusal is not None:
            raise upstream.refusal
        if key in upstream.parked and upstream.parked[key].failure is not None:
            interest = upstream.parked.pop(key)  # what was told to a call that was cancelled just then
        else:
            interest = self.book.post(upstream.channel, key, epoch=epoch)
        self.flush()
        return Ask(self, endpoint, key, interest)

    def _callers_stream(self) -> torch.cuda.Stream | None:
        """The stream on which a caller of now will use what it gets; None for host memory."""
        return current_stream(self._pool.place) if self._pool.on_gpu else None

    async def _collect(self, arrival: Arrival | StockArrival, stream: torch.cuda.Stream | None) -> object:
        try:
            if stream is not None and not stream.query():
                # The copies will be queued on it, since they take memory of its own, and be waited for. What the
                # caller has queued there before may take long; this can be cancelled, a copy cannot.
                await wait_over(mark(stream))
            if arrival.size <= INLINE_COPY or (stream is not None and arrival.is_quick):
                value = _restore_on(stream, arrival)
            else:
                # Nothing is gained by a cancellation here, and what came from a stock sender would be lost.
                with trio.CancelScope(shield=True):
                    value = await trio.to_thread.run_sync(_restore_on, stream, arrival)
        except BaseException:
            arrival.give_back()
            raise
        arrival.finish_soon()
        return value

    def _begin(self, interest: Interest) -> Arrival:
        self.book.take(interest)
        return Arrival(self, interest)

    def is_quick(self, interest: Interest) -> bool:
        """Whether a GPU makes the copy out of the pool, in as short a time as may be waited for in place."""
        if interest.size > INLINE_GPU or self._device not in (None, self._pool.place):
            return False
        # What has no recipe may hold bytes, which go to the host.
        return self._landing(interest) is None and glance(interest.header).recipe is not None

    def is_staged(self, interest: Interest) -> bool:
        """Whether it is in host memory still, though the pool is on a GPU."""
        return self._landing(interest) is not None

    def _landing(self, interest: Interest) -> Landing | None:
        return self._upstream_of(interest.channel).landing

    def land(self, interest: Interest, extent: Extent | None) -> None:
        """Bring what is staged into the pool. In any thread."""
        landing = self._landing(interest)
        if landing is not None and extent is not None:
            landing.land(extent.offset, interest.size)

    def restore(self, interest: Interest, extent: Extent | None) -> Restored:
        """The payload that came, in memory of its own. In any thread."""
        header, size, pool = interest.header, interest.size, self._pool
        if extent is None:
            return self.payload_types.restore(header, pool.region.tensor[:0], device=self._device)
        landing = self._landing(interest)
        if landing is not None:
            staged = landing.mirror[extent.offset : extent.offset + size]
            return self.payload_types.restore(header, staged, device=self._device or pool.region.tensor.device)
        recipe, address = glance(header).recipe, pool.address(extent, size)
        if recipe is not None and address and recipe.size <= size and self._device is None:
            return Restored(recipe.made_of(address), ())
        if recipe is not None and pool.on_gpu and recipe.size <= size and self._device in (None, pool.place):
            made = make_on_gpu(recipe, pool.gpu_address(extent, size), pool.place)
            if made is not None:
                return Restored(made, ())
        return self.payload_types.restore(header, pool.tensor(extent, size), device=self._device)

    def finish(self, interest: Interest) -> None:
        """It has been copied: the sender may forget it."""
        self._forget(interest)
        self.note_progress()
        self.flush()

    def _forget(self, interest: Interest) -> None:
        self.traffic.count(edge_of(interest.key), interest.size)
        extent = self.book.acknowledge(interest)
        if extent is not None:
            self.book.release(extent)

    def finish_soon(self, interest: Interest) -> None:
        """As `finish`, in the next tick: a third of what a get of a small payload does once it is here.

        What is large is finished at once. That costs nothing beside its copy; and who computes with it before the loop
        goes on would keep its room at the sender meanwhile.
        """
        if self._closing or interest.size > INLINE_COPY:
            self.finish(interest)
        else:
            self._copied.append(interest)
            self._afterwork.soon()

    def tidy(self) -> None:
        """Do now what calls that have returned left to do; by whoever would notice that it is not done yet."""
        if not self._copied:
            return
        copied, self._copied = self._copied, []
        for interest in copied:
            # Else its sender is gone, or it was given back: there is nobody to tell, and its memory is free.
            if interest.state is State.TAKEN:
                self._forget(interest)
        self.flush()

    def hand_over_soon(self, link: QueuedLink) -> None:
        """A call has read a link in the place of the task that listens, and returns."""
        self._led.append(link)
        self._afterwork.soon()

    def _do_afterwork(self) -> None:
        self.tidy()
        led, self._led = self._led, []
        for link in led:
            link.hand_over()

    @asynccontextmanager
    async def lease(self, endpoint: Endpoint, key: str, known: Mapping[str, object]) -> AsyncIterator[Lease]:
        """The payload where it arrived, for as long as the block lasts."""
        arrival = await self.take(endpoint, key, known)
        if arrival.is_staged and arrival.size > INLINE_COPY:
            try:
                with trio.CancelScope(shield=True):  # as any copy out of the pool
                    await trio.to_thread.run_sync(arrival.land)
            except BaseException:
                arrival.give_back()
                raise
        lease = arrival.keep()
        with lease.buffer:
            try:
                yield lease
            finally:
                stream = self._callers_stream()
                if stream is not None and not stream.query():  # for what the block has queued to read there
                    with trio.CancelScope(shield=True):
                        await wait_over(mark(stream))

    def keep(self, interest: Interest) -> Lease:
        """It stays where it arrived, and the sender may forget it."""
        if interest.extent is None:  # a payload without tensors; a buffer wants memory all the same
            try:
                interest.extent = self._pool.reserve_nowait(1, INBOUND)
            except TrioMoriError:
                self.give_back(interest)
                raise
        self.traffic.count(edge_of(interest.key), interest.size)
        extent = self.book.acknowledge(interest)
        assert extent is not None
        self.note_progress()
        self.flush()
        return Lease(self.buffer(extent, interest.size), interest.header, self.payload_types)

    def buffer(self, extent: Extent, size: int) -> ManagedBuffer:
        """Hand memory that was acknowledged to a caller."""

        def release() -> None:
            self.book.release(extent)
            self.flush()

        return ManagedBuffer(self._pool, extent, size, release, on_detach=lambda: self.book.hand_over(extent))

    # --- waiting ------------------------------------------------------------------------------------------

    async def _wait(self, interest: Interest) -> bool:
        """Until it arrived. False: ask again, for the sender speaks another dialect now. Gives it back on errors."""
        self.flush()
        try:
            if interest.settled:
                await trio.lowlevel.checkpoint()
            elif self.config.busy_poll_us and not self._spinning:
                await self._spin(interest)
            if not interest.settled:
                await self._upstream_of(interest.channel).lead(interest)
            if not interest.settled:
                await self._park(interest)
        except BaseException:
            self.give_back(interest)
            if interest.failure is not None and interest.failure[0] in (wire.EXPIRED, wire.GONE):
                # The sender says so once, and did as the cancellation was on its way: the next call is told.
                self._upstream_of(interest.channel).keep_notice(interest)
            raise
        if interest.failure is not None and interest.failure[0] == CHANGED_DIALECT:
            return False
        self._check(interest)
        return True

    async def _spin(self, interest: Interest) -> None:
        """Keep the run from sleeping for `busy_poll_us`, or until what is waited for is here.

        Other tasks have their turns all the while. One that waits does this for all.
        """
        deadline = trio.current_time() + self.config.busy_poll_us / 1e6
        upstream = self._upstream_of(interest.channel)
        self._spinning = True
        try:
            while not interest.settled and trio.current_time() < deadline:
                await trio.lowlevel.checkpoint()
                upstream.look()  # its own task would be woken, and then this one: two turns
        finally:
            self._spinning = False

    async def _park(self, interest: Interest) -> None:
        interest.waiter = trio.lowlevel.current_task()

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            interest.waiter = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _check(self, interest: Interest) -> None:
        if interest.failure is None:
            return
        code, detail = interest.failure
        key, endpoint = interest.key, self._upstream_of(interest.channel).endpoint
        if code == wire.EXPIRED:
            raise Expired(
                f"{key!r} expired at the sender {endpoint.address}{detail and f' ({detail})'}: get it sooner, or raise "
                "buffer_ttl_seconds there; a get that begins now waits until it is put again",
                key=key,
            )
        if code == wire.GONE:
            why = "it was cleaned up, or its stream has ended"
            raise Gone(
                f"{key!r} was dropped by the sender {endpoint.address}{detail and f' ({detail})'}: {why}; a get that "
                "begins now waits until it is put again",
                key=key,
            )
        if code == book.TOO_BIG:
            raise TooBig(
                f"{key!r} can never be received here, and stays at the sender {endpoint.address}: {detail}",
                size=interest.needed,
                limit=self._pool.extents.limit(INBOUND),
            )
        if code in (book.PEER_LOST, book.PEER_RESTARTED):
            kind = PeerLost if code == book.PEER_LOST else PeerRestarted
            raise kind(f"{key!r} will not come from the sender {endpoint.address}: {detail}", peer=endpoint.address)
        if code == book.MISMATCH:
            refusal = self.upstreams[endpoint].last_refusal
            raise refusal if refusal is not None else EngineMismatch(detail)
        if code == _CLOSED:
            raise ConnectorClosed(f"the connector was closed while get waited for {key!r}")
        if code == wire.LIMIT:
            raise NoRoom(f"get of {key!r} refused by the sender {endpoint.address}: {detail}", size=0, free=0)
        raise TransferFailed(
            f"{key!r} could not be moved here, and stays at the sender {endpoint.address}: {detail}; get it again",
            settled=interest.extent is None,
        )

    def _upstream_of(self, channel: Channel) -> Upstream:
        assert isinstance(channel.handle, Upstream)
        return channel.handle

    def give_back(self, interest: Interest) -> None:
        """It is not wanted, or could not be read; the payload stays with the sender."""
        self.book.give_back(interest)
        self.flush()

    def cancel(self, name: str, edge: str | None) -> int:
        """Give up what `get_nowait` asked for under a key or of a request; the payloads stay at their senders."""

        def is_meant(key: str) -> bool:
            return name in names_of(key) and (edge is None or edge_of(key) == edge)

        count = 0
        for upstream in self.upstreams.values():
            for key in filter(is_meant, list(upstream.parked)):
                self.book.give_back(upstream.parked.pop(key))
                count += 1
            if upstream.stock is not None:
                count += upstream.stock.cancel(is_meant)
        self.flush()
        return count

    # --- what the book left to do -------------------------------------------------------------------------

    def _note_room(self) -> None:
        # Not at once: whoever freed the memory is in the middle of a book. The other half of the pool may have done it,
        # after which nothing else would make this half look.
        if self.book.hungry.waiting and not self._placing:
            self._placing = True
            self._pool.post(self._place)

    def _place(self) -> None:
        self._placing = False
        self.flush()

    def note_progress(self) -> None:
        """Something was settled that a closing receiver may wait for."""
        if self._closing:
            self._settled.set()

    def note_cut_off(self) -> None:
        """A connection to a sender was cut off, for a message without an end or of too many parts."""
        self.cut_off += 1

    def quarantine(self, now: float) -> tuple[Quarantined, ...]:
        """What senders may still write to although nobody waits for it."""
        return self._quarantine.look(self.book.doubts(), now)

    def _name_of(self, sender: object) -> str:
        return self._upstream_of(sender).endpoint.address if isinstance(sender, Channel) else str(sender)

    @property
    def refusals(self) -> int:
        """How often a sender and this side did not accept each other's keys."""
        return sum(u.refusals for u in self.upstreams.values())

    @property
    def malformed(self) -> int:
        """Messages of senders that could not be understood."""
        return sum(u.malformed for u in self.upstreams.values())

    @property
    def timeouts(self) -> int:
        """How often a sender was given up."""
        return sum(u.timeouts for u in self.upstreams.values())

    def flush(self) -> None:
        """Carry out what the book decided: wake callers, send messages."""
        if self.book.hungry.waiting:
            self.book.find_room()
        if self.heartbeat.rests:
            self.heartbeat.note()
        if self.book.waking:
            waking, self.book.waking = self.book.waking, []
            for interest in waking:
                task, interest.waiter = interest.waiter, None
                if isinstance(task, trio.lowlevel.Task):
                    trio.lowlevel.reschedule(task)
                elif isinstance(task, QueuedLink):
                    task.rouse()
        if self.book.talking:
            talking, self.book.talking = self.book.talking, {}
            for channel in talking:
                self._upstream_of(channel).compose_later()

    # --- senders ------------------------------------------------------------------------------------------

    def _upstream(self, endpoint: Endpoint) -> Upstream:
        self.tidy()
        if self._closing:
            raise ConnectorClosed("get after the connector was closed")
        upstream = self.upstreams.get(endpoint)
        if upstream is None:
            upstream = Upstream(endpoint, self.book.open_channel(os.urandom(16)), self)
            self.upstreams[endpoint] = upstream.channel.handle = upstream
            self.nursery.start_soon(upstream.talk)
            self.heartbeat.note()
            if len(self.upstreams) == 1:
                self.heartbeat.begin()
                self.nursery.start_soon(self._afterwork.do_forever)
        return upstream

    async def _ready_upstream(self, endpoint: Endpoint) -> Upstream:
        """A sender of which it is known what it speaks."""
        upstream = self._upstream(endpoint)
        while True:
            dialect = upstream.dialect
            if not dialect.known.is_set():
                await dialect.known.wait()
            if self._closing:
                raise ConnectorClosed(f"the connector was closed while get waited for the sender {endpoint.address}")
            refusal = dialect.refusal
            if refusal is not None:
                await trio.lowlevel.checkpoint()
                raise refusal  # although it may be over by now: the next call finds that
            if dialect is upstream.dialect:
                return upstream

    def stock_sender(self, endpoint: Endpoint) -> StockSender:
        """How a stock sender at an endpoint is asked."""
        return StockSender(
            endpoint.host,
            endpoint.port,
            config=self.config,
            keys=self.keys,
            engine=self.engine,
            pool=self._pool,
            book=self.book,
            nursery=self.nursery,
            buffer=self.buffer,
            note_progress=self.note_progress,
            note_cut_off=self.note_cut_off,
        )

    def _beat(self, late: float) -> None:
        for upstream in self.upstreams.values():
            upstream.beat(trio.current_time(), late)
        # Not what was cancelled a moment ago: its sender answers in a round trip.
        self._quarantine.tell(self.book.doubts(), trio.current_time(), after=self.config.heartbeat_interval / 2)
        self.flush()

    def _is_at_rest(self) -> bool:
        return all(upstream.channel.is_at_rest for upstream in self.upstreams.values())

    # --- closing ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all waiting: each call is told that the connector is closed. Idempotent."""
        self.tidy()
        self._closing = True
        for upstream in self.upstreams.values():
            upstream.stop()
            self.book.fail_all(upstream.channel, _CLOSED, "")
            for interest in list(upstream.channel.interests.values()):
                if interest.state is State.ARRIVED:
                    self.book.refuse(interest, _CLOSED)
        self.flush()

    async def drain(self, deadline: float) -> bool:
        """End all waiting, and get every destination back. False: a sender may still write into the pool."""
        self.stop()
        await self._wait_until(lambda: not self.book.touched, deadline)
        reading = any(i.state is State.TAKEN for u in self.upstreams.values() for i in u.channel.interests.values())
        for upstream in self.upstreams.values():
            for interest in list(upstream.channel.interests.values()):
                if interest.state is State.TAKEN:  # its copy has not ended: it stays with the sender
                    self.book.give_back(interest)
            self.book.heartbeat(upstream.channel)
        self.flush()
        # Whoever has answered a heartbeat has read what was acknowledged before it, and will not deliver that again.
        await self._wait_until(
            lambda: all(u.has_heard for u in self.upstreams.values()), trio.current_time() + FAREWELL
        )
        for upstream in self.upstreams.values():
            upstream.say_goodbye()
        await trio.lowlevel.checkpoint()
        return not (reading or self.book.touched)

    async def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        with trio.CancelScope(deadline=deadline):
            while not condition():
                self._settled = trio.Event()
                await self._settled.wait()


class Ask:
    """A payload that was asked for. Wait for it with `receive`, or give it back.

    Attributes:
        epoch: After `receive`: the incarnation of the sender that it came from.
    """

    def __init__(self, receiver: Receiver, endpoint: Endpoint, key: str, interest: Interest | None) -> None:
        self.epoch: bytes | None = None
        self._receiver = receiver
        self._endpoint = endpoint
        self._key = key
        self._interest = interest

    async def receive(self) -> object:
        """The payload, in memory of its own. If this is cancelled or fails, it was given back."""
        interest, receiver = self._interest, self._receiver
        stream = receiver._callers_stream()
        if interest is not None:
            bound = interest.epoch is not None
            if await receiver._wait(interest):
                self.epoch = interest.epoch
                return await receiver._collect(receiver._begin(interest), stream)
            if bound:
                raise _replaced(self._key, self._endpoint)
        return await receiver.get(self._endpoint, self._key, {})

    def give_back(self) -> None:
        """It is not wanted any more; it stays with the sender."""
        if self._interest is not None:
            self._receiver.give_back(self._interest)


def _restore_on(stream: torch.cuda.Stream | None, arrival: Arrival | StockArrival) -> object:
    if stream is None or stream is current_stream(stream.device):  # to enter it takes 50 us after a pause
        return arrival.restore()
    with working_on(stream):
        return arrival.restore()


def _replaced(key: str, endpoint: Endpoint) -> PeerRestarted:
    return PeerRestarted(
        f"{key!r} will not come from the sender {endpoint.address}: a stock sender took its place; a stream does "
        "not outlive its sender, begin it again",
        peer=endpoint.address,
    )
