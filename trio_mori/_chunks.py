"""Chunk streams: the payloads of one request on one edge, in order, with an end that always gets through.

Each chunk is one payload under the key ``{request}_{stage}_{n}``, wrapped with a mark that says whether it is a chunk,
the end, or the end by a failure, and with the number of its stream: a request id may be used again, while what nobody
read of an earlier stream still lies under the same keys.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, NoReturn, Protocol

import attrs
import trio

from ._errors import Misuse, PayloadLost, RemoteProtocolError, StreamFailed, TrioMoriError
from ._protocol.keys import chunk_key, full_key

_logger = logging.getLogger("trio_mori.sender")

# How long the terminal chunk of a stream whose block was cancelled or failed may wait for room. It takes one unit of
# the pool: if that is not there in this time, nobody reads, and the receiver is told without the reason.
TERMINAL_GRACE = 2.0

# Characters of the reason that a receiver is told. It has to travel in a header of 32 KiB, and into a log line.
MAX_REASON = 1000

# The reason of a stream whose block was cancelled.
_CANCELLED = "cancelled"

# Numbers of the streams that this process sends, rising. A receiver compares them within one life of the sender.
_numbers = count()


class _Mark(IntEnum):
    """What a chunk's payload is."""

    CHUNK = 0
    END = 1  # with the number of chunks before it
    FAILED = 2  # with the reason


@attrs.frozen
class _Wrapped:
    """What travels, as a plain tuple.

    Attributes:
        stream: The number of its stream.
    """

    mark: _Mark
    stream: int
    content: object

    @staticmethod
    def of(payload: object) -> _Wrapped | None:
        """What came; None if no chunk sender sent it."""
        if isinstance(payload, tuple) and len(payload) == 3 and payload[0] in (0, 1, 2) and type(payload[1]) is int:
            return _Wrapped(_Mark(payload[0]), payload[1], payload[2])
        return None


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

    def lose(self, from_stage: str, to_stage: str, key: str) -> None:
        """Let the receiver know that nothing comes under this key."""


class _Asks(Protocol):
    def _ask(self, from_stage: str, to_stage: str, key: str, epoch: bytes | None) -> Incoming: ...


class ChunkSender:
    """The sending end of a stream. Made by `Connector.open_chunk_sender`; one task uses it."""

    def __init__(self, connector: _Puts, request_id: str, from_stage: str, to_stage: str) -> None:
        self._connector = connector
        self._request_id = request_id
        self._from_stage = from_stage
        self._to_stage = to_stage
        self._stream = next(_numbers)
        self._sent = 0
        self._is_sending = False
        self._ended = False

    @property
    def sent(self) -> int:
        """Chunks sent so far; the end is none."""
        return self._sent

    async def send(self, chunk: object) -> None:
        """Send the next chunk. Waits for room; when it returns, the source may be overwritten.

        Cancellation: before it returns, and then the chunk was not sent; the stream goes on with the same number.

        Raises:
            Misuse: after the end, or while another task sends.
            KeyBusy: a chunk that nobody had read of an earlier stream of this request is being transferred under its
                key just now. It was not sent; send it again.
            others: as `Connector.put`.
        """
        self._check_turn()
        self._is_sending = True
        try:
            await self._put(_Mark.CHUNK, chunk)
            self._sent += 1
        finally:
            self._is_sending = False
            if self._ended:  # its block was left meanwhile, and could not send the end
                self._lose()

    def _check_turn(self) -> None:
        if self._ended:
            raise Misuse(f"a chunk of {self._request_id!r} was sent after the end of its stream; send within the block")
        if self._is_sending:
            raise Misuse(
                f"two tasks send chunks of {self._request_id!r} at once, so that they have no order; let one do it"
            )

    async def _put(self, mark: _Mark, content: object) -> None:
        key = chunk_key(self._request_id, self._from_stage, self._sent)
        await self._connector.put(self._from_stage, self._to_stage, key, (int(mark), self._stream, content))

    async def _end(self, error: BaseException | None) -> None:
        """Send the terminal chunk. A cancellation does not stop it: then it is sent shielded, and bounded."""
        self._ended = True
        if self._is_sending:
            raise Misuse(f"the stream of {self._request_id!r} was left while another task sends on it; wait for it")
        try:
            if error is None:
                await self._put_end()
            else:
                await self._put_shielded(_Mark.FAILED, _reason(error))
        except TrioMoriError:
            self._lose()
            raise

    async def _put_end(self) -> None:
        try:
            await self._put(_Mark.END, self._sent)
        except trio.Cancelled:
            await self._put_shielded(_Mark.END, self._sent)
            raise

    async def _put_shielded(self, mark: _Mark, content: object) -> None:
        with trio.move_on_after(TERMINAL_GRACE, shield=True) as scope:
            await self._put(mark, content)
        if scope.cancelled_caught:
            # Who cancels a stream has a reason, and says it: this would only stand in front of it.
            level = logging.INFO if content == _CANCELLED else logging.WARNING
            _logger.log(
                level,
                "the stream of %r ended with no room for its last chunk within %g s (%s): the receiver is told only "
                "that no more comes; let receivers read, or raise memory_pool_size",
                self._request_id,
                TERMINAL_GRACE,
                content if mark is _Mark.FAILED else "complete",
            )
            self._lose()

    def _lose(self) -> None:
        """The receiver gets `Gone` where the stream ends: that needs no room."""
        key = chunk_key(self._request_id, self._from_stage, self._sent)
        self._connector.lose(self._from_stage, self._to_stage, key)


def _reason(error: BaseException) -> str:
    """What a receiver is told of an error, in a length and an alphabet that can travel."""
    if isinstance(error, trio.Cancelled):
        return _CANCELLED
    reason = type(error).__name__
    try:
        reason = f"{reason}: {error}"
    except Exception:  # noqa: BLE001 - foreign code: what it raises would come in the place of the error
        reason = f"{reason} (without a text: its __str__ raises)"
    if len(reason) > MAX_REASON:
        reason = reason[:MAX_REASON] + "..."
    return reason.encode("utf-8", "backslashreplace").decode()


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
            raise error from error.__cause__ or second
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
        self._stream: int | None = None  # the number of the one that is received
        self._epoch: bytes | None = None  # of the sender; the stream does not outlive it
        self._incoming: Incoming | None = None
        self._is_receiving = False
        self._end: Callable[[], Exception] | None = None  # what is raised from now on

    @property
    def received(self) -> int:
        """Chunks handed out so far; the end is none."""
        return self._received

    def __aiter__(self) -> ChunkReceiver:
        return self

    async def __anext__(self) -> Any:
        """The next chunk.

        Cancellation: at any time; the same chunk comes with the next call.

        Raises:
            StopAsyncIteration: after the terminal chunk.
            StreamFailed: the sending stage ended the stream by a failure, or began another one for this request; says
                which. So does every later call.
            PayloadLost: a chunk expired or was cleaned up, or the stream ended without room to say how. So does every
                later call.
            PeerRestarted: the sending process was replaced; what it had not delivered is lost.
            Misuse: after the block, or while another task receives.
            others: as `Connector.get`.
        """
        if self._end is not None:
            raise self._end()
        if self._is_receiving:
            raise Misuse(
                f"two tasks receive chunks of {self._request_id!r} at once, so that they have no order; let one do it"
            )
        self._is_receiving = True
        try:
            chunk = await self._receive()
        finally:
            self._is_receiving = False
        if chunk.mark is _Mark.CHUNK:
            self._received += 1
            with suppress(TrioMoriError):  # what is wrong with the next one, its own call says
                self._ask()
            return chunk.content
        if chunk.mark is _Mark.FAILED:
            self._fail(str(chunk.content))
        if chunk.content != self._received:
            self._break(f"it ended after {chunk.content} chunks, but {self._received} came")
        self._end = StopAsyncIteration
        raise StopAsyncIteration

    async def _receive(self) -> _Wrapped:
        while True:
            incoming = self._incoming or self._ask()
            self._incoming = None
            try:
                payload = await incoming.receive()
            except PayloadLost as lost:  # the sender says so once
                self._end = partial(type(lost), str(lost), key=lost.key)
                raise
            self._epoch = incoming.epoch
            chunk = _Wrapped.of(payload)
            if chunk is None:
                self._break(f"{self._key()!r} is consumed, but no chunk sender sent it; use get for such keys")
            if self._stream is None:
                self._stream = chunk.stream
            if chunk.stream == self._stream:
                return chunk
            if chunk.stream > self._stream:
                self._fail("another stream of this request took its place; one at a time can be sent on an edge")
            # Left over from an earlier stream of this request, which nobody read to its end.

    def _ask(self) -> Incoming:
        key = chunk_key(self._request_id, self._from_stage, self._received)
        self._incoming = self._connector._ask(self._from_stage, self._to_stage, key, self._epoch)
        return self._incoming

    def _key(self) -> str:
        key = chunk_key(self._request_id, self._from_stage, self._received)
        return full_key(key, self._from_stage, self._to_stage)

    def _fail(self, reason: str) -> NoReturn:
        after = f"after {self._received} chunks"
        text = f"stage {self._from_stage} ended the stream of {self._request_id!r} {after}: {reason}"
        self._end = partial(StreamFailed, text, request_id=self._request_id, reason=reason)
        raise self._end()

    def _break(self, text: str) -> NoReturn:
        self._end = partial(RemoteProtocolError, f"the stream of {self._request_id!r} is broken: {text}")
        raise self._end()

    def __enter__(self) -> ChunkReceiver:
        self._ask()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._incoming is not None:
            self._incoming.give_back()
            self._incoming = None
        self._end = partial(Misuse, f"a chunk of {self._request_id!r} was asked for after its block; receive within it")


@asynccontextmanager
async def open_chunk_receiver(
    connector: _Asks, request_id: str, from_stage: str, to_stage: str
) -> AsyncIterator[ChunkReceiver]:
    """See `Connector.open_chunk_receiver`."""
    with ChunkReceiver(connector, request_id, from_stage, to_stage) as receiver:
        yield receiver
