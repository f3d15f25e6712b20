"""Receiving from a stock sender: one request in flight per socket, no acknowledgements, no way to take a pull back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import attrs
import trio

from ._arrival import StockArrival
from ._buffer import ManagedBuffer
from ._config import ConnectorConfig
from ._errors import NotReady, PeerLost, RemoteProtocolError, TransferFailed, TrioMoriError
from ._keys import Keys
from ._pool import Pool
from ._protocol import stock_wire
from ._protocol.extents import INBOUND, Extent
from ._protocol.inbox import Inbox
from ._zmq_dialler import open_dialler
from .abc import Arrived, Connected, Engine, Link

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
        doubted: Where a pull that was given up may still be written to. The connection is kept to hear its answer, and
            for nothing else.
    """

    link: Link
    over: trio.Event = attrs.field(factory=trio.Event)
    connected: bool = False
    asked: bool = False
    doubted: Extent | None = None

    async def ask(self, request: stock_wire.Query | stock_wire.Pull) -> bytes | stock_wire.Found:
        """Send a request and wait for its answer. `asked` says whether it was sent.

        Raises:
            PeerLost: the connection broke before the answer came.
        """
        self.asked = False
        while not self.connected:
            for event in await self.link.receive():
                self.connected = isinstance(event, Connected)
        self.link.send(stock_wire.encode_request(request))
        self.asked = True
        return await self.answer()

    async def answer(self) -> bytes | stock_wire.Found:
        """Wait for the answer to the request that is under way."""
        while True:
            frames, broke = None, False
            for event in await self.link.receive():
                if isinstance(event, Arrived):
                    frames = event.frames
                else:
                    self.connected = isinstance(event, Connected)
                    broke = broke or not self.connected
            if frames is not None:
                return stock_wire.decode_answer(frames)
            if broke:
                raise PeerLost(f"the connection to {self.link.address} broke", peer=self.link.address)


@attrs.define(eq=False)
class _Attempt:
    """What `get_nowait` set in motion for one key."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    over: bool = False
    arrival: StockArrival | None = None
    error: TrioMoriError | None = None


class StockSender:
    """One stock sender, asked through a small bounded set of sockets, until it is retired."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        config: ConnectorConfig,
        keys: Keys | None,
        engine: Engine,
        pool: Pool,
        book: Inbox,
        nursery: trio.Nursery,
        buffer: Callable[[Extent, int], ManagedBuffer],
        note_progress: Callable[[], None],
        note_cut_off: Callable[[], None],
    ) -> None:
        self._name = f"the stock sender {host}:{port}"
        self._host = host
        self._port = port
        self._config = config
        self._keys = keys
        self._engine = engine
        self._pool = pool
        self._book = book
        self._nursery = nursery
        self._buffer = buffer
        self._note_progress = note_progress
        self._note_cut_off = note_cut_off
        self._limit = trio.CapacityLimiter(SOCKETS)
        self._idle: list[_Socket] = []
        self._asking: dict[trio.CancelScope, None] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._retired = False

    # --- gets ---------------------------------------------------------------------------------------------

    async def take(self, key: str, known: Mapping[str, object]) -> StockArrival | None:
        """The payload; None when this was retired meanwhile."""
        pause = FIRST_PAUSE
        with trio.CancelScope() as scope:
            self._asking[scope] = None
            try:
                while not self._retired:
                    arrival = await self._try(key, known)
                    if arrival is not None:
                        return arrival
                    await trio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
            finally:
                del self._asking[scope]
        return None

    def take_nowait(self, key: str, known: Mapping[str, object]) -> StockArrival:
        """The payload if an attempt that was begun by an earlier call has brought it; else begin one.

        Raises:
            NotReady: not yet.
        """
        attempt = self._attempts.get(key)
        if attempt is None or (attempt.over and attempt.arrival is None and attempt.error is None):
            attempt = self._attempts[key] = _Attempt()
            self._nursery.start_soon(self._attempt, attempt, key, known)
        if not attempt.over:
            raise NotReady(f"{key!r} has not come from {self._name} yet; ask again later, or wait for it in get")
        del self._attempts[key]
        if attempt.error is not None:
            raise attempt.error
        assert attempt.arrival is not None
        return attempt.arrival

    async def _attempt(self, attempt: _Attempt, key: str, known: Mapping[str, object]) -> None:
        try:
            with attempt.scope:
                attempt.arrival = await self._try(key, known)
        except TrioMoriError as error:
            attempt.error = error
        attempt.over = True
        if attempt.arrival is not None and self._attempts.get(key) is not attempt:
            attempt.arrival.give_back()  # it was cancelled when it had come already

    def cancel(self, is_meant: Callable[[str], bool]) -> int:
        """Give up what `get_nowait` began for these keys; returns for how many. What has come already is lost."""
        keys = list(filter(is_meant, self._attempts))
        for key in keys:
            self._drop(self._attempts.pop(key))
        return len(keys)

    def _drop(self, attempt: _Attempt) -> None:
        attempt.scope.cancel()
        if attempt.arrival is not None:
            attempt.arrival.give_back()

    def retire(self) -> None:
        """Ask nothing any more, and let whoever waits know. Idempotent."""
        self._retired = True
        for scope in self._asking:
            scope.cancel()
        self.cancel(lambda _: True)
        while self._idle:
            self._idle.pop().over.set()

    # --- requests -----------------------------------------------------------------------------------------

    async def _try(self, key: str, known: Mapping[str, object]) -> StockArrival | None:
        """Ask for a payload once. None: it is not there, or there was no answer."""
        self._book.check_quarantine(key)
        async with self._socket() as socket:
            found = await self._find(socket, key, known)
            if found is None:
                return None
            extent = await self._pull(socket, key, found.data_size)
            return StockArrival(key, self._buffer(extent, found.data_size), is_raw=found.is_fast_path)

    async def _find(self, socket: _Socket, key: str, known: Mapping[str, object]) -> stock_wire.Found | None:
        """The size of a payload, from put's metadata or by a query; None if the sender does not have it."""
        size, is_raw = known.get("data_size"), known.get("is_fast_path")
        if isinstance(size, int) and size > 0 and isinstance(is_raw, bool):
            return stock_wire.Found(key, size, is_raw)
        answer: bytes | stock_wire.Found = stock_wire.NOT_FOUND
        try:
            with trio.move_on_after(QUERY_TIMEOUT) as limit:
                answer = await socket.ask(stock_wire.Query(key))
        except (PeerLost, RemoteProtocolError):
            socket.over.set()
            return None
        if limit.cancelled_caught:
            socket.over.set()  # a late answer must never be taken for that to a newer request
        if isinstance(answer, stock_wire.Found) and answer.data_size == 0:
            raise RemoteProtocolError(f"{self._name} says that {key!r} has 0 bytes")
        return answer if isinstance(answer, stock_wire.Found) else None

    async def _pull(self, socket: _Socket, key: str, size: int) -> Extent:
        """Have a payload written into the pool; the extent is leased."""
        extent = await self._pool.reserve(size, INBOUND)
        descriptor = self._engine.descriptor
        request = stock_wire.Pull(key, descriptor.engine, descriptor.memory, extent.offset, size)
        seconds = self._config.transfer_timeout(size)
        answer: bytes | stock_wire.Found | None = None
        self._book.expose(extent)
        try:
            with trio.move_on_after(seconds):
                answer = await socket.ask(request)
        finally:
            if answer is None and socket.asked:
                # It may still write. The late answer is the only evidence that it has ended.
                self._book.doubt(extent, self._name)
                socket.doubted = extent
                socket.over.set()
            else:
                self._settle(extent, lease=answer == stock_wire.TRANSFER_DONE)
        if answer is None:
            held = f"{size} bytes of the pool are in quarantine until it comes" if socket.asked else "it was not asked"
            raise TransferFailed(
                f"pull of {key!r} from {self._name}: no answer within {seconds:g} s; {held}; get it again",
                settled=not socket.asked,
            )
        if answer != stock_wire.TRANSFER_DONE:
            raise TransferFailed(
                f"pull of {key!r} refused by {self._name} (trans_error): it has not {size} bytes under that key, or "
                "its engine failed; the payload, if there is one, stays there: get it again"
            )
        return extent

    def _settle(self, extent: Extent, *, lease: bool) -> None:
        self._book.settle(extent, lease=lease)
        self._note_progress()

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
                if whole and not self._retired:
                    self._idle.append(socket)
                else:
                    socket.over.set()

    async def _connection(self, *, task_status: trio.TaskStatus[_Socket]) -> None:
        async with open_dialler(self._host, self._port, keys=self._keys, on_cut_off=self._note_cut_off) as link:
            socket = _Socket(link)
            task_status.started(socket)
            await socket.over.wait()
            if socket.doubted is None:
                return
            try:
                await socket.answer()
            except (PeerLost, RemoteProtocolError):
                return  # no evidence will ever come: the memory stays out of use
            self._settle(socket.doubted, lease=False)
