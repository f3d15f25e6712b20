"""One worker thread for what must not run at the same time, nor in the loop: the models' input processors.

They share dictionaries of the whole adapter, and were written for one thread. The worker stays in its one call of
`trio.to_thread` for as long as the adapter is open, and is given work by the scheduler's thread directly: to begin a
call for each chunk, by way of the loop, took twice the changes of threads, which cost more than the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

import trio

Work = Callable[[], None]


class Bench:
    """Does work in the order in which it is put up."""

    def __init__(self, rest: Work) -> None:
        """Store what is done whenever there is no more work."""
        self._rest = rest
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._limiter = trio.CapacityLimiter(1)

    def put_up(self, work: Work) -> None:
        """Have something done, which must not raise. From any thread; it waits for nobody."""
        self._queue.put(work)

    async def serve(self) -> None:
        """Work, until `stop`. Cancellation does not end it."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._work, limiter=self._limiter)

    def stop(self) -> None:
        """Have it end when it has done what was put up before."""
        self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            if self._queue.empty():
                self._rest()
