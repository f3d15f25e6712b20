"""A sender and a receiver of the stock connector's shape (vllm-omni 0.30.0): for comparison, not for use.

They do on each get what that connector does, and no more: a query and a pull by a blocking REQ socket whose time limits
are set each time, a polled ROUTER socket, four worker threads that answer by a queue and an inproc socket, typed
msgpack, a table of payloads and a table of peers under locks, and pools with a sorted free list under a lock. They lack
logging (which is on by default there) and Mori: the "engine" is a copy into a shared file.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq

ALIGNMENT = 4096


class Query(msgspec.Struct):
    """How large is it?"""

    request_id: str


class Found(msgspec.Struct):
    """It is so large."""

    request_id: str
    data_size: int
    is_fast_path: bool


class Pull(msgspec.Struct):
    """Write it there."""

    request_id: str
    engine_desc_packed: bytes
    mem_desc_packed: bytes
    dst_offset: int
    length: int


class FreeList:
    """First fit over a sorted list of free blocks."""

    def __init__(self, size: int) -> None:
        self._blocks = [(0, size)]
        self._lock = threading.Lock()

    def allocate(self, size: int) -> int:
        """Where there is room."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            for index, (start, length) in enumerate(self._blocks):
                if length >= size:
                    self._blocks[index : index + 1] = [(start + size, length - size)] if length > size else []
                    return start
        raise MemoryError(f"no room for {size} bytes")

    def free(self, start: int, size: int) -> None:
        """Give it back, and join neighbours."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            bisect.insort(self._blocks, (start, size))
            joined = [self._blocks[0]]
            for begin, length in self._blocks[1:]:
                last, before = joined[-1]
                if last + before == begin:
                    joined[-1] = (last, before + length)
                else:
                    joined.append((begin, length))
            self._blocks = joined


class StockShapedSender:
    """Has a payload for every key that it is asked for: put when it is asked for first, and again when it has left."""

    def __init__(self, size: int, target: Path, pool: int) -> None:
        self._size = size
        self._memory = (ctypes.c_char * pool)()
        self._source = ctypes.addressof(self._memory)
        with target.open("r+b") as file:
            self._target = mmap.mmap(file.fileno(), 0)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._target))
        self._room = FreeList(pool)
        self._payloads: dict[str, tuple[int, int, bool, float]] = {}
        self._payloads_lock = threading.Lock()
        self._peers: dict[bytes, bytes] = {}
        self._peers_lock = threading.Lock()
        self._context = zmq.Context()
        self._local = threading.local()
        self._workers = ThreadPoolExecutor(4)
        self._router = self._context.socket(zmq.ROUTER)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._notices = self._context.socket(zmq.PULL)
        self._notices.bind("inproc://answers")
        self._checked = time.monotonic()

    def put(self, key: str) -> None:
        """Store a payload."""
        offset = self._room.allocate(self._size)
        with self._payloads_lock:
            self._payloads[key] = (offset, self._size, True, time.monotonic())

    def serve(self) -> None:
        """For ever."""
        answers: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._notices, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(1000))
            if self._notices in ready:
                while True:
                    try:
                        self._notices.recv(zmq.NOBLOCK)
                    except zmq.Again:
                        break
            while True:
                try:
                    identity, answer = answers.get_nowait()
                except queue.Empty:
                    break
                self._router.send_multipart([identity, b"", answer])
            self._checked = max(self._checked, time.monotonic() - 10)
            if self._router in ready:
                frames = self._router.recv_multipart()
                self._workers.submit(self._answer, answers, frames[0], frames[-1])

    def _answer(self, answers: queue.Queue[tuple[bytes, bytes]], identity: bytes, request: bytes) -> None:
        if request.startswith(b"query_info"):
            query = msgspec.msgpack.decode(request[len(b"query_info") :], type=Query)
            with self._payloads_lock:
                known = query.request_id in self._payloads
            if not known:
                self.put(query.request_id)  # for the first get of a key only
            with self._payloads_lock:
                _, size, is_raw, _ = self._payloads[query.request_id]
            answers.put((identity, msgspec.msgpack.encode(Found(query.request_id, size, is_raw))))
            self._notify()
            return
        pull = msgspec.msgpack.decode(request, type=Pull)
        with self._payloads_lock:
            offset, size, _, _ = self._payloads[pull.request_id]
        if pull.length != size:
            answers.put((identity, b"trans_error"))
            self._notify()
            return
        with self._peers_lock:
            self._peers.setdefault(pull.engine_desc_packed, pull.mem_desc_packed)
        ctypes.memmove(self._address + pull.dst_offset, self._source + offset, size)
        with self._payloads_lock:
            del self._payloads[pull.request_id]
        self._room.free(offset, size)
        answers.put((identity, b"trans_done"))
        self._notify()

    def _notify(self) -> None:
        notifier = getattr(self._local, "notifier", None)
        if notifier is None:
            notifier = self._local.notifier = self._context.socket(zmq.PUSH)
            notifier.connect("inproc://answers")
        notifier.send(b"", zmq.NOBLOCK)


class StockShapedReceiver:
    """Query and pull by a blocking REQ socket."""

    def __init__(self, port: int, engine_desc: bytes, mem_desc: bytes, pool: memoryview) -> None:
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._descriptors = (engine_desc, mem_desc)
        self._pool = pool
        self._room = FreeList(len(pool))

    def get(self, key: str) -> bytearray:
        """A copy of a payload that is there; `key` with its edge."""
        self._limit(5_000)
        self._socket.send(b"query_info" + msgspec.msgpack.encode(Query(key)))
        size = msgspec.msgpack.decode(self._socket.recv(), type=Found).data_size
        offset = self._room.allocate(size)
        self._limit(30_000 + size // (100 << 20) * 5_000)
        self._socket.send(msgspec.msgpack.encode(Pull(key, *self._descriptors, offset, size)))
        answer = self._socket.recv()
        if answer != b"trans_done":
            raise RuntimeError(f"pull of {key} answered {answer!r}")
        copy = bytearray(self._pool[offset : offset + size])
        self._room.free(offset, size)
        return copy

    def _limit(self, milliseconds: int) -> None:
        self._socket.setsockopt(zmq.SNDTIMEO, milliseconds)
        self._socket.setsockopt(zmq.RCVTIMEO, milliseconds)


if __name__ == "__main__":
    sender = StockShapedSender(int(sys.argv[2]), Path(sys.argv[1]), 64 << 20)
    print(sender.port, flush=True)
    sender.serve()
