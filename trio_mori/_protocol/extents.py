"""The allocator of a pool, over integers: which bytes are whose. It never touches memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import attrs

from .._errors import InternalError, NoRoom, TooBig
from .blocks import Blocks, Span

__all__ = ["INBOUND", "OUTBOUND", "Claim", "Extent", "Extents", "format_size"]

INBOUND = "inbound"
OUTBOUND = "outbound"
_OTHER = {INBOUND: OUTBOUND, OUTBOUND: INBOUND}


@attrs.frozen(eq=False)
class Extent:
    """A piece of a pool that has one owner. Two extents are never equal: what counts is which one it is.

    Attributes:
        offset: First byte, a multiple of the pool's alignment.
        size: Bytes, rounded up to whole units.
        share: `INBOUND` or `OUTBOUND`.
    """

    offset: int
    size: int
    share: str

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size


@attrs.define(eq=False)
class Claim:
    """A place that is kept for somebody who waits. Made by `Extents.claim`.

    Attributes:
        span: The place; None while earlier claims leave none.
        obstacle: An extent of the other share that lay there when this was looked at last.
    """

    size: int
    share: str
    span: Span | None = None
    obstacle: Extent | None = None


class Extents:
    """Hands out pieces of ``0 .. size`` by best fit; see `Blocks`.

    Measured, one free and one allocate together in a fragmented pool: 8 us with 10 extents live, 12 us with 10,000;
    with guarantees, where each share has a view of its own, 9 us and 16 us.

    **Guarantees.** What a share is guaranteed is one block at its own end of the pool, low for inbound extents and
    high for outbound ones, in which none of the other share is placed. So whatever the other share holds, an extent of
    that size finds room when the share's own have left. The middle is for whoever comes first. An extent
    that is booked under another share stays where it is, though, perhaps in a block that is guaranteed to the one it
    left. Therefore what a share has not taken of its guarantee is kept free in bytes, too.

    **Claims.** Whoever waits claims a place, and nothing but what it waits for is put there. So all that passes
    `check_limit` finds room when what lies there now has been freed, however much else comes and goes. Claims do not
    overlap: one that finds no place waits until an earlier one has been dropped, and so do those behind it.
    While an extent of the other share lies in a claim's place, what is guaranteed to its own share is given there all
    the same: nobody has to wait for the other direction behind somebody who does. That ends when the obstacle has left,
    since no other one is put there, so that whoever claims waits for what is there then and for nothing else.

    Attributes:
        on_free: Called after every `free` and `drop_claim`, when the books agree again; may allocate. Set by the pool.
    """

    def __init__(
        self,
        size: int,
        *,
        alignment: int = 4096,  # a page: what memory registration and mapping work in, and what the stock pool uses
        guarantees: Mapping[str, int] | None = None,
        on_free: Callable[[], None] | None = None,
    ) -> None:
        usable = size // alignment * alignment
        if usable <= 0:
            raise ValueError(f"a pool of {size} bytes holds no unit of {alignment} bytes")
        self._size = usable
        self._alignment = alignment
        given = dict(guarantees or {})
        if unknown := given.keys() - _OTHER.keys():
            raise ValueError(f"guarantees for {sorted(unknown)}, but the shares of a pool are {list(_OTHER)}")
        self._guarantees = {share: self._round(given[share]) if given.get(share) else 0 for share in _OTHER}
        if sum(self._guarantees.values()) > usable:
            raise ValueError(f"guarantees of {given} bytes exceed the pool of {usable} bytes")
        self.on_free = on_free
        self._used = dict.fromkeys(_OTHER, 0)
        self._free = usable
        self._live: dict[int, Extent] = {}
        self._blocks = Blocks(usable, {share: self.limit(share) for share in _OTHER})
        self._claims: dict[Claim, None] = {}

    @property
    def size(self) -> int:
        """Bytes that can be handed out: the pool, less a tail that fills no whole unit."""
        return self._size

    @property
    def alignment(self) -> int:
        """Bytes of a unit; every offset and size is a multiple of it."""
        return self._alignment

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent, those that are guaranteed to a share included."""
        return self._free

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block."""
        return max(self._blocks.size_at.values(), default=0)

    @property
    def live(self) -> int:
        """How many extents there are."""
        return len(self._live)

    def used(self, share: str) -> int:
        """Bytes in the extents of a share."""
        return self._used[share]

    def limit(self, share: str) -> int:
        """The largest size that `allocate` can ever grant to a share, when nothing else is in the pool."""
        return self._size - self._guarantees[_OTHER[share]]

    def __iter__(self) -> Iterator[Extent]:
        """All extents, in no particular order."""
        return iter(self._live.values())

    def check_limit(self, size: int, share: str) -> None:
        """Raise what `allocate` would raise however empty the pool is.

        Raises:
            TooBig: it can never fit.
        """
        if self._round(size) > self.limit(share):
            raise self._too_big(size, share)

    def allocate(self, size: int, share: str) -> Extent:
        """Take an extent of at least `size` bytes (at least one unit) out of the free blocks.

        The caller owns it until it passes it to `free`.

        Raises:
            TooBig: it can never fit.
            NoRoom: not now.
        """
        rounded = self._round(size)
        if rounded > self.limit(share):
            raise self._too_big(size, share)
        extent = self._take(rounded, share, None)
        if extent is None:
            raise self._no_room(size, share)
        return extent

    def try_allocate(self, size: int, share: str, claim: Claim | None = None) -> Extent | None:
        """As `allocate`, for what passed `check_limit`; None if there is no room now.

        Args:
            claim: Its own, where it may be placed, too. The claim stays until it is dropped.
        """
        return self._take(self._round(size), share, claim)

    def free(self, extent: Extent) -> None:
        """Give an extent back, and join it with the free blocks beside it.

        Raises:
            InternalError: it is not live: freed before, or never one of ours. Nothing was changed.
        """
        self._leave(extent)
        self._blocks.give(extent.offset, extent.end)
        if self.on_free is not None:
            self.on_free()

    def claim(self, size: int, share: str) -> Claim:
        """Keep a place for what has just found no room and waits, until `drop_claim`."""
        claim = Claim(self._round(size), share)
        self._claims[claim] = None
        self._seat_claims()
        return claim

    def drop_claim(self, claim: Claim) -> None:
        """It was served, or waits no more. Others may now find room."""
        del self._claims[claim]
        self._seat_claims()
        if self.on_free is not None:
            self.on_free()

    def transfer(self, extent: Extent, share: str) -> Extent:
        """Book an extent under another share, without moving its bytes.

        Returns:
            The extent to use from now on; the one passed in is no longer live.

        Raises:
            NoRoom: the share that it leaves has a guarantee that could then not be kept. Nothing was changed.
            InternalError: it is not live. Nothing was changed.
        """
        self._leave(extent)
        moved = self._enter(Extent(extent.offset, extent.size, share))
        kept = sum(map(self._unmet, _OTHER))
        if self._free >= kept:
            return moved
        self._leave(moved)
        self._enter(extent)
        raise NoRoom(
            f"no room now to keep {format_size(extent.size)} of {extent.share} memory as {share}: "
            f"{format_size(self._free)} are free, {format_size(kept)} would have to be, for what is guaranteed to each "
            "direction. Wait until something is freed, or raise memory_pool_size",
            size=extent.size,
            free=self._free,
        )

    def undo_transfer(self, moved: Extent, extent: Extent) -> None:
        """Book an extent as it was before its `transfer`, even if a guarantee cannot be kept for a while."""
        self._leave(moved)
        self._enter(extent)
        if self.on_free is not None:
            self.on_free()

    def check(self) -> None:
        """Verify everything that must hold between two calls; O(n log n), for tests.

        Raises:
            InternalError: names what does not hold.
        """
        _require(
            all(extent.offset == offset for offset, extent in self._live.items()), "an extent under a wrong offset"
        )
        self._blocks.check()
        blocks = [(start, start + size, True) for start, size in self._blocks.size_at.items()]
        pieces = [(extent.offset, extent.end, False) for extent in self] + blocks
        position, was_free = 0, False
        for start, end, is_free in sorted(pieces):
            _require(start == position, f"bytes {position}..{start} are nobody's, or have two owners")
            _require(end > start and end % self._alignment == 0, f"{start}..{end} is not made of whole units")
            _require(not (is_free and was_free), f"two free blocks meet at {start}")
            position, was_free = end, is_free
        _require(position == self._size, f"the pieces end at {position}, the pool at {self._size}")
        for share in _OTHER:
            total = sum(extent.size for extent in self if extent.share == share)
            _require(total == self._used[share], f"{share} adds up to {total}, booked are {self._used[share]}")
        _require(self._free + sum(self._used.values()) == self._size, "free and used do not add up to the pool")
        _require(self._free >= sum(map(self._unmet, _OTHER)), "a guarantee cannot be kept")
        claimed = sorted(self._claimed())
        apart = all(one.end <= next_.start for one, next_ in pairwise(claimed))
        _require(apart, "two claims overlap")

    def _round(self, size: int) -> int:
        if size < 0:
            raise InternalError(f"an extent of {size} bytes was asked for")
        return max(1, -(-size // self._alignment)) * self._alignment

    def _take(self, rounded: int, share: str, claim: Claim | None) -> Extent | None:
        if rounded > self._free - self._unmet(_OTHER[share]):
            return None
        offset = self._blocks.take(rounded, share, self._claimed(besides=claim) if self._claims else ())
        if offset is None and self._claims and rounded <= self._unmet(share):
            held = [c.span for c in self._claims if c is not claim and c.span and not self._is_obstructed(c, share)]
            offset = self._blocks.take(rounded, share, held)
        return None if offset is None else self._enter(Extent(offset, rounded, share))

    def _unmet(self, share: str) -> int:
        """What a share has not yet taken of its guarantee; that much is kept free from the other one."""
        return max(0, self._guarantees[share] - self._used[share])

    def _too_big(self, size: int, share: str) -> TooBig:
        limit = self.limit(share)
        kept = self._size - limit
        guarded = f", since {format_size(kept)} are guaranteed to {_OTHER[share]} ones" if kept else ""
        return TooBig(
            f"{format_size(size)} can never fit: an {share} payload may have at most {format_size(limit)} in a pool "
            f"of {format_size(self._size)}{guarded}. Raise memory_pool_size, or send it in pieces",
            size=size,
            limit=limit,
        )

    def _no_room(self, size: int, share: str) -> NoRoom:
        return NoRoom(
            f"no room now for {format_size(size)} {share}: {format_size(self._free)} of {format_size(self._size)} are "
            f"free, {format_size(self._unmet(_OTHER[share]))} of them kept for {_OTHER[share]} ones, the largest block "
            f"in its reach has {format_size(self._blocks.largest(share))}. Wait until something is freed (the calls "
            "without _nowait do), or raise memory_pool_size",
            size=size,
            free=self._free,
        )

    def _not_live(self, extent: Extent) -> InternalError:
        holder = self._live.get(extent.offset)
        now = "free or inside another one" if holder is None else f"one of {holder.size} bytes, {holder.share}"
        return InternalError(
            f"{extent.share} extent {extent.offset}..{extent.end} is not live: freed twice, or never of this pool; "
            f"at that offset there is now {now}"
        )

    def _enter(self, extent: Extent) -> Extent:
        self._live[extent.offset] = extent
        self._used[extent.share] += extent.size
        self._free -= extent.size
        return extent

    def _leave(self, extent: Extent) -> None:
        if self._live.get(extent.offset) is not extent:
            raise self._not_live(extent)
        del self._live[extent.offset]
        self._used[extent.share] -= extent.size
        self._free += extent.size

    def _claimed(self, besides: Claim | None = None) -> list[Span]:
        return [claim.span for claim in self._claims if claim is not besides and claim.span is not None]

    def _is_obstructed(self, claim: Claim, share: str) -> bool:
        """Whether a claim of this share has to wait for an extent of the other one.

        O(1) while the one that was found before is there, else O(n).
        """
        span, obstacle = claim.span, claim.obstacle
        if claim.share != share or span is None:
            return False
        if obstacle is None or self._live.get(obstacle.offset) is not obstacle:
            obstacles = (e for e in self if e.share != share and e.offset < span.end and span.start < e.end)
            claim.obstacle = next(obstacles, None)
        return claim.obstacle is not None

    def _seat_claims(self) -> None:
        for claim in self._claims:
            if claim.span is None:
                claim.span = self._blocks.foremost(claim.size, claim.share, self._claimed())
            if claim.span is None:
                return  # those behind it wait, or they would be in its way


def format_size(size: int) -> str:
    """Bytes as a person writes them: ``37 bytes``, ``1.5 MiB``; with the exact number where that is rounded."""
    unit, name = 1, "bytes"
    for name_, unit_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= unit_:
            unit, name = unit_, name_
            break
    rounded = f"{size / unit:.1f}".removesuffix(".0")
    return f"{rounded} {name}" if float(rounded) * unit == size else f"{rounded} {name} ({size} bytes)"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InternalError(f"the allocator's books do not agree: {what}")
