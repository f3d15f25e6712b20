"""Receiving from a stock sender: one request in flight per socket, no acknowledgements, no way to take a pull back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from . import _stock_payload
from ._buffer import ManagedBuffer
from ._config import ConnectorConfig
from ._errors import NotReady, PeerLost, RemoteProtocolError, TransferFailed, TrioMoriError
from ._pool import Pool
from ._protocol import wire
from ._protocol.extents import INBOUND, Extent
from ._protocol.inbox import Inbox
from ._zmq import open_dialler
from .abc import Arrived, Connected, Disconnected, Engine, Link

logger = logging.getLogger("trio_mori.receiver")

# As many pulls as a stock sender serves at a time (its executor has four workers); more would wait there.
SOCKETS = 4

# How long a stock sender may take to answer a query before the socket is given up; it is the stock receiver's limit.
QUERY_TIMEOUT = 5.0

# A stock sender has to be asked again and again. The stock adapter asks every millisecond; its own first answer takes
# about 0.4 ms here, so that 2 ms cost little latency. The pause doubles up to 50 ms for keys that do not come.
FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.05


@attrs.define(eq=False)
class _Socket:
    """One connection, as a REQ socket would use it.

    Attributes:
        over: Set to let its task end; the connection is closed then.
        late: A pull was given up: it is kept to hear the answer, and for nothing else.
    """

    link: Link
    over: trio.Event = attrs.field(factory=trio.Event)
    connected: bool = False
    late: bool = False

    async def ask(self, request: wire.StockQuery | wire.StockPull) -> bytes | wire.StockFound:
        """Send a request and wait for its answer.

        Raises:
            PeerLost: the connection broke before the answer came.
        """
        while not self.connected:
            self._notice(await self.link.receive())
        self.link.send(wire.encode_stock_request(request))
        return await self.answer()

    async def answer(self) -> bytes | wire.StockFound:
        """Wait for the answer to the request that is under way."""
        while True:
            frames = self._notice(await self.link.receive())
            if frames is not None:
                return wire.decode_stock_answer(frames)
            if not self.connected:
                raise PeerLost(f"the connection to {self.link.address} broke", peer=self.link.address)

    def _notice(self, events: Sequence[Arrived | Connected | Disconnected]) -> Sequence[bytes] | None:
        frames = None
        for event in events:
            if isinstance(event, Arrived):
                frames = event.frames
            else:
                self.connected = isinstance(event, Connected)
        return frames


@attrs.define(eq=False)
class _Attempt:
    """What `get_nowait` set in motion for one key."""

    over: bool = False
    extent: Extent | None = None
    size: int = 0
    is_raw: bool = False
    error: TrioMoriError | None = None


class StockSender:
    """One stock sender, asked through a small bounded set of sockets."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        config: ConnectorConfig,
        engine: Engine,
        pool: Pool,
        book: Inbox,
        nursery: trio.Nursery,
        buffer: Callable[[Extent, int], ManagedBuffer],
    ) -> None:
        self._host = host
        self._port = port
        self._config = config
        self._engine = engine
        self._pool = pool
        self._book = book
        self._nursery = nursery
        self._buffer = buffer
        self._limit = trio.CapacityLimiter(SOCKETS)
        self._idle: list[_Socket] = []
        self._attempts: dict[str, _Attempt] = {}

    # --- gets ---------------------------------------------------------------------------------------------

    async def get(self, key: str, known: Mapping[str, object]) -> tuple[object, int]:
        """The payload and its size: a ManagedBuffer if it is raw, for dtype and shape do not travel here."""
        extent, size, is_raw = await self._fetch(key, known)
        return self._value(extent, size, is_raw), size

    async def lease(self, key: str, known: Mapping[str, object]) -> ManagedBuffer:
        """The bytes where they arrived."""
        extent, size, _ = await self._fetch(key, known)
        return self._buffer(extent, size)

    def get_nowait(self, key: str, known: Mapping[str, object]) -> tuple[object, int]:
        """The payload if an attempt that was begun by an earlier call has brought it; else begin one.

        Raises:
            NotReady: not yet.
        """
        attempt = self._attempts.get(key)
        if attempt is None or (attempt.over and attempt.extent is None and attempt.error is None):
            attempt = self._attempts[key] = _Attempt()
            self._nursery.start_soon(self._attempt, attempt, key, known)
        if not attempt.over:
            raise NotReady(f"{key!r} has not come from the stock sender {self._host}:{self._port} yet")
        del self._attempts[key]
        if attempt.error is not None:
            raise attempt.error
        assert attempt.extent is not None
        return self._value(attempt.extent, attempt.size, attempt.is_raw), attempt.size

    async def _attempt(self, attempt: _Attempt, key: str, known: Mapping[str, object]) -> None:
        try:
            async with self._socket() as socket:
                found = await self._find(socket, key, known)
                if found is not None:
                    attempt.size, attempt.is_raw = found.data_size, found.is_fast_path
                    attempt.extent = await self._pull(socket, key, attempt.size)
        except TrioMoriError as error:
            attempt.error = error
        finally:
            attempt.over = True

    def _value(self, extent: Extent, size: int, is_raw: bool) -> object:
        if is_raw:
            return self._buffer(extent, size)
        with self._buffer(extent, size) as buffer:
            return _stock_payload.stock_decode(buffer.to_bytes())

    async def _fetch(self, key: str, known: Mapping[str, object]) -> tuple[Extent, int, bool]:
        pause = FIRST_PAUSE
        while True:
            async with self._socket() as socket:
                found = await self._find(socket, key, known)
                if found is not None:
                    extent = await self._pull(socket, key, found.data_size)
                    return extent, found.data_size, found.is_fast_path
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    # --- requests -----------------------------------------------------------------------------------------

    async def _find(self, socket: _Socket, key: str, known: Mapping[str, object]) -> wire.StockFound | None:
        """The size of a payload, from put's metadata or by a query; None if the sender does not have it."""
        size, is_raw = known.get("data_size"), known.get("is_fast_path")
        if isinstance(size, int) and size > 0 and isinstance(is_raw, bool):
            return wire.StockFound(key, size, is_raw)
        answer: bytes | wire.StockFound = wire.NOT_FOUND
        try:
            with trio.move_on_after(QUERY_TIMEOUT) as limit:
                answer = await socket.ask(wire.StockQuery(key))
        except (PeerLost, RemoteProtocolError):
            socket.over.set()
            return None
        if limit.cancelled_caught:
            socket.over.set()  # a late answer must never be taken for that to a newer request
        if isinstance(answer, wire.StockFound) and answer.data_size == 0:
            raise RemoteProtocolError(f"the stock sender {self._host}:{self._port} says that {key!r} has 0 bytes")
        return answer if isinstance(answer, wire.StockFound) else None

    async def _pull(self, socket: _Socket, key: str, size: int) -> Extent:
        """Have a payload written into the pool; the extent is leased."""
        extent = await self._pool.reserve(size, INBOUND)
        descriptor = self._engine.descriptor
        request = wire.StockPull(key, descriptor.engine, descriptor.memory, extent.offset, size)
        self._book.expose(extent)
        answer: bytes | wire.StockFound | None = None
        try:
            with trio.move_on_after(self._config.transfer_timeout(size)):
                answer = await socket.ask(request)
        except RemoteProtocolError:
            pass
        finally:
            if answer is None:
                # It may still write. The socket is kept, for the late answer is the only evidence that it has ended.
                self._book.doubt(extent)
                socket.late = True
                self._nursery.start_soon(self._await_late_answer, socket, extent)
        if answer is None:
            raise TransferFailed(
                f"pull of {key!r} from the stock sender {self._host}:{self._port}: no answer within "
                f"{self._config.transfer_timeout(size):g} s; {size} bytes of the pool are in quarantine until it comes",
                settled=False,
            )
        self._book.settle(extent, lease=answer == wire.TRANSFER_DONE)
        if answer != wire.TRANSFER_DONE:
            raise TransferFailed(
                f"pull of {key!r} refused by the stock sender {self._host}:{self._port} (trans_error): it has not "
                f"{size} bytes under that key, or its engine failed; the payload, if there is one, stays there"
            )
        return extent

    async def _await_late_answer(self, socket: _Socket, extent: Extent) -> None:
        try:
            await socket.answer()
        except (PeerLost, RemoteProtocolError):
            return  # no evidence will ever come: the memory stays out of use
        finally:
            socket.over.set()
        self._book.settle(extent, lease=False)

    # --- sockets ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _socket(self) -> AsyncIterator[_Socket]:
        async with self._limit:
            socket = self._idle.pop() if self._idle else await self._nursery.start(self._connection)
            whole = False
            try:
                yield socket
                whole = not socket.over.is_set()
            finally:
                if whole:
                    self._idle.append(socket)
                elif not socket.late:
                    socket.over.set()

    async def _connection(self, *, task_status: trio.TaskStatus[_Socket]) -> None:
        async with open_dialler(self._host, self._port) as link:
            socket = _Socket(link)
            task_status.started(socket)
            await socket.over.wait()
