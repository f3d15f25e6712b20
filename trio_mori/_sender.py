"""The sending half of a connector: its listener, its payloads, and the writes into receivers' pools."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from math import inf

import torch
import trio

from . import _payload
from ._buffer import ManagedBuffer
from ._config import ConnectorConfig, Endpoint
from ._errors import ConnectorClosed, NoRoom, TransferFailed
from ._events import EXPIRED, PEER_LOST, UNFETCHED
from ._gpu import current_stream, mark, wait_over
from ._pool import INLINE_COPY, Pool
from ._protocol import stock_wire, wire
from ._protocol.entries import Course, Entry, Fetch, Session, StockCaller, Ticket
from ._protocol.extents import OUTBOUND, Extent
from ._protocol.keys import edge_of
from ._protocol.outbox import Outbox, OutboxLimits
from ._quarantine import Quarantined, QuarantineWatch
from ._reception import NativePeer, Reception
from ._room_watch import RoomWatch
from ._staging import Reservation, plan_payload
from ._statistics import Receipt
from ._stock_reception import StockPeer
from ._traffic import Traffic
from .abc import Engine, EnginePeer, Posted, Write

logger = logging.getLogger("trio_mori.sender")

# How long a close waits for receivers to say that they heard of it. They answer within a round trip.
FAREWELL = 0.25

# Keys of payloads that one line of a log names; all are in its record.
SHOWN = 5


class Sender:
    """Runs in the nursery of its connector, which starts `sweep` once; whoever listens for it runs `reception.serve`.

    Attributes:
        endpoint: Where it listens, as receivers are told.
        room: Puts that wait for some.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        engine: Engine,
        pool: Pool,
        nursery: trio.Nursery,
        deployment: wire.Deployment,
        endpoint: Endpoint,
    ) -> None:
        self.epoch = os.urandom(16)
        self.traffic = Traffic()
        self.book = Outbox(
            pool.extents,
            OutboxLimits(
                ttl=config.ttl,
                acknowledge_timeout=config.acknowledge_timeout,
                transfer_timeout=config.transfer_timeout,
                max_fetches=config.max_fetches_per_peer,
                max_sessions=config.max_peers,
                stock_keep=config.stock_keep,
            ),
        )
        self._config = config
        self.endpoint = endpoint
        self._engine = engine
        self._pool = pool
        self._nursery = nursery
        self.closing = False
        self._quarantine = QuarantineWatch(_name_of)
        self._settled = trio.Event()  # replaced whenever somebody waits; set when a write or a session ends
        self.room = RoomWatch()
        self._emptied: trio.Event | None = None  # while somebody waits for it: nothing is held, or it never will be so
        self._is_cut_off = False  # closed while something was held
        self._nap = trio.CancelScope()
        self._asleep_until = inf
        self.reception = Reception(
            self, config=config, engine=engine, pool=pool, nursery=nursery, deployment=deployment
        )

    # --- puts ---------------------------------------------------------------------------------------------

    async def put(self, key: str, data: object) -> Receipt:
        """Copy a payload into the pool and publish it; wait for room."""
        if isinstance(data, ManagedBuffer) and data.belongs_to(self._pool):
            self._check_open(key)
            size = data.size
            if self._pool.on_gpu:  # for what the caller has queued to be written there
                stream = current_stream(self._pool.place)
                if not stream.query():
                    await wait_over(mark(stream))
                self._nudge(key)
            return await data.detach(OUTBOUND, lambda extent: self._publish_buffer(key, extent, size))
        await trio.lowlevel.checkpoint_if_cancelled()
        plan = data if isinstance(data, _payload.Plan) else plan_payload(data)
        try:
            reservation = self.reserve_nowait(key, plan)
        except NoRoom:
            with self.room.waiting(plan.size):
                if self.room.due < self._asleep_until:
                    self._nap.cancel()
                extent = await self._pool.reserve(plan.size, OUTBOUND)
            reservation = self._stage(key, extent, plan)
        try:
            if reservation.by_gpu:
                if plan.ready:
                    await reservation.wait_ready()
                self._nudge(key)
                if not reservation.fill_nowait():
                    await reservation.fill_soon()
            elif plan.size <= INLINE_COPY:
                reservation.fill()
            else:
                await trio.to_thread.run_sync(reservation.fill)
            # A cancellation that came too late to end the wait for room, or the copy, is in time to have nothing put.
            await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            reservation.release()
            raise
        receipt = reservation.publish()
        await trio.lowlevel.cancel_shielded_checkpoint()  # last: the receiver is on its way already
        return receipt

    def _nudge(self, key: str) -> None:
        """Have the process of who waits for a key wake while its payload is being copied."""
        fetch = self.book.next_fetch(key)
        if fetch is not None:
            receiver = fetch.session.handle
            assert isinstance(receiver, NativePeer)
            receiver.link.nudge(receiver.route)

    def put_nowait(self, key: str, data: object) -> Receipt:
        """As `put`, copying here and now, or not at all.

        Raises:
            NoRoom: the pool has no room now.
        """
        if isinstance(data, ManagedBuffer) and data.belongs_to(self._pool):
            self._check_open(key)
            size = data.size
            if self._pool.on_gpu:
                torch.cuda.current_stream(self._pool.region.tensor.device).synchronize()
            return self._publish_buffer(key, data.detach_nowait(OUTBOUND), size)
        reservation = self.reserve_nowait(key, data if isinstance(data, _payload.Plan) else plan_payload(data))
        try:
            reservation.fill()
        except BaseException:
            reservation.release()
            raise
        return reservation.publish()

    def reserve_nowait(self, key: str, plan: _payload.Plan) -> Reservation:
        """Claim room for a payload that is copied elsewhere."""
        self._check_open(key)
        return self._stage(key, self._pool.reserve_nowait(plan.size, OUTBOUND), plan)

    def has_place(self, key: str, size: int) -> bool:
        """See `Connector.has_place`."""
        return not self.closing and self.book.shelf.find(key) is None and self._pool.extents.free_bytes >= size

    def _stage(self, key: str, extent: Extent, plan: _payload.Plan) -> Reservation:
        entry = self.book.stage(key, extent)
        return Reservation(self, entry, plan, self._pool)

    def _check_open(self, key: str) -> None:
        if self.closing:
            raise ConnectorClosed(f"put of {key!r} after the connector was closed")
        self.book.shelf.check_free(key)

    def _publish_buffer(self, key: str, extent: Extent, size: int) -> Receipt:
        self._check_open(key)  # while the memory is not ours yet: it stays with the caller
        return self.publish(self.book.stage(key, extent), _payload.plan_bytes(size))

    def publish(self, entry: Entry, plan: _payload.Plan) -> Receipt:
        """Let receivers have what was staged and copied."""
        if self.closing:
            self.unstage(entry)
            raise ConnectorClosed(f"the connector was closed during the put of {entry.key!r}")
        self.book.publish(entry, header=plan.header, size=plan.size, is_raw=plan.is_raw, now=trio.current_time())
        self.flush()
        self.traffic.count(edge_of(entry.key), plan.size)
        return Receipt(plan.size, plan.is_raw, plan.whole_header, self.endpoint)

    def unstage(self, entry: Entry) -> None:
        """Give the room of a put that failed back."""
        self.book.unstage(entry)
        self.note_progress()

    def cleanup(self, name: str, edge: str | None, *, tell: bool = True) -> int:
        """Drop the payload under a key and all chunks of a request; whoever fetches one next may be told."""
        entries = [e for e in self.book.shelf.named(name) if edge is None or edge_of(e.key) == edge]
        count = self.book.cleanup(entries, tell=tell)
        if not tell:
            self.book.shelf.forget(name, edge)
        self.flush()
        return count

    def lose(self, key: str) -> None:
        """Let whoever waits for a key, or asks next, know that nothing comes under it. Takes no room."""
        self.book.lose(key)
        self.flush()

    async def wait_empty(self) -> int:
        """See `Connector.drain`."""
        counters = self.book.counters
        before = counters.expired + counters.cleaned
        await trio.lowlevel.checkpoint()
        # Somebody may put again before this has its turn: it returns only when nothing is held as it returns.
        while self._is_cut_off or not self.book.shelf.is_empty:
            if self.closing:
                raise ConnectorClosed(
                    "the connector was closed before all that was put had been fetched; the rest was dropped"
                )
            if self._emptied is None:
                self._emptied = trio.Event()
                self.book.shelf.on_empty = self._note_empty
            await self._emptied.wait()
        return counters.expired + counters.cleaned - before

    def _note_empty(self) -> None:
        self.book.shelf.on_empty = None
        if self._emptied is not None:
            self._emptied.set()
            self._emptied = None

    # --- what the book left to do -------------------------------------------------------------------------

    def flush(self) -> None:
        """Carry out what the book decided: start writes, send messages, set the alarm."""
        book = self.book
        while book.starting:
            now = trio.current_time()
            starting, book.starting = book.starting, []
            for ticket in starting:
                self._start(ticket, now)
        if book.pulls.answers:
            answers, book.pulls.answers = book.pulls.answers, []
            for caller, answer in answers:
                assert isinstance(caller.handle, StockPeer)
                caller.handle.link.send(stock_wire.encode_answer(answer), caller.route)
        if book.talking:
            for session in book.talking:
                self._compose_later(session)
            book.talking.clear()
        if book.alarm < self._asleep_until:
            self._nap.cancel()

    def _compose_later(self, session: Session) -> None:
        receiver = session.handle
        assert isinstance(receiver, NativePeer)
        if receiver.composing:
            return
        receiver.composing = True

        def compose() -> list[bytes] | None:
            receiver.composing = False
            if not session.outgoing or session.handle is not receiver:  # it went over to another link
                return None
            batch = wire.Replies(session.token, session.generation, self.epoch, session.outgoing)
            frames, count = wire.encode_batch(batch)
            session.outgoing = session.outgoing[count:]
            if session.outgoing:
                self._compose_later(session)
            return frames

        receiver.link.send(compose, receiver.route)

    def _start(self, ticket: Ticket, now: float) -> None:
        holder = ticket.holder
        handle = holder.session.handle if isinstance(holder, Fetch) else holder.handle
        assert isinstance(handle, NativePeer | StockPeer)
        if isinstance(handle, StockPeer) and now - handle.asked_at > self._config.stock_pull_limit:
            # The stock receiver frees its destination after 30 s: too late to begin.
            self._ended(ticket, now, TransferFailed("the pull is too old to be begun"))
            return
        write = Write(ticket.source, ticket.destination, ticket.size)
        try:
            begun = not ticket.size or self._engine.write_nowait(handle.peer, write)
        except TransferFailed as error:
            self._ended(ticket, now, error)
            return
        if begun is True:
            self._ended(ticket, now, None)
            return
        self.book.watch(ticket, now)
        self._nursery.start_soon(self._write, handle.peer, write, ticket, begun or None)

    async def _write(self, peer: EnginePeer, write: Write, ticket: Ticket, posted: Posted | None) -> None:
        failure = None
        with trio.CancelScope(shield=True):  # a posted write cannot be taken back: it ends, or it is abandoned
            try:
                await (self._engine.write(peer, write) if posted is None else posted.wait())
            except TransferFailed as error:
                failure = error
        self._ended(ticket, trio.current_time(), failure)
        self.flush()

    def _ended(self, ticket: Ticket, now: float, error: TransferFailed | None) -> None:
        if error is not None:
            # Of one that ended the receiver is told, and its caller; with a receiver that died it is news to nobody.
            level = logging.DEBUG if error.settled else logging.WARNING
            logger.log(level, "write of %d bytes of %r failed: %s", ticket.size, ticket.entry.key, error)
        self.book.write_ended(ticket, now, error)
        if self._quarantine.has_told or ticket.course is Course.UNSETTLED:
            self._quarantine.tell(self.book.doubts(), now)
        self.note_progress()
        if isinstance(ticket.holder, Fetch) and self.book.has_left(ticket.holder.session):
            self.reception.drop_receiver(ticket.holder.session)

    def note_progress(self) -> None:
        """A write or a session ended, which a closing sender may wait for."""
        self._settled.set()

    async def sweep(self) -> None:
        """Wake at the next deadline of the book, and only then."""
        while True:
            self._asleep_until = due = min(self.book.next_deadline(), self.room.due)
            with trio.CancelScope(deadline=due) as self._nap:
                await trio.sleep_forever()
            now = trio.current_time()
            if now - due >= self._config.heartbeat_interval:
                # This process was stopped or stuck. What its receivers said is yet to be read.
                self.book.excuse(now - due + self._config.heartbeat_interval, now)
            self.book.expire(now)
            self._tell_expired()
            self._tell_silent()
            quarantined = sum(doubt.size for doubt in self.book.doubts())
            self.room.tell(now, self._pool.statistics(), self.book.shelf.held(), quarantined)
            self._quarantine.tell(self.book.doubts(), trio.current_time())
            self.flush()

    def _tell_expired(self) -> None:
        expired, self.book.expired = self.book.expired, []
        if expired:
            logger.warning(
                "%d payloads expired, for nobody fetched them within %g s (buffer_ttl_seconds): %s%s",
                len(expired),
                self._config.ttl,
                ", ".join(expired[:SHOWN]),
                ", ..." if len(expired) > SHOWN else "",
                extra={"event": EXPIRED, "keys": expired, "count": len(expired)},
            )

    def _tell_silent(self) -> None:
        silent, self.book.silent = self.book.silent, []
        for session in silent:
            receiver = session.handle
            assert isinstance(receiver, NativePeer)
            seconds = trio.current_time() - session.last_heard
            logger.warning(
                "the receiver %s has been silent for %.0f s (acknowledge_timeout is %g s): what it did not acknowledge "
                "goes to whoever asks next; its process may be stopped or stuck",
                receiver.peer.identity,
                seconds,
                self._config.acknowledge_timeout,
                extra={"event": PEER_LOST, "peer": receiver.peer.identity, "seconds": seconds},
            )

    def quarantine(self, now: float) -> tuple[Quarantined, ...]:
        """What writes may still read although nobody waits for them."""
        return self._quarantine.look(self.book.doubts(), now)

    # --- closing ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Publish nothing and begin no write from now on. Idempotent."""
        if not self.closing:
            self.closing = True
            self._is_cut_off = not self.book.shelf.is_empty
            self._note_empty()
        self.book.stop()

    async def drain(self, deadline: float, *, told_at: int) -> bool:
        """Wait for the writes and copies under way, then tell the receivers. False: some have not ended.

        Args:
            told_at: Level at which it is logged that payloads are dropped.
        """
        self.stop()
        await self._wait_until(lambda: not self.book.is_touched, deadline)
        ended = not self.book.is_touched
        if not ended:
            self._engine.abandon()
        self._tell_unfetched(told_at)
        self.book.leave()
        self.flush()
        connected = any(s.connected for s in self.book.sessions.values())
        if connected:
            await self._wait_until(lambda: not self.book.sessions, trio.current_time() + FAREWELL)
        return ended

    def _tell_unfetched(self, level: int) -> None:
        dropped = self.book.shelf.unfetched()
        if dropped:
            keys, size = [entry.key for entry in dropped], sum(entry.size for entry in dropped)
            logger.log(
                level,
                "payloads that nobody has fetched are dropped with their connector: %d, of %d bytes in all (%s%s); "
                "`drain()` before it is closed waits until they are fetched",
                len(keys),
                size,
                ", ".join(keys[:SHOWN]),
                ", ..." if len(keys) > SHOWN else "",
                extra={"event": UNFETCHED, "keys": keys, "count": len(keys), "size": size},
            )

    async def say_farewell(self) -> None:
        """Send the receivers away, for another sender takes this one's place, and wait until they have heard.

        Only while nothing was put, and after `reception.leave`. It ends with `begin_anew`.
        """
        self.book.leave()
        self.flush()
        if any(s.connected for s in self.book.sessions.values()):
            await self._wait_until(lambda: not self.book.sessions, trio.current_time() + FAREWELL)

    def begin_anew(self) -> None:
        """Forget whoever is left, and be another incarnation to those that come."""
        self.reception.begin_anew()
        self.book.begin_anew()
        self.epoch = os.urandom(16)

    async def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        with trio.CancelScope(deadline=deadline):
            while not condition():
                self._settled = trio.Event()
                await self._settled.wait()


def _name_of(receiver: object) -> str:
    assert isinstance(receiver, Fetch | StockCaller)
    handle = receiver.session.handle if isinstance(receiver, Fetch) else receiver.handle
    assert isinstance(handle, NativePeer | StockPeer)
    return handle.peer.identity
