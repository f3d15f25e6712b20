"""The writes out of the sender's pool that have not ended.

**What keeps memory safe.** A write pins its entry from the moment its ticket is made, and a pinned entry's extent is
not given back. A ticket ends when the engine says that no byte moves any more; or, when the engine could not say that,
with the proven death of the receiver's process. A write that runs out of time is failed to its receiver and stays
pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from . import doubts
from .alarm import Alarm
from .doubts import Doubt
from .entries import Course, Fetch, Session, Ticket, Want


class Tickets:
    """A part of `Outbox`: one ticket for each write.

    Args:
        time_limit: Seconds that a write of so many bytes may take.

    Attributes:
        unended: All of them.
    """

    def __init__(self, alarm: Alarm, time_limit: Callable[[int], float]) -> None:
        self.unended: dict[Ticket, None] = {}
        self.time_limit = time_limit
        self._alarm = alarm

    def watch(self, ticket: Ticket, now: float) -> None:
        """A write did not end at once: from now on its time runs."""
        ticket.deadline = now + self.time_limit(ticket.size)
        self._alarm.at = min(self._alarm.at, ticket.deadline)

    # --- looking ------------------------------------------------------------------------------------------

    def serves(self, fetch: Fetch) -> bool:
        """Whether a write for it may still be under way."""
        if fetch.state in (Want.WRITING, Want.WITHDRAWN):
            return True
        return fetch.state is Want.FAILED and any(t.holder is fetch for t in self.unended)

    def of(self, session: Session) -> list[Ticket]:
        """The writes into a session's pool."""
        return [t for t in self.unended if isinstance(t.holder, Fetch) and t.holder.session is session]

    def fetch_ids(self, session: Session) -> list[int]:
        """The fetches of a session that are written for."""
        holders = [t.holder for t in self.unended]
        return [h.id for h in holders if isinstance(h, Fetch) and h.session is session]

    def overdue(self, now: float) -> list[Ticket]:
        """Those whose time is over, and whose receivers have not been told."""
        return [t for t in self.unended if t.deadline <= now and t.course is Course.RUNNING]

    def next_deadline(self) -> float:
        """When the next one's time is over; `inf` if never."""
        return min((t.deadline for t in self.unended if t.course is Course.RUNNING), default=inf)

    def doubts(self) -> list[Doubt]:
        """Sources of writes that do not end as they should."""
        return [
            Doubt(t, t.size, t.holder, doubts.OVERDUE if t.course is Course.OVERDUE else doubts.UNSETTLED)
            for t in self.unended
            if t.course is not Course.RUNNING
        ]
