"""What the benchmark makes of its measurements; that it runs is checked by .ci/run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.bench import cases, figures, publish, where
from benchmarks.bench.measure import quantile, summary
from benchmarks.bench.page import STYLE, draw
from benchmarks.bench.peers import PEERS
from benchmarks.bench.turn import Turn

pytestmark = pytest.mark.deterministic


def everything() -> list[cases.Case]:
    return [case for make in cases.SCENARIOS.values() for group in make() for case in group.cases]


def a_turn(case: cases.Case, peer: str, number: int) -> dict[str, Any]:
    """A turn's figures, larger for each further round and peer."""
    value = 10.0 * (1 + number) * (1 + list(PEERS).index(peer))
    turn: dict[str, Any] = {"peak_mb": {"send": value, "receive": 2 * value}}
    if case.turn.scenario == "parked":
        return turn | {"idle_ms": {"send": value, "receive": value}}
    return turn | {"p50_us": value, "p99_us": 2 * value, "cpu_us": value, "rate": 1e6 / value, "put_p50_us": value}


def a_run(*, rounds: int = 3) -> dict[str, Any]:
    measured = [
        {
            "name": case.name,
            "title": case.title,
            "clock": case.clock,
            "turn": {"size": case.turn.size, "streams": case.turn.streams},
            "rounds": [{peer: a_turn(case, peer, number) for peer in case.peers} for number in range(rounds)],
        }
        for case in everything()
    ]
    machine = dict.fromkeys(("processor", "cores", "kernel", "python", "date", "commit", "load_before"), "?")
    return {
        "machine": machine, "rounds": rounds, "is_quick": False, "cases": measured, "skipped": {}, "failures": [],
        "peers": {name: peer.title for name, peer in PEERS.items()},
    }  # fmt: skip


def a_goal(**changes: Any) -> figures.Goal:
    given = {
        "row": "r",
        "column": "c",
        "case": "x",
        "peer": "a",
        "base": ("b", "c"),
        "metric": figures.p50,
        "bound": 0.5,
    }
    return figures.Goal(**(given | changes))


def rounds_of(*rounds: dict[str, float]) -> dict[str, Any]:
    return {"cases": [{"name": "x", "rounds": [{peer: {"p50_us": v} for peer, v in each.items()} for each in rounds]}]}


def test_a_ratio_is_taken_within_each_round_against_the_best_of_the_bases() -> None:
    result = rounds_of({"a": 1, "b": 2, "c": 4}, {"a": 100, "b": 900, "c": 400}, {"a": 30, "b": 40})
    found = figures.outcome(a_goal(), result)
    assert found is not None
    assert (found.middle, found.least, found.most) == (0.5, 0.25, 0.75)
    assert found.is_met


def test_a_round_in_which_a_peer_failed_counts_for_nothing() -> None:
    found = figures.outcome(a_goal(), rounds_of({"a": 9}, {"b": 9}, {"a": 1, "c": 1}))
    assert found is not None
    assert found.middle == 1
    assert not found.is_met
    assert "missed" in str(found)


def test_what_was_not_measured_has_no_outcome() -> None:
    assert figures.outcome(a_goal(case="y"), rounds_of({"a": 1, "b": 1})) is None


def test_more_may_be_better() -> None:
    rate: Callable[[dict[str, Any]], float] = figures.rate
    result = {"cases": [{"name": "x", "rounds": [{"a": {"rate": 80.0}, "b": {"rate": 10.0}, "c": {"rate": 20.0}}]}]}
    found = figures.outcome(a_goal(metric=rate, bound=4, is_least=True), result)
    assert found is not None
    assert found.middle == 4
    assert found.is_met


def test_a_turn_is_summed_up_over_both_processes() -> None:
    turn = Turn("streams", streams=2, chunks=2)
    send = {"starts": [[0, 1000], [2000, 3000]], "cpu_us": 10.0, "peak_mb": 1.0}
    receive = {"ends": [[5000, 9000], [8000, 12000]], "cpu_us": 30.0, "peak_mb": 2.0}
    found = summary(turn, {"send": send, "receive": receive})
    assert (found["p50_us"], found["max_us"], found["cpu_us"]) == (8.0, 9.0, 10.0)
    assert found["rate"] == pytest.approx(4 / 12e-6)


def test_a_sample_counts_for_the_code_that_ran_and_what_python_and_torch_do_for_their_caller() -> None:
    loop = "main (bench/half.py:9);run (trio/_core/_run.py:1)"
    put = f"{loop};Connector.put (trio_mori/_connector.py:98)"
    found = where.shares(
        [
            f"{loop} 10",
            f"{put} 5",
            f"{put};memmove (trio_mori/_payload_copy.py:104) 20",
            f"{put};Extents.allocate (trio_mori/_protocol/extents.py:7) 15",
            f"{put};encode (trio_mori/_protocol/wire.py:7);len (torch/_tensor.py:8) 20",
            "run (threading.py:3);put (trio_mori_vllm_omni/_sync.py:1);put (queue.py:2) 10",
            f"{loop};check (bench/payload.py:36);__len__ (torch/_tensor.py:8) 10",
            "run (threading.py:3);schedule (vllm/v1/core/sched.py:5) 5",
            "run (threading.py:3) 5",
        ]
    )
    assert found == pytest.approx(
        {
            "trio": 0.1,
            "between them": 0.05,
            "copies, tensors": 0.2,
            "the books": 0.15,
            "messages": 0.2,
            "shim, adapter": 0.1,
            "benchmark, vllm-omni": 0.2,
        }
    )
    halves = {"send": (200.0, found), "receive": (100.0, {"trio": 1.0})}
    lines = list(where.table({"async-unix": halves}))
    assert lines[0] == "| CPU us per chunk | async-unix, send | async-unix, receive |"
    assert "| trio | 20 | 100 |" in lines
    assert lines[-1] == "| all | 200 | 100 |"


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0


def test_every_case_has_peers_that_exist_a_clock_and_a_name_of_its_own() -> None:
    all_cases = everything()
    assert len({case.name for case in all_cases}) == len(all_cases)
    for case in all_cases:
        assert set(case.peers) <= PEERS.keys()
        assert case.clock


def test_every_goal_is_measured_by_a_case_that_its_peers_take_part_in() -> None:
    by_name = {case.name: case for case in everything()}
    for goal in (*figures.goals(), *figures.bare_goals()):
        taking_part = by_name[goal.case].peers
        assert goal.peer in taking_part, goal
        assert not goal.base or set(goal.base) & set(taking_part), goal


def test_the_page_is_xml_and_shows_every_peer_that_it_has_figures_of() -> None:
    page = ElementTree.fromstring(draw(a_run()))
    shown = {element.text for element in page.iter() if element.tag.endswith("text")}
    assert {STYLE[name][0] for name in ("async-unix", "memory+stock-adapter", "nixl", "wake-up")} <= shown


def test_publishing_replaces_what_stands_between_the_comments_and_nothing_else(tmp_path: Path) -> None:
    for name, marks in (("README.md", ("figures",)), ("docs/performance.md", ("page", "tables"))):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        marked = (f"{publish.BEGIN.format(mark)}\nold\n{publish.END.format(mark)}\n" for mark in marks)
        path.write_text("before\n" + "".join(marked) + "after\n")
    for _ in range(2):
        publish.publish(a_run(), tmp_path)
        for name in ("README.md", "docs/performance.md"):
            text = (tmp_path / name).read_text()
            assert text.startswith("before\n")
            assert text.endswith("\nafter\n")
            assert "old" not in text
            assert text.count("SharedMemory") > 1
    assert (tmp_path / "docs/performance.svg").is_file()


def test_a_file_without_the_comments_is_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match=r"README.md: .*figures: begin"):
        publish.between(path, "figures", iter(()))
    assert path.read_text() == "nothing\n"
