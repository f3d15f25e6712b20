"""Where a chunk's CPU time goes: samples of both processes of a peer, by py-spy, while a case is repeated.

    python -m benchmarks.bench.where --case flat-out-16 --peer async-unix --peer shim+our-adapter

A sample counts for the code that ran, not for what called it; what the standard library and torch do is their caller's.
The microseconds are its share of the CPU time of the process by getrusage. py-spy stops a process for each look, which
makes everything take longer: read what stands to what.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import cases
from .environments import ROOT, Environment
from .peers import PEERS, Pair

RATE = 250  # looks per second
BETWEEN = 3  # chunks of the turn that warms up

OTHERS = "benchmark, vllm-omni"

# Whose a file is: the first with which its name begins. What is of none (the standard library, torch) is its caller's.
JOBS = (
    ("trio_mori/_protocol/wire.py", "messages"),
    ("trio_mori/_protocol/stock_wire.py", "messages"),
    ("trio_mori/_protocol/", "the books"),
    ("trio_mori/_payload_copy.py", "copies, tensors"),
    ("trio_mori/_engines/", "copies, tensors"),
    ("trio_mori/_spare.py", "copies, tensors"),
    ("trio_mori/_payload", "headers"),
    ("trio_mori/_unix", "messages"),
    ("trio_mori/_zmq", "messages"),
    ("trio_mori/_link.py", "messages"),
    ("zmq/", "messages"),
    ("trio_mori/", "between them"),
    ("trio_mori_vllm_omni/", "shim, adapter"),
    ("trio/", "trio"),
    ("outcome/", "trio"),
    ("bench/", OTHERS),
    ("vllm", OTHERS),
    ("drive_adapter.py", OTHERS),
)


def job_of(stack: str) -> str:
    """Whose code runs, by py-spy's ``name (file:line);...`` from the outermost frame on."""
    for frame in reversed(stack.split(";")):
        file = frame.rpartition("(")[2]
        for start, job in JOBS:
            if file.startswith(start):
                return job
    return OTHERS


def shares(lines: Iterable[str]) -> dict[str, float]:
    """The share of each job, of py-spy's raw output: a stack and a count in each line."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        found[job_of(stack)] += int(count)
    total = sum(found.values())
    return {job: count / total for job, count in found.items()}


def spy() -> str:
    """py-spy's command."""
    for candidate in (ROOT / ".venv-bench/bin/py-spy", Path(sys.executable).with_name("py-spy")):
        if candidate.exists():
            return str(candidate)
    found = shutil.which("py-spy")
    if found is None:
        sys.exit("no py-spy: pip install py-spy")
    return found


def watch(case: cases.Case, pool: int, name: str, seconds: float) -> dict[str, tuple[float, dict[str, float]]]:
    """CPU microseconds of a chunk, and the shares of them, of the sending and of the receiving process."""
    peer = PEERS[name]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "wb") as log:
        environment = Environment(peer.environment, log.fileno())
        try:
            environment.wait_ready()
            pair = Pair(peer, environment)
            pair.open(pool)
            pair.turn(dataclasses.replace(case.turn, chunks=BETWEEN, tag="w"))
            spies = [record(process, f"{folder}/{role}") for role, process in pair.processes.items()]
            cpu = dict.fromkeys(pair.processes, 0.0)
            chunks, until = 0, time.monotonic() + seconds
            while time.monotonic() < until:
                chunks += case.turn.total
                for role, half in pair.turn(dataclasses.replace(case.turn, tag=f"t{chunks:x}")).items():
                    cpu[role] += half["cpu_us"]
            for each in spies:
                each.send_signal(signal.SIGINT)
                each.wait()
            pair.close()
        finally:
            environment.close()
        found = {role: shares(Path(f"{folder}/{role}").read_text().splitlines()) for role in cpu}
    return {role: (cpu[role] / chunks, found[role]) for role in cpu}


def record(process: int, path: str) -> subprocess.Popen[bytes]:
    """Look at a process until SIGINT."""
    command = [spy(), "record", "--rate", str(RATE), "--format", "raw", "--output", path, "--pid", str(process)]
    return subprocess.Popen([*command, "--duration", "unlimited"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def table(found: dict[str, dict[str, tuple[float, dict[str, float]]]]) -> Iterator[str]:
    """A column for each process of each peer."""
    columns = [(f"{name}, {role}", *half) for name, halves in found.items() for role, half in halves.items()]
    yield "| CPU us per chunk | " + " | ".join(title for title, _, _ in columns) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for job in dict.fromkeys(job for _, job in JOBS):
        yield f"| {job} | " + " | ".join(f"{cpu * part.get(job, 0):.0f}" for _, cpu, part in columns) + " |"
    yield "| all | " + " | ".join(f"{cpu:.0f}" for _, cpu, _ in columns) + " |"


def main() -> None:
    groups = [(group, case) for make in cases.SCENARIOS.values() for group in make() for case in group.cases]
    streams = {case.name: (case, group.pool) for group, case in groups if case.turn.scenario == "streams"}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench.where",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", choices=streams, default="flat-out-16")
    parser.add_argument("--peer", action="append", choices=PEERS, required=True, help="again for more")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each peer (%(default)s)")
    args = parser.parse_args()
    case, pool = streams[args.case]
    print(case.title, flush=True)
    for line in table({name: watch(case, pool, name, args.seconds) for name in args.peer}):
        print(line)


if __name__ == "__main__":
    main()
