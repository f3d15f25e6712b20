"""Our connector beside stock ones under the stock chunk adapter, in turns, in one pair of processes.

    PYTHONPATH=SETUP:SETUP/fakemori python tests/vllm/compare_stages.py --rounds 10

SETUP is the folder with drive_adapter.py, whose producer and consumer run here. The turns of a round follow each other
within seconds, so that what else the machine does hits all alike; what counts is the ratio within a round. Printed are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import time
from argparse import Namespace
from multiprocessing.connection import Connection
from typing import Any

OURS, MEMORY, MORI = "TrioMoriConnector", "SharedMemoryConnector", "MoriTransferEngineConnector"
MODES: dict[str, dict[str, Any]] = {
    "one stream, 5 ms": {"requests": 30, "concurrency": 1, "interval_ms": 5.0},
    "16 streams, 50 ms": {"requests": 48, "concurrency": 16, "interval_ms": 50.0},
    "16 streams, flat out": {"requests": 64, "concurrency": 16, "interval_ms": 0.0},
}
BASE = 26000


def arguments(connector: str, mode: str, turn: int) -> Namespace:
    extra = {"host": "127.0.0.1", "zmq_port": BASE + 4 * (turn % 1000), "memory_pool_size": 256 << 20}
    return Namespace(
        **MODES[mode], connector=connector, extra={} if connector == MEMORY else extra, plugin="", load_plugins=False,
        stages=2, chunks=10, chunk_bytes=65536, tick_ms=1.0, timeout=60.0, stop_on_failure=False, tag=f"{turn:x}",
        sender_info="none" if connector == MORI else "orchestrator",
    )  # fmt: skip


def run_stage(stage: int, orders: Connection, started: Any, done: Any, stop: Any) -> None:
    import drive_adapter
    import torch
    import trio_mori_vllm_omni

    torch.set_num_threads(1)
    trio_mori_vllm_omni.register()
    while (order := orders.recv()) is not None:
        a = arguments(*order)
        adapter, _ = drive_adapter.make_adapter(a, stage)
        orders.send("ready")
        orders.recv()
        cpu = time.process_time()
        if stage == 0:
            result = drive_adapter.produce(a, adapter, started, done, stop)
        else:
            result = drive_adapter.consume(a, adapter, stage, started, done, stop)
        result["cpu"] = time.process_time() - cpu
        orders.send(result)
        orders.recv()
        adapter.shutdown()
        orders.send("over")


class Pair:
    """Two stage processes."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.started, self.done = (context.Value("i", 0, lock=False) for _ in range(2))
        self.stop = context.Event()
        self.pipes = []
        for stage in range(2):
            mine, theirs = context.Pipe()
            self.pipes.append(mine)
            shared = (self.started, self.done, self.stop)
            context.Process(target=run_stage, args=(stage, theirs, *shared), daemon=True).start()

    def say(self, word: object) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(word)
        return [pipe.recv() for pipe in self.pipes]

    def turn(self, connector: str, mode: str, number: int) -> dict[str, float]:
        self.started.value = self.done.value = 0
        self.say((connector, mode, number))
        sent, got = self.say("go")
        self.say("shut down")
        late = sorted(got["t_ready"][k] - t for k, t in sent["t_save"].items() if k in got["t_ready"])
        wanted = MODES[mode]["requests"] * 10
        if len(late) != wanted or got["corrupt"]:
            raise RuntimeError(f"{connector}, {mode}: {len(late)} of {wanted} chunks, {got['corrupt']} corrupt")
        seconds = (max(got["t_ready"].values()) - sent["t0"]) / 1e9
        return {
            "p50 ms": late[wanted // 2] / 1e6,
            "p99 ms": late[int(wanted * 0.99)] / 1e6,
            "chunks/s": wanted / seconds,
            "cpu ms/chunk": (sent["cpu"] + got["cpu"]) * 1000 / wanted,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--without", action="append", default=[], help="a connector to leave out")
    rounds, left_out = (vars(parser.parse_args())[name] for name in ("rounds", "without"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    connectors = [c for c in (OURS, MEMORY, MORI) if c not in left_out]
    pair = Pair()
    for mode in MODES:
        seen: dict[str, list[dict[str, float]]] = {c: [] for c in connectors}
        for number in range(rounds + 1):
            for connector in connectors[number % len(connectors) :] + connectors[: number % len(connectors)]:
                turn = list(MODES).index(mode) * 300 + number * 3 + connectors.index(connector)
                figures = pair.turn(connector, mode, turn)
                if number:  # the first round warms up
                    seen[connector].append(figures)
        load = os.getloadavg()[0]
        print(f"{mode} ({rounds} rounds, load {load:.1f})", flush=True)
        for connector in connectors:
            cells = []
            for name in seen[connector][0]:
                middle = statistics.median(f[name] for f in seen[connector])
                ratio = statistics.median(
                    ours[name] / f[name] for ours, f in zip(seen[OURS], seen[connector], strict=True)
                )
                cells.append(f"{name} {middle:.2f}" + ("" if connector == OURS else f" (ours {ratio:.2f}x)"))
            print(f"  {connector:28s} {', '.join(cells)}", flush=True)
    for pipe in pair.pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
