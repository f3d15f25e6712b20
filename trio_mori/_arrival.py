"""A get in two halves: wait here, copy wherever the caller likes, then let the sender forget the payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from . import _stock_payload
from ._buffer import ManagedBuffer
from ._errors import ConnectorClosed
from ._protocol.inbox import Interest, State

if TYPE_CHECKING:
    import torch


class _Taker(Protocol):
    """What an arrival needs of its receiver."""

    def restore(self, interest: Interest, source: torch.Tensor) -> object: ...

    def finish(self, interest: Interest) -> None: ...

    def give_back(self, interest: Interest) -> None: ...


class Arrival:
    """A payload that has come, and that its sender keeps until `finish`. Made by `Connector.take`.

    Copy with `restore`, in any thread, and end it with `finish` or `give_back` in the connector's own. Until then a
    close waits for it, and if that takes longer than `close_grace`, the memory is kept for the rest of the process
    rather than pulled away under the copy.

    Attributes:
        key: Its full key, ``{key}@{from}_{to}``.
        size: Its bytes in the pool.
    """

    def __init__(self, taker: _Taker, interest: Interest, source: torch.Tensor) -> None:
        self.key = interest.key
        self.size = interest.size
        self._taker = taker
        self._interest = interest
        self._source = source

    def restore(self) -> object:
        """The payload, in memory of its own."""
        return self._taker.restore(self._interest, self._source)

    def finish(self) -> None:
        """Let the sender forget it.

        Raises:
            ConnectorClosed: the connector was closed before the copy had ended; the payload is the sender's still.
        """
        if self._interest.state is not State.TAKEN:
            raise ConnectorClosed(f"the connector was closed before get had copied {self.key!r}")
        self._taker.finish(self._interest)

    def give_back(self) -> None:
        """It is not wanted after all; it stays with the sender."""
        self._taker.give_back(self._interest)


class StockArrival:
    """As `Arrival`, from a stock sender: it has let the payload go already, and cannot have it back.

    Attributes:
        key: Its full key.
        size: Its bytes in the pool.
        buffer: Where it lies.
        is_raw: Its bytes are all there is to it. Otherwise they are its encoding.
    """

    def __init__(self, key: str, buffer: ManagedBuffer, *, is_raw: bool) -> None:
        self.key = key
        self.size = buffer.size
        self.buffer = buffer
        self.is_raw = is_raw

    def restore(self) -> object:
        """The payload; if it is raw, the `ManagedBuffer` itself, for dtype and shape do not travel here."""
        if self.is_raw:
            return self.buffer
        with self.buffer:
            return _stock_payload.stock_decode(self.buffer.to_bytes())

    def finish(self) -> None:
        """There is nobody to tell."""

    def give_back(self) -> None:
        """It is not wanted after all, and lost."""
        self.buffer.release()
