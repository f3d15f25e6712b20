"""The listening link over ZMQ and tcp (ROUTER), and the port that it has."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf

import trio
import zmq

from ._descriptors import require_descriptors
from ._endpoint import format_endpoint
from ._errors import BindFailed
from ._keys import Keys
from ._link import QueuedLink
from ._log_limit import LogLimit
from ._scope import open_service
from ._zmq_flood import CONNECTIONS, Sluice, open_sluice
from ._zmq_guard import HANDSHAKES, Guard, open_desk
from ._zmq_socket import (
    MAX_BYTES,
    MAX_FRAMES,
    Monitor,
    Socket,
    ZmqTransport,
    lock,
    open_own_context,
    open_socket,
    resolve,
    watch,
)
from ._zmtp import LISTENER

# Ports tried when an ephemeral one, free on the first address, is taken on another.
EPHEMERAL_ATTEMPTS = 8

# Seconds to wait for libzmq's thread to close a listening descriptor; measured 60 us, 0.9 ms at worst.
RELEASE_TIMEOUT = 1.0

_LISTENER_CLOSED = int(zmq.EVENT_CLOSED)

_REMEDIES = {
    errno.EADDRINUSE: "another socket listens there (`ss -ltnp` names its process): end that one, or set another port",
    errno.EADDRNOTAVAIL: "this host has no such address (`ip addr` lists those it has): set one of them, or 'auto'",
    errno.EMFILE: "raise the limit of this process (`ulimit -n`), or close what it does not need",
    errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE: set a port from 1024 to 65535, or 0 for any free one",
}


class ListeningLink(QueuedLink):
    """A link to any number of peers that dial one port, on one or several addresses of this host."""

    def __init__(self, endpoints: Sequence[str], transport: ZmqTransport, guard: Guard | None, sluice: Sluice) -> None:
        super().__init__()
        self._endpoints = endpoints
        self._transport = transport
        self._guard = guard
        self._sluice = sluice

    @property
    def address(self) -> str:
        return ",".join(self._endpoints)

    @property
    def port(self) -> int:
        """The port that was bound: another one than was asked for if that was 0."""
        return _port_of(self._endpoints)

    @property
    def refused(self) -> int:
        """Connections that were not let in, for want of keys."""
        return 0 if self._guard is None else self._guard.refused

    @property
    def cut_off(self) -> int:
        """Connections that were cut off for a message without an end or of too many parts."""
        return self._sluice.cut

    def look_again(self) -> None:
        """Somebody else has asked the socket, which has input: let `receive` take it."""
        self._wake()

    async def follow(self, monitor: Monitor) -> None:
        """Keep account of the connections, until cancelled. Run by whoever opened the link."""
        guard = self._guard
        try:
            while True:
                happened = None
                with trio.CancelScope(deadline=inf if guard is None else guard.due):
                    happened = await monitor.wait()
                if guard is not None:
                    if happened is not None:
                        guard.note(happened)
                    guard.tell_held(trio.current_time())
                if happened is not None:
                    self._sluice.note(happened)
                await trio.lowlevel.checkpoint()  # whoever comes and goes without a pause keeps nobody else waiting
        finally:
            if guard is not None:
                guard.tell_held(inf)


@asynccontextmanager
async def open_listener(
    hosts: Sequence[str],
    port: int,
    *,
    keys: Keys | None = None,
    max_frames: int = MAX_FRAMES,
    max_bytes: int = MAX_BYTES,
) -> AsyncIterator[ListeningLink]:
    """Listen on one port of one or several addresses of this host. Once it has been left, the port is free.

    Args:
        hosts: Addresses or names of this host.
        port: From 1 to 65535, or 0 for any that is free on all of them, see `ListeningLink.port`.
        keys: Let only those in whom they allow; the others are counted (`ListeningLink.refused`) and logged.
        max_frames: As in `open_dialler`.
        max_bytes: As in `open_dialler`.

    Raises:
        BindFailed: one of them cannot be listened on; says why and what to do.
        NoDescriptors: too few are left. libzmq ends the process where it finds none to look up addresses with.
    """
    require_descriptors("a port that receivers connect to")
    addresses = list(dict.fromkeys([await _resolve_own(host, port) for host in hosts]))
    async with AsyncExitStack() as stack:
        context = desk = None
        if keys is not None:
            context = stack.enter_context(open_own_context())
            desk = stack.enter_context(open_socket(zmq.REP, max_bytes, context))
            open_desk(desk)
        socket = stack.enter_context(open_socket(zmq.ROUTER, max_bytes, context))
        socket.setsockopt(zmq.ROUTING_ID, LISTENER)  # `fetch_name` asks for it
        if keys is not None:
            lock(socket, keys)
        # Before it listens, so that no connection is missed.
        monitor = stack.enter_context(watch(socket, CONNECTIONS | HANDSHAKES | _LISTENER_CLOSED))
        endpoints = await stack.enter_async_context(_bound(socket, monitor, addresses, port))
        guard = None if keys is None else Guard(keys, ",".join(endpoints))
        transport = ZmqTransport(socket, max_frames=max_frames, max_bytes=max_bytes)
        sluice = stack.enter_context(
            open_sluice(transport, limit=max_bytes, address=",".join(endpoints), log_limit=LogLimit())
        )
        link = ListeningLink(endpoints, transport, guard, sluice)
        service = await stack.enter_async_context(open_service())
        await service.start(link.flush_forever)
        service.start_soon(link.follow, monitor)
        service.start_soon(sluice.watch_forever, link.look_again)
        if guard is not None and desk is not None:
            service.start_soon(guard.answer, desk)
        try:
            yield link
        finally:
            link.close()


async def _resolve_own(host: str, port: int) -> str:
    try:
        return await resolve(host, port)
    except (trio.socket.gaierror, UnicodeError) as error:
        message = f"cannot listen on {host}:{port}: {error}; set host to an address of this host, or 'auto'"
        raise BindFailed(message, host=host, port=port, errno=None) from error


@asynccontextmanager
async def _bound(socket: Socket, monitor: Monitor, addresses: Sequence[str], port: int) -> AsyncIterator[list[str]]:
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
            await _unbind(socket, monitor, endpoints)


def _bind(socket: Socket, address: str, port: int) -> str:
    try:
        socket.setsockopt(zmq.IPV6, ":" in address)
        socket.bind(format_endpoint(address, port))
    except zmq.ZMQError as error:
        number = error.errno or 0
        message = "; ".join(filter(None, [os.strerror(number), _REMEDIES.get(number)]))
        message = f"cannot listen on {format_endpoint(address, port)}: {message}"
        raise BindFailed(message, host=address, port=port, errno=error.errno) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _port_of(endpoints: Sequence[str]) -> int:
    """The port that the first of these was bound to; 0 if there is none."""
    return int(endpoints[0].rpartition(":")[2]) if endpoints else 0


async def _unbind(socket: Socket, monitor: Monitor, endpoints: Sequence[str]) -> None:
    """Stop listening, and wait until the kernel knows: libzmq does it later, in its own thread."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + RELEASE_TIMEOUT):
        monitor.forget()  # an address that could not be listened on has closed a descriptor, too
        for endpoint in endpoints:
            socket.unbind(endpoint)
        open_ones = len(endpoints)
        while open_ones:
            open_ones -= (await monitor.wait()).event == _LISTENER_CLOSED
