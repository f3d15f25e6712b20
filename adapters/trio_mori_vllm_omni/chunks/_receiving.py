"""The loop's half of receiving: a task per request, which asks for its chunks in order and hands them over.

Its cancel scope is the commit barrier on this side: a chunk that has not come when the scope ends stays with its
sender. One that has come goes to the scheduler's half, which drops it if its request has ended meanwhile, and says so.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trio_mori import NoRoom, PayloadLost, TransferFailed

from ._flows import AHEAD, Arrived, Broken, Event, Inflow
from ._marks import is_last
from ._wire import Wire

# What may pass is tried again so often, after this.
RETRIES = 3
PAUSE = 0.5


@attrs.define(eq=False)
class _Stream:
    """An inflow, as the loop has it.

    Attributes:
        room: Chunks that may be asked for.
    """

    flow: Inflow
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    room: int = AHEAD
    has_room: trio.Event = attrs.field(factory=trio.Event)


class Receiving:
    """In the loop, in the nursery that it is given."""

    def __init__(self, wire: Wire, nursery: trio.Nursery, tell: Callable[[Event], None]) -> None:
        self._wire = wire
        self._nursery = nursery
        self._tell = tell
        self._streams: dict[Inflow, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, flow: Inflow) -> None:
        """Receive a request."""
        stream = self._streams[flow] = _Stream(flow)
        self._nursery.start_soon(self._receive, stream)

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

    async def _receive(self, stream: _Stream) -> None:
        flow = stream.flow
        try:
            with stream.scope:
                number = 0
                while True:
                    if not stream.room:
                        stream.has_room = trio.Event()
                        await stream.has_room.wait()
                    payload = await self._take(flow, number)
                    stream.room -= 1
                    number += 1
                    self._tell(Arrived(flow, payload))
                    if is_last(payload):
                        return
        except Exception as error:  # noqa: BLE001 - told in the scheduler's thread
            self._tell(Broken(flow, f"{type(error).__name__}: {error}"))
        finally:
            del self._streams[flow]

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
