"""What has come where: each payload exactly once, whole and in order, or its loss told with a reason."""

from __future__ import annotations

from collections import Counter

from .payloads import Read


class Violation(AssertionError):
    """A promise was broken."""


class Ledger:
    """Of one stage that takes.

    Attributes:
        next: By stream, the number that has to come next.
        counts: What came.
    """

    def __init__(self, name: str, streams: int) -> None:
        self.next = dict.fromkeys(range(streams), 0)
        self.ends: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self._name = name

    def took(self, stream: int, number: int, read: Read, incarnations: int) -> None:
        """A stage took something."""
        where = f"{self._name}: payload {number} of stream {stream}"
        if read.fault:
            raise Violation(f"{where}: {read.fault}")
        if number != self.next[stream] or stream in self.ends:
            raise Violation(f"{where} came when {self.next[stream]} was to come; ends: {self.ends}")
        if read.number != number:
            raise Violation(f"{where} is number {read.number}")
        if read.end:
            self.ends[stream] = number
            return
        self.next[stream] += 1
        if read.lost:
            self.counts[f"lost: {read.lost}"] += 1
            return
        if not 0 <= read.incarnation < incarnations:
            raise Violation(f"{where} was made by a source {read.incarnation} that there never was")
        self.counts["payloads"] += 1
        self.counts["bytes"] += read.size

    def lost(self, stream: int, number: int, reason: str, allowed: frozenset[str]) -> None:
        """A stage was told that something is lost."""
        if reason not in allowed:
            raise Violation(
                f"{self._name}: payload {number} of stream {stream} is lost ({reason}), and nothing lost it"
            )
        self.took(stream, number, Read(number, lost=reason), 0)

    def rewind(self, first: dict[int, int]) -> None:
        """The stage was replaced by one that takes all from there on."""
        self.next = dict(first)
        self.ends = {}
