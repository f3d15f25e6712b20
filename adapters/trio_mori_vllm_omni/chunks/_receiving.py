"""The loop's half of receiving: a task per request, which asks for its chunks in order and hands them over.

Its cancel scope is the commit barrier on this side: after it nothing is handed over. A chunk that has come before goes
to the scheduler's half, which drops it if its request has ended meanwhile, and says so. What the sender still has of a
request that was under way is fetched and dropped for a while, so that it need not keep it until it expires; when the
adapter is closed, it stays with the sender.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import trio

from trio_mori import NoRoom, PayloadLost, TransferFailed

from ._flows import AHEAD, Arrived, Broken, Event, Inflow
from ._marks import is_last
from ._wire import Wire

logger = logging.getLogger("trio_mori.chunk_adapter")

# What may pass is tried again so often, after this.
RETRIES = 3
PAUSE = 0.5

# How long the rest of a request is fetched that is not wanted any more. A sender that has it all answers in a round
# trip for each; one that was told of the end, too, has dropped it.
RECLAIM = 2.0


@attrs.define(eq=False)
class _Stream:
    """An inflow, as the loop has it.

    Attributes:
        room: Chunks that may be asked for.
        number: Of the chunk that is asked for next.
    """

    flow: Inflow
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    room: int = AHEAD
    number: int = 0
    is_over: bool = False
    reclaiming: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    has_room: trio.Event = attrs.field(factory=trio.Event)


class Receiving:
    """In the loop, in the nursery that it is given."""

    def __init__(self, wire: Wire, nursery: trio.Nursery, tell: Callable[[Event], None]) -> None:
        self._wire = wire
        self._nursery = nursery
        self._tell = tell
        self._streams: dict[Inflow, _Stream] = {}
        self._last: dict[str, _Stream] = {}  # to have begun, by external id; also while its rest is fetched and dropped
        self.reclaimed = 0

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, flow: Inflow) -> None:
        """Receive a request."""
        before = self._last.get(flow.external_id)
        if before is not None:  # its keys are those of the new one, also if it has yet to learn that it was dropped
            before.reclaiming.cancel()
        stream = self._streams[flow] = self._last[flow.external_id] = _Stream(flow)
        self._nursery.start_soon(self._run, stream)

    def credit(self, flow: Inflow, count: int) -> None:
        """So many more of its chunks were taken."""
        stream = self._streams.get(flow)
        if stream is not None:
            stream.room += count
            stream.has_room.set()

    def drop(self, flow: Inflow) -> None:
        """End it."""
        stream = self._streams.get(flow)
        if stream is not None:
            stream.scope.cancel()

    async def _run(self, stream: _Stream) -> None:
        try:
            await self._receive(stream)
            # Not before anything has come: the first chunk of a new request of this name might be taken for one of it.
            if not stream.is_over and stream.number and not stream.reclaiming.cancel_called:
                await self._reclaim(stream)
            if not stream.is_over:
                self._wire.forget(stream.flow.external_id)
        finally:
            if self._last.get(stream.flow.external_id) is stream:
                del self._last[stream.flow.external_id]

    async def _receive(self, stream: _Stream) -> None:
        flow = stream.flow
        try:
            with stream.scope:
                while not stream.is_over:
                    if not stream.room:
                        stream.has_room = trio.Event()
                        await stream.has_room.wait()
                    stream.room -= 1
                    self._tell(Arrived(flow, await self._next(stream)))
        except Exception as error:  # noqa: BLE001 - told in the scheduler's thread
            stream.is_over = True
            self._tell(Broken(flow, f"{type(error).__name__}: {error}"))
        finally:
            del self._streams[flow]

    async def _reclaim(self, stream: _Stream) -> None:
        stream.reclaiming.deadline = trio.current_time() + RECLAIM
        try:
            with stream.reclaiming:
                while not stream.is_over:
                    await self._next(stream)
                    self.reclaimed += 1
        except Exception as error:  # noqa: BLE001 - it was not wanted
            logger.debug("the rest of %s cannot be fetched: %s", stream.flow.external_id, error)

    async def _next(self, stream: _Stream) -> object:
        payload = await self._take(stream.flow, stream.number)
        stream.number += 1
        stream.is_over = is_last(payload)
        return payload

    async def _take(self, flow: Inflow, number: int) -> object:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._wire.take(flow.external_id, number, flow.source)
            except PayloadLost:
                # Before anything has come, it may be what is left of an earlier request of this name. It is told once.
                if number or attempt > 1:
                    raise
            except (NoRoom, TransferFailed):
                if attempt > RETRIES:
                    raise
                await trio.sleep(PAUSE)
