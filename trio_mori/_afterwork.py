"""What calls that have returned leave to be done, in the next tick: their callers have what they waited for."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Afterwork:
    """Calls `do` once for all that was left in a tick. Runs in the nursery of whoever made it.

    Args:
        do: Does all that is left, which may be nothing. Called at any time, by others too: by whoever would notice that
            it is not done yet.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self._task: trio.lowlevel.Task | None = None  # while it sleeps

    def soon(self) -> None:
        """Something was left."""
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    async def do_forever(self) -> None:
        """Do what is left, until cancelled."""
        while True:
            self._do()
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
