"""One worker thread at a time for what must not run at the same time, nor in the loop: the models' input processors.

They share dictionaries of the whole adapter, and were written for one thread. What several tasks want done is done in
one change of threads: that costs as much as a small chunk's processing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Generic, TypeVar

import trio

T = TypeVar("T")

# A turn in the worker ends after this, so that who came first need not wait for all who came with it.
TURN = 0.002


class Job(Generic[T]):
    """Something to be done in the worker, once; it cannot be stopped when it has begun."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: T | None = None
        self._error: Exception | None = None
        self.is_wanted = True  # cleared in the loop, and looked at once in the worker
        self.done = trio.Event()

    def run(self) -> None:
        """In the worker."""
        if not self.is_wanted:
            return
        try:
            self._value = self._function()
        except Exception as error:  # noqa: BLE001 - raised again in the task that asks
            self._error = error

    def result(self) -> T | None:
        """What came of it; None also if it was not wanted any more."""
        if self._error is not None:
            raise self._error
        return self._value


class Bench:
    """Does jobs in the order in which they were put up. `serve` runs for as long as it is needed."""

    def __init__(self) -> None:
        self._jobs: deque[Job[object]] = deque()
        self._news = trio.Event()
        self._limiter = trio.CapacityLimiter(1)

    def put_up(self, function: Callable[[], T]) -> Job[T]:
        """Have something done. Nobody need wait for it."""
        job = Job(function)
        self._jobs.append(job)  # type: ignore[arg-type]
        self._news.set()
        return job

    async def serve(self) -> None:
        """Carry out jobs. Cancellation: between two turns; what was put up is left undone then."""
        while True:
            if not self._jobs:
                self._news = trio.Event()
                await self._news.wait()
            turn = list(self._jobs)
            self._jobs.clear()
            done = await trio.to_thread.run_sync(_carry_out, turn, limiter=self._limiter)
            self._jobs.extendleft(reversed(turn[done:]))
            for job in turn[:done]:
                job.done.set()


def _carry_out(turn: list[Job[object]]) -> int:
    """Do jobs until the turn is over. Returns how many were done."""
    end = perf_counter() + TURN
    for at, job in enumerate(turn, 1):
        job.run()
        if perf_counter() >= end:
            return at
    return len(turn)
