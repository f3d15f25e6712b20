"""Message links over ZMQ and tcp: a dialling one (DEALER) and a listening one (ROUTER)."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from math import inf

import trio
import zmq

from ._descriptors import require_descriptors
from ._errors import BindFailed
from ._keys import Keys
from ._link import MAX_BATCH, QueuedLink, Transport
from ._log_limit import LogLimit
from ._scope import open_service
from ._zmq_flood import CONNECTIONS, Sluice, open_sluice
from ._zmq_guard import HANDSHAKES, MISMATCH, Guard, open_desk
from ._zmq_socket import (
    CONNECT_TIMEOUT,
    MAX_BYTES,
    MAX_FRAMES,
    Happened,
    Monitor,
    Socket,
    ZmqTransport,
    lock,
    open_own_context,
    open_socket,
    show_keys,
    watch,
)
from ._zmtp import LISTENER, fetch_mechanism
from .abc import Connected, Disconnected, Refused

_log = logging.getLogger("trio_mori.link")

# Seconds between attempts to connect. 10 ms: with a peer that comes up just then, the first chunk waits 1-17 ms instead
# of 42-152 ms at ZMQ's default. 1 s: an absent peer costs 0.1% of a core.
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 1.0

# Seconds after which an attempt of which nothing is heard is given up: libzmq says nothing when it found no descriptor
# for one. Above CONNECT_TIMEOUT, whose end is heard of.
DIAL_TIMEOUT = 2 * CONNECT_TIMEOUT / 1000

# Seconds that whoever hung up may take to say by which handshake it knows its peers; libzmq does so in a round trip.
MECHANISM_TIMEOUT = 1.0

# How often in a row a sender hangs up on our keys before it has another key. Once may be its end.
HANG_UPS = 2

# Ports tried when an ephemeral one, free on the first address, is taken on another.
EPHEMERAL_ATTEMPTS = 8

# Seconds to wait for libzmq's thread to close a listening descriptor; measured 60 us, 0.9 ms at worst.
RELEASE_TIMEOUT = 1.0

_CONNECTED = int(zmq.EVENT_CONNECTED)
_HANDSHAKE_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_FAILED_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_FAILED_SILENTLY = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_NOT_CONNECTED = int(zmq.EVENT_CLOSED)
_ENDS = int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_CONNECTION_EVENTS = _CONNECTED | _HANDSHAKE_SUCCEEDED | _FAILED_AUTH | _FAILED_PROTOCOL | _FAILED_SILENTLY | _ENDS
_LISTENER_CLOSED = int(zmq.EVENT_CLOSED)

_WANTS_KEYS = "it wants keys, and this side has none: set curve_secret_key"
_HAS_NO_KEYS = "it has no keys, and this side wants some: set curve_secret_key there (a stock peer cannot)"
_OTHER_KEY = (
    "it has another key than this side expects: set curve_sender_key to its public one (by default it is that of this "
    "side's own pair)"
)

_REMEDIES = {
    errno.EADDRINUSE: "another socket listens there (`ss -ltnp` names its process): end that one, or set another port",
    errno.EADDRNOTAVAIL: "this host has no such address (`ip addr` lists those it has): set one of them, or 'auto'",
    errno.EMFILE: "raise the limit of this process (`ulimit -n`), or close what it does not need",
    errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE: set a port from 1024 to 65535, or 0 for any free one",
}


class DiallingLink(QueuedLink):
    """A link to one peer, dialled again and again until it is there, and whenever it was lost.

    One ZMQ socket makes one connection. When it is lost, what had arrived by it is taken out, the socket is closed
    and another one dials. So every message after `Connected` is of that connection, all that came by the one before
    stand in front of `Disconnected`, and nothing queued for the old peer reaches its successor. ZMQ's own way,
    reconnecting below a socket that lives on, gives none of the three: IMMEDIATE=1 throws away what arrived
    unread, IMMEDIATE=0 keeps what was not sent for whoever answers next. The reconnect interval, which the socket
    never lives to see, is what keeps the unread messages: without one the pipe is torn down with the connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        keys: Keys | None,
        on_cut_off: Callable[[], object],
        max_frames: int,
        max_bytes: int,
    ) -> None:
        super().__init__()
        self._on_cut_off = on_cut_off
        self._peer = (host, port)
        self._keys = keys
        self._limits = (max_frames, max_bytes)
        self._refusal = ""  # the last one that was told
        self._hang_ups = 0
        self._log_limit = LogLimit()

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
        """Make one connection and wait until it is over. Returns whether it was of any use."""
        host, port = self._peer
        max_frames, max_bytes = self._limits
        address = await _resolve(host, port)
        with ExitStack() as stack:
            socket = stack.enter_context(open_socket(zmq.DEALER, max_bytes))
            monitor = stack.enter_context(watch(socket, _CONNECTION_EVENTS))
            transport = ZmqTransport(socket, max_frames=max_frames, max_bytes=max_bytes)
            sluice = stack.enter_context(
                open_sluice(transport, limit=max_bytes, address=self.address, log_limit=self._log_limit)
            )
            socket.setsockopt(zmq.IPV6, ":" in address)
            if self._keys is not None:
                show_keys(socket, self._keys)
            socket.connect(_endpoint(address, port))
            outcome = None
            with trio.move_on_after(DIAL_TIMEOUT):
                outcome = await monitor.wait()
                if outcome.event == _CONNECTED:
                    if sluice.is_alone(outcome.value):
                        return False
                    sluice.note(outcome)
                    outcome = await monitor.wait()
            if outcome is None or outcome.event != _HANDSHAKE_SUCCEEDED:
                refusal = "" if outcome is None else self._why_refused(outcome)
                if outcome is not None and outcome.event == _FAILED_SILENTLY:
                    refusal = await self._why_hung_up(address, port)
                if outcome is not None and outcome.event == _NOT_CONNECTED and self._refusal:
                    # Whoever refused is gone: somebody else may come up there, and is waited for as before.
                    self._refusal = ""
                    self._events.append(Disconnected())
                    self._wake()
                self._note_refusal(refusal)
                return False
            self._refusal, self._hang_ups = "", 0
            self._attach(transport)
            try:
                async with open_service() as service:
                    service.start_soon(sluice.watch_forever, self._wake)
                    await monitor.wait()
            finally:
                self._detach(transport)
            if sluice.cut:
                self._on_cut_off()
            return not sluice.cut

    def _why_refused(self, outcome: Happened) -> str:
        """Why the handshake failed, in words; empty if it did not, or nobody can tell."""
        if outcome.event == _FAILED_AUTH:
            return "it does not allow our key: add the public key of this side to its curve_allowed_keys"
        if outcome.event == _FAILED_PROTOCOL and outcome.value == MISMATCH:
            return _WANTS_KEYS if self._keys is None else _HAS_NO_KEYS
        return _OTHER_KEY if outcome.event == _FAILED_PROTOCOL and self._keys is not None else ""

    async def _why_hung_up(self, address: str, port: int) -> str:
        """The same if it closed the connection: of two that do not fit, only the quicker one hears why.

        It may also have ended just then, or be a proxy (a container's published port) before a sender that is not up.
        """
        mechanism = ""
        with trio.move_on_after(MECHANISM_TIMEOUT):
            mechanism = await fetch_mechanism(address, port)
        if self._keys is None:
            return _WANTS_KEYS if mechanism == "CURVE" else ""
        if mechanism == "CURVE":
            self._hang_ups += 1
            return _OTHER_KEY if self._hang_ups >= HANG_UPS else ""
        return _HAS_NO_KEYS if mechanism else ""

    def _note_refusal(self, why: str) -> None:
        if why and why != self._refusal:
            self._refusal = why
            self._events.append(Refused(why))
            self._wake()

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
        """Connections that were cut off for a message without an end."""
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
async def open_dialler(
    host: str,
    port: int,
    *,
    keys: Keys | None = None,
    on_cut_off: Callable[[], object] = lambda: None,
    max_frames: int = MAX_FRAMES,
    max_bytes: int = MAX_BYTES,
) -> AsyncIterator[DiallingLink]:
    """Open a link to whoever listens on a host's port, now or later; `receive` says when it is `Connected`.

    What was sent before leaving is handed to the kernel if it takes it at once; nothing lingers.

    Args:
        host: Address or name. A name is resolved anew for each connection; its IPv4 address is preferred.
        port: From 1 to 65535.
        keys: Talk to the sender that has this key only, and show ours. A peer with which that does not work is
            `Refused`, and dialled again.
        on_cut_off: Called when the connection was cut off, for a message without an end; it is dialled again.
        max_frames: Messages with more frames are dropped and counted.
        max_bytes: Messages that are larger in all are dropped and counted; a single larger frame ends the connection.
    """
    link = DiallingLink(host, port, keys=keys, on_cut_off=on_cut_off, max_frames=max_frames, max_bytes=max_bytes)
    async with open_service() as service:
        await service.start(link.flush_forever)
        service.start_soon(link.dial_forever)
        try:
            yield link
        finally:
            link.close()


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


async def _unbind(socket: Socket, monitor: Monitor, endpoints: Sequence[str]) -> None:
    """Stop listening, and wait until the kernel knows: libzmq does it later, in its own thread."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + RELEASE_TIMEOUT):
        monitor.forget()  # an address that could not be listened on has closed a descriptor, too
        for endpoint in endpoints:
            socket.unbind(endpoint)
        open_ones = len(endpoints)
        while open_ones:
            open_ones -= (await monitor.wait()).event == _LISTENER_CLOSED
