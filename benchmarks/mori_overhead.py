"""What `Engine.write` adds to Mori: 64 KiB to another process, against a bare `batch_write` and `Wait`, in turns.

    python benchmarks/mori_overhead.py        on AMD GPUs; or in the lane, see docs/mori.md

Both go round the pool, as payloads do, so that neither copies what the caches hold already. What else runs on the
machine makes rounds slower, now of this and now of that: the ratio is the median of those of single rounds, in which
both take turns.

And what Mori's sessions spare: `batch_write` and a session's `write`, each with a `Wait`, in turns, always at one
place.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from trio_mori._engines import open_engine
from trio_mori._engines._mori_library import IOEngine, load
from trio_mori.abc import Descriptor, Write

SIZE = 64 << 10
POOL = 64 << 20
ROUNDS = 100
WRITES = 100


def emulate() -> None:
    """Use the lane's GPUs, where there is one."""
    try:
        import moriemu
    except ModuleNotFoundError:
        return
    moriemu.install()


async def own() -> None:
    async with open_engine("xgmi", pool_size=POOL, device="cuda:1") as engine:
        engine.region.tensor.zero_()
        print(engine.descriptor.engine.hex(), engine.descriptor.memory.hex(), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


def time_in_place(write: Callable[[], list[Any]]) -> list[float]:
    """Some writes, each with the wait for its end."""
    times = []
    for _ in range(WRITES):
        began = time.perf_counter()
        write()[0].Wait()
        times.append(time.perf_counter() - began)
    return times


async def compare(descriptor: Descriptor, limit: float | None) -> None:
    mori = load()
    async with open_engine("xgmi", pool_size=POOL, device="cuda:0") as engine:
        engine.region.tensor.zero_()
        peer = engine.add_peer(descriptor)
        bare = mori.IOEngine(f"bare-{time.monotonic_ns()}", mori.IOEngineConfig("127.0.0.1", 0))
        bare.create_backend(mori.BackendType.XGMI, mori.XgmiBackendConfig(64, 64))
        local = bare.register_torch_tensor(engine.region.tensor)
        bare.register_remote_engine(mori.EngineDesc.unpack(descriptor.engine))
        remote = mori.MemoryDesc.unpack(descriptor.memory)
        cursor = itertools.count(0, SIZE)

        def write_bare(bare: IOEngine) -> list[float]:
            times = []
            for _ in range(WRITES):
                at = next(cursor) % POOL
                began = time.perf_counter()
                status = bare.batch_write([local], [[at]], [remote], [[at]], [[SIZE]], [bare.allocate_transfer_uid()])
                status[0].Wait()
                times.append(time.perf_counter() - began)
            return times

        async def write_ours() -> list[float]:
            times = []
            for _ in range(WRITES):
                at = next(cursor) % POOL
                write = Write(at, at, SIZE)
                began = time.perf_counter()
                await engine.write(peer, write)
                times.append(time.perf_counter() - began)
            return times

        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        for number in range(ROUNDS):
            if number % 2:
                ours.append(await write_ours())
            theirs.append(write_bare(bare))
            if not number % 2:
                ours.append(await write_ours())
        batches: list[list[float]] = []
        sessions: list[list[float]] = []
        if session := bare.create_session(local, remote):

            def write_batch(bare: IOEngine) -> list[Any]:
                uids = [bare.allocate_transfer_uid()]
                return [*bare.batch_write([local], [[0]], [remote], [[0]], [[SIZE]], uids)]

            def write_by_session() -> list[Any]:
                return [session.write(0, 0, SIZE, next(cursor))]

            for _ in range(ROUNDS):
                batches.append(time_in_place(partial(write_batch, bare)))
                sessions.append(time_in_place(write_by_session))
            del session
        bare.deregister_memory(local)
        del bare
    for name, rounds in (
        ("bare batch_write + Wait", theirs),
        ("Engine.write", ours),
        ("one place: batch_write", batches),
        ("one place: by a session", sessions),
    ):
        if not rounds:
            continue
        times = list(itertools.chain(*rounds))
        p99 = statistics.quantiles(times, n=100)[98]
        print(f"{name:24} p50 {1e6 * statistics.median(times):7.1f} us   p99 {1e6 * p99:7.1f} us")
    ratio = statistics.median(
        statistics.median(our) / statistics.median(their) for our, their in zip(ours, theirs, strict=True)
    )
    print(f"ratio {ratio:.2f}")
    if limit is not None and ratio > limit:
        sys.exit(f"more than {limit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, help="exit with an error if the ratio is above this")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    emulate()
    if arguments.own:
        trio.run(own)
        return
    command = [sys.executable, __file__, "--own"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        descriptor = Descriptor(*map(bytes.fromhex, other.stdout.readline().split()))
        trio.run(compare, descriptor, arguments.limit)
        other.communicate()


if __name__ == "__main__":
    main()
