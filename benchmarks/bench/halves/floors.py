"""What nothing can be faster than: a copy, a wake-up of another process, a round trip of a blocking socket."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from typing import Any

from ..half import PAUSE, Half, Ready, pace
from ..turn import Turn

MESSAGE = b"0" * 64


class Copy(Half):
    """``present``: `memmove` between two buffers of this process that were used before; the sender does nothing."""

    def open(self, pool: int, other: Any) -> Any:
        return None

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        if self.role == "send":
            return {"puts": []}
        source, target = (ctypes.create_string_buffer(turn.size) for _ in range(2))
        for each in (source, target):
            ctypes.memset(each, 1, turn.size)
        took = []
        for _ in range(turn.chunks):
            time.sleep(PAUSE)
            begin = time.monotonic_ns()
            ctypes.memmove(target, source, turn.size)
            took.append((time.monotonic_ns() - begin) / 1000)
        return {"gets": took}

    def close(self) -> None:
        pass


class Socket(Half):
    """``streams``: 64 bytes over a unix socket to a process that is blocked in recv, as long as it takes to wake up."""

    def open(self, pool: int, other: Any) -> Any:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self.role == "send":
            address = f"\0trio-mori-bench-{os.getpid()}"
            self._socket.bind(address)
            self._socket.listen(1)
            return address
        self._socket.connect(other)
        return None

    def meet(self, other: Any) -> None:
        self._socket, listener = self._socket.accept()[0], self._socket
        listener.close()

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        times = [0] * turn.chunks
        begin = time.monotonic()
        if self.role == "receive":
            ready()
        for chunk in range(turn.chunks):
            if self.role == "receive":
                self._socket.recv(64)
                times[chunk] = time.monotonic_ns()
                continue
            time.sleep(max(pace(begin, turn, chunk + 1), 0))
            times[chunk] = time.monotonic_ns()
            self._socket.send(MESSAGE)
        return {"starts" if self.role == "send" else "ends": [times]}

    def close(self) -> None:
        self._socket.close()


class Echo(Half):
    """``streams``: 64 bytes and back, blocking pyzmq over tcp; the sender's clock alone."""

    def open(self, pool: int, other: Any) -> Any:
        import zmq

        self._socket: Any = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        if self.role == "send":
            return f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._socket.connect(other)
        return None

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        starts, ends = [0] * turn.chunks, [0] * turn.chunks
        begin = time.monotonic()
        if self.role == "receive":
            ready()
        for chunk in range(turn.chunks):
            if self.role == "receive":
                self._socket.send(self._socket.recv())
                continue
            time.sleep(max(pace(begin, turn, chunk + 1), 0))
            starts[chunk] = time.monotonic_ns()
            self._socket.send(MESSAGE)
            self._socket.recv()
            ends[chunk] = time.monotonic_ns()
        return {"starts": [starts], "ends": [ends]} if self.role == "send" else {}

    def close(self) -> None:
        self._socket.close()
