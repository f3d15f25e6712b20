"""The loop's half of sending: a task per life of a request, which puts its chunks one after the other.

```
   offered --(worker)--> built --(there is room)--> put, and the next one
```
A task ends after the terminal chunk; by a failure, which the next stage is told in the place of the terminal chunk; or
because it was cut. A terminal chunk that is queued is not cut off: the scheduler's half never cuts such a stream, and
when the adapter is closed, what is queued is still sent, shielded, for `TERMINAL_GRACE`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import attrs
import trio

from trio_mori import ConnectorClosed, KeyRefused, TooBig, TrioMoriError, UnsupportedPayload, WrongRole

from ._building import Built
from ._flows import Ended, Event, Outflow
from ._marks import failed_terminal
from ._wire import Wire

logger = logging.getLogger("trio_mori.chunk_adapter")

# For what is left of streams whose end is queued, when the adapter is closed. vllm-omni gives it two seconds in all.
TERMINAL_GRACE = 1.0

# Chunks of a stream that are put before others have their turn: half a millisecond.
AT_ONCE = 16

# Seconds for which a life without room keeps the next one under its name waiting. A next stage that has ended it, too,
# fetches and drops what is left for so long; after that the room may not come before all of it expires.
STALL = 2.0

# Other failures of a put may pass: it is tried again so often, after this.
RETRIES = 3
PAUSE = 0.05
_FINAL = (UnsupportedPayload, TooBig, WrongRole, KeyRefused, ConnectorClosed)


@attrs.define(eq=False)
class _Stream:
    """An outflow, as the loop has it.

    Attributes:
        has_begun: It has its turn: what is put under its name is of it.
        sent: Chunks that were put.
        is_idle: Its task waits for the next one.
        is_cut: Nothing more of it is to be sent, but `failure` if there is one.
        telling: Around the put of that.
    """

    flow: Outflow
    queue: deque[Built] = attrs.field(factory=deque)
    news: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    over: trio.Event = attrs.field(factory=trio.Event)
    has_begun: bool = False
    sent: int = 0
    is_idle: bool = False
    is_cut: bool = False
    failure: str | None = None
    telling: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(shield=True))

    @property
    def is_dropped(self) -> bool:
        """Whether nobody is to have anything of it."""
        return self.is_cut and self.failure is None

    @property
    def takes_more(self) -> bool:
        """Whether a chunk may be put past its task."""
        return self.is_idle and not self.queue and not self.is_cut

    @property
    def waits_for_room(self) -> bool:
        """Whether it has something to put, and has its turn."""
        return self.has_begun and bool(self.queue) and not self.is_cut

    @property
    def has_end(self) -> bool:
        """Whether its terminal chunk is queued."""
        return bool(self.queue) and self.queue[-1].is_terminal


class CannotBuild(Exception):
    """A chunk could not be built; says why."""


class Sending:
    """In the loop, in the nursery that it is given."""

    def __init__(self, wire: Wire, nursery: trio.Nursery, tell: Callable[[Event], None]) -> None:
        self._wire = wire
        self._nursery = nursery
        self._tell = tell
        self._streams: dict[Outflow, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, flow: Outflow) -> None:
        """Begin a stream, which waits for the one before it."""
        stream = self._streams[flow] = _Stream(flow)
        before = None if flow.after is None else self._streams.get(flow.after)
        self._nursery.start_soon(self._run, stream, before)

    def send(self, flow: Outflow, chunk: Built) -> None:
        """Put a chunk here and now if that needs no waiting, else queue it.

        One for a stream that has ended is dropped: that it has is on its way to the scheduler, or came from there.
        """
        stream = self._streams.get(flow)
        if stream is None or flow.is_cut:
            return
        # To wake the task for it takes as long as the rest of a small chunk's way through the loop.
        if stream.takes_more and self._put_at_once(stream, chunk):
            return
        stream.queue.append(chunk)
        stream.news.set()

    def _put_at_once(self, stream: _Stream, chunk: Built) -> bool:
        """Put a chunk that is next, if it is no end and needs no waiting."""
        if chunk.planned is None or chunk.is_terminal:
            return False
        if not self._wire.put_at_once(stream.flow.external_id, stream.sent, chunk.planned):
            return False
        stream.sent += 1
        return True

    def cut(self, flow: Outflow, failure: str | None) -> None:
        """End a stream, unless it has ended. Without a failure, what was put of it is gone when this returns."""
        stream = self._streams.get(flow)
        if stream is not None:
            stream.is_cut, stream.failure = True, failure
            stream.scope.cancel()
            if failure is None:
                stream.telling.cancel()
            has_turn = stream.has_begun
        else:  # it is over, and may have been told as failed; or it is yet to begin, maybe after the one before
            has_turn = not any(each.external_id == flow.external_id for each in self._streams)
        if failure is None and has_turn:
            self._wire.clean(flow.external_id)

    async def _wait_for_end(self, before: _Stream) -> None:
        """Wait until a life is over, and end it if it waits for room that nobody makes."""
        while not before.over.is_set():
            sent = before.sent
            with trio.move_on_after(STALL) as patience:
                await before.over.wait()
            if patience.cancelled_caught and before.waits_for_room and before.sent == sent:
                logger.warning(
                    "what is left of an earlier request %s is dropped: it had no room for %g s, and the next one of "
                    "its name waits",
                    before.flow.external_id,
                    STALL,
                )
                self.cut(before.flow, None)

    async def _run(self, stream: _Stream, before: _Stream | None) -> None:
        failure: str | None = None
        external_id = stream.flow.external_id
        try:
            if before is not None:
                await self._wait_for_end(before)
            self._wire.clean(external_id)  # what is left of an earlier request of this name
            stream.has_begun = True
            try:
                with stream.scope:
                    await self._send_all_but_for_a_cut(stream)
            except Exception as error:  # noqa: BLE001 - told in the scheduler's thread, and to the next stage
                if not stream.is_dropped:
                    failure = str(error) if isinstance(error, CannotBuild) else f"{type(error).__name__}: {error}"
                    stream.failure = failure
                    logger.error("request %s cannot be sent on: %s", external_id, failure)
            if stream.failure is not None:
                await self._send_failure(stream, stream.failure)
            if stream.is_dropped:
                self._wire.clean(external_id)
        finally:
            del self._streams[stream.flow]
            stream.over.set()
        self._tell(Ended(stream.flow, failure))

    async def _send_all_but_for_a_cut(self, stream: _Stream) -> None:
        try:
            await self._send_all(stream)
        except trio.Cancelled:
            if stream.has_end and not stream.is_cut:
                with trio.move_on_after(TERMINAL_GRACE, shield=True):
                    await self._send_all(stream)
            raise

    async def _send_all(self, stream: _Stream) -> None:
        at_once = 0  # since others had a turn
        while True:
            if not stream.queue:
                stream.news = trio.Event()
                stream.is_idle = True
                try:
                    await stream.news.wait()
                finally:
                    stream.is_idle = False
                at_once = 0
            chunk = stream.queue[0]
            if at_once < AT_ONCE and not stream.is_cut and self._put_at_once(stream, chunk):
                at_once += 1
                stream.queue.popleft()
                continue
            at_once = 0
            if chunk.failure is not None:
                raise CannotBuild(chunk.failure)
            if chunk.planned is not None:
                await self._put(stream, chunk.planned)
            stream.queue.popleft()
            if chunk.is_terminal:
                return

    async def _put(self, stream: _Stream, planned: object) -> None:
        attempt = 0
        while True:
            attempt += 1
            try:
                await self._wire.put(stream.flow.external_id, stream.sent, planned)
                break
            except _FINAL:
                raise
            except TrioMoriError as error:
                if attempt > RETRIES:
                    raise
                logger.info("a chunk of %s is put again: %s", stream.flow.external_id, error)
                await trio.sleep(PAUSE)
        stream.sent += 1

    async def _send_failure(self, stream: _Stream, reason: str) -> None:
        """Tell the next stage, shielded from all but a cut: if there is no room for a reason, that nothing comes."""
        stream.telling.deadline = trio.current_time() + TERMINAL_GRACE
        try:
            with stream.telling:
                await self._put(stream, self._wire.planned(failed_terminal(reason)))
            if not stream.telling.cancelled_caught:
                return
        except TrioMoriError as error:
            logger.warning("the next stage is not told why %s failed: %s", stream.flow.external_id, error)
        if not stream.is_dropped:
            self._wire.lose(stream.flow.external_id, stream.sent)
