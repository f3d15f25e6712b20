"""The sending half of a connector: its listener, its payloads, and the writes into receivers' pools."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from math import inf

import attrs
import torch
import trio

from . import _payload, _stock_payload
from ._buffer import ManagedBuffer
from ._config import ConnectorConfig
from ._errors import (
    ConnectorClosed,
    DescriptorRefused,
    NoRoom,
    RemoteProtocolError,
    TooBig,
    TransferFailed,
    UnsupportedPayload,
)
from ._pool import Pool
from ._protocol import wire
from ._protocol.entries import Entry, Fetch, Session, Ticket
from ._protocol.extents import OUTBOUND, Extent
from ._protocol.keys import edge_of
from ._protocol.outbox import Outbox, OutboxLimits
from ._traffic import Traffic
from .abc import Arrived, Descriptor, Disconnected, Engine, EnginePeer, Link, Write

logger = logging.getLogger("trio_mori.sender")

# Copies of up to 1 MB take 0.2 ms; a thread costs 0.18 ms to reach. Above, they leave the loop.
INLINE_COPY = 1 << 20

# How long a close waits for receivers to say that they heard of it. They answer within a round trip.
FAREWELL = 0.25


@attrs.define(eq=False)
class _Receiver:
    """What the sender keeps for a session: by which link and route it is reached, and its pool."""

    link: Link
    route: bytes
    peer: EnginePeer
    composing: bool = False
    fence: trio.CancelScope = attrs.field(factory=trio.CancelScope)


class Sender:
    """Runs in the nursery of its connector; `serve` once for each link that it listens on."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        engine: Engine,
        pool: Pool,
        nursery: trio.Nursery,
        deployment: wire.Deployment,
    ) -> None:
        self.epoch = os.urandom(16)
        self.traffic = Traffic()
        self.malformed = 0
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
        self._engine = engine
        self._pool = pool
        self._nursery = nursery
        self._deployment = deployment
        self._closing = False
        self._settled = trio.Event()  # replaced whenever somebody waits; set when a write or a session ends
        self._nap = trio.CancelScope()
        self._asleep_until = inf

    # --- puts ---------------------------------------------------------------------------------------------

    async def put(self, key: str, data: object) -> _payload.Plan:
        """Copy a payload into the pool and publish it; wait for room."""
        if isinstance(data, ManagedBuffer) and data.belongs_to(self._pool):
            self.book.shelf.check_free(key)
            size = data.size
            return self._publish_buffer(key, await data.detach(OUTBOUND), size)
        plan = self._plan(data)
        self.book.shelf.check_free(key)
        extent = await self._pool.reserve(plan.size, OUTBOUND)
        entry = self.book.stage(key, extent)
        try:
            target = self._pool.tensor(extent, plan.size)
            if plan.size <= INLINE_COPY:
                plan.copy_into(target)
            else:
                await trio.to_thread.run_sync(plan.copy_into, target)
        except BaseException:
            self.book.unstage(entry)
            raise
        self._publish(entry, plan)
        return plan

    def put_nowait(self, key: str, data: object) -> _payload.Plan:
        """As `put`, copying here and now, or not at all.

        Raises:
            NoRoom: the pool has no room now.
        """
        if isinstance(data, ManagedBuffer) and data.belongs_to(self._pool):
            self.book.shelf.check_free(key)
            size = data.size
            return self._publish_buffer(key, data.detach_nowait(OUTBOUND), size)
        plan = self._plan(data)
        self.book.shelf.check_free(key)
        entry = self.book.stage(key, self._pool.reserve_nowait(plan.size, OUTBOUND))
        try:
            plan.copy_into(self._pool.tensor(entry.extent, plan.size))
        except BaseException:
            self.book.unstage(entry)
            raise
        self._publish(entry, plan)
        return plan

    def _plan(self, data: object) -> _payload.Plan:
        if self._closing:
            raise ConnectorClosed("put after the connector was closed")
        return _payload.plan(data.tensor if isinstance(data, ManagedBuffer) else data)

    def _publish_buffer(self, key: str, extent: Extent, size: int) -> _payload.Plan:
        plan = _payload.plan(torch.empty(size, dtype=torch.uint8))  # for its header; the memory is never touched
        self._publish(self.book.stage(key, extent), plan)
        return plan

    def _publish(self, entry: Entry, plan: _payload.Plan) -> None:
        if self._closing:
            self.book.unstage(entry)
            raise ConnectorClosed(f"the connector was closed during the put of {entry.key!r}")
        self.book.publish(entry, header=plan.header, size=plan.size, is_raw=plan.is_raw, now=trio.current_time())
        self.traffic.count(edge_of(entry.key), plan.size)
        self.flush()

    def cleanup(self, name: str, edge: str | None) -> int:
        """Drop the payload under a key and all chunks of a request; whoever fetches one next is told."""
        entries = [e for e in self.book.shelf.named(name) if edge is None or edge_of(e.key) == edge]
        count = self.book.cleanup(entries)
        self.flush()
        return count

    # --- what the book left to do -------------------------------------------------------------------------

    def flush(self) -> None:
        """Carry out what the book decided: start writes, send messages, set the alarm."""
        book = self.book
        while book.starting:
            starting, book.starting = book.starting, []
            for ticket in starting:
                self._start(ticket)
        if book.answers:
            answers, book.answers = book.answers, []
            for caller, answer in answers:
                assert isinstance(caller.handle, _Caller)
                caller.handle.link.send(wire.encode_stock_answer(answer), caller.route)
        if book.talking:
            for session in book.talking:
                self._compose_later(session)
            book.talking.clear()
        if book.alarm < self._asleep_until:
            self._nap.cancel()

    def _compose_later(self, session: Session) -> None:
        receiver = session.handle
        assert isinstance(receiver, _Receiver)
        if receiver.composing:
            return
        receiver.composing = True

        def compose() -> list[bytes] | None:
            receiver.composing = False
            if not session.outgoing:
                return None
            messages, session.outgoing = session.outgoing, []
            return wire.encode(wire.Replies(session.token, session.generation, self.epoch, messages))

        receiver.link.send(compose, receiver.route)

    def _start(self, ticket: Ticket) -> None:
        now = trio.current_time()
        holder = ticket.holder
        handle = holder.session.handle if isinstance(holder, Fetch) else holder.handle
        assert isinstance(handle, _Receiver | _Caller)
        if isinstance(handle, _Caller) and now - handle.asked_at > self._config.stock_pull_limit:
            # The stock receiver frees its destination after 30 s: too late to begin.
            self._ended(ticket, TransferFailed("the pull is too old to be begun"))
            return
        write = Write(ticket.source, ticket.destination, ticket.size)
        try:
            if not ticket.size or self._engine.write_nowait(handle.peer, write):
                self._ended(ticket, None)
                return
        except TransferFailed as error:
            self._ended(ticket, error)
            return
        self.book.watch(ticket, now)
        self._nursery.start_soon(self._write, handle.peer, write, ticket)

    async def _write(self, peer: EnginePeer, write: Write, ticket: Ticket) -> None:
        failure = None
        with trio.CancelScope(shield=True):  # a posted write cannot be taken back: it ends, or it is abandoned
            try:
                await self._engine.write(peer, write)
            except TransferFailed as error:
                failure = error
        self._ended(ticket, failure)
        self.flush()

    def _ended(self, ticket: Ticket, error: TransferFailed | None) -> None:
        if error is not None:
            logger.warning("write of %d bytes of %r failed: %s", ticket.size, ticket.entry.key, error)
        self.book.write_ended(ticket, trio.current_time(), error)
        self._settled.set()

    async def sweep(self) -> None:
        """Wake at the next deadline of the book, and only then."""
        while True:
            self._asleep_until = self.book.next_deadline()
            with trio.CancelScope(deadline=self._asleep_until) as self._nap:
                await trio.sleep_forever()
            self.book.expire(trio.current_time())
            self.flush()

    # --- messages -----------------------------------------------------------------------------------------

    async def serve(self, link: Link) -> None:
        """Answer what comes by a listening link until cancelled."""
        while True:
            for event in await link.receive():
                if isinstance(event, Arrived):
                    self._on_arrival(link, event)
                elif isinstance(event, Disconnected):
                    self._on_route_gone(link, event.route)
            self.flush()

    def _on_arrival(self, link: Link, event: Arrived) -> None:
        if not wire.is_native(event.frames):
            self._on_stock_request(link, event)
            return
        try:
            body = wire.decode_from_receiver(event.frames)
        except RemoteProtocolError as error:
            self.malformed += 1
            logger.debug("malformed message from route %s: %s", event.route.hex(), error)
            link.send(wire.encode(wire.VersionRange(wire.OLDEST_VERSION, wire.VERSION)), event.route)
            return
        if isinstance(body, wire.Hello):
            self._on_hello(link, event.route, body)
        else:
            self._on_requests(link, event.route, body)

    def _on_requests(self, link: Link, route: bytes, body: wire.Requests) -> None:
        session = self.book.sessions.get(body.session)
        if session is None or session.generation != body.generation or body.epoch != self.epoch:
            link.send(wire.encode(wire.Stale(body.session, body.generation, self.epoch)), route)
            return
        now = trio.current_time()
        for message in body.messages:
            if isinstance(message, wire.Bye):
                self._say_goodbye(session)
            else:
                self.book.on_message(session, message, now)

    def _say_goodbye(self, session: Session) -> None:
        self.book.bye(session)
        self._drop_receiver(session)

    def _drop_receiver(self, session: Session) -> None:
        receiver = session.handle
        assert isinstance(receiver, _Receiver)
        receiver.fence.cancel()
        self._settled.set()
        others = (s.handle for s in self.book.sessions.values() if s is not session)
        if not any(isinstance(o, _Receiver) and o.peer is receiver.peer for o in others):
            self._engine.drop_peer(receiver.peer)

    def _on_route_gone(self, link: Link, route: bytes) -> None:
        for session in self.book.sessions.values():
            receiver = session.handle
            if isinstance(receiver, _Receiver) and receiver.link is link and receiver.route == route:
                self.book.disconnected(session)

    # --- hello --------------------------------------------------------------------------------------------

    def _on_hello(self, link: Link, route: bytes, hello: wire.Hello) -> None:
        if self._closing:
            return
        if hello.oldest > wire.VERSION or hello.newest < wire.OLDEST_VERSION:
            link.send(wire.encode(wire.VersionRange(wire.OLDEST_VERSION, wire.VERSION)), route)
            return
        peer = self._reach(link, route, hello)
        if peer is None:
            return
        known = self.book.sessions.get(hello.session)
        before = None if known is None else known.handle
        receiver = _Receiver(link, route, peer)
        try:
            session = self.book.open_session(
                hello.session,
                hello.generation,
                region_size=peer.size,
                handle=receiver,
                now=trio.current_time(),
            )
        except NoRoom as error:
            self._mismatch(link, route, hello, str(error))
            return
        if session is None:
            link.send(wire.encode(wire.Stale(hello.session, hello.generation, self.epoch)), route)
            return
        if known is not session:
            self._nursery.start_soon(self._watch, session, receiver)
        elif isinstance(before, _Receiver):
            receiver.fence = before.fence
        link.send(
            wire.encode(
                wire.Welcome(
                    min(hello.newest, wire.VERSION),
                    hello.session,
                    hello.generation,
                    self.epoch,
                    self._config.max_fetches_per_peer,
                    self._engine.name,
                    [offer(self._engine)],
                    self._deployment,
                )
            ),
            route,
        )

    def _reach(self, link: Link, route: bytes, hello: wire.Hello) -> EnginePeer | None:
        """The receiver's pool, as our engine sees it; None after telling it why there is no way."""
        theirs = next((o for o in hello.offers if o.name == self._engine.name), None)
        if theirs is None:
            names = ", ".join(o.name for o in hello.offers) or "none"
            self._mismatch(link, route, hello, f"the sender writes through {self._engine.name}; offered: {names}")
            return None
        try:
            return self._engine.add_peer(Descriptor(theirs.engine, theirs.memory))
        except DescriptorRefused as error:
            self._mismatch(link, route, hello, str(error))
            return None

    def _mismatch(self, link: Link, route: bytes, hello: wire.Hello, detail: str) -> None:
        logger.warning("receiver %s refused: %s", hello.session.hex(), detail)
        body = wire.Mismatch(hello.session, hello.generation, [self._engine.name], detail[:1024])
        link.send(wire.encode(body), route)

    async def _watch(self, session: Session, receiver: _Receiver) -> None:
        """End a session when its process is proven dead."""
        with receiver.fence:
            await self._engine.wait_fenced(receiver.peer)
            if self.book.sessions.get(session.token) is session:
                self.book.fenced(session, trio.current_time())
                self._drop_receiver(session)
                self.flush()

    # --- stock receivers ----------------------------------------------------------------------------------

    def _on_stock_request(self, link: Link, event: Arrived) -> None:
        try:
            request = wire.decode_stock_request(event.frames)
        except RemoteProtocolError as error:
            self.malformed += 1
            logger.debug("malformed request from route %s: %s", event.route.hex(), error)
            link.send(wire.encode_stock_answer(wire.TRANSFER_ERROR), event.route)
            return
        caller, entry = self.book.begin_request(event.route, request.request_id)
        size = None if entry is None else self._stock_size(entry)
        if isinstance(request, wire.StockQuery):
            found = wire.NOT_FOUND
            if entry is None or size is None:
                link.send(wire.encode_stock_answer(found), event.route)
            else:
                answer = wire.StockFound(entry.key, size, entry.is_raw)
                link.send(wire.encode_stock_answer(answer), event.route)
            return
        try:
            peer = self._engine.add_peer(Descriptor(request.engine_desc_packed, request.mem_desc_packed))
        except DescriptorRefused as error:
            logger.warning("pull of %r refused: %s", request.request_id, error)
            link.send(wire.encode_stock_answer(wire.TRANSFER_ERROR), event.route)
            return
        caller.handle = _Caller(link, peer, trio.current_time())
        if entry is None or size is None:
            self.book.refuse(caller)
            return
        if request.length != size:
            logger.warning("pull of %r refused: it asks for %d bytes of %d", entry.key, request.length, size)
        self.book.pull(caller, entry, destination=request.dst_offset, length=request.length, region_size=peer.size)

    def _stock_size(self, entry: Entry) -> int | None:
        """Bytes of an entry's stock form, which is built now if it must be; None when that cannot be."""
        if entry.is_raw:
            return entry.size
        if entry.encoding is None:
            try:
                encoded = _stock_payload.stock_encode(entry.header, self._pool.tensor(entry.extent, entry.size))
                extent = self._pool.reserve_nowait(len(encoded), OUTBOUND)
            except (UnsupportedPayload, NoRoom, TooBig) as error:
                logger.warning("a stock peer cannot have %r: %s", entry.key, error)
                return None
            _payload.plan(encoded).copy_into(self._pool.tensor(extent, len(encoded)))
            self.book.attach_encoding(entry, extent, len(encoded))
        return None if entry.encoding is None else entry.encoding.size

    # --- closing ------------------------------------------------------------------------------------------

    async def drain(self, deadline: float) -> bool:
        """Wait for the writes under way, then tell the receivers. False: writes have not ended."""
        self._closing = True
        self.book.stop()
        await self._wait_until(lambda: not self.book.tickets, deadline)
        ended = not self.book.tickets
        if not ended:
            self._engine.abandon()
        self.book.leave()
        self.flush()
        connected = any(s.connected for s in self.book.sessions.values())
        if connected:
            await self._wait_until(lambda: not self.book.sessions, trio.current_time() + FAREWELL)
        return ended

    async def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        with trio.CancelScope(deadline=deadline):
            while not condition():
                self._settled = trio.Event()
                await self._settled.wait()


@attrs.frozen(eq=False)
class _Caller:
    """What the sender keeps for a stock caller: how it is answered, its pool, and when it asked."""

    link: Link
    peer: EnginePeer
    asked_at: float


def offer(engine: Engine) -> wire.Offer:
    """An engine as a hello names it."""
    descriptor = engine.descriptor
    return wire.Offer(engine.name, descriptor.engine, descriptor.memory)
