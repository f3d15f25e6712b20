"""What the unix link reads from and writes to: connections, their packets, and the messages that these make up.

A message is one packet, or several of at most `PACKET` bytes: a mark that says whether more follow, and a part of the
message, which is a count of frames, their lengths, and the frames.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf

import attrs
import trio

from ._errors import SHORTAGES
from ._link import QUIET, Transport
from .abc import Arrived

# Well below the smallest send buffer that Linux gives (net.core.wmem_default is 208 KiB), so that a packet always fits
# into an empty one.
PACKET = 64 << 10

# Packets taken in a row that complete no message, before other tasks run: about 4 ms of the largest ones.
PACKETS = 256

# Packets that may wait for one peer to read: as many as the fetches that one may have open. Whoever has more coming
# reads nothing, and what is said to it from then on is lost, which heartbeats repair.
MAX_BACKLOG = 32768

# Seconds until somebody who waits to connect is looked for again, when this process had no descriptor for one.
ACCEPT_PAUSE = 0.1

_LAST, _MORE = b"\0", b"\1"

# A packet that is no part of a message, and says that one will come soon.
_NUDGE = b"\2"

# Seconds for which a process stays awake for it: as long as 256 MB take from GPU to GPU, two copies of them, with all
# calls. To wake one that sleeps takes 130 us.
AWAKE = 1.5e-3
_UCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)

# What a message begins with, by its number of frames: that number, and their lengths.
_HEADS = tuple(struct.Struct(f"<B{count}I") for count in range(256))


@attrs.define(eq=False)
class _Connection:
    """One peer: what could not be sent yet, and the parts of a message that has not come whole."""

    socket: socket.socket
    route: bytes
    backlog: deque[bytes] = attrs.field(factory=deque)
    parts: list[bytes] = attrs.field(factory=list)
    size: int = 0


class UnixTransport(Transport):
    """Connections, whatever says which of them have something.

    Attributes:
        awake_until: Until when it is worth while to look for a message again and again, for one will come soon.

    Args:
        fd: Readable while one of them has.
        nursery: For tasks that send to who reads slowly.
        on_gone: Called with the route of a connection that is over.
    """

    edge_triggered = False

    def __init__(
        self, fd: int, nursery: trio.Nursery, on_gone: Callable[[bytes], None], *, max_frames: int, max_bytes: int
    ) -> None:
        super().__init__(fd)
        self._start_soon = nursery.start_soon
        self._on_gone = on_gone
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._message: Arrived | None = None
        self._oversized = False
        self._looked = False  # since `readable` was last false
        self.awake_until = -inf

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    @abstractmethod
    def _next(self) -> _Connection | None:
        """One that may have a packet; None: they have no more, or the descriptor will tell."""

    @abstractmethod
    def _find(self, route: bytes) -> _Connection | None:
        """That of a route."""

    @abstractmethod
    def _forget(self, record: _Connection) -> None:
        """It is over."""

    # --- reading ------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        packets = 0
        while self._message is None and not self._oversized:
            # Parts of messages without an end: others have their turn, and the descriptor tells.
            record = self._next() if packets < PACKETS else None
            if record is None:
                # While there is something to come, whoever waits looks again instead of sleeping.
                self.readable = self._looked = self.awake_until > 0 and trio.current_time() < self.awake_until
                return False
            packets += 1
            self._receive(record)
        self.readable = True
        return True

    def _receive(self, record: _Connection) -> None:
        """Take one packet, or see that the connection is over."""
        try:
            packet = record.socket.recv(PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet == _NUDGE:
            self.awake_until = trio.current_time() + AWAKE
            return
        if not packet or packet == _MORE:  # its end; or a part without content, of which there could be any number
            self._forget(record)
            self._on_gone(record.route)
            return
        record.size += len(packet) - 1
        if record.size <= self._max_bytes:
            record.parts.append(packet[1:])
        if packet[:1] == _LAST:
            whole, size = b"".join(record.parts), record.size
            record.parts, record.size = [], 0
            frames = None if size > self._max_bytes else _unpack(whole, self._max_frames)
            if frames is None:
                self._oversized = True
            else:
                self._message = Arrived(frames, record.route)

    def read(self) -> Arrived | None:
        message, self._message, self._oversized = self._message, None, False
        self.awake_until = -inf
        return message

    def expect(self) -> None:
        """Have the next `settle` look, though the descriptor has told nobody."""
        self.readable = self._looked = True

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, frames: Sequence[bytes], route: bytes) -> bool:
        record = self._find(route)
        if record is None or len(record.backlog) >= MAX_BACKLOG:
            return False
        message = _pack(frames)
        if len(message) < PACKET and not record.backlog:
            return self._send(record, _LAST + message)
        room = PACKET - 1
        for start in range(0, len(message), room):
            mark = _MORE if start + room < len(message) else _LAST
            if not self._send(record, mark + message[start : start + room]):
                return False
        return True

    def nudge(self, route: bytes) -> None:
        """Let who is there wake."""
        record = self._find(route)
        if record is not None and not record.backlog:
            with suppress(OSError):  # nothing is lost; and if it is gone, reading tells
                record.socket.send(_NUDGE)

    def _send(self, record: _Connection, packet: bytes) -> bool:
        if not record.backlog:
            try:
                record.socket.send(packet)
            except BlockingIOError:
                self._start_soon(_send_backlog, record)
            except OSError:
                return False  # the peer is gone; what it had sent before can still be read
            else:
                return True
        record.backlog.append(packet)
        return True


class Dialled(UnixTransport):
    """One connection, and its own descriptor. Whoever opened it closes it.

    A dialler wakes 20 us earlier from it than from an epoll descriptor around it.
    """

    def __init__(
        self,
        connection: socket.socket,
        nursery: trio.Nursery,
        on_gone: Callable[[bytes], None],
        *,
        max_frames: int,
        max_bytes: int,
    ) -> None:
        super().__init__(connection.fileno(), nursery, on_gone, max_frames=max_frames, max_bytes=max_bytes)
        self._connection: _Connection | None = _Connection(connection, b"")
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)

    def close(self) -> None:
        self._connection = None

    def _next(self) -> _Connection | None:
        # After a wake-up there is something, so nobody asks. A look that finds nothing costs 1 us, a receive in vain 7.
        if self._looked and not self._poller.poll(0):
            return None
        self._looked = True
        return self._connection

    def _find(self, route: bytes) -> _Connection | None:
        return self._connection

    def _forget(self, record: _Connection) -> None:
        self._connection = None


class Listening(UnixTransport):
    """Any number of connections behind one epoll descriptor, which is readable while one of them has something."""

    def __init__(
        self,
        listener: socket.socket,
        epoll: select.epoll,
        nursery: trio.Nursery,
        on_gone: Callable[[bytes], None],
        *,
        max_frames: int,
        max_bytes: int,
    ) -> None:
        super().__init__(epoll.fileno(), nursery, on_gone, max_frames=max_frames, max_bytes=max_bytes)
        self._epoll = epoll
        self._listener = listener
        self._connections: dict[int, _Connection] = {}
        self._by_route: dict[bytes, _Connection] = {}
        self._ready: deque[int] = deque()
        self._routes = 0
        self._looked_at = -inf
        self._busy = False
        epoll.register(listener.fileno(), select.EPOLLIN)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # nobody waits any more, or it cannot be had; the others go on
                if error.errno in SHORTAGES:
                    self._rest()
                return
            if not is_own_user(connection):
                connection.close()
                continue
            connection.setblocking(False)
            self._routes += 1
            record = _Connection(connection, self._routes.to_bytes(8, "big"))
            self._connections[connection.fileno()] = self._by_route[record.route] = record
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _rest(self) -> None:
        """No descriptors: whoever waits would have this process look again and again, in vain."""
        self._epoll.unregister(self._listener.fileno())
        self._start_soon(self._resume)

    async def _resume(self) -> None:
        await trio.sleep(ACCEPT_PAUSE)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def close(self) -> None:
        for record in self._connections.values():
            _close(record.socket)
        self._connections.clear()
        self._by_route.clear()

    def _next(self) -> _Connection | None:
        while True:
            if not self._ready:
                self._ready.extend(self._look_again())
                if not self._ready:
                    return None
            # One packet of each, in turn: the next look says who has more, and needs no receiving in vain.
            record = self._connections.get(self._ready.popleft())
            if record is not None:
                return record

    def _look_again(self) -> list[int]:
        """What has something now. After a pause one look is enough: if more comes, the descriptor tells."""
        if self._looked and not self._busy:
            return []
        now = trio.current_time()
        self._busy = now - self._looked_at < QUIET
        self._looked_at = now
        self._looked = True
        return self._poll()

    def _poll(self) -> list[int]:
        ready = []
        for fd, _events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._connections:
                ready.append(fd)
        return ready

    def _find(self, route: bytes) -> _Connection | None:
        return self._by_route.get(route)

    def _forget(self, record: _Connection) -> None:
        fd = record.socket.fileno()
        del self._connections[fd], self._by_route[record.route]
        self._epoll.unregister(fd)
        _close(record.socket)


async def _send_backlog(record: _Connection) -> None:
    """Send what a peer that reads slowly could not take yet; a task that lasts as long as there is any."""
    while record.backlog:
        try:
            await trio.lowlevel.wait_writable(record.socket)
            while record.backlog:
                record.socket.send(record.backlog[0])
                record.backlog.popleft()
        except BlockingIOError:
            continue
        except trio.ClosedResourceError:
            if record.socket.fileno() < 0:  # else the link woke its receiver, who waits on the same descriptor
                record.backlog.clear()
        except OSError:
            record.backlog.clear()  # the peer is gone; reading will tell


def _close(connection: socket.socket) -> None:
    trio.lowlevel.notify_closing(connection)
    connection.close()


def _pack(frames: Sequence[bytes]) -> bytes:
    count = len(frames)
    return b"".join((_HEADS[count].pack(count, *map(len, frames)), *frames))


def _unpack(message: bytes, max_frames: int) -> list[bytes] | None:
    """The frames of a message; None if there are too many, or if they are not what the message says."""
    count = message[0] if message else 0
    head = _HEADS[count]
    at = head.size
    if not 0 < count <= max_frames or len(message) < at:
        return None
    frames = []
    for length in head.unpack_from(message)[1:]:
        frames.append(message[at : at + length])
        at += length
    return frames if at == len(message) else None


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user; the kernel knows."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(credentials)
    return bool(uid == os.geteuid())
