"""Pools with bytes in them, and what is known of each payload by somebody who sees everything."""

from __future__ import annotations

from contextlib import suppress
from math import inf

import attrs

from trio_mori._errors import NoRoom
from trio_mori._protocol.entries import Entry
from trio_mori._protocol.extents import INBOUND, OUTBOUND, Extent, Extents
from trio_mori._protocol.outbox import OutboxLimits

UNIT = 4096
SENDER_POOL = 64 * UNIT
RECEIVER_POOL = 48 * UNIT
STOCK_POOL = 8 * UNIT
GUARANTEED = 8 * UNIT
ROUTES = (b"a", b"b")  # of two stock receivers
POISON = memoryview(b"\xdd" * SENDER_POOL)
LIMITS = OutboxLimits(
    ttl=300.0,
    acknowledge_timeout=30.0,
    transfer_timeout=lambda size: 20.0,
    max_fetches=6,
    max_sessions=3,
    stock_keep=5.0,
)


class Pool(Extents):
    """An allocator with the memory that it speaks of. What is free is poisoned, so that whoever reads it is noticed."""

    def __init__(self, size: int, share: str) -> None:
        super().__init__(size, guarantees={INBOUND: GUARANTEED, OUTBOUND: GUARANTEED})
        self.memory = bytearray(POISON[:size])
        self.other = OUTBOUND if share == INBOUND else INBOUND
        self.occupied: list[Extent] = []

    def free(self, extent: Extent) -> None:
        self.memory[extent.offset : extent.end] = POISON[: extent.size]
        super().free(extent)

    def at(self, offset: int) -> Extent | None:
        """The live extent that begins there."""
        return next((e for e in self if e.offset == offset), None)

    def occupy(self, units: int) -> None:
        """The other direction of a middle stage takes some of the pool, in pieces."""
        with suppress(NoRoom):
            for _ in range(units // 4):
                self.occupied.append(self.allocate(4 * UNIT, self.other))

    def vacate(self, *, leave_every_second: bool = False) -> None:
        """It gives that back."""
        kept = self.occupied[::2] if leave_every_second else []
        gone = [extent for extent in self.occupied if extent not in kept]
        self.occupied = kept
        for extent in gone:
            self.free(extent)


@attrs.define(eq=False)
class Put:
    """What became of one payload, as somebody sees it who sees everything.

    Attributes:
        reasons: Why it may leave the sender.
        takers: How many callers took and acknowledged it.
        excused: It may be taken twice: its first receiver ended, or was silent for too long.
        told: Somebody who asked for it was told that it is gone.
    """

    number: int
    key: str
    size: int
    entry: Entry
    filed_at: float = inf
    reasons: set[str] = attrs.field(factory=set)
    takers: int = 0
    excused: bool = False
    told: bool = False

    @property
    def data(self) -> bytes:
        """Its bytes; no two puts have the same."""
        return (self.number.to_bytes(4, "big") * (self.size // 4 + 1))[: self.size]

    @property
    def encoded(self) -> bytes:
        """Its stock encoding, if it has one."""
        return b"\x93" + self.data[: 2 * UNIT] + b"stock"
