"""The link between processes of one host: a unix socket of whole packets, with no thread between sender and receiver.

Its listener has an abstract name, which exists in one network namespace and for as long as the socket is open; nothing
is left in a file system, however the process ends. Both ends check that the other one runs as the same user. The end
of a peer's process is the end of its connection, at once.
"""

from __future__ import annotations

import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ._errors import PeerLost
from ._link import MAX_BATCH, QueuedLink
from ._scope import open_service
from ._unix_transport import Dialled, Listening, UnixTransport, is_own_user
from .abc import Arrived, Connected, Disconnected

# As for the ZMQ link: what a message may have at most.
MAX_FRAMES = 8
MAX_BYTES = 4 << 20

# How the names of senders begin: nothing else is dialled because a peer said so.
LOCAL_PREFIX = "trio-mori-"

# Seconds after which nobody is taken to be awake still for what was said last.
ASLEEP = 0.001

# Connections that wait to be accepted.
_BACKLOG = 128


class _UnixLink(QueuedLink):
    _transport: UnixTransport | None

    def attach(self, transport: UnixTransport) -> None:
        """Begin."""
        self._transport = transport

    def detach(self) -> None:
        """There is nothing to read any more, and nobody to send to."""
        self._transport = None


class UnixDialler(_UnixLink):
    """A link to the listener of one name, for as long as the connection lasts; it is not made again."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def attach(self, transport: UnixTransport) -> None:
        super().attach(transport)
        self._events.append(Connected())

    @property
    def address(self) -> str:
        return f"unix:@{self._name}"

    def receive_nowait(self) -> list[Arrived]:
        """What has arrived, before `receive`, which waits all the while, is woken for it; nothing of it comes twice."""
        if self._transport is None:
            return []
        self._transport.expect()
        return self._read(self._transport, MAX_BATCH)

    def lose(self, route: bytes) -> None:
        """The connection is over."""
        self.detach()
        self._events.append(Disconnected())


class UnixListener(_UnixLink):
    """A link to any number of peers that dial one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def address(self) -> str:
        return f"unix:@{self.name}"

    def nudge(self, route: bytes = b"") -> None:
        if self._transport is not None and trio.current_time() - self._flushed_at > ASLEEP:
            self._transport.nudge(route)

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
    try:
        connection = _new_socket()
    except OSError as error:
        raise _unreachable(name, error) from error
    with connection:
        try:
            connection.connect(f"\0{name}")
        except OSError as error:
            raise _unreachable(name, error) from error
        if not is_own_user(connection):
            raise PeerLost(f"unix:@{name} is listened on by another user", peer=f"unix:@{name}")
        async with open_service() as service:
            link = UnixDialler(name)
            transport = Dialled(connection, service, link.lose, max_frames=max_frames, max_bytes=max_bytes)
            link.attach(transport)
            async with _running(link, transport, service):
                yield link


def _unreachable(name: str, error: OSError) -> PeerLost:
    return PeerLost(f"cannot reach unix:@{name}: {error.strerror}", peer=f"unix:@{name}")


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
        async with open_service() as service:
            link = UnixListener(name)
            transport = Listening(listener, epoll, service, link.lose, max_frames=max_frames, max_bytes=max_bytes)
            link.attach(transport)
            async with _running(link, transport, service):
                yield link


@asynccontextmanager
async def _running(link: _UnixLink, transport: UnixTransport, service: trio.Nursery) -> AsyncIterator[None]:
    await service.start(link.flush_forever)
    try:
        yield
    finally:
        link.close()
        link.detach()
        trio.lowlevel.notify_closing(transport.fd)
        transport.close()
