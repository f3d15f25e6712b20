"""What a process holds: memory and descriptors, looked at while it is at rest, and whether they grow."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

# Looks that are judged, at least: the first third of all is not, for arenas still fill.
FEWEST = 8

# Minima that the slope is taken from: what came and went within a window is no growth.
WINDOWS = 12

# Bytes that may be gained over all that is judged: ten times what runs of 30 to 300 s gained.
GROWTH = 4_000_000

# Standard errors of the slope, as the run's own minima scatter, below which it says nothing; and the bytes from which
# on a run scatters too much to say anything.
ERRORS = 3
UNSTEADY = 16_000_000


@attrs.frozen
class Look:
    """A process at one moment.

    Attributes:
        memory: Bytes of its own pages, without those that it has left to the kernel (`MADV_FREE`), and of what it has
            mapped to share: all of a pool, however much of a peer's it has touched yet.
        descriptors: What is open, by kind, and how often.
    """

    seconds: float
    memory: int
    descriptors: Counter[str]


def look(seconds: float) -> Look:
    """This process, now."""
    own = _fields(Path("/proc/self/smaps_rollup").read_text())
    shared = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, mode, *_ = line.split()
        if mode.endswith("s"):
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            shared += last - first
    return Look(seconds, own["Anonymous"] - own["LazyFree"] + shared, descriptors())


def descriptors() -> Counter[str]:
    """What is open: paths, and `socket`, `pipe` and the like without their numbers."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            found[re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return found


def complaints(looks: Sequence[Look]) -> Iterator[str]:
    """What grew, or that nobody can say."""
    judged = looks[len(looks) // 3 :]
    if len(judged) < FEWEST:
        yield f"was looked at {len(looks)} times: too few to say whether anything grew"
        return
    grown, noise = growth(judged)
    if noise > UNSTEADY:
        yield f"has memory too unsteady to say whether it grew: by {grown / 1e6:.1f} +- {noise / 1e6:.1f} MB"
    if grown > max(GROWTH, noise):
        yield f"grew by {grown / 1e6:.1f} +- {noise / 1e6:.1f} MB"
    if more := judged[-1].descriptors - judged[0].descriptors:
        yield f"has more descriptors than before: {dict(more)}"


def growth(judged: Sequence[Look]) -> tuple[float, float]:
    """Bytes gained over the time by a line through the windows' minima, and how many of them are noise."""
    size = -(-len(judged) // WINDOWS)
    windows = [judged[first : first + size] for first in range(0, len(judged), size)]
    least = [min(window, key=lambda each: each.memory) for window in windows]
    xs, ys = [each.seconds for each in least], [float(each.memory) for each in least]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    square = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / square
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    span = judged[-1].seconds - judged[0].seconds
    return slope * span, ERRORS * span * (rest / max(len(xs) - 2, 1) / square) ** 0.5


def describe(looks: Sequence[Look]) -> str:
    """How it went, in words."""
    judged = looks[len(looks) // 3 :]
    if len(judged) < FEWEST:
        return f"looked at {len(looks)} times"
    grown, noise = growth(judged)
    return (
        f"{judged[-1].memory / 1e6:.1f} MB, {grown / 1e6:+.2f} +- {noise / 1e6:.2f} MB in "
        f"{judged[-1].seconds - judged[0].seconds:.0f} s ({len(judged)} looks), "
        f"{judged[0].descriptors.total()} descriptors, then {judged[-1].descriptors.total()}"
    )


def _fields(text: str) -> dict[str, int]:
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
