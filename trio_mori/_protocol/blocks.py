"""The free blocks of a pool, over integers, and which piece of which of them a share is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from sortedcontainers import SortedList

from .._errors import InternalError

__all__ = ["Blocks", "Span"]


@attrs.frozen(order=True)
class Span:
    """The bytes ``start .. end``."""

    start: int
    end: int

    def gap(self, size: int, taken: Iterable[Span]) -> int | None:
        """Where the first `size` bytes in it begin that are in none of the others, which come in order; or None."""
        start = self.start
        for other in taken:
            if min(other.start, self.end) - start >= size:
                return start
            start = max(start, other.end)
        return start if self.end - start >= size else None


@attrs.define(eq=False)
class _Side:
    """What one share may use, measured from the end of the pool at which it begins.

    Attributes:
        limit: How far it reaches.
        mirrored: It begins at the high end.
        pieces: Of the free blocks what it reaches, by (size, start).
    """

    limit: int
    mirrored: bool
    pieces: SortedList[tuple[int, int]] = attrs.field(factory=SortedList)


class Blocks:
    """Free blocks, joined where they meet, and searched by best fit: the smallest piece that does, nearest of equals.

    Each share begins at an end of its own, and reaches only so far: what lies behind is the other's alone. Where both
    reach everything, they are one side, and begin at the low end.

    Everything is O(log n), except a search that has to keep clear of claimed spans, which looks at each free piece in
    them that would do.

    Attributes:
        size_at: The blocks' sizes by where they start.
    """

    def __init__(self, size: int, reach: Mapping[str, int]) -> None:
        self._size = size
        self._sides: dict[str, _Side] = {}
        if all(limit == size for limit in reach.values()):
            self._sides = dict.fromkeys(reach, _Side(size, mirrored=False))
        else:
            self._sides = {s: _Side(limit, mirrored=n > 0) for n, (s, limit) in enumerate(reach.items())}
        self._distinct = list(dict.fromkeys(self._sides.values()))
        self.size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._add(0, size)

    def take(self, size: int, share: str, claimed: Iterable[Span]) -> int | None:
        """Take so many free bytes for a share, from none of the claimed spans; where they are, or None."""
        side = self._sides[share]
        # irange, not bisect and index: the latter would rebuild the list's positional index after every change.
        pieces = side.pieces.irange(minimum=(size, 0))
        if not claimed:
            piece = next(pieces, None)
            return None if piece is None else self._cut(side, piece[1], piece[1], size)
        taken = self._on_side(side, claimed)
        for available, start in pieces:
            at = Span(start, start + available).gap(size, taken)
            if at is not None:
                return self._cut(side, start, at, size)
        return None

    def foremost(self, size: int, share: str, claimed: Iterable[Span]) -> Span | None:
        """The bytes nearest to the share's end that are in none of the claimed spans, free or not."""
        side = self._sides[share]
        at = Span(0, side.limit).gap(size, self._on_side(side, claimed))
        if at is None:
            return None
        start = self._size - at - size if side.mirrored else at
        return Span(start, start + size)

    def largest(self, share: str) -> int:
        """Bytes of the largest free piece that a share reaches."""
        pieces = self._sides[share].pieces
        return pieces[-1][0] if pieces else 0

    def give(self, start: int, end: int) -> None:
        """Make bytes free, and join them with the blocks beside them."""
        if (before := self._start_before.get(start)) is not None:
            self._remove(before, start - before)
            start = before
        if (after := self.size_at.get(end)) is not None:
            self._remove(end, after)
            end += after
        self._add(start, end - start)

    def check(self) -> None:
        """Verify that all views agree.

        Raises:
            InternalError: they do not.
        """
        ends = {offset + size: offset for offset, size in self.size_at.items()}
        if ends != self._start_before:
            raise InternalError("the allocator's books do not agree: free blocks by start and by end")
        for side in self._distinct:
            blocks = ((self._size - o - n if side.mirrored else o, n) for o, n in self.size_at.items())
            pieces = sorted((min(n, side.limit - at), at) for at, n in blocks if at < side.limit)
            if pieces != list(side.pieces):
                raise InternalError("the allocator's books do not agree: free blocks by start and by size")

    def _cut(self, side: _Side, piece: int, at: int, size: int) -> int:
        """Take bytes out of the block of which a side has the piece that starts there."""
        start = self._start_before[self._size - piece] if side.mirrored else piece
        available = self.size_at[start]
        offset = self._size - at - size if side.mirrored else at
        self._remove(start, available)
        if start < offset:
            self._add(start, offset - start)
        if behind := start + available - offset - size:
            self._add(offset + size, behind)
        return offset

    def _on_side(self, side: _Side, spans: Iterable[Span]) -> list[Span]:
        if side.mirrored:
            spans = (Span(self._size - span.end, self._size - span.start) for span in spans)
        return sorted(spans)

    def _add(self, offset: int, size: int) -> None:
        self.size_at[offset] = size
        self._start_before[offset + size] = offset
        for side in self._distinct:
            start = self._size - offset - size if side.mirrored else offset
            if start < side.limit:
                side.pieces.add((min(size, side.limit - start), start))

    def _remove(self, offset: int, size: int) -> None:
        del self.size_at[offset]
        del self._start_before[offset + size]
        for side in self._distinct:
            start = self._size - offset - size if side.mirrored else offset
            if start < side.limit:
                side.pieces.remove((min(size, side.limit - start), start))
