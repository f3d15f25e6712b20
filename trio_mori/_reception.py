"""Who talks to a sender: receivers of the native dialect with their hellos and sessions, and stock receivers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from ._config import ConnectorConfig
from ._errors import SHORTAGES, ConnectorClosed, DescriptorRefused, NoRoom, RemoteProtocolError
from ._events import OTHER_STAGE, PEER_ENDED
from ._log_limit import LogLimit
from ._offers import Way, Ways, names_of, offers_of
from ._pool import Pool
from ._protocol import wire
from ._protocol.entries import Session
from ._stock_reception import SendingSide, StockReception
from .abc import Arrived, Disconnected, Engine, EnginePeer, Link

logger = logging.getLogger("trio_mori.sender")


@attrs.define(eq=False)
class NativePeer:
    """What the sender keeps for a session: by which link and route it is reached, and its pool by which engine."""

    link: Link
    route: bytes
    way: Way
    composing: bool = False
    fence: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def peer(self) -> EnginePeer:
        """Its pool, as that engine sees it."""
        return self.way.peer


class NativeSendingSide(SendingSide, Protocol):
    """What the native reception uses beside that."""

    epoch: bytes


class Reception:
    """Answers what comes by the sender's links; the book decides, the sender carries it out.

    Attributes:
        stock: Answers what is not of the native dialect.
        malformed: Messages that could not be understood, of that dialect.
        refused: Hellos of receivers that cannot be served: no common engine, a pool that cannot be written, no place.
        local: Name of the link for processes of this host; empty: there is none.
        may_yield: Asked when another instance of this deployment wants the port. True: it will be given up.
    """

    def __init__(
        self,
        sender: NativeSendingSide,
        *,
        config: ConnectorConfig,
        engine: Engine,
        pool: Pool,
        nursery: trio.Nursery,
        deployment: wire.Deployment,
    ) -> None:
        self.malformed = 0
        self.refused = 0
        self._log_limit = LogLimit()
        self.local = ""
        self.may_yield: Callable[[], bool] = lambda: False
        self._leaving = False
        self.stock = StockReception(
            sender, config=config, engine=engine, pool=pool, nursery=nursery, on_forgotten=self._drop_peer
        )
        self._sender = sender
        self._book = sender.book
        self._config = config
        self._engine = engine
        self._ways = Ways(engine, nursery)
        self._nursery = nursery
        self._deployment = deployment

    async def serve(self, link: Link) -> None:
        """Answer what comes by a listening link until cancelled."""
        while True:
            for event in await link.receive():
                if isinstance(event, Arrived):
                    self._on_arrival(link, event)
                elif isinstance(event, Disconnected):
                    self._on_route_gone(link, event.route)
            self._sender.flush()

    def _on_arrival(self, link: Link, event: Arrived) -> None:
        if not wire.is_native(event.frames):
            self.stock.on_arrival(link, event)
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
        elif isinstance(body, wire.Inquiry):
            self._on_inquiry(link, event.route, body)
        else:
            self._on_requests(link, event.route, body)

    def _on_requests(self, link: Link, route: bytes, body: wire.Requests) -> None:
        session = self._book.speaker(body, self._sender.epoch)
        if session is None or not _came_by(session, link, route):
            link.send(wire.encode(wire.Stale(body.session, body.generation, self._sender.epoch)), route)
            return
        now = trio.current_time()
        for message in body.messages:
            if isinstance(message, wire.Bye):
                self._say_goodbye(session)
            else:
                self._book.on_message(session, message, now)

    def _say_goodbye(self, session: Session) -> None:
        self._book.bye(session)
        self.drop_receiver(session)

    def drop_receiver(self, session: Session) -> None:
        """Forget a receiver that has left, once no write to it is under way.

        Until then the end of its process is waited for: it may be the only proof that a write has ended.
        """
        self._sender.note_progress()
        if self._book.is_written_to(session):
            return
        receiver = session.handle
        assert isinstance(receiver, NativePeer)
        receiver.fence.cancel()
        self._drop_peer(receiver.peer)

    def _drop_peer(self, peer: EnginePeer) -> None:
        """Unless a receiver is reached by it, of either dialect."""
        handles = (s.handle for s in self._book.sessions.values())
        native = any(isinstance(h, NativePeer) and h.peer is peer for h in handles)
        if not native and peer not in self.stock.peers:
            self._engine.drop_peer(peer)

    def _on_route_gone(self, link: Link, route: bytes) -> None:
        self._leave_route(link, route, None)

    def _leave_route(self, link: Link, route: bytes, successor: Session | None) -> None:
        """Of one connection there is one session at a time: who has another one may be forgotten."""
        for session in self._book.sessions.values():
            if session is not successor and _came_by(session, link, route):
                self._book.disconnected(session)

    # --- hello --------------------------------------------------------------------------------------------

    def _on_hello(self, link: Link, route: bytes, hello: wire.Hello) -> None:
        known = self._book.sessions.get(hello.session)
        if known is None and (self._sender.closing or self._leaving):
            return
        if not self._speaks(link, route, hello):
            return
        way = self._reach(link, route, hello)
        if way is None:
            return
        if known is not None and known.generation == hello.generation and not _came_by(known, link, route):
            # A receiver that has another connection counts on; this is a copy of what it said.
            link.send(wire.encode(wire.Stale(hello.session, hello.generation, self._sender.epoch)), route)
            return
        before = None if known is None else known.handle
        receiver = NativePeer(link, route, way)
        try:
            session = self._book.open_session(
                hello.session,
                hello.generation,
                region_size=way.peer.size,
                handle=receiver,
                now=trio.current_time(),
            )
        except NoRoom as error:
            self._drop_peer(way.peer)
            self._mismatch(link, route, hello, str(error))
            return
        while self._book.forgotten:
            self.drop_receiver(self._book.forgotten.pop())
        if session is None:
            link.send(wire.encode(wire.Stale(hello.session, hello.generation, self._sender.epoch)), route)
            return
        if known is not session:
            self._leave_route(link, route, session)
            level = logging.WARNING if way.reason else logging.INFO
            because = way.reason and f", because of {way.reason}"
            logger.log(level, "receiver %s is written to by %s%s", hello.session.hex()[:8], way.name, because)
            self._tell_stage(receiver, hello.deployment.stage)
            self._nursery.start_soon(self._watch, session, receiver)
        elif isinstance(before, NativePeer):
            receiver.fence = before.fence
        link.send(
            wire.encode(
                wire.Welcome(
                    min(hello.newest, wire.VERSION),
                    hello.session,
                    hello.generation,
                    self._sender.epoch,
                    self._config.max_fetches_per_peer,
                    way.name,
                    self.local,
                    offers_of(self._engine),
                    self._deployment,
                )
            ),
            route,
        )

    def _tell_stage(self, receiver: NativePeer, stage: int) -> None:
        """Say if another stage comes than this connector's edge leads to: what it waits for may never be put."""
        expected = self._config.to_stage
        if expected is None or expected in (stage, self._config.stage_id) or stage == -1:
            return
        if self._log_limit.admits():
            logger.warning(
                "the receiver %s serves stage %d, and this connector is to put for stage %d (to_stage): its gets wait "
                "for ever if nothing is put for that stage; compare its sender_zmq_port with the ports of the stages",
                receiver.peer.identity,
                stage,
                expected,
                extra={"event": OTHER_STAGE, "peer": receiver.peer.identity, "stage": stage},
            )

    def _speaks(self, link: Link, route: bytes, greeting: wire.Hello | wire.Inquiry) -> bool:
        """Whether both sides know a version of the protocol; if not, say which this side knows."""
        if greeting.newest >= wire.OLDEST_VERSION and greeting.oldest <= wire.VERSION:
            return True
        link.send(wire.encode(wire.VersionRange(wire.OLDEST_VERSION, wire.VERSION)), route)
        return False

    def _reach(self, link: Link, route: bytes, hello: wire.Hello) -> Way | None:
        """How the receiver's pool is written to. None: that is being tried out, or there is no way and it was told."""

        def again() -> None:
            self._on_hello(link, route, hello)
            self._sender.flush()

        try:
            return self._ways.find(hello.offers, again)
        except DescriptorRefused as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORTAGES:
                # No answer: the receiver says hello again at its next heartbeat, when there may be room for it.
                if self._log_limit.admits():
                    logger.warning("receiver %s has to wait: %s", hello.session.hex()[:8], error)
            else:
                self._mismatch(link, route, hello, str(error))
        except ConnectorClosed:
            pass  # the engine ends: no answer, and soon no sender
        return None

    def _mismatch(self, link: Link, route: bytes, hello: wire.Hello, detail: str) -> None:
        self.refused += 1
        if self._log_limit.admits():
            logger.warning("receiver %s refused: %s", hello.session.hex()[:8], detail)
        body = wire.Mismatch(hello.session, hello.generation, list(names_of(self._engine)), detail[:1024])
        link.send(wire.encode(body), route)

    async def _watch(self, session: Session, receiver: NativePeer) -> None:
        """End a session when its process is proven dead."""
        with receiver.fence:
            await self._engine.wait_fenced(receiver.peer)
            extra = {"event": PEER_ENDED, "peer": receiver.peer.identity}
            logger.info("receiver %s: its process has ended", receiver.peer.identity, extra=extra)
            self._book.fenced(session, trio.current_time())
            self.drop_receiver(session)
            self._sender.flush()

    # --- other senders ------------------------------------------------------------------------------------

    def _on_inquiry(self, link: Link, route: bytes, inquiry: wire.Inquiry) -> None:
        if self._speaks(link, route, inquiry):
            yields = inquiry.wanted and inquiry.deployment == self._deployment and self.may_yield()
            answer = wire.Holder(min(inquiry.newest, wire.VERSION), self._deployment, os.getpid(), yields)
            link.send(wire.encode(answer), route)

    def leave(self) -> None:
        """Take no new receivers: somebody else will listen here."""
        self._leaving = True

    def begin_anew(self) -> None:
        """Forget all receivers, and take new ones."""
        for session in list(self._book.sessions.values()):
            self._say_goodbye(session)
        self._leaving = False


def _came_by(session: Session, link: Link, route: bytes) -> bool:
    """Whether that is the connection of a session: by any other, what it is said to say is a copy."""
    receiver = session.handle
    return isinstance(receiver, NativePeer) and receiver.link is link and receiver.route == route
