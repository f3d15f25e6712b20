"""Writes what people read of a run: README's table, the tables of docs/performance.md, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .environments import ROOT
from .figures import COLUMNS, Outcome, bare_goals, goals, outcomes, short
from .machine import shown
from .page import count, draw

BEGIN, END = "<!-- {}: begin; written by make bench -->", "<!-- {}: end -->"


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def rows_of(found: list[Outcome]) -> Iterator[tuple[str, ...]]:
    for row in dict.fromkeys(each.goal.row for each in found):
        beside = [each for each in found if each.goal.row == row]
        yield (row, *("; ".join(str(each) for each in beside if each.goal.column == column) for column in COLUMNS))


def bare_cell(found: list[Outcome], row: str, column: str) -> str:
    return "; ".join(
        f"{short(each.middle)} ({short(each.least)}-{short(each.most)})"
        for each in found
        if (each.goal.row, each.goal.column) == (row, column)
    )


def for_readme(result: dict[str, Any]) -> Iterator[str]:
    """Goals and what came of them; then the same against the bare connector."""
    machine = result["machine"]
    if result["is_quick"]:
        yield "**Of a quick run: these figures say nothing.**"
        yield ""
    yield (
        f"{machine['cores']} cores, {machine['processor']}, {machine['date']}, load {machine['load_before']}: "
        f"medians of {result['rounds']} rounds in one run, in brackets the least and the largest round, and what was "
        "to be reached."
    )
    yield ""
    found = outcomes(result, goals())
    yield from table(("figure", *COLUMNS), rows_of(found))
    bare = outcomes(result, bare_goals())
    if bare:
        yield ""
        yield "Against SharedMemoryConnector driven bare, in a tight loop that takes a core:"
        yield ""
        columns = COLUMNS[:2]
        yield from table(
            ("figure, ours / bare SharedMemory", *columns),
            (
                (row, *(bare_cell(bare, row, column) for column in columns))
                for row in dict.fromkeys(each.goal.row for each in bare)
            ),
        )


def for_docs(result: dict[str, Any]) -> Iterator[str]:
    """Every case, in medians; what is in the clock, where it differs from the case before."""
    clock = ""
    for case in result["cases"]:
        peers = dict.fromkeys(name for found in case["rounds"] for name in found)
        if not peers:
            continue
        if case["clock"] != clock:
            clock = case["clock"]
            yield f"*In the clock:* {clock}."
            yield ""
        yield f"**{case['title'][0].upper()}{case['title'][1:]}**"
        yield ""
        turns = {name: [found[name] for found in case["rounds"] if name in found] for name in peers}
        yield from table(*case_table(result["peers"], turns))
        yield ""
    for peer, why in result["skipped"].items():
        yield f"Not measured: {result['peers'][peer]}: {why}."
    for failure in result["failures"]:
        yield f"Failed: {failure['peer']} in {failure['case']}: {failure['why'].strip().splitlines()[-1]}."


Turns = dict[str, list[dict[str, Any]]]

# What only some cases have.
OPTIONAL: dict[str, tuple[str, Callable[[float], str]]] = {
    "put_p50_us": ("put p50", shown),
    "step_p50_us": ("p50 to a step of the scheduler", shown),
    "rate": ("chunks/s", count),
    "put_rate": ("puts/s", count),
    "get_rate": ("gets/s", count),
    "cpu_us": ("CPU per chunk", shown),
}


def middle(turns: list[dict[str, Any]], key: str, role: str = "") -> float:
    """A figure's median over the rounds, or that of one of the two processes."""
    return float(statistics.median(turn[key][role] if role else turn[key] for turn in turns))


def case_table(titles: dict[str, str], turns: Turns) -> tuple[tuple[str, ...], Iterator[tuple[str, ...]]]:
    """Header and rows of one case, the fastest first."""
    first = next(iter(turns.values()))[0]
    if "idle_ms" in first:
        header: tuple[str, ...] = ("peer", "sender, CPU per 10 s", "receiver")
        return header, (
            (titles[name], *(f"{middle(found, 'idle_ms', role):.1f} ms" for role in ("send", "receive")))
            for name, found in turns.items()
        )
    kept = {key: value for key, value in OPTIONAL.items() if any(key in found[0] for found in turns.values())}
    header = ("peer", "p50", "p99", *(title for title, _ in kept.values()), "peak MB, sender / receiver")

    def rows() -> Iterator[tuple[str, ...]]:
        for name, found in sorted(turns.items(), key=lambda item: middle(item[1], "p50_us")):
            timed = (shown(middle(found, key)) for key in ("p50_us", "p99_us"))
            more = (show(middle(found, key)) if key in found[0] else "" for key, (_, show) in kept.items())
            peak = " / ".join(f"{middle(found, 'peak_mb', role):.0f}" for role in ("send", "receive"))
            yield (titles[name], *timed, *more, peak)

    return header, rows()


def between(path: Path, mark: str, lines: Iterator[str]) -> None:
    """Put these lines between a file's two comments.

    Raises:
        ValueError: they are not there.
    """
    text, begin, end = path.read_text(), BEGIN.format(mark), END.format(mark)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path}: the lines {begin!r} and {end!r} have to be there once each")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text("\n".join([before + begin, *lines, end + after]))


def publish(result: dict[str, Any], root: Path = ROOT) -> None:
    """Write all three under `root`."""
    (root / "docs/performance.svg").write_text(draw(result))
    between(root / "README.md", "figures", for_readme(result))
    between(root / "docs/performance.md", "page", iter(["![All of it on one page](performance.svg)"]))
    between(root / "docs/performance.md", "tables", for_docs(result))


def verdict(result: dict[str, Any]) -> Iterator[str]:
    """What was not reached, and what the run has no figure for."""
    found = outcomes(result, goals())
    for each in found:
        if not each.is_met:
            yield f"missed: {each.goal.row}, {each.goal.column}: {str(each).replace('**missed**', '').strip()}"
    measured = {each.goal for each in found}
    for goal in goals():
        if goal not in measured:
            yield f"not measured: {goal.row}, {goal.column} ({goal.case}, {goal.peer})"
