"""The marks of a page: SVG text, an axis, a panel of dots, of bars, of lines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

Show = Callable[[float], str]

INK, FAINT, GRID = "#1f2328", "#656d76", "#d8dee4"
THIN = {"stroke": GRID}
WIDTH, HEIGHT = 580, 290  # of a panel
LEFT, TOP, BOTTOM = 216, 46, 26  # of its plot; names stand left of it


@dataclasses.dataclass(frozen=True)
class Dot:
    """One row of a panel: a value, and one behind it that a line leads to."""

    name: str
    color: str
    value: float
    far: float | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """Values over x."""

    name: str
    color: str
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False


def element(name: str, look: Mapping[str, object] | None = None, content: str = "", **place: object) -> str:
    """``stroke_width: 2`` is written ``stroke-width="2"``; numbers with one digit behind the point."""
    written = "".join(
        f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else value}"'
        for key, value in {**place, **(look or {})}.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(
    x: float, y: float, content: str, *, size: int = 12, color: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = 600 if bold else 400
    look = {"text_anchor": anchor, "font_size": size, "font_weight": weight, "fill": color}
    return element("text", look, escape(content), x=float(x), y=float(y))


def rule(x1: float, x2: float, y1: float, y2: float, look: Mapping[str, object]) -> str:
    return element("line", look, x1=float(x1), x2=float(x2), y1=float(y1), y2=float(y2))


def decades(least: float, most: float) -> list[float]:
    """Powers of ten from below the least to above the most."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def heading(title: str, note: str) -> Iterator[str]:
    yield text(0, 14, title, size=14, bold=True)
    yield text(0, 31, note, size=11, color=FAINT)


def frame(panel: Iterator[str], x: float, y: float) -> str:
    return element("g", content="".join(panel), transform=f"translate({x},{y})")


def dots(title: str, note: str, rows: Sequence[Dot], show: Show) -> Iterator[str]:
    """On a logarithmic axis, for values that are orders of magnitude apart; the best one first."""
    yield from heading(title, note)
    rows = sorted(rows, key=lambda row: row.value)
    if not rows:
        return
    ticks = decades(min(row.value for row in rows), max(row.far or row.value for row in rows))
    span = math.log10(ticks[-1] / ticks[0])

    def at(value: float) -> float:
        return LEFT + math.log10(value / ticks[0]) / span * (WIDTH - LEFT - 70)

    bottom = HEIGHT - BOTTOM
    for tick in ticks:
        yield rule(at(tick), at(tick), TOP - 6, bottom, THIN)
        yield text(at(tick), bottom + 15, show(tick), size=10, color=FAINT, anchor="middle")
    step = (bottom - TOP) / len(rows)
    for index, row in enumerate(rows):
        y = TOP + step * (index + 0.5)
        yield text(LEFT - 10, y + 4, row.name, anchor="end", size=11)
        end = at(row.value)
        if row.far is not None:
            end = at(row.far)
            look = {"stroke": row.color, "stroke_width": 2, "opacity": 0.4}
            yield rule(at(row.value), end, y, y, look)
            yield rule(end, end, y - 4, y + 4, look)
        yield element("circle", cx=at(row.value), cy=y, r=5, fill=row.color)
        yield text(end + 9, y + 4, show(row.value), size=11)


def bars(title: str, note: str, rows: Sequence[Dot], show: Show, *, best_is_most: bool = False) -> Iterator[str]:
    """From zero; the best one first."""
    yield from heading(title, note)
    rows = sorted(rows, key=lambda row: -row.value if best_is_most else row.value)
    if not rows:
        return
    most = max(row.value for row in rows)
    step = (HEIGHT - BOTTOM - TOP) / len(rows)
    for index, row in enumerate(rows):
        y = TOP + step * (index + 0.5)
        width = row.value / most * (WIDTH - LEFT - 70)
        yield text(LEFT - 10, y + 4, row.name, anchor="end", size=11)
        yield element(
            "rect", x=LEFT, y=y - step * 0.32, width=max(width, 1.0), height=step * 0.64, rx=2, fill=row.color
        )
        yield text(LEFT + width + 7, y + 4, show(row.value), size=11)


def lines(title: str, note: str, rows: Sequence[Line], show_x: Show, show_y: Show) -> Iterator[str]:
    """Both axes logarithmic; names stand at the ends of the lines, moved apart where they would touch."""
    yield from heading(title, note)
    rows = [row for row in rows if row.points]
    if not rows:
        return
    xs = sorted({x for row in rows for x, _ in row.points})
    values = [y for row in rows for _, y in row.points]
    ticks = decades(min(values), max(values))
    left, right, bottom = 58, WIDTH - 190, HEIGHT - BOTTOM
    span_x = math.log10(xs[-1] / xs[0]) or 1
    span_y = math.log10(ticks[-1] / ticks[0])

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + math.log10(x / xs[0]) / span_x * (right - left)
        return across, bottom - math.log10(y / ticks[0]) / span_y * (bottom - TOP)

    for tick in ticks:
        _, y = at(xs[0], tick)
        yield rule(left, right, y, y, THIN)
        yield text(left - 8, y + 4, show_y(tick), size=10, color=FAINT, anchor="end")
    for each in xs:
        x, _ = at(each, ticks[0])
        yield text(x, bottom + 16, show_x(each), size=10, color=FAINT, anchor="middle")
    ends = []
    for row in rows:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in row.points))
        dash = "4 3" if row.is_dashed else "none"
        yield element("polyline", points=path, fill="none", stroke=row.color, stroke_width=2, stroke_dasharray=dash)
        for point in row.points:
            x, y = at(*point)
            yield element("circle", cx=x, cy=y, r=3, fill=row.color)
        ends.append((at(*row.points[-1]), row))
    floor = TOP - 20.0
    for (x, y), row in sorted(ends, key=lambda end: end[0][1]):
        floor = max(y + 4, floor + 13)
        yield text(x + 9, floor, row.name, size=11, color=row.color)
