"""Message links over ZMQ and tcp: a dialling one (DEALER) and a listening one (ROUTER). The only `import zmq`."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import trio
import zmq

from ._errors import BindFailed
from ._link import MAX_BATCH, QueuedLink, Transport
from ._protocol.wire import MAX_BODY
from ._scope import open_service
from .abc import Arrived, Connected, Disconnected

_log = logging.getLogger("trio_mori.link")
_Socket = zmq.Socket[bytes]

# Both dialects have two frames; the rest is room for later versions.
MAX_FRAMES = 8
# A body above MAX_BODY gets a typed refusal from the protocol; only far above it is the connection cut.
MAX_BYTES = 4 * MAX_BODY

# Seconds between attempts to connect. 10 ms: with a peer that comes up just then, the first chunk waits 1-17 ms instead
# of 42-152 ms at ZMQ's default. 1 s: an absent peer costs 0.1% of a core.
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 1.0

# Milliseconds until an attempt to reach a host that does not answer at all is made anew. The kernel would go on for two
# minutes at growing intervals, and miss a host that comes back by up to the longest of them.
CONNECT_TIMEOUT = 5_000

# Seconds after which an attempt of which nothing is heard is given up: libzmq says nothing when it found no descriptor
# for one. Above CONNECT_TIMEOUT, whose end is heard of.
DIAL_TIMEOUT = 10.0

# Milliseconds: more than any task keeps the trio thread from closing the socket; see `DiallingLink`.
NEVER_RECONNECT = 3_600_000

# Seconds: a host that vanished without a word is noticed after 10 + 3 * 5, before the peer_timeout of 30.
KEEPALIVE_IDLE = 10
KEEPALIVE_INTERVAL = 5
KEEPALIVE_COUNT = 3

# Ports tried when an ephemeral one, free on the first address, is taken on another.
EPHEMERAL_ATTEMPTS = 8

# Seconds to wait for libzmq's thread to close a listening descriptor; measured 60 us, 0.9 ms at worst.
RELEASE_TIMEOUT = 1.0

# Plain integers: `&` on the enums costs more than asking the socket.
_POLLIN = int(zmq.POLLIN)
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_HANDSHAKE_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_CONNECTION_EVENTS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_LISTENER_CLOSED = int(zmq.EVENT_CLOSED)

_REMEDIES = {
    errno.EADDRINUSE: "another socket listens there (`ss -ltnp` names its process): end that one, or set another port",
    errno.EADDRNOTAVAIL: "this host has no such address (`ip addr` lists those it has): set one of them, or 'auto'",
    errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE: set a port from 1024 to 65535, or 0 for any free one",
}


class _ZmqTransport(Transport):
    """A ZMQ socket; the first frame of a ROUTER's messages is the route."""

    def __init__(self, socket: _Socket, *, max_frames: int = MAX_FRAMES, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(cast(int, socket.get(zmq.FD)))
        self.socket = socket
        self._routed = socket.type == zmq.ROUTER
        self._max_frames = max_frames + self._routed
        self._max_bytes = max_bytes

    def settle(self) -> bool:
        self.readable = bool(cast(int, self.socket.get(zmq.EVENTS)) & _POLLIN)
        return self.readable

    def read(self) -> Arrived | None:
        # By Frame, which knows its size and whether more follow: 2.5 us a message against 3.7 with recv_multipart.
        frame = self.socket.recv(_DONTWAIT, copy=False)
        parts = [frame]
        count, size = 1, len(frame)
        while frame.more:
            frame = self.socket.recv(_DONTWAIT, copy=False)
            count += 1
            size += len(frame)
            if count <= self._max_frames:
                parts.append(frame)
        if count > self._max_frames or size > self._max_bytes:
            return None
        frames = [part.bytes for part in parts]
        return Arrived(frames[1:], frames[0]) if self._routed else Arrived(frames)

    def write(self, frames: Sequence[bytes], route: bytes) -> bool:
        # Copies: at 100 KB that takes as long as to lend the bytes to libzmq, 17 us, and less below.
        try:
            if self._routed:
                self.socket.send(route, _MORE)
            for frame in frames[:-1]:
                self.socket.send(frame, _MORE)
            self.socket.send(frames[-1], _DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True


class DiallingLink(QueuedLink):
    """A link to one peer, dialled again and again until it is there, and whenever it was lost.

    One ZMQ socket makes one connection. When it is lost, what had arrived by it is taken out, the socket is closed
    and another one dials. So every message after `Connected` is of that connection, all that came by the one before
    stand in front of `Disconnected`, and nothing queued for the old peer reaches its successor. ZMQ's own way,
    reconnecting below a socket that lives on, gives none of the three: IMMEDIATE=1 throws away what arrived
    unread, IMMEDIATE=0 keeps what was not sent for whoever answers next. The reconnect interval, which the socket
    never lives to see, is what keeps the unread messages: without one the pipe is torn down with the connection.
    """

    def __init__(self, host: str, port: int, *, max_frames: int, max_bytes: int) -> None:
        super().__init__()
        self._peer = (host, port)
        self._limits = (max_frames, max_bytes)

    @property
    def address(self) -> str:
        return _endpoint(*self._peer)

    async def dial_forever(self) -> None:
        """Keep the link connected. Run by whoever opened it."""
        pause = FIRST_PAUSE
        hindrance = ""
        while True:
            try:
                if await self._dial():
                    pause = FIRST_PAUSE
                hindrance = ""
            except (OSError, zmq.ZMQError, UnicodeError) as error:
                # No descriptor, no such name or none that DNS could know, no such interface: a host may be given by a
                # peer, and what is wrong today may be right tomorrow.
                if str(error) != hindrance:
                    _log.warning("cannot dial %s now (%s); trying on until that is over", self.address, error)
                hindrance = str(error)
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _dial(self) -> bool:
        """Make one connection and wait until it is over. Returns whether it was made at all."""
        host, port = self._peer
        max_frames, max_bytes = self._limits
        address = await _resolve(host, port)
        with _open_socket(zmq.DEALER, max_bytes) as socket, _watch(socket, _CONNECTION_EVENTS) as monitor:
            socket.setsockopt(zmq.IPV6, ":" in address)
            socket.connect(_endpoint(address, port))
            event = None
            with trio.move_on_after(DIAL_TIMEOUT):
                event = await monitor.wait()
            if event != _HANDSHAKE_SUCCEEDED:
                return False
            transport = _ZmqTransport(socket, max_frames=max_frames, max_bytes=max_bytes)
            self._attach(transport)
            try:
                await monitor.wait()
            finally:
                self._detach(transport)
            return True

    def _attach(self, transport: Transport) -> None:
        self._transport = transport
        self._events.append(Connected())
        self._wake()

    def _detach(self, transport: Transport) -> None:
        while transport.settle():
            self._events += self._read(transport, MAX_BATCH)
        self._transport = None
        self._events.append(Disconnected())
        self._wake()


class ListeningLink(QueuedLink):
    """A link to any number of peers that dial one port, on one or several addresses of this host."""

    def __init__(self, endpoints: Sequence[str], transport: Transport) -> None:
        super().__init__()
        self._endpoints = endpoints
        self._transport = transport

    @property
    def address(self) -> str:
        return ",".join(self._endpoints)

    @property
    def port(self) -> int:
        """The port that was bound: another one than was asked for if that was 0."""
        return _port_of(self._endpoints)


@asynccontextmanager
async def open_dialler(
    host: str, port: int, *, max_frames: int = MAX_FRAMES, max_bytes: int = MAX_BYTES
) -> AsyncIterator[DiallingLink]:
    """Open a link to whoever listens on a host's port, now or later; `receive` says when it is `Connected`.

    What was sent before leaving is handed to the kernel if it takes it at once; nothing lingers.

    Args:
        host: Address or name. A name is resolved anew for each connection; its IPv4 address is preferred.
        port: From 1 to 65535.
        max_frames: Messages with more frames are dropped and counted.
        max_bytes: Messages that are larger in all are dropped and counted; a single larger frame ends the connection.
    """
    link = DiallingLink(host, port, max_frames=max_frames, max_bytes=max_bytes)
    async with open_service() as service:
        await service.start(link.flush_forever)
        service.start_soon(link.dial_forever)
        try:
            yield link
        finally:
            link.close()


@asynccontextmanager
async def open_listener(
    hosts: Sequence[str], port: int, *, max_frames: int = MAX_FRAMES, max_bytes: int = MAX_BYTES
) -> AsyncIterator[ListeningLink]:
    """Listen on one port of one or several addresses of this host. Once it has been left, the port is free.

    Args:
        hosts: Addresses or names of this host.
        port: From 1 to 65535, or 0 for any that is free on all of them, see `ListeningLink.port`.
        max_frames: As in `open_dialler`.
        max_bytes: As in `open_dialler`.

    Raises:
        BindFailed: one of them cannot be listened on; says why and what to do.
    """
    addresses = list(dict.fromkeys([await _resolve_own(host, port) for host in hosts]))
    with _open_socket(zmq.ROUTER, max_bytes) as socket:
        async with _bound(socket, addresses, port) as endpoints:
            link = ListeningLink(endpoints, _ZmqTransport(socket, max_frames=max_frames, max_bytes=max_bytes))
            async with open_service() as service:
                await service.start(link.flush_forever)
                try:
                    yield link
                finally:
                    link.close()


# --- addresses ----------------------------------------------------------------------------------------------


def _endpoint(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


async def _resolve(host: str, port: int) -> str:
    """The address of a host, IPv4 if it has one. Not left to libzmq, which would halt all links meanwhile."""
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    _family, *_, address = min(found, key=lambda entry: entry[0] != trio.socket.AF_INET)
    return str(address[0])


async def _resolve_own(host: str, port: int) -> str:
    try:
        return await _resolve(host, port)
    except (trio.socket.gaierror, UnicodeError) as error:
        message = f"cannot listen on {host}:{port}: {error}; set host to an address of this host, or 'auto'"
        raise BindFailed(message, host=host, port=port, errno=None) from error


@asynccontextmanager
async def _bound(socket: _Socket, addresses: Sequence[str], port: int) -> AsyncIterator[list[str]]:
    """Listen on all of these addresses, on one port; afterwards on none."""
    for attempt in itertools.count(1):
        endpoints: list[str] = []
        try:
            try:
                for address in addresses:
                    endpoints.append(_bind(socket, address, port or _port_of(endpoints)))
            except BindFailed as error:
                if port == 0 and endpoints and error.errno == errno.EADDRINUSE and attempt < EPHEMERAL_ATTEMPTS:
                    continue
                raise
            yield endpoints
            return
        finally:
            await _unbind(socket, endpoints)


def _bind(socket: _Socket, address: str, port: int) -> str:
    try:
        socket.setsockopt(zmq.IPV6, ":" in address)
        socket.bind(_endpoint(address, port))
    except zmq.ZMQError as error:
        number = error.errno or 0
        message = "; ".join(filter(None, [os.strerror(number), _REMEDIES.get(number)]))
        message = f"cannot listen on {_endpoint(address, port)}: {message}"
        raise BindFailed(message, host=address, port=port, errno=error.errno) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _port_of(endpoints: Sequence[str]) -> int:
    """The port that the first of these was bound to; 0 if there is none."""
    return int(endpoints[0].rpartition(":")[2]) if endpoints else 0


async def _unbind(socket: _Socket, endpoints: Sequence[str]) -> None:
    """Stop listening, and wait until the kernel knows: libzmq does it later, in its own thread."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + RELEASE_TIMEOUT):
        with _watch(socket, _LISTENER_CLOSED) as monitor:
            for endpoint in endpoints:
                socket.unbind(endpoint)
            for _ in endpoints:
                await monitor.wait()


# --- sockets ------------------------------------------------------------------------------------------------

# One for the process, and never terminated: that would wait for every socket of every thread. Its threads start with
# the first socket, and end with the process.
_context: zmq.Context[_Socket] = zmq.Context()
_inherited: list[zmq.Context[_Socket]] = []


def _renew_context() -> None:
    # A forked child has the parent's sockets but not the threads that serve them. It must not even free them.
    global _context
    _inherited.append(_context)
    _context = zmq.Context()


os.register_at_fork(after_in_child=_renew_context)


@contextmanager
def _open_socket(kind: int, max_bytes: int) -> Iterator[_Socket]:
    socket = _context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        # No limit on what waits to be sent: at one, a ROUTER drops without a word. The protocol bounds it.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        else:
            # At a limit the socket stops reading, and would not notice that the connection is gone.
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT)
            socket.setsockopt(zmq.RECONNECT_IVL, NEVER_RECONNECT)
        yield socket
    finally:
        socket.close()


class _Monitor:
    """What libzmq's thread says about the connections of a socket."""

    def __init__(self, transport: _ZmqTransport) -> None:
        self._transport = transport

    async def wait(self) -> int:
        """Wait for the next event; returns which."""
        while not self._transport.settle():
            await trio.lowlevel.wait_readable(self._transport.fd)
        header, _ = self._transport.socket.recv_multipart(_DONTWAIT)
        (event,) = struct.unpack_from("=H", header)
        return int(event)


_monitor_numbers = itertools.count()


@contextmanager
def _watch(socket: _Socket, events: int) -> Iterator[_Monitor]:
    """Have a socket's events reported. It must not be closed before this has been left."""
    address = f"inproc://trio-mori-monitor-{next(_monitor_numbers)}"
    with _context.socket(zmq.PAIR) as ear:
        ear.setsockopt(zmq.LINGER, 0)
        socket.monitor(address, events)
        try:
            ear.connect(address)
            yield _Monitor(_ZmqTransport(ear))
        finally:
            # Before the ear closes: the end of watching is an event too, and libzmq's thread would wait for ever for
            # an ear to hear it, and no socket of the process be served.
            socket.disable_monitor()
