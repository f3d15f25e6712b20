"""A get in two halves: wait here, copy wherever the caller likes, then let the sender forget the payload."""

from __future__ import annotations

from typing import Protocol

from . import _payload, _stock_payload
from ._buffer import ManagedBuffer
from ._errors import ConnectorClosed
from ._lease import Lease
from ._payload import Restored
from ._payload_types import PayloadTypes
from ._protocol.extents import Extent
from ._protocol.interests import Interest, State


class _Taker(Protocol):
    """What an arrival needs of its receiver."""

    def restore(self, interest: Interest, extent: Extent | None) -> Restored: ...

    def is_quick(self, interest: Interest) -> bool: ...

    def is_staged(self, interest: Interest) -> bool: ...

    def land(self, interest: Interest, extent: Extent | None) -> None: ...

    def finish(self, interest: Interest) -> None: ...

    def finish_soon(self, interest: Interest) -> None: ...

    def keep(self, interest: Interest) -> Lease: ...

    def give_back(self, interest: Interest) -> None: ...


class Arrival:
    """A payload that has come, and that its sender keeps until `finish`. Made by `Connector.take`.

    Copy with `restore`, in any thread, and end it with `finish`, `keep` or `give_back` in the connector's own. Until
    then a close waits for it, and if that takes longer than `close_grace`, the memory is kept for the rest of the
    process rather than pulled away under the copy.

    Attributes:
        key: Its full key, ``{key}@{from}_{to}``.
        size: Its bytes in the pool.
        unlisted_types: After `restore`: struct types in it that `payload_types` does not list; their instances came as
            dicts or tuples.
    """

    def __init__(self, taker: _Taker, interest: Interest) -> None:
        self.key = interest.key
        self.size = interest.size
        self.unlisted_types: tuple[str, ...] = ()
        self._taker = taker
        self._interest = interest
        self._landed = False
        self._extent = interest.extent  # the interest may lose it when the connector is closed

    @property
    def is_raw(self) -> bool:
        """Whether it is one tensor or bytes, and its bytes in the pool are all there is to it.

        Raises:
            RemoteProtocolError: the sender's description of it is malformed.
        """
        return _payload.is_raw(self._interest.header)

    @property
    def is_quick(self) -> bool:
        """Whether a GPU copies it, in so short a time that it may be waited for in place.

        Raises:
            RemoteProtocolError: the sender's description of it is malformed.
        """
        return self._taker.is_quick(self._interest)

    @property
    def is_staged(self) -> bool:
        """Whether it is in host memory still, though the pool is on a GPU; see `land`."""
        return self._taker.is_staged(self._interest)

    def land(self) -> None:
        """Bring what is staged into the pool, as `keep` does if nobody has. In any thread."""
        if not self._landed:
            self._taker.land(self._interest, self._extent)
            self._landed = True

    def restore(self) -> object:
        """The payload, in memory of its own."""
        restored = self._taker.restore(self._interest, self._extent)
        self.unlisted_types = restored.unknown_types
        return restored.value

    def finish(self) -> None:
        """Let the sender forget it.

        Raises:
            ConnectorClosed: the connector was closed before the copy had ended; the payload is the sender's still.
        """
        self._check_open()
        self._taker.finish(self._interest)

    def finish_soon(self) -> None:
        """As `finish`, in the next tick."""
        self._check_open()
        self._taker.finish_soon(self._interest)

    def keep(self) -> Lease:
        """Have it where it arrived instead of a copy, for as long as the caller likes, and let the sender forget it.

        Release `Lease.buffer` when it is not needed any more.

        Raises:
            ConnectorClosed: the connector was closed meanwhile; the payload is the sender's still.
            NoRoom: it has no bytes in the pool, and there is no room for any; it was given back.
        """
        self._check_open()
        self.land()
        return self._taker.keep(self._interest)

    def give_back(self) -> None:
        """It is not wanted after all; it stays with the sender."""
        self._taker.give_back(self._interest)

    def _check_open(self) -> None:
        if self._interest.state is not State.TAKEN:
            raise ConnectorClosed(f"the connector was closed before get had copied {self.key!r}")


class StockArrival:
    """As `Arrival`, from a stock sender: it has let the payload go already, and cannot have it back.

    Attributes:
        key: Its full key.
        size: Its bytes in the pool.
        buffer: Where it lies.
        is_quick: Never: it may have to be decoded.
        is_staged: Never.
        is_raw: Its bytes are all there is to it. Otherwise they are its encoding.
    """

    is_quick = False
    is_staged = False

    def __init__(self, key: str, buffer: ManagedBuffer, *, is_raw: bool) -> None:
        self.key = key
        self.size = buffer.size
        self.buffer = buffer
        self.is_raw = is_raw

    def land(self) -> None:
        """It is where it belongs."""

    def restore(self) -> object:
        """The payload; if it is raw, the `ManagedBuffer` itself, for dtype and shape do not travel here."""
        if self.is_raw:
            return self.buffer
        with self.buffer:
            return _stock_payload.stock_decode(self.buffer.to_bytes())

    def finish(self) -> None:
        """There is nobody to tell."""

    finish_soon = finish

    def keep(self) -> Lease:
        """Have it where it arrived instead of a copy. Release `Lease.buffer` when it is not needed any more."""
        header = _payload.plan_bytes(self.size).header if self.is_raw else None
        return Lease(self.buffer, header, PayloadTypes(()))  # the stock form restores no struct types

    def give_back(self) -> None:
        """It is not wanted after all, and lost."""
        self.buffer.release()
