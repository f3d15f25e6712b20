"""When the sender's book has to be looked at next."""

from __future__ import annotations

from math import inf

import attrs


@attrs.define
class Alarm:
    """The earliest deadline that was set since the book was last asked for its next one.

    Whoever sleeps longer is woken.

    Attributes:
        at: That time; `inf` if there is none.
    """

    at: float = inf
