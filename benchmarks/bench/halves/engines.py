"""Transfer engines without a connector around them: NIXL and Mooncake, each used as its documentation shows it.

Both ends have a registered pool, cut into slots of the turn's size. Which chunk is in which slot both know beforehand,
so that no allocator, no keys and no checks are on the way, and a *put* is a copy into the slot and one write into the
same slot over there. A *get* is a copy out of the slot when the write has been told; of a present payload it is one
read and that copy. No torch here, and raw payloads only.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
import socket
import struct
import time
from typing import Any

from ..half import GIVE_UP, PAUSE, Half, Ready, pace
from ..turn import Turn

_SLOT = struct.Struct("q")


class Engine(Half):
    """A peer in terms of registered memory and writes from slot to slot."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self._slots = 0, 0

    def _claim(self, pool: int) -> None:
        self._memory = mmap.mmap(-1, pool)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pool = pool
        ctypes.memset(self._address, 1, pool)

    @abc.abstractmethod
    def prepare(self, size: int, count: int) -> None:
        """The slots of a turn are these; outside of the clock."""

    @abc.abstractmethod
    def write(self, slot: int) -> None:
        """Returns when the slot is over there."""

    @abc.abstractmethod
    def read(self, slot: int) -> None:
        """Returns when the slot is here."""

    @abc.abstractmethod
    def wait_written(self) -> list[int]:
        """The slots that were written since; at least one."""

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        if turn.total * turn.size > self._pool:
            raise ValueError(f"{turn.total} chunks of {turn.size} bytes do not fit into {self._pool}")
        if self._slots != (turn.size, turn.total):
            self._slots = turn.size, turn.total
            self.prepare(turn.size, turn.total)
        if turn.scenario == "present":
            return self._put_all(turn) if self.role == "send" else self._get_all(turn)
        return self._send_streams(turn) if self.role == "send" else self._receive_streams(turn, ready)

    def _send_streams(self, turn: Turn) -> dict[str, Any]:
        payload = ctypes.create_string_buffer(turn.size)
        starts = [[0] * turn.chunks for _ in range(turn.streams)]
        begin = time.monotonic()
        for chunk in range(turn.chunks):
            if (left := pace(begin, turn, chunk + 1)) > 0:
                time.sleep(left)
            for stream in range(turn.streams):
                _SLOT.pack_into(payload, 0, turn.number(stream, chunk))
                slot = stream * turn.chunks + chunk
                starts[stream][chunk] = time.monotonic_ns()
                ctypes.memmove(self._address + slot * turn.size, payload, turn.size)
                self.write(slot)
        return {"starts": starts}

    def _receive_streams(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        ends = [[0] * turn.chunks for _ in range(turn.streams)]
        left = turn.total
        ready()
        while left:
            for slot in self.wait_written():
                stream, chunk = divmod(slot, turn.chunks)
                value = self._copy(turn, slot)
                ends[stream][chunk] = time.monotonic_ns()
                check(value, turn.number(stream, chunk))
                left -= 1
        return {"ends": ends}

    def _copy(self, turn: Turn, slot: int) -> bytearray:
        return bytearray(self._view[slot * turn.size : (slot + 1) * turn.size])

    def _put_all(self, turn: Turn) -> dict[str, Any]:
        payload = ctypes.create_string_buffer(turn.size)
        took = []
        for chunk in range(turn.chunks):
            _SLOT.pack_into(payload, 0, turn.number(0, chunk))
            time.sleep(PAUSE)
            begin = time.monotonic_ns()
            ctypes.memmove(self._address + chunk * turn.size, payload, turn.size)
            took.append((time.monotonic_ns() - begin) / 1000)
        return {"puts": took}

    def _get_all(self, turn: Turn) -> dict[str, Any]:
        took = []
        for chunk in range(turn.chunks):
            time.sleep(PAUSE)
            begin = time.monotonic_ns()
            self.read(chunk)
            value = self._copy(turn, chunk)
            took.append((time.monotonic_ns() - begin) / 1000)
            check(value, turn.number(0, chunk))
        return {"gets": took}


def check(value: bytearray, number: int) -> None:
    found = _SLOT.unpack_from(value)[0]
    if found != number:
        raise ValueError(f"chunk {number} arrived as {found}")


class Nixl(Engine):
    """NIXL over UCX, its progress thread off, so that a caller who waits has to poll."""

    def open(self, pool: int, other: Any) -> Any:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._claim(pool)
        config = nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"bench-{self.role}", config)
        self._registered = self._agent.register_memory([(self._address, pool, 0, "")], "DRAM")
        mine = [self._agent.get_agent_metadata().hex(), self._address]
        if self.role == "receive":
            self.meet(other)
        return mine

    def meet(self, other: Any) -> None:
        metadata, self._there = other
        name = self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._remote = name.decode() if isinstance(name, bytes) else name

    def prepare(self, size: int, count: int) -> None:
        here, there = (
            [(start + slot * size, size, 0) for slot in range(count)] for start in (self._address, self._there)
        )
        self._near = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
        self._far = self._agent.prep_xfer_dlist(self._remote, there, "DRAM")

    def _transfer(self, operation: str, slot: int, notice: bytes) -> None:
        handle = self._agent.make_prepped_xfer(operation, self._near, [slot], self._far, [slot], notice)
        state = self._agent.transfer(handle)
        until = time.monotonic() + GIVE_UP
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            if time.monotonic() > until:
                raise TimeoutError(f"NIXL: {operation} of slot {slot} is still in progress after {GIVE_UP} s")
        if state != "DONE":
            raise RuntimeError(f"NIXL: {operation} of slot {slot} ended as {state}")
        handle.release()

    def write(self, slot: int) -> None:
        self._transfer("WRITE", slot, _SLOT.pack(slot))

    def read(self, slot: int) -> None:
        self._transfer("READ", slot, b"")

    def wait_written(self) -> list[int]:
        until = time.monotonic() + GIVE_UP
        while not (told := self._agent.get_new_notifs()):
            if time.monotonic() > until:
                raise TimeoutError(f"NIXL: no notification within {GIVE_UP} s")
        return [_SLOT.unpack(each)[0] for notices in told.values() for each in notices]

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class Mooncake(Engine):
    """Mooncake's transfer engine over tcp. It tells nobody of a write, so that a plain socket does."""

    def open(self, pool: int, other: Any) -> Any:
        from mooncake.engine import TransferEngine

        self._claim(pool)
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's TransferEngine.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '') failed")
        if self._engine.register_memory(self._address, pool):
            raise RuntimeError(f"Mooncake's register_memory of {pool} bytes failed")
        session = f"127.0.0.1:{self._engine.get_rpc_port()}"
        if self.role == "send":
            self._listener = socket.create_server(("127.0.0.1", 0))
            return [session, self._address, self._listener.getsockname()[1]]
        self._session, self._there, port = other
        self._notices = socket.create_connection(("127.0.0.1", port))
        self._size = 0
        return [session, self._address, 0]

    def meet(self, other: Any) -> None:
        self._session, self._there, _ = other
        self._notices, _ = self._listener.accept()
        self._notices.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listener.close()

    def prepare(self, size: int, count: int) -> None:
        self._size = size

    def _transfer(self, operation: str, slot: int) -> None:
        at = slot * self._size
        transfer = getattr(self._engine, f"transfer_sync_{operation}")
        if code := transfer(self._session, self._address + at, self._there + at, self._size):
            raise RuntimeError(f"Mooncake: {operation} of slot {slot} failed with {code}")

    def write(self, slot: int) -> None:
        self._transfer("write", slot)
        self._notices.sendall(_SLOT.pack(slot))

    def read(self, slot: int) -> None:
        self._transfer("read", slot)

    def wait_written(self) -> list[int]:
        data = self._notices.recv(1 << 16)
        while len(data) % _SLOT.size:
            data += self._notices.recv(1 << 16)
        if not data:
            raise ConnectionError("Mooncake: the sender has gone")
        return [slot for (slot,) in _SLOT.iter_unpack(data)]

    def close(self) -> None:
        self._notices.close()
        self._engine.unregister_memory(self._address)
