"""Who may connect to a secured listener: asked by libzmq for each peer, and told of those that did not come so far."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf

import trio
import zmq

from ._events import PEER_REFUSED
from ._keys import Keys
from ._log_limit import LogLimit
from ._zmq_socket import Happened, Socket, ZmqTransport, copy_of, encode_key

logger = logging.getLogger("trio_mori.security")

# Where libzmq asks, in every context (its RFC 27).
_ASKED_AT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"

# Refusals that are remembered as logged. A peer that tries again and again is named once.
_LOGGED = 256

# Seconds for which a refusal of which little is known, who it was or why, is held back from the log. Who is refused
# dials again, and asks why, which is another connection that hangs up: among the first eight, which take 2 s, there
# is one of which more can be said.
_HOLD = 2.0

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_FAILED_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_FAILED_SILENTLY = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
HANDSHAKES = _ACCEPTED | _DISCONNECTED | _FAILED_AUTH | _FAILED_PROTOCOL | _FAILED_SILENTLY | _SUCCEEDED

MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)

_WHY = {
    MISMATCH: "it has no keys: a stock peer, or one without curve_secret_key",
    _CRYPTOGRAPHIC: "it dialled with another key than this sender's: its curve_sender_key is wrong",
}
# Who it was cannot be told any more: libzmq is quicker with a refusal than we are with a look.
_GONE = "a peer that is gone"
_NO_WORD = "it hung up during the handshake, as a stock peer does, which has no keys, or a program that ends"


class Guard:
    """Answers libzmq, and counts and names those that were refused.

    Attributes:
        refused: Connections that did not get through the handshake.
    """

    def __init__(self, keys: Keys, address: str) -> None:
        self.refused = 0
        self._allowed = keys.allowed
        self._address = address
        self._hosts: dict[int, str] = {}  # of connections whose handshake is under way, by descriptor
        self._failed: Happened | None = None
        self._logged: dict[tuple[str, str], None] = {}
        self._held: dict[tuple[str, str], float] = {}  # what is held back from the log, and until when
        self._log_limit = LogLimit()

    # --- before ---------------------------------------------------------------------------------------------

    async def answer(self, zap: Socket) -> None:
        """Say of each peer whether it may come in, until cancelled."""
        transport = ZmqTransport(zap)
        while True:
            while not transport.settle():
                await trio.lowlevel.wait_readable(transport.fd)
            zap.send_multipart(self._decide(zap.recv_multipart(zmq.DONTWAIT)), zmq.DONTWAIT)
            await trio.lowlevel.checkpoint()

    def _decide(self, request: Sequence[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        name = None
        if len(request) == 7 and request[0] == _VERSION and request[5] == b"CURVE" and len(request[6]) == 32:
            key = encode_key(request[6])
            name = self._allowed.get(key)
            if name is None:
                host = request[3].decode("ascii", "replace")
                self._log(host, f"its key {key.decode()} is none of curve_allowed_keys")
        code, text = (b"400", b"key not allowed") if name is None else (b"200", b"OK")
        return [_VERSION, number, code, text, b"" if name is None else name.encode(), b""]

    # --- after ----------------------------------------------------------------------------------------------

    def note(self, happened: Happened) -> None:
        """Take what libzmq says about its connections, and count the handshakes that failed."""
        if happened.event == _ACCEPTED:
            self._hosts[happened.value] = _host_of(happened.value)
        elif happened.event == _DISCONNECTED:
            host = self._hosts.pop(happened.value, "a peer")
            if self._failed is not None:  # libzmq says of which connection it spoke right afterwards
                self._count(self._failed, host)
            self._failed = None
        elif happened.event != _SUCCEEDED:
            self._failed = happened

    def _count(self, failed: Happened, host: str) -> None:
        self.refused += 1
        if failed.event == _FAILED_PROTOCOL:
            self._log(host, _WHY.get(failed.value, "it breaks the protocol of the handshake"))
        elif failed.event == _FAILED_SILENTLY:
            self._log(host, _NO_WORD)

    @property
    def due(self) -> float:
        """When to `tell_held`; inf: nothing is held back."""
        return next(iter(self._held.values()), inf)

    def tell_held(self, now: float) -> None:
        """Log what was held back for long enough, and of which nothing more was said."""
        for (host, why), due in list(self._held.items()):
            if due <= now:
                if not self._is_superseded(host, why):
                    self._say(host, why)
                del self._held[host, why]

    def _log(self, host: str, why: str) -> None:
        if (host, why) in self._logged or (host, why) in self._held or self._is_superseded(host, why):
            return
        if why != _NO_WORD and host != _GONE:
            self._say(host, why)
        elif len(self._held) < _LOGGED:
            self._held[host, why] = trio.current_time() + _HOLD

    def _is_superseded(self, host: str, why: str) -> bool:
        """Whether another line says of this refusal what can be said, or will."""
        if why == _NO_WORD:
            told = any(host in (_GONE, h) or h == _GONE for h, _ in self._logged)
            return told or any(w != _NO_WORD or host == _GONE != h for h, w in self._held)
        # Who has no keys is refused in either way, as it happens, and that it hung up names both.
        if why == _WHY[MISMATCH] and any((h, _NO_WORD) in self._logged for h in (host, _GONE)):
            return True
        return host == _GONE and any(w == why for _, w in self._logged)

    def _say(self, host: str, why: str) -> None:
        if not self._log_limit.admits():
            return
        if len(self._logged) == _LOGGED:
            self._logged.clear()
        self._logged[host, why] = None
        logger.warning(
            "%s refused a connection from %s: %s (further ones are counted, not logged)",
            self._address,
            host,
            why,
            extra={"event": PEER_REFUSED, "address": self._address, "peer": host, "reason": why},
        )


def open_desk(zap: Socket) -> None:
    """Have libzmq ask this socket. What it asks waits until `Guard.answer` runs."""
    zap.bind(_ASKED_AT)


def _host_of(descriptor: int) -> str:
    """Who is at the other end of a connection, as far as it can still be told: it may be over, and be another."""
    try:
        with copy_of(descriptor) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return _GONE
