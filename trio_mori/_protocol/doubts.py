"""Memory that stays out of use because somebody may still touch it: which, for whose sake, and why."""

from __future__ import annotations

import attrs

UNCONFIRMED = "a get gave it up, and its sender has not confirmed that it writes no more"
AWAY = "a get gave it up, and its sender is away"
FORMER = "its sender was replaced or has left, and its process is not proven dead"
UNANSWERED = "a stock sender has not answered a pull"
OVERDUE = "a write out of it takes longer than it may"
UNSETTLED = "a write out of it failed, and may not have ended"


@attrs.frozen(eq=False)
class Doubt:
    """One piece of such memory.

    Attributes:
        subject: The record that the doubt is about: the same one as long as it lasts.
        size: Bytes.
        holder: The record of whoever may touch it, or its name.
        reason: One of this module's.
    """

    subject: object
    size: int
    holder: object
    reason: str
