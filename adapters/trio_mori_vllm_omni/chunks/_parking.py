"""Requests that wait for a chunk are taken out of the scheduler's queues before it schedules, and put back afterwards.

```
            no chunk wanted yet                     a chunk was committed
 WAITING ------------------------> WAITING_FOR_CHUNK ---------------------> WAITING or RUNNING, and ready
 RUNNING                           (parked in each tick)
```
Between the two, a request may be aborted and freed by the scheduler. What is not in `live` any more is never put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, MutableSet
from typing import Any

import attrs

from ._records import Flag, Reception, Receptions


@attrs.frozen
class Statuses:
    """The values of vllm's `RequestStatus` that are needed here."""

    waiting: Any
    running: Any
    waiting_for_chunk: Any
    preempted: Any


class Parking:
    """The queue work of a tick.

    Attributes:
        waiting, running: Requests that wait for a chunk, by the queue that they came from.
        held: Running requests outside of the window of active streams.
    """

    def __init__(
        self,
        records: Receptions,
        statuses: Statuses,
        want: Callable[[Reception, Any], None],
        clock: Callable[[], float],
        *,
        window: int,
        max_running: int,
    ) -> None:
        """Store.

        Args:
            want: Has the next chunk of a request received.
            window: Streams that may be active at once; 0: all.
            max_running: Requests that the scheduler runs at once.
        """
        self.waiting: deque[Any] = deque()
        self.running: deque[Any] = deque()
        self.held: deque[Any] = deque()
        self._records = records
        self._statuses = statuses
        self._want = want
        self._clock = clock
        self._window = window
        self._max_running = max_running
        self._active = 0  # counted at the begin of a tick

    # --- a tick -------------------------------------------------------------------------------------------

    def take_out(self, waiting: Any, running: list[Any], arrived: MutableSet[str]) -> list[Reception]:
        """Park what waits for a chunk. Returns what has become ready."""
        if self._window:
            self._active = sum(Flag.ACTIVE in record.flags for record in self._records.values())
            self._promote(running)
            self._promote(waiting)
        ready: list[Reception] = []
        leaving = self._look_through(waiting, self._statuses.waiting, self.waiting, arrived, ready)
        if leaving:
            waiting.remove_requests(leaving)
        leaving = self._look_through(running, self._statuses.running, self.running, arrived, ready)
        if leaving:
            running[:] = [request for request in running if request not in leaving]
        return ready

    def _look_through(
        self, queue: Any, origin: Any, parked: deque[Any], arrived: MutableSet[str], ready: list[Reception]
    ) -> set[Any]:
        leaving: set[Any] = set()
        for request in list(queue):
            record = self._records.of(request.request_id)
            if not self._is_active(record):
                # It has no chunk, and must not run. One that runs is held back later, when its turn has been looked at.
                if origin is self._statuses.waiting:
                    parked.append(request)
                    leaving.add(request)
                continue
            if request.status != self._statuses.waiting_for_chunk:
                if Flag.READY in record.flags:
                    continue  # since an earlier tick; it was not scheduled yet
                if record.is_done:
                    request.additional_information = None
                    continue
                request.status = self._statuses.waiting_for_chunk
                if record.waiting_since is None:
                    record.waiting_since = self._clock()
                if request.request_id not in arrived:
                    self._want(record, request)
            if request.request_id in arrived:
                arrived.discard(request.request_id)
                record.flags.add(Flag.READY)
                record.waiting_since = None
                request.status = origin
                ready.append(record)
                continue
            record.origin = origin
            parked.append(request)
            leaving.add(request)
        return leaving

    def settle(self, waiting: Any, running: list[Any], replaced: Container[str]) -> None:
        """After prompts have changed: admit those anew, and keep within the limits."""
        for request in [r for r in running if r.request_id in replaced]:
            record = self._records.of(request.request_id)
            if Flag.READY not in record.flags:
                continue
            running.remove(request)
            request.status = record.origin = self._statuses.waiting
            waiting.add_request(request)
        if self._window:
            self._promote(waiting)
            self._hold_back(running)
            return
        while len(running) > self._max_running:
            request = running.pop()
            request.status = self._statuses.preempted
            waiting.prepend_requests([request])

    def put_back(self, waiting: Any, running: list[Any], live: Container[str] | None) -> list[str]:
        """Undo `take_out`, but for requests that are not `live`. Returns the ids of those."""
        gone = [] if live is None else self.purge(live)
        for request in self.waiting:
            waiting.add_request(request)
        running.extend(self.running)
        running.extend(self.held)
        self.waiting.clear()
        self.running.clear()
        self.held.clear()
        return gone

    # --- requests that end --------------------------------------------------------------------------------

    def purge(self, live: Container[str]) -> list[str]:
        """Let go of the parked requests that are not `live`. Returns their ids."""
        gone = [request.request_id for request in self._everyone() if request.request_id not in live]
        for request_id in gone:
            self.discard(request_id)
        return gone

    def discard(self, request_id: str) -> None:
        """Let go of one request."""
        for parked in (self.waiting, self.running, self.held):
            if any(request.request_id == request_id for request in parked):
                kept = [request for request in parked if request.request_id != request_id]
                parked.clear()
                parked.extend(kept)

    def owned(self) -> set[str]:
        """The ids of all that are out of the scheduler's queues now."""
        return {request.request_id for request in self._everyone()}

    def _everyone(self) -> Iterable[Any]:
        return [*self.waiting, *self.running, *self.held]

    # --- the window of active streams ---------------------------------------------------------------------

    def _promote(self, queue: Iterable[Any]) -> None:
        """Make streams active in the order of a queue, as far as the window goes."""
        if self._active < self._window:
            for request in list(queue):
                self._is_active(self._records.of(request.request_id))

    def _is_active(self, record: Reception) -> bool:
        """Whether it is in the window, into which it is taken if there is room."""
        if not self._window or Flag.ACTIVE in record.flags:
            return True
        if self._active >= self._window:
            return False
        self._active += 1
        record.flags.add(Flag.ACTIVE)
        return True

    def _hold_back(self, running: list[Any]) -> None:
        """Keep running requests outside of the window to ourselves: a queue must not change again in this step."""
        held = [request for request in running if Flag.ACTIVE not in self._records.of(request.request_id).flags]
        if held:
            running[:] = [request for request in running if Flag.ACTIVE in self._records.of(request.request_id).flags]
            self.held.extend(held)
