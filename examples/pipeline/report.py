"""What the user sees: a line that says how far the stages are, and the table at the end."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import NamedTuple

from examples.pipeline.messages import NAMES, Finished

PAYLOADS = ("hidden states", "codec frames")  # what travels on the edge after stage 0, and after stage 1


class Live:
    """The progress line. On a terminal it is rewritten in place; in a file or a log there is one line per quarter."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._frames = [0] * len(NAMES)
        self._total: int | None = None
        self._quarters = 0
        self._open = False

    def show(self, stage: int, frames: int, total: int | None) -> None:
        """A stage is through with so many frames."""
        self._frames[stage] = frames
        self._total = total or self._total
        if self._total is None:
            return
        percent = [100 * done // self._total for done in self._frames]
        stages = "   ".join(f"{name} {part:3d}%" for name, part in zip(NAMES, percent, strict=True))
        line = f"{self._requests} requests   {stages}"
        if sys.stdout.isatty():
            print(f"\r{line}", end="", flush=True)
            self._open = True
        elif percent[-1] // 25 > self._quarters:
            self._quarters = percent[-1] // 25
            print(line, flush=True)

    def end(self) -> None:
        """What is printed next begins on a line of its own."""
        if self._open:
            print()
            self._open = False


class Row(NamedTuple):
    """One edge in the table; also its heading."""

    edge: str
    from_pid: str
    to_pid: str
    put: str
    written: str
    got: str
    bytes: str
    p50: str
    p99: str
    rate: str


HEADING = Row("edge", "from pid", "to pid", "put", "written", "got", "bytes", "p50", "p99", "MB/s")


def table(stages: list[Finished]) -> str:
    """What passed over each edge, from what the stages said at their end.

    Payloads and bytes are what the connectors at the two ends counted, the mark at the end of each stream included, and
    between them what the engine wrote. The latency runs from the start of `send` until the receiving stage had the
    chunk; MB/s is over the time from the first `send` to the last arrival.
    """
    heading = HEADING._replace(written=f"{stages[0].engine} wrote")
    rows = [heading] + [edge(number, *ends) for number, ends in enumerate(pairwise(stages))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row.edge.ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def edge(number: int, sender: Finished, receiver: Finished) -> Row:
    """The row of the edge that leaves stage ``number``."""
    name = f"{number}_{number + 1}"
    put, got = sender.put[name], receiver.got[name]
    seconds = receiver.last_arrived - receiver.first_sent
    return Row(
        f"{number} -> {number + 1} {PAYLOADS[number]}",
        str(sender.pid),
        str(receiver.pid),
        str(put.payloads),
        str(sender.written),
        str(got.payloads),
        f"{got.bytes:,}",
        f"{1000 * percentile(receiver.latencies, 50):.2f} ms",
        f"{1000 * percentile(receiver.latencies, 99):.2f} ms",
        f"{got.bytes / seconds / 1e6:.1f}",
    )


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]
