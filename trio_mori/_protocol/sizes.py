"""How large a payload may be that is asked for before its size is known."""

from __future__ import annotations

import attrs

from .keys import edge_of

# The destination of the first fetches on an edge whose payloads' sizes are not known yet: a codec chunk or the hidden
# states of a few tokens fit; a larger payload costs one more round trip, once.
FIRST_CAPACITY = 64 * 1024

# How many arrivals the "largest recent size" of an edge looks back, at least; at most twice as many.
RECENT = 64


@attrs.define
class _Recent:
    """The largest of the last payloads of an edge, by two windows."""

    previous: int = 0
    current: int = 0
    count: int = 0

    @property
    def largest(self) -> int:
        return max(self.previous, self.current)


class RecentSizes:
    """The largest recent payload of each edge."""

    def __init__(self) -> None:
        self._edges: dict[str, _Recent] = {}

    def add(self, key: str, size: int) -> None:
        """A payload of this size has come."""
        edge = edge_of(key)
        recent = self._edges.get(edge)
        if recent is None:
            recent = self._edges[edge] = _Recent()
        recent.current = max(recent.current, size)
        recent.count += 1
        if recent.count == RECENT:
            recent.previous, recent.current, recent.count = recent.current, 0, 0

    def expect(self, key: str) -> int:
        """The size of a destination that is chosen ahead of the data."""
        recent = self._edges.get(edge_of(key))
        return FIRST_CAPACITY if recent is None else recent.largest
