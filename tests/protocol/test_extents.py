from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_mori import _errors
from trio_mori._protocol.extents import INBOUND, OUTBOUND, Claim, Extent, Extents, format_size

UNIT = 4096


@pytest.mark.deterministic
def test_sizes_are_rounded_up_to_units_and_nothing_takes_one() -> None:
    extents = Extents(8 * UNIT)
    assert [extents.allocate(size, INBOUND).size for size in (0, 1, UNIT, UNIT + 1)] == [UNIT, UNIT, UNIT, 2 * UNIT]
    assert extents.used(INBOUND) == 5 * UNIT
    assert extents.free_bytes == 3 * UNIT
    extents.check()


@pytest.mark.deterministic
def test_a_tail_that_fills_no_unit_is_not_handed_out() -> None:
    extents = Extents(2 * UNIT + 100)
    assert extents.size == 2 * UNIT
    extents.allocate(2 * UNIT, INBOUND)
    with pytest.raises(_errors.NoRoom):
        extents.allocate(1, INBOUND)


@pytest.mark.deterministic
def test_the_smallest_block_that_holds_it_is_taken_and_the_lowest_of_equals() -> None:
    extents = Extents(16 * UNIT)
    pieces = [extents.allocate(units * UNIT, INBOUND) for units in (3, 1, 2, 1, 2, 1, 6)]
    for piece in pieces[0::2]:
        extents.free(piece)  # holes of 3, 2, 2 and 6 units
    taken = [extents.allocate(units * UNIT, OUTBOUND) for units in (2, 2, 2, 4)]
    assert [extent.offset // UNIT for extent in taken] == [4, 7, 0, 10]
    extents.check()


@pytest.mark.deterministic
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_freed_neighbours_become_one_block(order: tuple[int, int, int]) -> None:
    extents = Extents(3 * UNIT)
    pieces = [extents.allocate(UNIT, INBOUND) for _ in range(3)]
    for index in order:
        extents.free(pieces[index])
        extents.check()
    assert extents.largest_free == extents.free_bytes == 3 * UNIT
    assert extents.live == 0


@pytest.mark.deterministic
def test_a_double_free_is_refused_also_when_the_place_is_taken_again() -> None:
    extents = Extents(4 * UNIT)
    first = extents.allocate(UNIT, INBOUND)
    extents.free(first)
    with pytest.raises(_errors.InternalError, match="freed twice"):
        extents.free(first)
    second = extents.allocate(UNIT, INBOUND)
    assert second.offset == first.offset
    with pytest.raises(_errors.InternalError, match="there is now one of 4096 bytes, inbound"):
        extents.free(first)
    assert list(extents) == [second]
    extents.check()


@pytest.mark.deterministic
@pytest.mark.parametrize(
    "forged",
    [
        Extent(0, UNIT, INBOUND),
        Extent(0, 2 * UNIT, INBOUND),
        Extent(UNIT, 2 * UNIT, INBOUND),
        Extent(-UNIT, 9, OUTBOUND),
    ],
)
def test_a_foreign_or_overlapping_extent_is_refused_and_changes_nothing(forged: Extent) -> None:
    extents = Extents(8 * UNIT)
    mine = extents.allocate(2 * UNIT, INBOUND)
    for refused in (extents.free, lambda extent: extents.transfer(extent, OUTBOUND)):
        with pytest.raises(_errors.InternalError):
            refused(forged)
    assert list(extents) == [mine]
    assert extents.free_bytes == 6 * UNIT
    extents.check()


@pytest.mark.deterministic
def test_what_can_never_fit_is_told_from_what_does_not_fit_now() -> None:
    extents = Extents(8 * UNIT, guarantees={INBOUND: 3 * UNIT})
    with pytest.raises(_errors.TooBig, match=r"24 KiB can never fit.*at most 20 KiB.*12 KiB are guaranteed") as too_big:
        extents.allocate(6 * UNIT, OUTBOUND)
    assert (too_big.value.size, too_big.value.limit) == (6 * UNIT, extents.limit(OUTBOUND)) == (6 * UNIT, 5 * UNIT)
    assert extents.limit(INBOUND) == 8 * UNIT
    extents.allocate(8 * UNIT, INBOUND)
    with pytest.raises(_errors.NoRoom, match=r"no room now for 20 KiB outbound: 0 bytes of 32 KiB are free") as no_room:
        extents.allocate(5 * UNIT, OUTBOUND)
    assert (no_room.value.size, no_room.value.free) == (5 * UNIT, 0)


@pytest.mark.deterministic
def test_what_is_free_in_pieces_only_is_told_with_the_largest_of_them() -> None:
    extents = Extents(8 * UNIT)
    pieces = [extents.allocate(2 * UNIT, INBOUND) for _ in range(4)]
    extents.free(pieces[0])
    extents.free(pieces[2])
    with pytest.raises(_errors.NoRoom, match=r"16 KiB of 32 KiB are free.*the largest block in its reach has 8 KiB"):
        extents.allocate(3 * UNIT, INBOUND)
    extents.allocate(2 * UNIT, INBOUND)


@pytest.mark.deterministic
def test_less_than_nothing_is_not_to_be_had() -> None:
    extents = Extents(8 * UNIT)
    with pytest.raises(_errors.InternalError, match="-1 bytes"):
        extents.allocate(-1, INBOUND)
    assert extents.alignment == UNIT
    assert extents.free_bytes == 8 * UNIT


@pytest.mark.deterministic
def test_a_guarantee_stays_free_for_its_share_until_that_share_has_taken_it() -> None:
    extents = Extents(8 * UNIT, guarantees={INBOUND: 2 * UNIT, OUTBOUND: 3 * UNIT})
    extents.allocate(5 * UNIT, INBOUND)
    with pytest.raises(_errors.NoRoom, match="12 KiB of them kept for outbound"):
        extents.allocate(UNIT, INBOUND)
    mine = extents.allocate(2 * UNIT, OUTBOUND)
    with pytest.raises(_errors.NoRoom):
        extents.allocate(UNIT, INBOUND)
    extents.allocate(UNIT, OUTBOUND)
    extents.free(mine)
    with pytest.raises(_errors.NoRoom):
        extents.allocate(UNIT, INBOUND)
    extents.check()


@pytest.mark.deterministic
def test_a_guarantee_is_rounded_up_to_units() -> None:
    assert Extents(8 * UNIT, guarantees={INBOUND: UNIT + 1}).limit(OUTBOUND) == 6 * UNIT


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("size", "guarantees"),
    [(UNIT - 1, {}), (0, {}), (2 * UNIT, {INBOUND: UNIT, OUTBOUND: UNIT + 1}), (UNIT, {"in": 1})],
)
def test_a_pool_that_cannot_be_is_refused(size: int, guarantees: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"pool"):
        Extents(size, guarantees=guarantees)


@pytest.mark.deterministic
@pytest.mark.parametrize(("mine", "other"), [(INBOUND, OUTBOUND), (OUTBOUND, INBOUND)])
def test_a_guarantee_is_one_block_wherever_the_other_share_has_been_placed(mine: str, other: str) -> None:
    extents = Extents(16 * UNIT, guarantees={INBOUND: 4 * UNIT, OUTBOUND: 4 * UNIT})
    rng = random.Random(3)
    held: list[Extent] = []
    for _ in range(300):
        try:
            held.append(extents.allocate(rng.randrange(1, 3 * UNIT), other))
        except _errors.NoRoom:
            extents.free(held.pop(rng.randrange(len(held))))
        extents.free(extents.allocate(4 * UNIT, mine))


@pytest.mark.deterministic
def test_each_share_begins_at_its_end_of_the_pool() -> None:
    extents = Extents(16 * UNIT, guarantees={INBOUND: UNIT, OUTBOUND: UNIT})
    offsets = [extents.allocate(2 * UNIT, share).offset // UNIT for share in (INBOUND, OUTBOUND, INBOUND, OUTBOUND)]
    assert offsets == [0, 14, 2, 12]


@pytest.mark.deterministic
def test_what_waits_gets_its_place_although_both_shares_go_on_taking_what_they_can() -> None:
    extents = Extents(16 * UNIT, guarantees={INBOUND: 2 * UNIT, OUTBOUND: 2 * UNIT})
    rng = random.Random(5)
    held = [extents.allocate(UNIT, share) for share in (INBOUND, OUTBOUND) for _ in range(8)]
    there_before = set(held)
    claim = extents.claim(12 * UNIT, INBOUND)
    passed = 0
    while there_before:
        assert extents.try_allocate(12 * UNIT, INBOUND, claim) is None
        gone = held.pop(rng.randrange(len(held)))
        there_before.discard(gone)
        extents.free(gone)
        for share in (INBOUND, OUTBOUND):
            extent = extents.try_allocate(rng.randrange(1, 2 * UNIT), share)
            if extent is not None:
                held.append(extent)
                passed += 1
        extents.check()
    assert passed > 20
    assert extents.try_allocate(12 * UNIT, INBOUND, claim) is not None


@pytest.mark.deterministic
def test_what_is_guaranteed_is_given_also_while_a_claim_of_its_share_waits_for_the_other_one() -> None:
    extents = Extents(16 * UNIT, guarantees={INBOUND: 4 * UNIT, OUTBOUND: 4 * UNIT})
    obstacle = extents.allocate(8 * UNIT, OUTBOUND)
    claim = extents.claim(12 * UNIT, INBOUND)
    first = extents.try_allocate(3 * UNIT, INBOUND)
    assert first is not None
    assert extents.try_allocate(2 * UNIT, INBOUND) is None, "that would be more than is guaranteed"
    second = extents.try_allocate(UNIT, INBOUND)
    assert second is not None
    extents.free(second)
    extents.free(obstacle)
    assert extents.try_allocate(UNIT, INBOUND) is None, "from here on the claim waits for its own share only"
    extents.free(first)
    assert extents.try_allocate(12 * UNIT, INBOUND, claim) is not None


@pytest.mark.deterministic
def test_of_two_that_need_the_same_place_the_later_one_gets_its_own_when_the_first_has_left() -> None:
    extents = Extents(16 * UNIT)
    held = extents.allocate(16 * UNIT, INBOUND)
    first, second = extents.claim(12 * UNIT, INBOUND), extents.claim(12 * UNIT, OUTBOUND)
    assert first.span is not None
    assert second.span is None
    extents.free(held)
    extents.drop_claim(first)
    assert second.span is not None
    assert extents.try_allocate(5 * UNIT, INBOUND) is None
    assert extents.try_allocate(12 * UNIT, OUTBOUND, second) is not None


@pytest.mark.deterministic
def test_a_transfer_changes_the_share_and_makes_the_old_extent_dead() -> None:
    extents = Extents(4 * UNIT)
    received = extents.allocate(2 * UNIT, INBOUND)
    sent = extents.transfer(received, OUTBOUND)
    assert (sent.offset, sent.size, sent.share) == (received.offset, received.size, OUTBOUND)
    assert (extents.used(INBOUND), extents.used(OUTBOUND)) == (0, 2 * UNIT)
    with pytest.raises(_errors.InternalError):
        extents.free(received)
    extents.free(sent)
    extents.check()


@pytest.mark.deterministic
def test_a_transfer_that_would_break_a_guarantee_is_refused_and_changes_nothing() -> None:
    extents = Extents(4 * UNIT, guarantees={INBOUND: 2 * UNIT})
    extents.allocate(2 * UNIT, OUTBOUND)
    received = extents.allocate(2 * UNIT, INBOUND)
    with pytest.raises(_errors.NoRoom, match="0 bytes are free, 8 KiB would have to be"):
        extents.transfer(received, OUTBOUND)
    extents.check()
    extents.free(received)


@pytest.mark.deterministic
def test_on_free_comes_after_the_books_agree_and_may_allocate() -> None:
    extents = Extents(2 * UNIT)
    granted: list[Extent] = []

    def take() -> None:
        extents.check()
        granted.append(extents.allocate(2 * UNIT, OUTBOUND))
        extents.on_free = None

    held = extents.allocate(2 * UNIT, INBOUND)
    extents.on_free = take
    extents.free(held)
    assert granted == list(extents)


@pytest.mark.deterministic
def test_check_finds_books_that_do_not_agree() -> None:
    extents = Extents(4 * UNIT)
    extents.allocate(UNIT, INBOUND)
    extents._live[2 * UNIT] = Extent(2 * UNIT, UNIT, INBOUND)
    with pytest.raises(_errors.InternalError, match="two owners"):
        extents.check()


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (1 << 30, "1 GiB"),
        ((1 << 20) + 1, "1 MiB (1048577 bytes)"),
    ],
)
def test_sizes_read_well_and_stay_exact(size: int, text: str) -> None:
    assert format_size(size) == text


class Counted(int):
    """An int that counts comparisons, and stays one under the arithmetic of an allocator."""

    comparisons = 0

    __hash__ = int.__hash__


def _counting(name: str, *, compares: bool) -> Callable[[Counted, int], Any]:
    plain = getattr(int, name)

    def operator(self: Counted, other: int) -> Any:
        Counted.comparisons += compares
        result = plain(self, other)
        return result if compares else Counted(result)

    return operator


for _name in ("__lt__", "__le__", "__eq__", "__gt__", "__ge__"):
    setattr(Counted, _name, _counting(_name, compares=True))
for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__"):
    setattr(Counted, _name, _counting(_name, compares=False))


def test_an_allocation_among_ten_thousand_costs_a_logarithm() -> None:
    rng = random.Random(7)
    extents = Extents(200_000 * UNIT, alignment=Counted(UNIT))
    live = [extents.allocate(rng.randrange(1, 8 * UNIT), INBOUND) for _ in range(20_000)]
    rng.shuffle(live)
    for extent in live[10_000:]:
        extents.free(extent)
    assert extents.live == 10_000
    worst = 0
    for index in range(200):
        Counted.comparisons = 0
        extents.free(live[index])
        extents.allocate(rng.randrange(1, 8 * UNIT), INBOUND)
        worst = max(worst, Counted.comparisons)
    # At most 7 searches among some 5,000 free blocks, 13 steps of two comparisons each; a scan would take thousands.
    assert 0 < worst < 400


OTHER = {INBOUND: OUTBOUND, OUTBOUND: INBOUND}


class AgainstBytes(RuleBasedStateMachine):
    """`Extents` beside the obvious implementation: a list that says for every unit whose it is."""

    ALIGNMENT = 16
    UNITS = 24
    GUARANTEES = {INBOUND: 5 * ALIGNMENT, OUTBOUND: 4 * ALIGNMENT - 3}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(self.UNITS * self.ALIGNMENT, alignment=self.ALIGNMENT, guarantees=self.GUARANTEES)
        self.units: list[Extent | None] = [None] * self.UNITS
        self.claims: list[Claim] = []
        self.strangers: list[Extent] = []  # booked under another share where they lay
        self.live: list[Extent] = []
        self.dead: list[Extent] = []
        self.freed = 0
        self.extents.on_free = self._count

    def _count(self) -> None:
        self.freed += 1

    def used(self, share: str) -> int:
        return sum(owner is not None and owner.share == share for owner in self.units)

    def guaranteed(self, share: str) -> int:
        return -(-self.GUARANTEES[share] // self.ALIGNMENT)

    def unmet(self, share: str) -> int:
        return max(0, self.guaranteed(share) - self.used(share))

    def runs(self, units: Sequence[object]) -> Iterator[tuple[int, int]]:
        """Length and start of each run of None."""
        start = 0
        for index in range(len(units) + 1):
            if index == len(units) or units[index] is not None:
                if index > start:
                    yield index - start, start
                start = index + 1

    def seen_by(self, share: str, units: Sequence[object]) -> Sequence[object]:
        """What a share reaches, from the end at which it begins."""
        order = units if share == INBOUND else units[::-1]
        return order[: self.UNITS - self.guaranteed(OTHER[share])]

    def place_for(self, share: str, needed: int, claim: Claim | None) -> int | None:
        """Where a request is put: what is guaranteed also where a claim waits for the other share."""
        others = [c for c in self.claims if c is not claim]
        place = self.place_beside(others, share, needed)
        if place is None and others and needed <= self.unmet(share):
            place = self.place_beside([c for c in others if not self.obstructed(c, share)], share, needed)
        return place

    def obstructed(self, claim: Claim, share: str) -> bool:
        """Whether a claim of this share waits for the other one."""
        if claim.share != share or claim.span is None:
            return False
        span = self.units[claim.span.start // self.ALIGNMENT : claim.span.end // self.ALIGNMENT]
        return any(owner is not None and owner.share != share for owner in span)

    def place_beside(self, claims: Sequence[Claim], share: str, needed: int) -> int | None:
        """Of the smallest run of free units the first that no claim is in the way of; its offset."""
        taken = [c.span for c in claims if c.span is not None]
        for length, start in sorted(self.runs(self.seen_by(share, self.units))):
            for at in range(start, start + length - needed + 1):
                unit = at if share == INBOUND else self.UNITS - at - needed
                first, end = unit * self.ALIGNMENT, (unit + needed) * self.ALIGNMENT
                if all(end <= span.start or span.end <= first for span in taken):
                    return first
        return None

    @rule(size=st.integers(0, 20 * 16), share=st.sampled_from([INBOUND, OUTBOUND]), data=st.data())
    def allocate(self, size: int, share: str, data: st.DataObject) -> None:
        needed = max(1, -(-size // self.ALIGNMENT))
        if needed > self.UNITS - self.guaranteed(OTHER[share]):
            with pytest.raises(_errors.TooBig):
                self.extents.allocate(size, share)
            return
        mine = [c for c in self.claims if c.share == share and c.size == needed * self.ALIGNMENT]
        claim = data.draw(st.sampled_from([None, *mine]))
        place = self.place_for(share, needed, claim)
        extent = self.extents.try_allocate(size, share, claim)
        if place is None or self.units.count(None) - needed < self.unmet(OTHER[share]):
            assert extent is None
        else:
            assert extent is not None
            assert (extent.offset, extent.size, extent.share) == (place, needed * self.ALIGNMENT, share)
            self._own(extent, extent)

    @precondition(lambda self: len(self.claims) < 3)
    @rule(size=st.integers(1, 19 * 16), share=st.sampled_from([INBOUND, OUTBOUND]))
    def claim(self, size: int, share: str) -> None:
        self.claims.append(self.extents.claim(size, share))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def drop_claim(self, data: st.DataObject) -> None:
        before = self.freed
        self.extents.drop_claim(self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1))))
        assert self.freed == before + 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = self._draw_live(data)
        before = self.freed
        self.extents.free(extent)
        assert self.freed == before + 1
        self._own(extent, None)
        self.dead.append(extent)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.sampled_from([INBOUND, OUTBOUND]))
    def transfer(self, data: st.DataObject, share: str) -> None:
        extent = self._draw_live(data)
        moved = Extent(extent.offset, extent.size, share)
        self._own(extent, moved)
        if self.units.count(None) < self.unmet(INBOUND) + self.unmet(OUTBOUND):
            self._own(moved, extent)
            with pytest.raises(_errors.NoRoom):
                self.extents.transfer(extent, share)
        else:
            moved_now = self.extents.transfer(extent, share)
            self._own(moved, moved_now)
            self.dead.append(extent)
            self.strangers.append(moved_now)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        before = self.freed
        with pytest.raises(_errors.InternalError):
            self.extents.free(data.draw(st.sampled_from(self.dead)))
        assert self.freed == before

    def _draw_live(self, data: st.DataObject) -> Extent:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    def _own(self, old: Extent, new: Extent | None) -> None:
        self.live = [extent for extent in self.live if extent is not old]
        if new is not None:
            self.live.append(new)
        for unit in range(old.offset // self.ALIGNMENT, old.end // self.ALIGNMENT):
            self.units[unit] = new

    @invariant()
    def books_agree(self) -> None:
        self.extents.check()
        assert set(self.extents) == set(self.live)
        assert self.extents.live == len(self.live)
        assert self.extents.free_bytes == self.units.count(None) * self.ALIGNMENT
        assert self.extents.largest_free == max((size for size, _ in self.runs(self.units)), default=0) * self.ALIGNMENT
        for share in (INBOUND, OUTBOUND):
            assert self.extents.used(share) == self.used(share) * self.ALIGNMENT
            home = set(self.seen_by(share, self.units)[: self.guaranteed(share)]) - {None, *self.strangers}
            assert all(extent.share == share for extent in home), (
                "in a guaranteed block there is one of the other share"
            )
        for claim in self.claims[:1]:
            assert claim.span is not None, "nothing is in the way of the oldest claim"

    def teardown(self) -> None:
        """Whoever waits gets room when what was there has been freed, and no sooner claims of others are in the way."""
        for extent in self.live[:]:
            self.extents.free(extent)
        for claim in self.claims:
            extent = self.extents.try_allocate(claim.size, claim.share, claim)
            assert extent is not None
            self.extents.drop_claim(claim)
            self.extents.free(extent)


TestAgainstBytes = AgainstBytes.TestCase
TestAgainstBytes.settings = settings(stateful_step_count=40)
