"""Puts that wait for room: how many, since when, and one line in the log when that lasts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf

import attrs
import trio

from ._events import PUTS_WAIT
from ._log_limit import LogLimit
from ._pool import PoolStatistics

logger = logging.getLogger("trio_mori.sender")

# Seconds after which a put that waits is told. One that waits for its turn behind a receiver at work has it in one;
# who gets nothing for five has stopped, or was never there.
PATIENCE = 5.0

_WORDS = {
    "published": "published and not fetched",
    "claimed": "asked for, and waiting for room at its receiver",
    "pinned": "being written",
    "delivered": "delivered and not acknowledged",
    "dying": "dropped while it is being written",
    "staged": "being copied in",
}


@attrs.frozen(eq=False)
class _Wait:
    """A put that waits.

    Attributes:
        size: Bytes that it needs.
    """

    since: float
    size: int


class RoomWatch:
    """Knows the puts of one sender that wait for room, the eldest first."""

    def __init__(self) -> None:
        self._waits: dict[_Wait, None] = {}
        self._told = False
        self._log_limit = LogLimit()

    def __len__(self) -> int:
        return len(self._waits)

    @contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """A put waits for so many bytes, for the length of a ``with`` block."""
        wait = _Wait(trio.current_time(), size)
        self._waits[wait] = None
        try:
            yield
        finally:
            del self._waits[wait]
            self._told = self._told and bool(self._waits)

    @property
    def due(self) -> float:
        """When to `tell`; inf: there is nothing to be told."""
        eldest = next(iter(self._waits), None)
        return inf if eldest is None or self._told else eldest.since + PATIENCE

    def tell(self, now: float, pool: PoolStatistics, held: Mapping[str, int], quarantined: int) -> None:
        """Say, if it is time, what the pool is full of; once until no put waits."""
        if now < self.due:
            return
        self._told = True
        if not self._log_limit.admits():
            return
        eldest = next(iter(self._waits))
        parts = {_WORDS[state]: size for state, size in held.items()}
        parts |= {"for what is received": pool.inbound, "in quarantine": quarantined}
        full_of = ", ".join(f"{size} bytes {words}" for words, size in parts.items() if size) or "nothing"
        seconds = now - eldest.since
        logger.warning(
            "%s for room, the eldest for %.0f s and %d bytes; of the pool's %d bytes %d are free (%d in one "
            "piece), and it holds: %s. Do the receivers run, and get what is put? Otherwise clean up what nobody will "
            "get, lower buffer_ttl_seconds, or raise memory_pool_size",
            "1 put waits" if len(self._waits) == 1 else f"{len(self._waits)} puts wait",
            seconds,
            eldest.size,
            pool.size,
            pool.free,
            pool.largest_free,
            full_of,
            extra={"event": PUTS_WAIT, "count": len(self._waits), "seconds": seconds, "size": eldest.size},
        )
