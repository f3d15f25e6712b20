"""See the package."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from .lane import SETTLE, run_round
from .ledger import Violation
from .plan import Plan, make_plan
from .plants import PLANTS


def run_lane(
    *, seed: int, seconds: float, first: int = 0, rounds: int | None = None, plant: str = "", settle: float = SETTLE
) -> Counter[str]:
    """Rounds until the time is over; returns what was done in all of them.

    Raises:
        Violation: of the first round in which something was not as it has to be.
    """
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    number = first
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        while time.monotonic() < until and (rounds is None or number < first + rounds):
            plan = plan_of(seed, number)
            counts["rounds"] += 1
            counts += run_round(plan, Path(directory), plant=plant, settle=settle)
            number += 1
    return counts


def plan_of(seed: int, number: int) -> Plan:
    """A round of a seed."""
    return make_plan(f"{seed}.{number}", random.Random(f"{seed}.{number}.time").choice((3.0, 6.0)))


def describe(counts: Counter[str]) -> str:
    """What was done, in lines."""
    return "\n".join(f"  {name}: {count}" for name, count in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Run the fault lane.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="by default another one each time; it is printed")
    parser.add_argument("--round", type=int, default=0, help="the number of the first round")
    parser.add_argument("--rounds", type=int, default=None, help="at most so many")
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help="a fault in the code itself, to be found")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"fault lane: seed {seed}, {arguments.minutes:g} minutes", flush=True)
    started = time.monotonic()
    try:
        counts = run_lane(
            seed=seed,
            seconds=60 * arguments.minutes,
            first=arguments.round,
            rounds=arguments.rounds,
            plant=arguments.plant,
        )
    except Violation as violation:
        print(f"FOUND after {time.monotonic() - started:.0f} s: {violation}")
        return 1
    print(f"{describe(counts)}\nfault lane: seed {seed}, {time.monotonic() - started:.0f} s, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
