"""How interests move, what is said of them to their senders, and whose callers are woken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from . import wire
from .entries import step
from .interests import INTEREST_TABLE, Cause, Channel, Interest, State


@attrs.define
class InboxCounters:
    """What happened since the book was opened."""

    posted: int = 0
    arrived: int = 0
    acknowledged: int = 0
    given_back: int = 0
    failed: int = 0
    preposted_hits: int = 0


class Asking:
    """A part of `Inbox`: the steps that all others take.

    Args:
        say: Leave a message for the shell to send; none while the channel is not up.
        hush: Nothing is to be sent to a sender any more.
        wake: Leave an interest that arrived or failed, for its caller.
        returning: Where those that are RETURNING are kept.
    """

    def __init__(
        self,
        counters: InboxCounters,
        returning: dict[Interest, None],
        *,
        say: Callable[[Channel, wire.ToSender], None],
        hush: Callable[[Channel], None],
        wake: Callable[[Interest], None],
    ) -> None:
        self.say: Final = say
        self.hush: Final = hush
        self.wake: Final = wake
        self._counters = counters
        self._returning = returning

    def move(self, interest: Interest, cause: Cause) -> None:
        """Something happened to it."""
        interest.state = step(INTEREST_TABLE, interest.state, cause)
        interest.channel.is_steady = False
        if interest.state is State.RETURNING:
            if cause is Cause.GIVE_BACK:
                interest.returned = interest.channel.sequence
            self._returning[interest] = None
        else:
            self._returning.pop(interest, None)

    def ask(self, interest: Interest) -> None:
        """Say the fetch, with the destination that it has."""
        extent = interest.extent
        offset, capacity = (0, 0) if extent is None else (extent.offset, extent.size)
        self.say(interest.channel, wire.Fetch(interest.id, interest.key, interest.round, offset, capacity))

    def fail(self, interest: Interest, code: int, detail: str) -> None:
        """Tell its caller why nothing comes."""
        self._counters.failed += 1
        interest.failure = (code, detail)
        self.wake(interest)
