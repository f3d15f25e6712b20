"""A sender and a receiver of the stock connector's shape, as DESIGN describes it: for comparison, not for use.

What they lack is what does not cost time: engines, clean-up, errors. The "engine" is a copy into a shared file.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq


class StockShapedSender:
    """Serves query and pull by a polled ROUTER socket, four workers, and a queue back to the poller."""

    def __init__(self, payload: bytes, target: Path) -> None:
        self._payload = payload
        self._source = (ctypes.c_char * len(payload)).from_buffer_copy(payload)
        with target.open("r+b") as file:
            self._target = mmap.mmap(file.fileno(), 0)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._target))
        self._context = zmq.Context()
        self._answers: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self._local = threading.local()
        self._workers = ThreadPoolExecutor(4)
        self._router = self._context.socket(zmq.ROUTER)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._notices = self._context.socket(zmq.PULL)
        self._notices.bind("inproc://answers")

    def serve(self) -> None:
        """For ever."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._notices, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(1000))
            if self._notices in ready:
                self._notices.recv()
                while not self._answers.empty():
                    identity, answer = self._answers.get_nowait()
                    self._router.send_multipart([identity, b"", answer])
            if self._router in ready:
                frames = self._router.recv_multipart()
                self._workers.submit(self._answer, frames[0], frames[-1])

    def _answer(self, identity: bytes, request: bytes) -> None:
        if request.startswith(b"query_info"):
            key = msgspec.msgpack.decode(request[len(b"query_info") :])["request_id"]
            found = {"request_id": key, "data_size": len(self._payload), "is_fast_path": True}
            answer = msgspec.msgpack.encode(found)
        else:
            pull = msgspec.msgpack.decode(request)
            ctypes.memmove(self._address + pull["dst_offset"], self._source, pull["length"])
            answer = b"trans_done"
        self._answers.put((identity, answer))
        notifier = getattr(self._local, "notifier", None)
        if notifier is None:
            notifier = self._local.notifier = self._context.socket(zmq.PUSH)
            notifier.connect("inproc://answers")
        notifier.send(b"")


class StockShapedReceiver:
    """Query and pull by a blocking REQ socket."""

    def __init__(self, port: int, engine_desc: bytes, mem_desc: bytes, pool: memoryview) -> None:
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._descriptors = {"engine_desc_packed": engine_desc, "mem_desc_packed": mem_desc}
        self._pool = pool

    def get(self, key: str) -> bytearray:
        """A copy of a payload that is there; `key` with its edge."""
        self._socket.send(b"query_info" + msgspec.msgpack.encode({"request_id": key}))
        size = msgspec.msgpack.decode(self._socket.recv())["data_size"]
        pull = {"request_id": key, **self._descriptors, "dst_offset": 0, "length": size}
        self._socket.send(msgspec.msgpack.encode(pull))
        answer = self._socket.recv()
        if answer != b"trans_done":
            raise RuntimeError(f"pull of {key} answered {answer!r}")
        return bytearray(self._pool[:size])


if __name__ == "__main__":
    sender = StockShapedSender(bytes(int(sys.argv[2])), Path(sys.argv[1]))
    print(sender.port, flush=True)
    sender.serve()
