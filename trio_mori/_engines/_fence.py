"""The proof that nothing of a peer can arrive any more."""

from __future__ import annotations

import os
import select

import trio

from .._errors import SHORTAGES

# Seconds between attempts to have a descriptor when the process has none left. An end that is noticed so much later
# costs nothing but memory.
SHORTAGE_PAUSE = 1.0


class Fence:
    """A descriptor that becomes readable when a peer is over: a pidfd, or a pipe. Takes it over."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closed = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def is_over(self) -> bool:
        """Whether the peer is over by now: 0.4 us, little enough to be asked before every write."""
        return bool(self._poll.poll(0))

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
