"""Blocks of a connector as threads enter them, and what they hold there of a chunk stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ._chunks import ChunkReceiver, ChunkSender
from ._entered import Entered
from ._portal import Portal

T = TypeVar("T")
U = TypeVar("U")


class Opened(Protocol):
    """A connector for threads. What is open of it keeps it, for one that was dropped is closed."""

    _portal: Portal


class Block(Generic[T, U]):
    """A block of the connector's, entered in the loop when the thread enters it."""

    def __init__(
        self,
        connector: Opened,
        factory: Callable[[], AbstractAsyncContextManager[T]],
        wrap: Callable[[T], U],
        *,
        what: str,
        timeout: float | None,
    ) -> None:
        self._connector = connector
        self._factory = factory
        self._wrap = wrap
        self._what = what
        self._timeout = timeout
        self._entered: Entered[T]

    def __enter__(self) -> U:
        portal = self._connector._portal
        self._entered = portal.enter(self._factory, timeout=self._timeout, what=self._what)
        return self._wrap(self._entered.value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, traceback)


class BlockingChunkSender:
    """The sending end of a chunk stream. See `trio_mori.ChunkSender`; one thread at a time uses it."""

    def __init__(self, connector: Opened, sender: ChunkSender, request_id: str, timeout: float | None) -> None:
        self._connector = connector
        self._sender = sender
        self._request_id = request_id
        self._timeout = timeout

    @property
    def sent(self) -> int:
        """Chunks sent so far; the end is none."""
        return self._sender.sent

    def send(self, chunk: object) -> None:
        """Send the next chunk; waits for room.

        Raises:
            TimeoutError: there was no room in time; the chunk was not sent.
        """
        what = f"chunk {self.sent} of {self._request_id!r}"
        self._connector._portal.call(self._sender.send, chunk, timeout=self._timeout, what=what)


class BlockingChunkReceiver:
    """The receiving end of a chunk stream, an iterator. See `trio_mori.ChunkReceiver`; one thread at a time uses it."""

    def __init__(self, connector: Opened, receiver: ChunkReceiver, request_id: str, timeout: float | None) -> None:
        self._connector = connector
        self._receiver = receiver
        self._request_id = request_id
        self._timeout = timeout

    @property
    def received(self) -> int:
        """Chunks handed out so far; the end is none."""
        return self._receiver.received

    def __iter__(self) -> BlockingChunkReceiver:
        return self

    def __next__(self) -> Any:
        """The next chunk.

        Raises:
            StopIteration: after the terminal chunk.
            TimeoutError: it did not come in time; the next call waits for the same one.
            others: as `ChunkReceiver`.
        """
        what = f"chunk {self.received} of {self._request_id!r}"
        try:
            return self._connector._portal.call(self._receiver.__anext__, timeout=self._timeout, what=what)
        except StopAsyncIteration:
            raise StopIteration from None
