"""Calls in other threads, as the tests of the blocking facade need them; and how many threads there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Seconds for a call that returns at once, on a machine that may be busy.
PATIENCE = 20.0


class Other:
    """A call in another thread, and what became of it."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            self.value = function(*args)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self.error = error

    def wait(self) -> object:
        """What it returned, or raise what it raised."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.value


def count_threads() -> int:
    """Threads of this process, libzmq's too, but none of those that trio keeps for a while when their work is done."""
    count = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            count += not (thread / "comm").read_text().startswith("Trio thread")
    return count
