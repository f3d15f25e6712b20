"""The short form of the lane, and whether it finds what it is there to find."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import pytest

from . import soak
from .__main__ import describe, plan_of, run_lane
from .lane import run_round
from .ledger import Violation
from .plan import Fault, Kind, Plan
from .proxy import QUIET
from .soak import STREAMS

pytestmark = [pytest.mark.faults, pytest.mark.slow]

# Seconds of the short form; a round that has begun is ended. FAULTS_SECONDS is how long .ci/run takes for it.
SECONDS = float(os.environ.get("FAULTS_SECONDS", "20"))


def test_nothing_is_lost_hung_or_leaked_under_faults(capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    with capsys.disabled():
        print(f"\nfault lane: seed {seed}, {SECONDS:g} s", flush=True)
    counts = run_lane(seed=seed, seconds=SECONDS)
    with capsys.disabled():
        print(describe(counts), flush=True)
    assert counts["rounds"]
    assert counts["payloads"]


def test_full_pools_and_slow_readers_are_among_the_faults(tmp_path: Path) -> None:
    counts = run_round(plain(seconds=1.5, pool=1 << 20, paces=(0.0, 0.1)), tmp_path)
    assert counts["puts into a full pool"]
    assert counts["rounds with a slow reader"] == 1


def test_a_source_is_not_minutes_ahead_of_a_slow_reader(tmp_path: Path) -> None:
    plan = plain(streams=1, seconds=1.5, pool=16 << 20, largest=4 << 10, ttl=1.0, paces=(0.0, 0.1))
    counts = run_round(plan, tmp_path)  # all of what was put, and has expired, is told one by one
    # So much at once, and then as fast as it is taken, which is as much again in the ten seconds that a round in which
    # everything expires goes on for a payload, and more while the machine is busy. Without a bound it is 5,000.
    assert counts["puts"] < 4 * plan.ahead
    assert counts["lost: Expired"]


def plain(**more: object) -> Plan:
    """A round in which gets are cancelled, copies take a while, and pools are small."""
    given: dict[str, object] = {
        "seed": "planted",
        "stages": 2,
        "streams": 8,
        "local": True,
        "pool": 2 << 20,
        "largest": 256 << 10,
        "ttl": None,
        "noise": QUIET,
        "paces": (0.0, 0.005),
        "impatience": 0.5,
        "slow_copies": True,
        "seconds": 5.0,
        "faults": (),
    }
    return Plan(**{**given, **more})  # type: ignore[arg-type]


def run_rounds(count: int, directory: Path, plant: str) -> None:
    """So many rounds, with a fault in the code."""
    for _ in range(count):
        run_round(plain(), directory, plant=plant, settle=15)


@pytest.mark.parametrize("plant", ["freed-while-pinned", "freed-destination", "ack-ignored"])
def test_a_planted_fault_is_found_within_a_minute(plant: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(Violation):
        run_rounds(5, tmp_path, plant)
    assert time.monotonic() - started < 60


def telling(plan: Plan) -> bool:
    """Whether a round can show what is planted: gets are cancelled while payloads are copied slowly."""
    return plan.slow_copies and plan.impatience >= 0.5 and plan.largest >= 64 << 10


@pytest.mark.parametrize("plant", ["freed-while-pinned", "freed-destination", "ack-ignored"])
def test_random_rounds_find_a_planted_fault_within_a_minute(plant: str, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = itertools.count(random.SystemRandom().randrange(1 << 32))
    # On a busy machine a minute is a handful of rounds, and not any of them can show it.
    seed = next(seed for seed in seeds if all(telling(plan_of(seed, number)) for number in range(3)))
    with capsys.disabled():
        print(f"\nfault lane: seed {seed}, {plant}", flush=True)
    with pytest.raises(Violation):
        run_lane(seed=seed, seconds=60.0, plant=plant, settle=15)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_a_fault_of_each_kind_hurts_nobody(kind: Kind, tmp_path: Path) -> None:
    lasts = 0.0 if kind in (Kind.CUT, Kind.STEP, Kind.DROP) else 0.5
    amount = {Kind.STARVE: 1, Kind.STEP: -86400}.get(kind, 0)
    place = 0 if kind in (Kind.REPLACE, Kind.DROP, Kind.CUT, Kind.HOLD) else 1
    plan = plain(stages=3, seconds=1.5, paces=(0.0, 0.0, 0.005), faults=(Fault(0.3, kind, place, lasts, amount),))
    counts = run_round(plan, tmp_path)
    assert counts["payloads"]
    assert counts[f"{kind.name.lower()}, {plan.role_of(place)}"] == 1


@pytest.mark.parametrize(("place", "seam"), [(0, 0), (1, 1), (2, 2), (1, 2)])
def test_a_stage_without_shared_memory_goes_on_and_one_that_starts_says_so_and_waits(
    place: int, seam: int, tmp_path: Path
) -> None:
    faults = (Fault(0.3, Kind.FULL, place, 0.5, seam), Fault(1.0, Kind.RETURN, place, 0.5, seam))
    counts = run_round(plain(stages=3, seconds=1.5, faults=faults, paces=(0.0, 0.0, 0.005)), tmp_path)
    assert counts["payloads"]
    assert counts["opened without shared memory: refused"] >= 2


def test_sixteen_streams_of_mixed_sizes_leave_memory_and_descriptors_as_they_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = max(SECONDS / 2, 30.0)
    sent, received = soak.soak(seconds, 1 << 62)
    with capsys.disabled():
        print(f"\n{soak.describe(seconds, sent, received)}", flush=True)
    assert list(soak.complaints(sent, received)) == []
    assert sent.chunks > STREAMS


def test_a_megabyte_a_second_and_one_descriptor_that_are_lost_are_found() -> None:
    sender, receiver = soak.complaints(*soak.soak(30.0, 1 << 62, leak=True))
    assert sender == "the sender has more descriptors than before: {'/dev/null': 1}"
    assert receiver.startswith("the receiver grew by ")
