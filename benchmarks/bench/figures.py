"""What a run comes to: ratios within each round, their median and spread, beside what was to be reached."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

Turn = dict[str, Any]
Metric = Callable[[Turn], float]

ZMQ, UNIX, ADAPTER, KEPT = "async, zmq", "async, unix link", "vllm-omni, our adapter", "vllm-omni, stock adapter kept"
COLUMNS = (ZMQ, UNIX, ADAPTER, KEPT)
PEER = {ZMQ: "async-zmq", UNIX: "async-unix", ADAPTER: "shim+our-adapter", KEPT: "shim+stock-adapter"}
LEASED = {ZMQ: "leased-zmq", UNIX: "leased-unix"}
MEMORY, MORI = "memory+stock-adapter", "mori+stock-adapter"
STOCK = (MEMORY, MORI, "memory", "mori")


def p50(turn: Turn) -> float:
    return float(turn["p50_us"])


def p99(turn: Turn) -> float:
    return float(turn["p99_us"])


def rate(turn: Turn) -> float:
    return float(turn["rate"])


def cpu(turn: Turn) -> float:
    return float(turn["cpu_us"])


def put_and_get(turn: Turn) -> float:
    return float(turn["put_p50_us"] + turn["p50_us"])


def idle(turn: Turn) -> float:
    return float(max(turn["idle_ms"].values()))


@dataclasses.dataclass(frozen=True)
class Goal:
    """One figure that was to be reached.

    Attributes:
        row, column: Where it stands in the table.
        case: What it is measured in.
        peer: Whose figure.
        base: What it is divided by, the best of these; empty: by nothing.
        metric: The figure of a turn.
        bound: At most this, or, for what is better when it is larger, at least.
        is_least: Larger is better.
        note: What a cell with several figures says of this one.
        unit: Of a figure that is not a ratio.
        inverse: Base by peer, not peer by base: a bandwidth as a share of the base's.
    """

    row: str
    column: str
    case: str
    peer: str
    base: tuple[str, ...]
    metric: Metric
    bound: float
    is_least: bool = False
    note: str = ""
    unit: str = ""
    inverse: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a goal: the median over the rounds, and the least and the largest of them."""

    goal: Goal
    middle: float
    least: float
    most: float

    @property
    def is_met(self) -> bool:
        return self.middle >= self.goal.bound if self.goal.is_least else self.middle <= self.goal.bound

    def __str__(self) -> str:
        sign, unit = ("≥" if self.goal.is_least else "≤"), self.goal.unit
        note = f"{self.goal.note} " if self.goal.note else ""
        spread = f"{short(self.least)}-{short(self.most)}"
        verdict = "" if self.is_met else " **missed**"
        return f"{note}{short(self.middle)}{unit} ({spread}; {sign} {short(self.goal.bound)}){verdict}"


def short(value: float) -> str:
    """Two digits that mean something."""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"


def goals() -> Iterator[Goal]:
    """What was to be reached. Bounds in the order of COLUMNS."""
    one, paced = "one waiting stream, 64 KB, p50 / SharedMemory", "16 paced streams"
    for row, case, metric, bounds in (
        (one, "waiting-64KB-structured", p50, (0.35, 0.20, 0.45, 1.0)),
        (f"{paced}, p50 / SharedMemory", "paced-16", p50, (0.30, 0.25, 0.40, 1.05)),
        (f"{paced}, p99 / SharedMemory", "paced-16", p99, (0.40, 0.30, 0.40, 1.0)),
        ("flat out, chunks/s / SharedMemory", "flat-out-16", rate, (8, 10, 3, 1.5)),
    ):
        for column, bound in zip(COLUMNS, bounds, strict=True):
            yield Goal(row, column, case, PEER[column], (MEMORY,), metric, bound, metric is rate)
    for row, case, metric, bound in (
        (f"{paced}, p50 / SharedMemory", "paced-16", p50, 0.45),
        (f"{paced}, p99 / SharedMemory", "paced-16", p99, 0.35),
        ("flat out, chunks/s / SharedMemory", "flat-out-16", rate, 4),
    ):
        yield Goal(row, KEPT, case, PEER[KEPT], (MORI,), metric, bound, metric is rate, note="/ stock Mori")
    row = "structured 16 MB, put + get / stock Mori"
    for column in (ZMQ, UNIX):
        case = "present-16MB-structured"
        yield Goal(row, column, case, PEER[column], ("mori",), put_and_get, 0.35, note="owned")
        yield Goal(row, column, case, LEASED[column], ("mori",), put_and_get, 0.20, note="leased")
    for column, bound in ((ADAPTER, 0.5), (KEPT, 0.6)):
        yield Goal(row, column, "waiting-16MB-structured", PEER[column], (MORI,), p50, bound)
    row, case = "present get, 64 KB", "present-64KB-structured"
    yield Goal(row, ZMQ, case, PEER[ZMQ], ("mori",), p50, 0.9, note="/ stock Mori")
    yield Goal(row, UNIX, case, PEER[UNIX], ("mori",), p50, 0.45, note="/ stock Mori")
    yield Goal(row, UNIX, case, PEER[UNIX], ("memory",), p50, 0.8, note="/ SharedMemory")
    row, case = "256 MB raw, leased get: share of memcpy bandwidth", "present-256MB-raw"
    for column in (ZMQ, UNIX):
        yield Goal(row, column, case, LEASED[column], ("memcpy",), p50, 0.9, is_least=True, inverse=True)
    for column in (ZMQ, UNIX, ADAPTER):
        row = "idle CPU, 1,000 parked, per process and 10 s"
        yield Goal(row, column, "parked-1000", PEER[column], (), idle, 5, unit=" ms")
    row = "free + allocate, 10,000 live extents"
    yield Goal(row, ZMQ, "allocator-10000", "extents", (), p50, 20, unit=" us")
    for many in ("senders", "receivers"):
        for column, link in ((ZMQ, "zmq"), (UNIX, "unix")):
            row = "16 streams flat out, CPU per chunk, 16 peers / 1"
            case, peer, base = f"peers-{many}", f"{many}-16-{link}", f"{many}-1-{link}"
            yield Goal(row, column, case, peer, (base,), cpu, 1.3, note=many)
    for column in COLUMNS:
        row = "receiver busy 80%, one stream, p50 / best stock"
        yield Goal(row, column, "busy-1", PEER[column], STOCK, p50, 1.0)


def bare_goals() -> Iterator[Goal]:
    """The same against SharedMemoryConnector without its adapter: nothing was promised, and both are to be quoted."""
    for row, case, metric in (
        ("one waiting stream, 64 KB, p50", "waiting-64KB-structured", p50),
        ("16 paced streams, p50", "paced-16", p50),
        ("16 paced streams, p99", "paced-16", p99),
        ("flat out, chunks/s", "flat-out-16", rate),
    ):
        for column in (ZMQ, UNIX):
            bound = 1.0
            yield Goal(row, column, case, PEER[column], ("memory",), metric, bound, metric is rate)


def outcome(goal: Goal, result: dict[str, Any]) -> Outcome | None:
    """What the run says of it; None if it was not measured."""
    values = []
    for case in result["cases"]:
        if case["name"] != goal.case:
            continue
        for found in case["rounds"]:
            bases = [goal.metric(found[name]) for name in goal.base if name in found]
            if goal.peer not in found or (goal.base and not bases):
                continue
            value = goal.metric(found[goal.peer])
            if bases:
                best = max(bases) if goal.metric is rate else min(bases)
                value = best / value if goal.inverse else value / best
            values.append(value)
    if not values:
        return None
    return Outcome(goal, statistics.median(values), min(values), max(values))


def outcomes(result: dict[str, Any], wanted: Iterator[Goal]) -> list[Outcome]:
    """Those that were measured."""
    return [found for goal in wanted if (found := outcome(goal, result)) is not None]


def median(result: dict[str, Any], case: str, peer: str, metric: Metric) -> float | None:
    """A figure of a peer, the median over the rounds."""
    values = [
        metric(found[peer])
        for each in result["cases"]
        if each["name"] == case
        for found in each["rounds"]
        if peer in found
    ]
    return statistics.median(values) if values else None
