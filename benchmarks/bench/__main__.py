"""Measure, and write down. `make bench` sets up what it needs and runs this.

python -m benchmarks.bench                              everything, in twelve minutes on two quiet cores
python -m benchmarks.bench --quick                      whether it runs; its figures say nothing
python -m benchmarks.bench --scenario paced --peer async-unix --peer memory+stock-adapter
python -m benchmarks.bench --from FILE --publish        the page and README's table again, of a run that was kept
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import cases, machine
from .environments import Environment, Missing
from .measure import Run
from .peers import PEERS
from .publish import publish, verdict


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one or two turns of everything: does it run?")
    parser.add_argument("--full", action="store_true", help="also what takes too long for the standard run")
    parser.add_argument("--scenario", action="append", choices=cases.SCENARIOS, help="only this one; again for more")
    parser.add_argument("--case", action="append", help="only cases with this in their name; again for more")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this one; again for more")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each peer in each case (5)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16), help="of the order of the peers")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where to write (%(default)s)")
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing; read this JSON instead")
    parser.add_argument("--publish", action="store_true", help="write docs/performance.* and README's table of it")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run it; the JSON."""
    began = time.monotonic()
    wanted = [name for name in PEERS if not args.peer or name in args.peer]
    groups = [
        group
        for scenario, make in cases.SCENARIOS.items()
        if not args.scenario or scenario in args.scenario
        for group in make()
        if args.full or not group.is_extra
    ]
    needed = {
        PEERS[name].environment for group in groups for case in group.cases for name in case.peers if name in wanted
    }
    skipped: dict[str, str] = {}
    environments: dict[str, Environment] = {}
    log, log_path = tempfile.mkstemp(prefix="trio-mori-bench-", suffix=".log")
    for name in sorted(needed):
        try:
            environments[name] = Environment(name, log)
        except Missing as error:
            skipped |= {peer: str(error) for peer in wanted if PEERS[peer].environment == name}
    for peer, why in skipped.items():
        say(f"without {peer}: {why}")
    run = Run(environments, [name for name in wanted if name not in skipped], args.rounds, args.seed, say)
    result: dict[str, Any] = {
        "machine": machine.described(),
        "is_quick": args.quick,
        "rounds": min(args.rounds, cases.QUICK_ROUNDS) if args.quick else args.rounds,
        "seed": args.seed,
        "peers": {name: PEERS[name].title for name in wanted},
        "skipped": skipped,
        "cases": [],
    }
    try:
        say(f"starts {', '.join(environments)}")
        for environment in environments.values():
            environment.wait_ready()
        for group in groups:
            chosen = tuple(
                cases.quick(case) if args.quick else case
                for case in group.cases
                if not args.case or any(part in case.name for part in args.case)
            )
            if not chosen or not any(name in case.peers for case in chosen for name in wanted if name not in skipped):
                continue
            pool = min(group.pool, cases.QUICK_POOL) if args.quick else group.pool
            group = cases.Group(group.scenario, pool, chosen, group.one_by_one)
            say(f"{time.monotonic() - began:6.0f} s  {group.scenario}: opens {group.pool >> 20} MB pools")
            for case in run.group(group):
                result["cases"].append(case)
                say(f"{time.monotonic() - began:6.0f} s  {case['title']} ({case['seconds']} s)")
                for line in machine.one_line_each(case):
                    say(f"          {line}")
    finally:
        for environment in environments.values():
            environment.close()
    result |= {"seconds": round(time.monotonic() - began, 1), "failures": run.failures, "load_after": machine.load()}
    if run.failures:
        say(f"what the failed peers printed is in {log_path}")
    else:
        Path(log_path).unlink()
    return result


def main() -> None:
    args = arguments()
    if args.source:
        result = json.loads(args.source.read_text())
    else:
        result = measure(args)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        say(f"{args.json}: {len(result['cases'])} cases, {result['seconds']} s")
    if args.publish:
        publish(result)
        say("docs/performance.svg, docs/performance.md and README.md say so now")
    if not args.quick and not (args.scenario or args.case or args.peer):
        for line in verdict(result):
            say(line)
    ours = sorted({each["peer"] for each in result["failures"] if PEERS[each["peer"]].is_ours})
    if ours:
        sys.exit(f"failed: {', '.join(ours)}; what they said is in the JSON under failures")


if __name__ == "__main__":
    main()
