"""Every exception that trio_mori raises on purpose, split by what the caller can do about it."""

from __future__ import annotations

import errno

# Errors of the system that pass when this process or another one lets go of something.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TrioMoriError(Exception):
    """Base of all errors raised by trio_mori."""


# --- what the caller asked for cannot be, and never will -------------------------------------------------


class ConfigError(TrioMoriError, ValueError):
    """A configuration value is not allowed.

    Attributes:
        key: The offending key, as it is spelled in the configuration.
        value: What was given.
        source: The file it stands in, or None when it came from a dict.
    """

    def __init__(self, message: str, *, key: str, value: object = None, source: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value
        self.source = source


class KeyRefused(TrioMoriError, ValueError):
    """A key that cannot be sent: too long, no text, text that has no form in UTF-8; or one of stages whose names hold
    '_' or '@', which divide the edge on the wire.
    """


class UnsupportedPayload(TrioMoriError, TypeError):
    """`put` was given something that cannot arrive bit for bit.

    Attributes:
        path: Where in the payload it stands, for example ``payload['codes'][2]``.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class TooBig(TrioMoriError, ValueError):
    """A payload can never fit, however long one waits.

    Attributes:
        size: Bytes that the payload needs.
        limit: The most bytes that one payload may have in that pool.
    """

    def __init__(self, message: str, *, size: int, limit: int) -> None:
        super().__init__(message)
        self.size = size
        self.limit = limit


class WrongRole(TrioMoriError):
    """The connector's role does not allow this call: `put` on a receiver, `get` on a sender."""


class NoEndpoint(TrioMoriError):
    """No address of the sender is known; `update_sender_info(host, port)` sets it."""


class EngineUnavailable(TrioMoriError, ImportError):
    """An engine's library is missing or broken, or this host lacks what it needs."""


class EngineMismatch(TrioMoriError):
    """Two peers have no engine in common through which bytes could move.

    Attributes:
        ours: Names of the engines of this side, in order of preference.
        theirs: Names of the peer's engines.
    """

    def __init__(self, message: str, *, ours: tuple[str, ...] = (), theirs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.ours = ours
        self.theirs = theirs


class NoDescriptors(TrioMoriError, OSError):
    """This process, or the machine, has too few file descriptors left to open something.

    Attributes:
        limit: How many the process may have (``ulimit -n``).
        errno: EMFILE, or ENFILE where it is the machine that has none.
    """

    def __init__(self, message: str, *, limit: int, errno: int) -> None:
        super().__init__(message)
        self.errno = errno
        self.limit = limit


class BindFailed(TrioMoriError, RuntimeError):
    """The control port cannot be listened on.

    Attributes:
        host: Address that was asked for.
        port: Port that was asked for.
        errno: The operating system's number, or None.
    """

    def __init__(self, message: str, *, host: str, port: int, errno: int | None) -> None:
        super().__init__(message)
        self.host = host
        self.port = port
        self.errno = errno


class PortHeld(BindFailed):
    """Another instance of the same deployment listens on the control port, and does not give it up: it has put.

    Attributes:
        pid: Its process.
    """

    def __init__(self, message: str, *, host: str, port: int, errno: int | None, pid: int) -> None:
        super().__init__(message, host=host, port=port, errno=errno)
        self.pid = pid


class Misuse(TrioMoriError, RuntimeError):
    """A call that cannot work where it was made, whatever the data and the peers; its text says what to do instead.

    A call of a `Connector` from another thread or from asyncio; a blocking call in the connector's own event loop or in
    a forked child; two tasks on one end of a chunk stream; a
    stream that is used after its end.
    """


# --- not now ----------------------------------------------------------------------------------------------


class NotReady(TrioMoriError):
    """`get_nowait`: the payload has not arrived. The interest stays posted; ask again later.

    `put_nowait`: another instance of the deployment has the port, and was asked for it; put again later.
    """


class NoRoom(TrioMoriError):
    """The pool has no room for this now.

    Attributes:
        size: Bytes asked for.
        free: Bytes free in the pool.
        quarantined: Bytes held back because a peer may still write to them.
    """

    def __init__(self, message: str, *, size: int, free: int, quarantined: int = 0) -> None:
        super().__init__(message)
        self.size = size
        self.free = free
        self.quarantined = quarantined


class KeyBusy(TrioMoriError):
    """`put` on a key whose payload is being transferred right now; the new put left no trace."""


# --- an answer about one payload --------------------------------------------------------------------------


class PayloadLost(TrioMoriError):
    """The payload cannot be had any more. Base of `Expired` and `Gone`."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class Expired(PayloadLost):
    """Nobody fetched the payload within the sender's `buffer_ttl_seconds`."""


class Gone(PayloadLost):
    """The sender was told to drop the payload (`cleanup`), or a chunk stream ended without room to say how."""


class TransferFailed(TrioMoriError):
    """An engine could not move the bytes; the payload stays at the sender.

    Attributes:
        settled: True when no byte of this transfer can still arrive. False: it may, and the memory at both
            ends stays out of use until the peer is fenced or the engine says that it ended.
    """

    def __init__(self, message: str, *, settled: bool = True) -> None:
        super().__init__(message)
        self.settled = settled


# --- a peer or a message ----------------------------------------------------------------------------------


class PeerLost(TrioMoriError):
    """An established peer went away and did not come back within `peer_timeout`.

    Attributes:
        peer: Its address.
    """

    def __init__(self, message: str, *, peer: str) -> None:
        super().__init__(message)
        self.peer = peer


class AuthenticationFailed(TrioMoriError):
    """A sender and this side do not accept each other's keys. It is dialled on, should that change.

    Attributes:
        peer: Its address.
    """

    def __init__(self, message: str, *, peer: str) -> None:
        super().__init__(message)
        self.peer = peer


class PeerRestarted(PeerLost):
    """The sender of a chunk stream was replaced by another process; what it had not delivered is lost."""


class StreamFailed(TrioMoriError):
    """The sending stage ended a chunk stream by a failure.

    Attributes:
        request_id: Whose stream.
        reason: What happened there.
    """

    def __init__(self, message: str, *, request_id: str, reason: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.reason = reason


class RemoteProtocolError(TrioMoriError):
    """A peer sent something that its protocol does not allow. Nothing of ours was changed by it."""


class DescriptorRefused(RemoteProtocolError):
    """A peer's description of its memory is malformed, forged, or not reachable from this process."""


# --- this side is over ------------------------------------------------------------------------------------


class ConnectorClosed(TrioMoriError):
    """The connector was closed before or during the call."""


class LeaseError(TrioMoriError):
    """A lease was used after it ended, or ended while tensors taken from it are still alive."""


class InternalError(TrioMoriError, AssertionError):
    """A bug in trio_mori: its books do not agree. Nothing was changed; please report it with the message."""
