"""Chunk streams: the payloads of one request on one edge, in order, with an end that always gets through.

Each chunk is one payload under the key ``{request}_{stage}_{n}``, wrapped with a mark that says whether it is a chunk,
the end, or the end by a failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from types import TracebackType
from typing import Protocol

import trio

from ._errors import InternalError, RemoteProtocolError, StreamFailed, TrioMoriError
from ._protocol.keys import chunk_key

# How long the terminal chunk of a stream whose block was cancelled may wait for room. It is a few bytes: if there is
# no room for them in this time, the receivers do not read, and their own deadlines tell them.
TERMINAL_GRACE = 2.0


class _Mark(IntEnum):
    """First item of each chunk's payload."""

    CHUNK = 0
    END = 1
    FAILED = 2


class Incoming(Protocol):
    """A chunk that was asked for ahead of its time.

    Attributes:
        epoch: After `receive`: the incarnation of the sender that it came from.
    """

    epoch: bytes | None

    async def receive(self) -> object:
        """Wait for it; if this is cancelled or fails, it was given back."""

    def give_back(self) -> None:
        """It is not wanted any more."""


class _Puts(Protocol):
    async def put(self, from_stage: str, to_stage: str, key: str, data: object) -> object: ...


class _Asks(Protocol):
    def _ask(self, from_stage: str, to_stage: str, key: str, epoch: bytes | None) -> Incoming: ...


class ChunkSender:
    """The sending end of a stream. Made by `Connector.open_chunk_sender`; one task uses it."""

    def __init__(self, connector: _Puts, request_id: str, from_stage: str, to_stage: str) -> None:
        self._connector = connector
        self._request_id = request_id
        self._from_stage = from_stage
        self._to_stage = to_stage
        self._sent = 0
        self._ended = False

    @property
    def sent(self) -> int:
        """Chunks sent so far; the end is none."""
        return self._sent

    async def send(self, chunk: object) -> None:
        """Send the next chunk. Waits for room; when it returns, the source may be overwritten.

        Cancellation: before it returns, and then the chunk was not sent; the stream goes on with the same number.

        Raises:
            as `Connector.put`.
        """
        if self._ended:
            raise InternalError(f"send on the stream of {self._request_id!r} after its end")
        await self._put((int(_Mark.CHUNK), chunk))
        self._sent += 1

    async def _put(self, data: object) -> None:
        key = chunk_key(self._request_id, self._from_stage, self._sent)
        await self._connector.put(self._from_stage, self._to_stage, key, data)

    async def _end(self, error: BaseException | None) -> None:
        """Send the terminal chunk. A cancellation does not stop it: then it is sent shielded, and bounded."""
        self._ended = True
        if error is None:
            last: tuple[int, object] = (int(_Mark.END), self._sent)
            try:
                await self._put(last)
            except trio.Cancelled:
                await self._put_shielded(last)
                raise
        else:
            reason = "cancelled" if isinstance(error, trio.Cancelled) else f"{type(error).__name__}: {error}"
            await self._put_shielded((int(_Mark.FAILED), reason))

    async def _put_shielded(self, data: object) -> None:
        with trio.move_on_after(TERMINAL_GRACE, shield=True):
            await self._put(data)


@asynccontextmanager
async def open_chunk_sender(
    connector: _Puts, request_id: str, from_stage: str, to_stage: str
) -> AsyncIterator[ChunkSender]:
    """See `Connector.open_chunk_sender`."""
    sender = ChunkSender(connector, request_id, from_stage, to_stage)
    try:
        yield sender
    except BaseException as error:
        try:
            await sender._end(error)
        except TrioMoriError as second:
            raise error from second
        raise
    await sender._end(None)


class ChunkReceiver:
    """The receiving end of a stream, an async iterator. Made by `Connector.open_chunk_receiver`; one task uses it.

    The next chunk is asked for before the present one is handed out, so that it can be written meanwhile.
    """

    def __init__(self, connector: _Asks, request_id: str, from_stage: str, to_stage: str) -> None:
        self._connector = connector
        self._request_id = request_id
        self._from_stage = from_stage
        self._to_stage = to_stage
        self._received = 0
        self._ended = False
        self._epoch: bytes | None = None  # of the sender; the stream does not outlive it
        self._incoming: Incoming | None = self._ask(0)

    @property
    def received(self) -> int:
        """Chunks handed out so far; the end is none."""
        return self._received

    def __aiter__(self) -> ChunkReceiver:
        return self

    async def __anext__(self) -> object:
        """The next chunk.

        Cancellation: at any time; the same chunk comes with the next call.

        Raises:
            StopAsyncIteration: after the terminal chunk.
            StreamFailed: the sending stage ended the stream by a failure; says which.
            PeerRestarted: the sending process was replaced; what it had not delivered is lost.
            others: as `Connector.get`.
        """
        if self._ended:
            raise StopAsyncIteration
        if self._incoming is None:
            self._incoming = self._ask(self._received)
        incoming, self._incoming = self._incoming, None
        mark, content = self._unwrap(await incoming.receive())
        self._epoch = incoming.epoch
        if mark is _Mark.CHUNK:
            self._received += 1
            with suppress(TrioMoriError):  # what is wrong with the next one, its own call says
                self._incoming = self._ask(self._received)
            return content
        self._ended = True
        if mark is _Mark.END:
            if content != self._received:
                raise RemoteProtocolError(
                    f"the stream of {self._request_id!r} ended after {content} chunks, but {self._received} came"
                )
            raise StopAsyncIteration
        raise StreamFailed(
            f"stage {self._from_stage} ended the stream of {self._request_id!r} after {self._received} chunks: "
            f"{content}",
            request_id=self._request_id,
            reason=str(content),
        )

    def _ask(self, number: int) -> Incoming:
        key = chunk_key(self._request_id, self._from_stage, number)
        return self._connector._ask(self._from_stage, self._to_stage, key, self._epoch)

    def _unwrap(self, payload: object) -> tuple[_Mark, object]:
        if isinstance(payload, tuple) and len(payload) == 2 and payload[0] in (0, 1, 2):
            return _Mark(payload[0]), payload[1]
        raise RemoteProtocolError(
            f"chunk {self._received} of {self._request_id!r} was not sent by a chunk sender; use get for its key"
        )

    def __enter__(self) -> ChunkReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._incoming is not None:
            self._incoming.give_back()
            self._incoming = None
        self._ended = True


@asynccontextmanager
async def open_chunk_receiver(
    connector: _Asks, request_id: str, from_stage: str, to_stage: str
) -> AsyncIterator[ChunkReceiver]:
    """See `Connector.open_chunk_receiver`."""
    with ChunkReceiver(connector, request_id, from_stage, to_stage) as receiver:
        yield receiver
