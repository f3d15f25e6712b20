"""When a receiver says that it lives: at intervals, every second of which is left out while nothing happens."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ._config import ConnectorConfig

# Heartbeats within the shortest time-out from which on every second one may be left out: two are still heard in it.
ENOUGH = 4


class Heartbeat:
    """Paces the heartbeats of one receiver. In a process that has slept for seconds, to be woken costs milliseconds.

    Args:
        beat: Says them, to all senders; told how many seconds late it is.
        is_at_rest: Whether nothing is lost if the next ones come later.

    Attributes:
        rests: Whether the next one is being left out. Whoever may have ended the rest calls `note`.
    """

    def __init__(
        self, config: ConnectorConfig, *, beat: Callable[[float], None], is_at_rest: Callable[[], bool]
    ) -> None:
        self.rests = False
        self._interval = config.heartbeat_interval
        self._may_rest = ENOUGH * self._interval <= min(config.peer_timeout, config.acknowledge_timeout)
        self._beat = beat
        self._is_at_rest = is_at_rest
        self._nap = trio.CancelScope()
        self._begun = trio.Event()

    def begin(self) -> None:
        """There is somebody to say it to. Idempotent."""
        self._begun.set()

    def note(self) -> None:
        """If something has happened, the next one comes within one interval."""
        if self.rests and not self._is_at_rest():
            self.rests = False
            self._nap.deadline = min(self._nap.deadline, trio.current_time() + self._interval)

    async def go_on(self) -> None:
        """Say them until cancelled."""
        await self._begun.wait()
        while True:
            self.rests = self._may_rest and self._is_at_rest()
            seconds = 2 * self._interval if self.rests else self._interval
            with trio.CancelScope(deadline=trio.current_time() + seconds) as self._nap:
                await trio.sleep_forever()
            self.rests = False
            self._beat(trio.current_time() - self._nap.deadline)
