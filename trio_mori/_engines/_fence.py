"""The proof that nothing of a peer can arrive any more."""

from __future__ import annotations

import os
import select
import time
from math import inf

import trio

from .._errors import SHORTAGES

# Seconds between attempts to have a descriptor when the process has none left. An end that is noticed so much later
# costs nothing but memory.
SHORTAGE_PAUSE = 1.0

# Seconds for which a look counts. A peer may die just after one anyway; and each look gives the interpreter away, which
# beside other threads costs 10 us in the middle, and now and then 5 ms. Real time, whatever clock a test runs by.
LOOK = 0.001


class Fence:
    """A descriptor that becomes readable when a peer is over: a pidfd, or a pipe. Takes it over."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closed = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._looked_at = -inf
        self._is_over = False

    def is_over(self) -> bool:
        """Whether the peer was over when last looked at, a millisecond ago at most: asked before every write."""
        now = time.monotonic()
        if now - self._looked_at > LOOK:
            self._looked_at = now
            self._is_over = bool(self._poll.poll(0))
        return self._is_over

    async def wait(self) -> None:
        """Return when the peer is over, also if `close` is called meanwhile. Cancellable; any number may wait."""
        while not self._closed:
            try:
                fd = os.dup(self._fd)  # trio lets one task wait for each
            except OSError as error:
                if error.errno not in SHORTAGES:
                    raise
                await trio.sleep(SHORTAGE_PAUSE)
                continue
            try:
                await trio.lowlevel.wait_readable(fd)
            finally:
                os.close(fd)
            return

    def close(self) -> None:
        """Let go of the descriptor."""
        self._closed = True
        self._poll.unregister(self._fd)
        os.close(self._fd)
