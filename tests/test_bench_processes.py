"""The benchmark's processes: that a peer's two halves meet, and that one which fails is named and holds up nobody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bench import environments
from benchmarks.bench.cases import Case, Group
from benchmarks.bench.environments import Environment, Missing
from benchmarks.bench.measure import Run
from benchmarks.bench.peers import PEERS, Pair, PeerFailed
from benchmarks.bench.turn import Turn

POOL = 4 << 20
ONE = Turn("streams", tag="t", chunks=3, size=4096, interval=0.001)


@pytest.fixture(scope="module")
def project() -> Iterator[Environment]:
    """One zygote for all tests: it imports torch."""
    log = os.open(os.devnull, os.O_WRONLY)
    environment = Environment("project", log)
    environment.wait_ready()
    yield environment
    environment.close()
    os.close(log)


@pytest.fixture
def pair(project: Environment) -> Iterator[Pair]:
    pair = Pair(PEERS["wake-up"], project)
    pair.open(POOL)
    yield pair
    pair.kill()


@pytest.mark.parametrize("name", ["wake-up", "async-unix", "blocking", "senders-4-unix", "receivers-4-zmq"])
def test_every_chunk_of_a_turn_has_a_begin_and_a_later_end(project: Environment, name: str) -> None:
    pair = Pair(PEERS[name], project)
    try:
        pair.open(POOL)
        halves = pair.turn(ONE)
    finally:
        pair.close()
    starts, ends = halves["send"]["starts"], halves["receive"]["ends"]
    assert [len(starts[0]), len(ends[0])] == [3, 3]
    assert all(start < end for start, end in zip(starts[0], ends[0], strict=True))
    assert all(half["cpu_us"] > 0 for half in halves.values())


def test_a_half_that_fails_is_named_with_what_it_raised(pair: Pair) -> None:
    with pytest.raises(PeerFailed, match=r"wake-up, send: (?s:.*)TypeError"):
        pair.turn(Turn("streams", chunks=3, interval="soon"))  # type: ignore[arg-type]


def test_a_half_that_has_died_is_named(pair: Pair) -> None:
    pair.kill()
    with pytest.raises(PeerFailed, match="wake-up"):
        pair.turn(ONE)


def test_a_run_goes_on_without_a_peer_that_fails(project: Environment) -> None:
    said: list[str] = []
    run = Run({"project": project}, ["wake-up", "memcpy"], rounds=2, seed=1, say=said.append)
    case = Case("odd", "what the copy cannot do", "nothing", ONE, ("wake-up", "memcpy"))
    measured = list(run.group(Group("waiting", POOL, (case,))))
    assert [sorted(found) for found in measured[0]["rounds"]] == [["wake-up"], ["wake-up"]]
    assert [(failure["peer"], failure["case"]) for failure in run.failures] == [("memcpy", "odd")]
    assert "memcpy failed" in said[0]


def test_an_environment_that_is_not_here_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIO_MORI_VLLM_SETUP", str(tmp_path))
    with pytest.raises(Missing, match=r"\.ci/vllm-lane"):
        environments.vllm()
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    with pytest.raises(Missing, match="make bench"):
        environments.engines()
