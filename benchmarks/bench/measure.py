"""Runs cases: peers in random order, in rounds; and sums up each turn."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .cases import Case, Group
from .environments import Environment
from .peers import PEERS, Pair, PeerFailed
from .turn import Turn

Say = Callable[[str], None]
WARM_UP = 3  # chunks of each stream in the turn that is not counted


def quantile(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed, of those that are there; no interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(turn: Turn, halves: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of one turn: microseconds, chunks per second, MB above what the process had before it opened."""
    send, receive = halves["send"], halves["receive"]
    both = {**receive, **send}
    result: dict[str, Any] = {"peak_mb": {"send": send["peak_mb"], "receive": receive["peak_mb"]}}
    if turn.scenario == "parked":
        scale = 10 / turn.seconds / 1000
        return result | {"idle_ms": {role: half["idle_us"] * scale for role, half in halves.items()}}
    if turn.scenario == "allocator":
        return result | figures("", receive["gets"])
    result["cpu_us"] = (send["cpu_us"] + receive["cpu_us"]) / turn.total
    if turn.scenario == "streams":
        starts, ends = both["starts"], both["ends"]
        span = max(map(max, ends)) - min(map(min, starts))
        result |= figures("", between(starts, ends)) | {"rate": turn.total / span * 1e9}
        return result | (figures("step_", between(starts, both["steps"])) if "steps" in both else {})
    if both.get("puts"):
        result |= figures("put_", both["puts"])
    for kind in ("put", "get"):
        if f"{kind}_wall_us" in both:
            result[f"{kind}_rate"] = turn.total / both[f"{kind}_wall_us"] * 1e6
    return result | figures("", both["gets"])


def between(starts: list[list[int]], ends: list[list[int]]) -> list[float]:
    """Microseconds that each chunk took."""
    return [
        (end - start) / 1000
        for begun, ended in zip(starts, ends, strict=True)
        for start, end in zip(begun, ended, strict=True)
    ]


def figures(prefix: str, took: list[float]) -> dict[str, Any]:
    return {
        f"{prefix}p50_us": quantile(took, 0.5),
        f"{prefix}p99_us": quantile(took, 0.99),
        f"{prefix}max_us": max(took),
        f"{prefix}n": len(took),
    }


class Run:
    """One run of the benchmark.

    Attributes:
        failures: What could not be measured, and why; by case and peer.
    """

    def __init__(
        self, environments: dict[str, Environment], peers: list[str], rounds: int, seed: int, say: Say
    ) -> None:
        self.failures: list[dict[str, str]] = []
        self._environments = environments
        self._peers = peers
        self._rounds = rounds
        self._random = random.Random(seed)
        self._say = say
        self._turns = 0

    def group(self, group: Group) -> Iterator[dict[str, Any]]:
        """Measure its cases; each as it goes into the JSON."""
        if group.one_by_one:
            yield from self._one_by_one(group)
            return
        wanted = [name for name in self._peers if any(name in case.peers for case in group.cases)]
        pairs = self._open(group, wanted)
        try:
            for case in group.cases:
                if pairs.keys() & set(case.peers):
                    yield self._case(case, pairs)
        finally:
            close(pairs)

    def _open(self, group: Group, names: list[str]) -> dict[str, Pair]:
        pairs = {name: Pair(PEERS[name], self._environments[PEERS[name].environment]) for name in names}

        def open_one(name: str) -> PeerFailed | None:
            try:
                pairs[name].open(group.pool)
            except PeerFailed as error:
                return error
            return None

        with ThreadPoolExecutor() as executor:
            outcomes = list(executor.map(open_one, names))
        for name, error in zip(names, outcomes, strict=True):
            if error is not None:
                self._fail(group.scenario, name, error)
                pairs.pop(name).kill()
        return pairs

    def _fail(self, where: str, name: str, error: PeerFailed) -> None:
        self.failures.append({"case": where, "peer": name, "why": str(error)})
        self._say(f"    {name} failed: {str(error).strip().splitlines()[-1]}")

    def _case(self, case: Case, pairs: dict[str, Pair]) -> dict[str, Any]:
        began = time.monotonic()
        rounds: list[dict[str, Any]] = []
        names = [name for name in case.peers if name in pairs]
        if case.turn.scenario not in ("parked", "allocator"):
            for name in list(names):
                self._turn(case, pairs, names, name, min(case.turn.chunks, WARM_UP))
        for _ in range(min(self._rounds, case.rounds)):
            order = self._random.sample(names, len(names))
            if case.together:
                rounds.append(self._together(case, pairs, order))
                continue
            found = {name: self._turn(case, pairs, names, name, case.turn.chunks) for name in order}
            rounds.append({name: value for name, value in found.items() if value})
        return described(case, rounds, time.monotonic() - began)

    def _turn(
        self, case: Case, pairs: dict[str, Pair], names: list[str], name: str, chunks: int
    ) -> dict[str, Any] | None:
        """One turn; a peer that fails is out for the rest of its group."""
        self._turns += 1
        turn = dataclasses.replace(case.turn, chunks=chunks, tag=f"t{self._turns:x}")
        try:
            return summary(turn, pairs[name].turn(turn))
        except PeerFailed as error:
            self._fail(case.name, name, error)
            pairs.pop(name).kill()
            names.remove(name)
            return None

    def _together(self, case: Case, pairs: dict[str, Pair], names: list[str]) -> dict[str, Any]:
        turns = {}
        for name in names:
            self._turns += 1
            turns[name] = dataclasses.replace(case.turn, tag=f"t{self._turns:x}")
            pairs[name].begin(turns[name])
        return {name: summary(turn, pairs[name].end()) for name, turn in turns.items()}

    def _one_by_one(self, group: Group) -> Iterator[dict[str, Any]]:
        began = time.monotonic()
        found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in group.cases}
        wanted = [name for name in self._peers if any(name in case.peers for case in group.cases)]
        for _ in range(self._rounds):
            for rounds in found.values():
                rounds.append({})
            for name in self._random.sample(wanted, len(wanted)):
                pairs = self._open(group, [name])
                cases = [case for case in group.cases if name in case.peers]
                for index, case in enumerate([cases[0], *cases]):  # the first one warms up
                    if name in pairs and (value := self._turn(case, pairs, [name], name, case.turn.chunks)) and index:
                        found[case.name][-1][name] = value
                close(pairs)
                if name not in pairs:
                    wanted.remove(name)
        took = (time.monotonic() - began) / len(group.cases)
        for case in group.cases:
            yield described(case, found[case.name], took)


def close(pairs: dict[str, Pair]) -> None:
    """All at once: the stock connector's close takes a second."""
    with ThreadPoolExecutor() as executor:
        list(executor.map(Pair.close, pairs.values()))


def described(case: Case, rounds: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """A case as it goes into the JSON."""
    return {
        "name": case.name,
        "title": case.title,
        "clock": case.clock,
        "turn": dataclasses.asdict(case.turn),
        "seconds": round(seconds, 1),
        "rounds": rounds,
    }
