"""The dialling link over ZMQ and tcp (DEALER)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

import trio
import zmq

from ._endpoint import format_endpoint
from ._keys import Keys
from ._link import MAX_BATCH, QueuedLink, Transport
from ._log_limit import LogLimit
from ._scope import open_service
from ._zmq_flood import open_sluice
from ._zmq_guard import MISMATCH
from ._zmq_socket import (
    CONNECT_TIMEOUT,
    MAX_BYTES,
    MAX_FRAMES,
    Happened,
    ZmqTransport,
    open_socket,
    resolve,
    show_keys,
    watch,
)
from ._zmtp import fetch_mechanism
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

_CONNECTED = int(zmq.EVENT_CONNECTED)
_HANDSHAKE_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_FAILED_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_FAILED_SILENTLY = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_NOT_CONNECTED = int(zmq.EVENT_CLOSED)
_ENDS = int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_CONNECTION_EVENTS = _CONNECTED | _HANDSHAKE_SUCCEEDED | _FAILED_AUTH | _FAILED_PROTOCOL | _FAILED_SILENTLY | _ENDS

_WANTS_KEYS = "it wants keys, and this side has none: set curve_secret_key"
_HAS_NO_KEYS = "it has no keys, and this side wants some: set curve_secret_key there (a stock peer cannot)"
_OTHER_KEY = (
    "it has another key than this side expects: set curve_sender_key to its public one (by default it is that of this "
    "side's own pair)"
)


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
        return format_endpoint(*self._peer)

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
        address = await resolve(host, port)
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
            socket.connect(format_endpoint(address, port))
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
                self._detach(transport, drained=not sluice.cut)
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

    def _detach(self, transport: Transport, *, drained: bool) -> None:
        # Not what a flood has left: millions of parts take seconds, and what it was worth is said again after a hello.
        while drained and transport.settle():
            self._events += self._read(transport, MAX_BATCH)
        self._transport = None
        self._events.append(Disconnected())
        self._wake()


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
        on_cut_off: Called when the connection was cut off, for a message without an end or of too many parts; it is
            dialled again.
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
