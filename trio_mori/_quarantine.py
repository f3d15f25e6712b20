"""What is in quarantine and for how long: looked at now and then, told once in the log, and said in statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import attrs

from ._events import QUARANTINE, QUARANTINE_OVER
from ._protocol.doubts import Doubt

logger = logging.getLogger("trio_mori.quarantine")


@attrs.frozen
class Quarantined:
    """A piece of the pool that is out of use because a peer, or the engine, may still touch it.

    Attributes:
        size: Bytes.
        seconds: Since it was first seen there; somebody looks at each heartbeat and each call of `statistics`.
        peer: Who may touch it: the address of a sender, the engine's name of a receiver.
        reason: Why, in words.
    """

    size: int
    seconds: float
    peer: str
    reason: str


class QuarantineWatch:
    """Knows since when each piece is there. The books, which decide, have no clock for it.

    Args:
        name_of: The name of a doubt's holder.
    """

    def __init__(self, name_of: Callable[[object], str]) -> None:
        self._name_of = name_of
        self._since: dict[object, float] = {}
        self._told: frozenset[tuple[str, str]] = frozenset()

    def look(self, doubts: Iterable[Doubt], now: float) -> tuple[Quarantined, ...]:
        """What is there now, the oldest first."""
        doubts = list(doubts)
        self._since = {doubt.subject: self._since.get(doubt.subject, now) for doubt in doubts}
        found = (
            Quarantined(d.size, max(now - self._since[d.subject], 0.0), self._name_of(d.holder), d.reason)
            for d in doubts
        )
        return tuple(sorted(found, key=lambda each: -each.seconds))

    @property
    def has_told(self) -> bool:
        """Whether something was logged that is not known to be over."""
        return bool(self._told)

    def tell(self, doubts: Iterable[Doubt], now: float, *, after: float = 0.0) -> None:
        """Log what has been there for so long, once for each peer and reason; and when it is over."""
        lasting = [each for each in self.look(doubts, now) if each.seconds >= after]
        groups = frozenset((each.peer, each.reason) for each in lasting)
        for peer, reason in groups - self._told:
            size = sum(each.size for each in lasting if (each.peer, each.reason) == (peer, reason))
            logger.warning(
                "%d bytes of the pool stay out of use, for %s may still touch them: %s",
                size,
                peer,
                reason,
                extra={"event": QUARANTINE, "peer": peer, "reason": reason, "size": size},
            )
        for peer, reason in self._told - groups:
            logger.info(
                "what %s might have touched is free again (%s)",
                peer,
                reason,
                extra={"event": QUARANTINE_OVER, "peer": peer, "reason": reason},
            )
        self._told = groups
