"""Copies that threads of this process make."""

from __future__ import annotations

import ctypes
import math

import trio

from .._errors import TransferFailed
from .._pages import PageFinder
from . import _memfd


class Copies:
    """Copies under way in threads. A copy cannot be stopped: it is waited for, or abandoned."""

    def __init__(self) -> None:
        self._running: set[trio.CancelScope] = set()
        self._none_running = trio.Event()
        self._none_running.set()
        # Apart from trio's own forty threads, which other code of this process may keep busy.
        self._threads = trio.CapacityLimiter(math.inf)

    async def copy(
        self, target: memoryview, source: memoryview, pages: PageFinder | None = None, offset: int = 0
    ) -> None:
        """Copy all of `source` to `target`, in a thread. Not cancellable.

        Args:
            pages: Finds those of the mapping that has `target` at `offset`, where they may be new to this process.

        Raises:
            TransferFailed: with ``settled=False``, when it was abandoned.
        """
        with trio.CancelScope(shield=True) as scope:
            if not self._running:
                self._none_running = trio.Event()
            self._running.add(scope)
            try:
                await trio.to_thread.run_sync(
                    _move, target, source, pages, offset, abandon_on_cancel=True, limiter=self._threads
                )
            finally:
                self._running.discard(scope)
                if not self._running:
                    self._none_running.set()
        if scope.cancelled_caught:
            raise TransferFailed(f"a copy of {len(source)} bytes was abandoned while it ran", settled=False)

    def abandon(self) -> bool:
        """End the wait for every copy; whether there was one. The memory of both sides has to stay from here on."""
        for scope in self._running:
            scope.cancel()
        return bool(self._running)

    async def wait_none_running(self) -> None:
        """Wait until no copy is under way that was not abandoned. Cancellable."""
        await self._none_running.wait()


def _move(target: memoryview, source: memoryview, pages: PageFinder | None, offset: int) -> None:
    if pages is not None:
        pages.find(offset, len(source))
    # ctypes gives the GIL back while it copies; an assignment to a slice would keep it.
    ctypes.memmove(_memfd.address(target), _memfd.address(source), len(source))
