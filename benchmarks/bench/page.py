"""One page of pictures that says in a minute how fast everything is. SVG, by hand: nothing to install."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import drawing
from .drawing import Dot, Line
from .figures import Metric, goals, median, outcomes, p50, p99, rate
from .machine import shown

BLUE, DARK_BLUE, LIGHT_BLUE, PURPLE = "#0969da", "#0a3069", "#54aeff", "#8250df"
ORANGE, BROWN, GREY, GREEN, TEAL = "#e16f24", "#953800", "#8c959f", "#4d7a3a", "#1b7c83"

# How peers are called where there is little room, and drawn.
STYLE = {
    "async-unix": ("trio_mori async, unix link", DARK_BLUE),
    "async-zmq": ("trio_mori async, zmq link", BLUE),
    "leased-unix": ("trio_mori leased, unix link", DARK_BLUE),
    "leased-zmq": ("trio_mori leased, zmq link", BLUE),
    "awake-unix": ("trio_mori, unix, busy_poll_us", DARK_BLUE),
    "blocking": ("trio_mori.blocking", BLUE),
    "shim": ("trio_mori in vllm-omni, bare", LIGHT_BLUE),
    "shim+our-adapter": ("trio_mori, its adapter", LIGHT_BLUE),
    "shim+stock-adapter": ("trio_mori, stock adapter", PURPLE),
    "memory+stock-adapter": ("stock SharedMemory, its adapter", ORANGE),
    "mori+stock-adapter": ("stock Mori (stand-in), its adapter", BROWN),
    "memory": ("stock SharedMemory, bare", ORANGE),
    "mori": ("stock Mori, bare", BROWN),
    "nixl": ("NIXL, engine alone", GREEN),
    "mooncake": ("Mooncake, engine alone", TEAL),
    "wake-up": ("floor: a process wakes up", GREY),
    "round-trip": ("floor: pyzmq round trip", GREY),
    "memcpy": ("floor: memmove", GREY),
    "extents": ("trio_mori", DARK_BLUE),
    "stock-extents": ("stock", ORANGE),
}


def rows(
    result: dict[str, Any], case: str, value: Metric, far: Metric | None = None, also: tuple[str, ...] = ()
) -> list[Dot]:
    """What each peer that took part in a case came to; `also` are cases of other peers that belong beside them."""
    found: dict[str, Dot] = {}
    for name in (case, *also):
        for peer in STYLE:
            middle = median(result, name, peer, value)
            if middle is None or peer in found:
                continue
            found[peer] = Dot(*STYLE[peer], middle, median(result, name, peer, far) if far else None)
    return list(found.values())


def over(
    result: dict[str, Any], prefix: str, suffix: str, field: str, peers: tuple[str, ...], value: Metric
) -> list[Line]:
    """One line for each peer, over a number of the cases whose names begin and end so."""
    cases = [case for case in result["cases"] if case["name"].startswith(prefix) and case["name"].endswith(suffix)]
    lines = []
    for peer in peers:
        points = [(case["turn"][field], median(result, case["name"], peer, value)) for case in cases]
        kept = tuple((x, y) for x, y in sorted(points) if y is not None)
        lines.append(Line(*STYLE[peer], kept, is_dashed=peer in ("async-zmq", "mooncake", "memcpy")))
    return lines


def cpu(turn: dict[str, Any]) -> float:
    return float(turn["cpu_us"])


def size(value: float) -> str:
    return f"{value / 2**20:.0f} MB" if value >= 2**20 else f"{value / 2**10:.0f} KB"


def count(value: float) -> str:
    return f"{value:,.0f}"


def panels(result: dict[str, Any]) -> Iterator[Iterator[str]]:
    """In the order in which one reads them."""
    ends = "dot: p50, line: to p99; put to owned payload"
    yield drawing.dots(
        "One stream, 64 KB, to a get that waits",
        f"{ends}; engines raw, the others structured",
        rows(result, "waiting-64KB-structured", p50, p99, also=("waiting-64KB-raw",)),
        shown,
    )
    yield drawing.dots("16 streams in bursts, 64 KB each 50 ms", ends, rows(result, "paced-16", p50, p99), shown)
    yield drawing.bars(
        "16 streams flat out, 64 KB", "chunks per second", rows(result, "flat-out-16", rate), count, best_is_most=True
    )
    yield drawing.bars(
        "CPU per chunk, 16 paced streams",
        "both processes; bare stock and NIXL poll in a loop",
        rows(result, "paced-16", cpu),
        shown,
    )
    sizes = ("async-unix", "async-zmq", "memory", "mori", "nixl", "mooncake")
    yield drawing.lines(
        "Raw, by size, to a get that waits", "p50", over(result, "waiting-", "-raw", "size", sizes, p50), size, shown
    )
    streams = (
        "async-unix",
        "async-zmq",
        "shim+our-adapter",
        "shim+stock-adapter",
        "memory+stock-adapter",
        "mori+stock-adapter",
    )
    yield drawing.lines(
        "CPU per chunk, by number of streams",
        "paced so that each chunk has 3 ms",
        over(result, "paced-", "", "streams", streams, cpu),
        count,
        shown,
    )
    yield drawing.dots(
        "The receiving process busy 80% with Python",
        f"one stream, 64 KB; {ends}",
        rows(result, "busy-1", p50, p99),
        shown,
    )
    yield drawing.lines(
        "Allocator: free and allocate",
        "p50, by live extents, every second block a hole",
        over(result, "allocator-", "", "streams", ("extents", "stock-extents"), p50),
        count,
        shown,
    )


def draw(result: dict[str, Any]) -> str:
    """The page."""
    machine = result["machine"]
    reached = outcomes(result, goals())
    met = sum(each.is_met for each in reached)
    head = (
        f"{machine['processor']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}; "
        f"{machine['date']}, {machine['commit']}; load {machine['load_before']} before"
    )
    method = (
        f"Medians over {result['rounds']} rounds, in each of which all peers take their turns in random order. "
        f"{met} of {len(reached)} goals reached: see README.md."
    )
    across, down = drawing.WIDTH + 40, drawing.HEIGHT + 34
    drawn = list(panels(result))
    height = 100 + down * -(-len(drawn) // 2)
    body = [
        drawing.text(30, 38, "trio_mori beside what else there is", size=22, bold=True),
        drawing.text(30, 60, head, color=drawing.FAINT),
        drawing.text(30, 78, method, color=drawing.FAINT),
        *(
            drawing.frame(panel, 30 + across * (index % 2), 108 + down * (index // 2))
            for index, panel in enumerate(drawn)
        ),
    ]
    warning = "A quick run: these figures say nothing." if result["is_quick"] else ""
    if warning:
        body.append(drawing.text(30, 96, warning, color=BROWN, bold=True))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * across + 20} {height}" '
        f'font-family="Inter, Helvetica, Arial, sans-serif"><rect width="100%" height="100%" fill="#ffffff"/>'
        + "\n".join(body)
        + "</svg>\n"
    )
