"""The link between processes of one host: a unix socket of whole packets, with no thread between sender and receiver.

Its listener has an abstract name, which exists in one network namespace and for as long as the socket is open; nothing
is left in a file system, however the process ends. Both ends check that the other one runs as the same user. The end
of a peer's process is the end of its connection, at once.

A message is one packet, or several of at most `PACKET` bytes: a mark that says whether more follow, and a part of the
message, which is a count of frames, their lengths, and the frames.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from math import inf

import attrs
import trio

from ._errors import PeerLost
from ._link import QUIET, QueuedLink, Transport
from ._scope import open_service
from .abc import Arrived, Connected, Disconnected

# Well below the smallest send buffer that Linux gives (net.core.wmem_default is 208 KiB), so that a packet always fits
# into an empty one.
PACKET = 64 << 10

# Packets taken in a row that complete no message, before other tasks run: about 4 ms of the largest ones.
PACKETS = 256

# As for the ZMQ link: what a message may have at most.
MAX_FRAMES = 8
MAX_BYTES = 4 << 20

# How the names of senders begin: nothing else is dialled because a peer said so.
LOCAL_PREFIX = "trio-mori-"

# Connections that wait to be accepted.
_BACKLOG = 128

_LAST, _MORE = b"\0", b"\1"
_UCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_LENGTH = struct.Struct("<I")


@attrs.define(eq=False)
class _Connection:
    """One peer: what could not be sent yet, and the parts of a message that has not come whole."""

    socket: socket.socket
    route: bytes
    backlog: deque[bytes] = attrs.field(factory=deque)
    parts: list[bytes] = attrs.field(factory=list)
    size: int = 0


class _UnixTransport(Transport):
    """Any number of connections behind one epoll descriptor, which is readable while one of them has something."""

    edge_triggered = False

    def __init__(
        self,
        nursery: trio.Nursery,
        epoll: select.epoll,
        on_gone: Callable[[bytes], None],
        *,
        max_frames: int,
        max_bytes: int,
    ) -> None:
        self._epoll = epoll
        super().__init__(epoll.fileno())
        self._start_soon = nursery.start_soon
        self._on_gone = on_gone
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._connections: dict[int, _Connection] = {}
        self._by_route: dict[bytes, _Connection] = {}
        self._listener: socket.socket | None = None
        self._ready: deque[int] = deque()
        self._message: Arrived | None = None
        self._oversized = False
        self._routes = 0
        self._looked = False  # since `readable` was last false
        self._looked_at = -inf
        self._busy = False

    # --- connections --------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket) -> None:
        """Accept connections, each with a route of its own."""
        self._listener = listener
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def add(self, connection: socket.socket, route: bytes) -> None:
        """Take over a connection."""
        connection.setblocking(False)
        record = _Connection(connection, route)
        self._connections[connection.fileno()] = self._by_route[route] = record
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # nobody waits any more, or this process has no descriptors left; the others go on
                return
            if is_own_user(connection):
                self._routes += 1
                self.add(connection, self._routes.to_bytes(8, "big"))
            else:
                connection.close()

    def _drop(self, record: _Connection) -> None:
        fd = record.socket.fileno()
        del self._connections[fd], self._by_route[record.route]
        self._epoll.unregister(fd)
        _close(record.socket)
        self._on_gone(record.route)

    def close(self) -> None:
        """Close all connections."""
        for record in self._connections.values():
            _close(record.socket)
        self._connections.clear()
        self._by_route.clear()

    # --- reading ------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        packets = 0
        while self._message is None and not self._oversized:
            packets += 1
            if packets > PACKETS:  # parts of messages without an end: others have their turn, and the descriptor tells
                self.readable = self._looked = False
                return False
            if not self._ready:
                self._ready.extend(self._look_again())
                if not self._ready:
                    self.readable = False
                    return False
            # One packet of each, in turn: the next look says who has more, and needs no receiving in vain.
            record = self._connections.get(self._ready.popleft())
            if record is not None:
                self._receive(record)
        self.readable = True
        return True

    def _look_again(self) -> list[int]:
        """What has something now. After a pause one look is enough: if more comes, the descriptor tells."""
        if self._looked and not self._busy:
            self._looked = False
            return []
        now = trio.current_time()
        self._busy = now - self._looked_at < QUIET
        self._looked_at = now
        ready = self._poll()
        self._looked = bool(ready)
        return ready

    def _poll(self) -> list[int]:
        ready = []
        for fd, _events in self._epoll.poll(0):
            if self._listener is not None and fd == self._listener.fileno():
                self._accept(self._listener)
                continue
            record = self._connections.get(fd)
            if record is not None:
                ready.append(fd)
        return ready

    def _receive(self, record: _Connection) -> None:
        """Take one packet, or see that the connection is over."""
        try:
            packet = record.socket.recv(PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet or packet == _MORE:  # its end; or a part without content, of which there could be any number
            self._drop(record)
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
        return message

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, frames: Sequence[bytes], route: bytes) -> bool:
        record = self._by_route.get(route)
        if record is None:
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

    def _send(self, record: _Connection, packet: bytes) -> bool:
        if not record.backlog:
            try:
                record.socket.send(packet)
            except BlockingIOError:
                self._start_soon(self._send_backlog, record)
            except OSError:
                return False  # the peer is gone; what it had sent before can still be read
            else:
                return True
        record.backlog.append(packet)
        return True

    async def _send_backlog(self, record: _Connection) -> None:
        """Send what a peer that reads slowly could not take yet; a task that lasts as long as there is any."""
        while record.backlog:
            try:
                await trio.lowlevel.wait_writable(record.socket)
                while record.backlog:
                    record.socket.send(record.backlog[0])
                    record.backlog.popleft()
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                record.backlog.clear()  # the peer is gone; reading will tell


def _close(connection: socket.socket) -> None:
    trio.lowlevel.notify_closing(connection)
    connection.close()


def _pack(frames: Sequence[bytes]) -> bytes:
    lengths = [_LENGTH.pack(len(frame)) for frame in frames]
    return b"".join((bytes((len(frames),)), *lengths, *frames))


def _unpack(message: bytes, max_frames: int) -> list[bytes] | None:
    """The frames of a message; None if there are too many, or if they are not what the message says."""
    count = message[0] if message else 0
    at = 1 + count * _LENGTH.size
    if not 0 < count <= max_frames or len(message) < at:
        return None
    frames = []
    for index in range(count):
        (length,) = _LENGTH.unpack_from(message, 1 + index * _LENGTH.size)
        frames.append(message[at : at + length])
        at += length
    return frames if at == len(message) else None


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user; the kernel knows."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(credentials)
    return bool(uid == os.getuid())


class UnixDialler(QueuedLink):
    """A link to the listener of one name, for as long as the connection lasts; it is not made again."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def attach(self, transport: Transport | None) -> None:
        """Begin, by a transport with the one connection; None: it is closed."""
        self._transport = transport
        self._events.append(Connected())

    @property
    def address(self) -> str:
        return f"unix:@{self._name}"

    def lose(self, route: bytes) -> None:
        """The connection is over."""
        self._transport = None
        self._events.append(Disconnected())


class UnixListener(QueuedLink):
    """A link to any number of peers that dial one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def attach(self, transport: Transport | None) -> None:
        """Begin, by a transport that accepts; None: it is closed."""
        self._transport = transport

    @property
    def address(self) -> str:
        return f"unix:@{self.name}"

    def lose(self, route: bytes) -> None:
        """One connection is over."""
        self._events.append(Disconnected(route))


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


@asynccontextmanager
async def open_unix_dialler(
    name: str, *, max_frames: int = MAX_FRAMES, max_bytes: int = MAX_BYTES
) -> AsyncIterator[UnixDialler]:
    """Connect to the listener of a name; the link is `Connected` from the start, and once.

    Raises:
        PeerLost: nobody listens by that name in this network namespace, or not as this user; or this process has no
            descriptors left.
    """
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(_new_socket())
            connection.connect(f"\0{name}")
            epoll = stack.enter_context(select.epoll())
        except OSError as error:
            raise PeerLost(f"cannot reach unix:@{name}: {error.strerror}", peer=f"unix:@{name}") from error
        if not is_own_user(connection):
            raise PeerLost(f"unix:@{name} is listened on by another user", peer=f"unix:@{name}")
        link = UnixDialler(name)
        async with _running(link, epoll, max_frames, max_bytes) as transport:
            transport.add(connection, b"")
            link.attach(transport)
            yield link


@asynccontextmanager
async def open_unix_listener(
    name: str, *, max_frames: int = MAX_FRAMES, max_bytes: int = MAX_BYTES
) -> AsyncIterator[UnixListener]:
    """Listen on an abstract name of this network namespace.

    Raises:
        OSError: the name is taken, or there are no such sockets here.
    """
    with _new_socket() as listener, select.epoll() as epoll:
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
        link = UnixListener(name)
        async with _running(link, epoll, max_frames, max_bytes) as transport:
            transport.listen(listener)
            link.attach(transport)
            yield link


@asynccontextmanager
async def _running(
    link: UnixDialler | UnixListener, epoll: select.epoll, max_frames: int, max_bytes: int
) -> AsyncIterator[_UnixTransport]:
    async with open_service() as service:
        transport = _UnixTransport(service, epoll, link.lose, max_frames=max_frames, max_bytes=max_bytes)
        await service.start(link.flush_forever)
        try:
            yield transport
        finally:
            link.close()
            link.attach(None)
            trio.lowlevel.notify_closing(transport.fd)
            transport.close()
