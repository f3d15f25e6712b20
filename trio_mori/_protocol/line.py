"""Who waits for room in a pool, in the order in which they came."""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import Generic, TypeVar

from .extents import Claim, Extent, Extents

# How many in line are looked at for one that fits: a look takes 1 us for each. Those further behind come nearer, since
# whoever is first is always served.
LOOKED_AT = 64

T = TypeVar("T")


class Line(Generic[T]):
    """Requests of one share that wait for room.

    Whoever is first claims a place, which is free when those that lie there now have left; see `Extents` for who else
    may be put there. Beside it others are served as they fit, in order. So a large request is not starved by small
    ones, and a small one does not stand still because a large one waits for something that is held for long.

    Attributes:
        waiting: Who waits, in order, and for how many bytes. To be looked at.
    """

    def __init__(self, extents: Extents, share: str) -> None:
        self._extents = extents
        self._share = share
        self.waiting: dict[T, int] = {}
        self._claim: Claim | None = None  # of the first

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def first(self) -> T | None:
        """Who waits for longest."""
        return next(iter(self.waiting), None)

    def join(self, item: T, size: int) -> None:
        """Wait for an extent of at least `size` bytes, which is given by `serve`.

        Raises:
            TooBig: it can never fit.
        """
        self._extents.check_limit(size, self._share)
        self.waiting[item] = size
        if self._claim is None:
            self._claim = self._extents.claim(size, self._share)

    def leave(self, item: T) -> None:
        """Wait no longer. Whoever is not in line may leave it, too."""
        if item in self.waiting:
            self._depart(item)

    def serve(self) -> tuple[T, Extent] | None:
        """Give the first that fits its extent. To be called until it says None, whenever something was freed."""
        refused: float = inf
        claim = self._claim
        for item, size in islice(self.waiting.items(), LOOKED_AT):
            if size < refused:
                extent = self._extents.try_allocate(size, self._share, claim)
                if extent is not None:
                    self._depart(item)
                    return item, extent
                refused = size
            claim = None  # it is the first one's
        return None

    def clear(self) -> list[T]:
        """Send everybody away."""
        items = list(self.waiting)
        self.waiting.clear()
        self._pass_on(None)
        return items

    def _depart(self, item: T) -> None:
        was_first = item is self.first
        del self.waiting[item]
        if was_first:
            size = next(iter(self.waiting.values()), None)
            self._pass_on(None if size is None else self._extents.claim(size, self._share))

    def _pass_on(self, claim: Claim | None) -> None:
        old, self._claim = self._claim, claim
        if old is not None:
            self._extents.drop_claim(old)
