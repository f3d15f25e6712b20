"""A bound on what strangers can make a log grow by."""

from __future__ import annotations

import trio

# Lines that may come at once: a deployment of some replicas that is wired wrongly says so for each.
BURST = 20

# Seconds for each line after these: 1,440 a day at most, from each place that has a limit.
INTERVAL = 60.0


class LogLimit:
    """Says whether one more line of a kind may be logged now. What may not is counted all the same."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at = 0.0

    def admits(self) -> bool:
        """Whether to log; if so, it is one line less."""
        now = trio.current_time()
        self._left = min(BURST, self._left + (now - self._at) / INTERVAL)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
