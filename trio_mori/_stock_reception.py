"""Stock receivers: their queries and pulls, their pools, and the encodings that they need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from . import _payload, _stock_payload
from ._config import ConnectorConfig
from ._errors import DescriptorRefused, NoRoom, RemoteProtocolError, TooBig, UnsupportedPayload
from ._log_limit import LogLimit
from ._pool import INLINE_COPY, Pool
from ._protocol import stock_wire
from ._protocol.entries import Entry
from ._protocol.extents import OUTBOUND
from ._protocol.outbox import Outbox
from .abc import Arrived, Descriptor, Engine, EnginePeer, Link

logger = logging.getLogger("trio_mori.sender")


@attrs.frozen(eq=False)
class StockPeer:
    """What the sender keeps for a stock caller: how it is answered, its pool, and when it asked."""

    link: Link
    peer: EnginePeer
    asked_at: float


@attrs.frozen(eq=False)
class _Request:
    """A query or pull, how it is answered, and when it came."""

    link: Link
    route: bytes
    body: stock_wire.Query | stock_wire.Pull
    came_at: float


class SendingSide(Protocol):
    """What a reception, of either dialect, uses of the sender that it belongs to."""

    book: Outbox
    closing: bool

    def flush(self) -> None:
        """Carry out what the book decided."""

    def note_progress(self) -> None:
        """Something was settled that a closing sender may wait for."""


class StockReception:
    """Answers stock receivers; the book decides, the sender carries it out.

    A structure is encoded for them when the first of them asks for it: a large one in a thread, with its payload pinned
    as by a write, and whoever asks meanwhile is answered when that has ended.

    Attributes:
        malformed: Requests that could not be understood.
        peers: Receivers that are known, and who waits for the end of each.
    """

    def __init__(
        self,
        sender: SendingSide,
        *,
        config: ConnectorConfig,
        engine: Engine,
        pool: Pool,
        nursery: trio.Nursery,
        on_forgotten: Callable[[EnginePeer], None],
    ) -> None:
        """
        Args:
            on_forgotten: Told of a receiver that is not known any more.
        """
        self.malformed = 0
        self._log_limit = LogLimit()
        self.peers: dict[EnginePeer, trio.CancelScope] = {}
        self._sender = sender
        self._book = sender.book
        self._config = config
        self._engine = engine
        self._pool = pool
        self._nursery = nursery
        self._on_forgotten = on_forgotten
        self._waiting: dict[Entry, list[_Request]] = {}

    def on_arrival(self, link: Link, event: Arrived) -> None:
        """A message that is not of the native dialect came."""
        try:
            body = stock_wire.decode_request(event.frames)
        except RemoteProtocolError as error:
            self.malformed += 1
            logger.debug("malformed request from route %s: %s", event.route.hex(), error)
            link.send(stock_wire.encode_answer(stock_wire.TRANSFER_ERROR), event.route)
            return
        self._consider(_Request(link, event.route, body, trio.current_time()))

    def _consider(self, request: _Request) -> None:
        """Answer a request, or begin what its answer waits for."""
        body = request.body
        if self._sender.closing:  # it is over: there is nothing any more, and no room to make it in
            self._answer(
                request, stock_wire.NOT_FOUND if isinstance(body, stock_wire.Query) else stock_wire.TRANSFER_ERROR
            )
            return
        caller, entry = self._book.pulls.begin(request.route, body.request_id)
        if entry in self._waiting:
            self._waiting[entry].append(request)
            return
        if entry is not None and not entry.is_raw and entry.encoding is None and self._begin_encoding(entry):
            if entry.size > INLINE_COPY:
                self._waiting[entry] = [request]
                self._nursery.start_soon(self._encode_in_thread, entry)
                return
            self._book.pulls.end_encoding(entry, made=self._encode(entry))
        size = None if entry is None else entry.stock_size
        if isinstance(body, stock_wire.Query):
            found = (
                stock_wire.NOT_FOUND
                if entry is None or size is None
                else stock_wire.Found(entry.key, size, entry.is_raw)
            )
            self._answer(request, found)
            return
        try:
            peer = self._engine.add_peer(Descriptor(body.engine_desc_packed, body.mem_desc_packed))
        except DescriptorRefused as error:
            self._warn("pull of %r refused: %s", body.request_id, error)
            self._answer(request, stock_wire.TRANSFER_ERROR)
            return
        self._keep(peer)
        caller.handle = StockPeer(request.link, peer, request.came_at)
        if entry is None or size is None:
            self._book.pulls.refuse(caller)
            return
        if body.length != size:
            self._warn("pull of %r refused: it asks for %d bytes of %d", entry.key, body.length, size)
        self._book.pull(caller, entry, destination=body.dst_offset, length=body.length, region_size=peer.size)

    def _answer(self, request: _Request, answer: bytes | stock_wire.Found) -> None:
        request.link.send(stock_wire.encode_answer(answer), request.route)

    def _warn(self, text: str, *details: object) -> None:
        if self._log_limit.admits():
            logger.warning(text, *details)

    # --- encodings ----------------------------------------------------------------------------------------

    def _begin_encoding(self, entry: Entry) -> bool:
        """Take room for an entry's stock form. False: it has none, or there is no room now."""
        try:
            size = _stock_payload.stock_size(entry.header, self._pool.tensor(entry.extent, entry.size))
            extent = self._pool.reserve_nowait(size, OUTBOUND)
        except (UnsupportedPayload, NoRoom, TooBig) as error:
            self._warn("a stock peer cannot have %r: %s", entry.key, error)
            return False
        self._book.pulls.begin_encoding(entry, extent, size)
        return True

    def _encode(self, entry: Entry) -> bool:
        """Write the stock form where room was taken for it. False: there is none. In any thread."""
        assert entry.encoding is not None
        try:
            encoded = _stock_payload.stock_encode(entry.header, self._pool.tensor(entry.extent, entry.size))
        except UnsupportedPayload as error:
            logger.warning("a stock peer cannot have %r: %s", entry.key, error)
            return False
        plan = _payload.plan(encoded)
        plan.copy_into(self._pool.tensor(entry.encoding.extent, plan.size))
        return True

    async def _encode_in_thread(self, entry: Entry) -> None:
        with trio.CancelScope(shield=True):  # it reads the pool, and ends by itself
            made = await trio.to_thread.run_sync(self._encode, entry)
        self._book.pulls.end_encoding(entry, made=made)
        self._sender.note_progress()
        for request in self._waiting.pop(entry):
            self._consider(request)
        self._sender.flush()

    # --- receivers ----------------------------------------------------------------------------------------

    def _keep(self, peer: EnginePeer) -> None:
        """Stock receivers never say that they leave: the oldest make place, and those whose process has ended."""
        if peer in self.peers:
            return
        if len(self.peers) >= self._config.max_peers:
            self._forget(next(iter(self.peers)))
        self.peers[peer] = trio.CancelScope()
        self._nursery.start_soon(self._watch, peer, self.peers[peer])

    async def _watch(self, peer: EnginePeer, scope: trio.CancelScope) -> None:
        with scope:
            await self._engine.wait_fenced(peer)
            self._forget(peer)

    def _forget(self, peer: EnginePeer) -> None:
        self.peers.pop(peer).cancel()
        self._on_forgotten(peer)
