"""A stock receiver and a stock sender, as they look from outside: sockets and bytes, made of nothing of ours.

Written from the description of the vllm-omni dialect: a REQ socket asks, a ROUTER socket answers, one frame of payload
behind an empty one, msgpack maps or one of four fixed strings. Bytes move through a memory engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import attrs
import msgspec
import torch
import trio
import zmq

from trio_mori import TransferFailed
from trio_mori._keys import Keys
from trio_mori._protocol.extents import OUTBOUND, Extents
from trio_mori.abc import Descriptor, Write
from trio_mori.testing import MemoryEngine, MemoryFabric

# Seconds between two looks at a socket. Polling is nothing to be proud of, but sees everything.
PAUSE = 0.0005

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as they lie in memory."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def serialised(value: object) -> bytes:
    """A structure as the stock connector stores it."""

    def plain(item: object) -> object:
        if isinstance(item, torch.Tensor):
            dtype = str(item.dtype).removeprefix("torch.")
            return {"__tensor__": True, "dtype": dtype, "shape": list(item.shape), "data": raw_bytes(item)}
        if isinstance(item, dict):
            return {key: plain(each) for key, each in item.items()}
        if isinstance(item, list | tuple):
            return [plain(each) for each in item]
        return item

    return encode(plain(value))


def restored(stored: bytes) -> Any:
    """What the stock connector makes of it."""

    def rich(item: Any) -> Any:
        if isinstance(item, dict) and item.get("__tensor__"):
            flat = torch.frombuffer(bytearray(item["data"]), dtype=torch.uint8)
            return flat.view(getattr(torch, item["dtype"])).reshape(item["shape"])
        if isinstance(item, dict):
            return {key: rich(each) for key, each in item.items()}
        return [rich(each) for each in item] if isinstance(item, list) else item

    return rich(decode(stored))


# --- a receiver ---------------------------------------------------------------------------------------------


class StockClient:
    """One REQ socket of a stock receiver, and its pool."""

    def __init__(self, socket: zmq.Socket[bytes], engine: MemoryEngine) -> None:
        self.engine = engine
        self._socket = socket

    async def ask(self, payload: bytes) -> bytes:
        """Send a request, wait for its answer."""
        self.ask_nowait(payload)
        return await self.answer()

    def ask_nowait(self, payload: bytes) -> None:
        """Send a request."""
        self._socket.send(payload, zmq.NOBLOCK)

    async def answer(self) -> bytes:
        """Wait for the answer."""
        while True:
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                await trio.sleep(PAUSE)

    async def query(self, key: str) -> dict[str, object] | None:
        """Ask for the size of a payload; None if it is not there."""
        answer = await self.ask(b"query_info" + encode({"request_id": key}))
        return None if answer == b"info_not_found" else decode(answer)

    def pull_request(self, key: str, offset: int, length: int) -> bytes:
        """A request for a payload."""
        descriptor = self.engine.descriptor
        return encode(
            {
                "request_id": key,
                "engine_desc_packed": descriptor.engine,
                "mem_desc_packed": descriptor.memory,
                "dst_offset": offset,
                "length": length,
            }
        )

    async def pull(self, key: str, offset: int, length: int) -> bytes:
        """Have a payload written to an offset; returns the answer."""
        return await self.ask(self.pull_request(key, offset, length))

    def region(self, offset: int, length: int) -> torch.Tensor:
        """What lies there."""
        return self.engine.region.tensor[offset : offset + length].clone()


@contextmanager
def open_stock_client(port: int, engine: MemoryEngine, keys: Keys | None = None) -> Iterator[StockClient]:
    """A stock receiver whose pool is that engine's; with keys, what it would be if it had any."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
                keys.sender,
                keys.public,
                keys.secret,
            )
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield StockClient(socket, engine)


# --- a sender -----------------------------------------------------------------------------------------------


@attrs.frozen
class Stored:
    """What a stock sender keeps under a key."""

    data: bytes
    is_raw: bool


@attrs.define(eq=False)
class StockServer:
    """A stock sender, and what a test lets it do wrong.

    Attributes:
        entries: Its payloads.
        queries, pulls, hellos: What it was asked: keys, and how often it could not understand.
        ignored: How many of the next requests it does not answer.
        refused: How many of the next pulls it answers by an error.
        late: Whether answers are kept until `answer_late`.
        rubbish: What it answers to the next requests instead of sense.
    """

    port: int
    engine: MemoryEngine
    entries: dict[str, Stored] = attrs.field(factory=dict)
    queries: list[str] = attrs.field(factory=list)
    pulls: list[str] = attrs.field(factory=list)
    hellos: int = 0
    ignored: int = 0
    refused: int = 0
    late: bool = False
    rubbish: list[bytes] = attrs.field(factory=list)
    peers: set[bytes] = attrs.field(factory=set)
    _socket: zmq.Socket[bytes] | None = None
    _kept: list[list[bytes]] = attrs.field(factory=list)
    _room: Extents | None = None

    def put(self, key: str, data: torch.Tensor | object) -> dict[str, object]:
        """Store a payload; returns put's metadata."""
        is_raw = isinstance(data, torch.Tensor)
        stored = Stored(raw_bytes(data) if isinstance(data, torch.Tensor) else serialised(data), is_raw)
        self.entries[key] = stored
        return {
            "source_host": "127.0.0.1",
            "source_port": self.port,
            "data_size": len(stored.data),
            "is_fast_path": is_raw,
        }

    def answer_late(self) -> None:
        """Send what was kept, and keep nothing any more."""
        assert self._socket is not None
        self.late = False
        while self._kept:
            self._send(self._kept.pop(0))

    def hang_up(self) -> None:
        """Close the socket, with every connection to it."""
        assert self._socket is not None
        socket, self._socket = self._socket, None
        socket.close(linger=0)

    async def serve(self, nursery: trio.Nursery) -> None:
        """Answer requests until cancelled."""
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await trio.sleep(PAUSE)
                continue
            if len(frames) >= 2:
                self.peers.add(frames[0])
                nursery.start_soon(self._handle, frames[0], frames[-1])

    async def _handle(self, identity: bytes, payload: bytes) -> None:
        answer = await self._answer(payload)
        if answer is not None:
            frames = [identity, b"", answer]
            if self.late:
                self._kept.append(frames)
            else:
                self._send(frames)

    def _send(self, frames: list[bytes]) -> None:
        if self._socket is not None:
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    async def _answer(self, payload: bytes) -> bytes | None:
        if self.ignored and payload[:1] != b"\xc1":
            self.ignored -= 1
            return None
        if self.rubbish and payload[:1] != b"\xc1":
            return self.rubbish.pop(0)
        if payload.startswith(b"query_info"):
            key = decode(payload[len(b"query_info") :])["request_id"]
            self.queries.append(key)
            stored = self.entries.get(key)
            if stored is None:
                return b"info_not_found"
            return encode({"request_id": key, "data_size": len(stored.data), "is_fast_path": stored.is_raw})
        try:
            request = decode(payload)
        except msgspec.DecodeError:
            self.hellos += 1
            return b"trans_error"
        key = request["request_id"]
        self.pulls.append(key)
        if self.refused:
            self.refused -= 1
            return b"trans_error"
        if key not in self.entries or len(self.entries[key].data) != request["length"]:
            return b"trans_error"
        return await self._write(key, request)

    async def _write(self, key: str, request: dict[str, Any]) -> bytes:
        assert self._room is not None
        data = self.entries[key].data
        peer = self.engine.add_peer(Descriptor(request["engine_desc_packed"], request["mem_desc_packed"]))
        extent = self._room.allocate(len(data), OUTBOUND)
        place = self.engine.region.tensor[extent.offset : extent.offset + len(data)]
        place.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        try:
            await self.engine.write(peer, Write(extent.offset, request["dst_offset"], len(data)))
        except TransferFailed:
            return b"trans_error"
        finally:
            self._room.free(extent)
        del self.entries[key]
        return b"trans_done"


@asynccontextmanager
async def open_stock_server(
    fabric: MemoryFabric, port: int = 0, *, pool: int = 1 << 20, keys: Keys | None = None
) -> AsyncIterator[StockServer]:
    """A stock sender on a port of loopback, on any one if that is 0; with keys, what it would be if it had any."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            socket.curve_server, socket.curve_secretkey = True, keys.secret
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        number = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        async with fabric.open(pool_size=pool) as engine, trio.open_nursery() as nursery:
            server = StockServer(number, engine, socket=socket, room=Extents(pool))
            nursery.start_soon(server.serve, nursery)
            try:
                yield server
            finally:
                engine.release()  # else a test that failed meanwhile would hang
            nursery.cancel_scope.cancel()
