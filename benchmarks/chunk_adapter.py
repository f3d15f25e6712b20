"""Our chunk adapter on our connector beside vllm-omni's own on its shared memory, in turns, in one pair of processes.

    PYTHONPATH=SETUP python benchmarks/chunk_adapter.py --rounds 5     # in the lane's environment: docs/vllm-omni.md

SETUP is the folder with drive_adapter.py, whose producer and consumer run here. The turns of a round follow each other
within seconds, so that what else the machine does hits both alike; what counts is the ratio within a round. Clocks run
from the call of `save_async` until

* *there*: the chunk is in the receiving process, decoded: stock's thread has committed it, our loop has handed it over;
* *ready*: the scheduler finds it committed, as drive_adapter.py has it. Ours is committed in the scheduler's tick;
* *run*: a tick schedules its request. The same for both.

The first request of each stream is left out of these: it waits for the connection, once in the life of a stage.

*200 waiting* is the receiving process's CPU while 200 requests wait and nothing comes, without ticks.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import time
from argparse import Namespace
from collections import defaultdict, deque
from multiprocessing.connection import Connection
from typing import Any

OURS, STOCK = "TrioMoriConnector", "SharedMemoryConnector"
MODES: dict[str, dict[str, Any]] = {
    "one stream, 5 ms": {"requests": 30, "concurrency": 1, "interval_ms": 5.0},
    "16 streams, 50 ms": {"requests": 48, "concurrency": 16, "interval_ms": 50.0},
    "16 streams, flat out": {"requests": 96, "concurrency": 16, "interval_ms": 0.0},
}
BASE = 26000
CHUNKS = 10
IDLE = 3.0


def arguments(connector: str, mode: str, turn: int) -> Namespace:
    extra = {
        "host": "127.0.0.1", "zmq_port": BASE + 4 * (turn % 1000), "memory_pool_size": 256 << 20, "chunk_adapter": True,
    }  # fmt: skip
    return Namespace(
        **MODES[mode], connector=connector, extra=extra if connector == OURS else {}, plugin="", load_plugins=False,
        stages=2, chunks=CHUNKS, chunk_bytes=65536, tick_ms=1.0, timeout=60.0, stop_on_failure=False, tag=f"{turn:x}",
        sender_info="orchestrator",
    )  # fmt: skip


class TimedEvents(deque[Any]):
    """What our loop hands over, with the moment of each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, list[int]] = defaultdict(list)

    def append(self, event: Any) -> None:
        super().append(event)
        if hasattr(event, "payload"):
            self.times[event.flow.request_id].append(time.monotonic_ns())


def run_stage(stage: int, orders: Connection, started: Any, done: Any, stop: Any) -> None:
    import drive_adapter
    import torch
    import trio_mori_vllm_omni
    from trio_mori_vllm_omni.chunks._courier import Courier

    torch.set_num_threads(1)
    trio_mori_vllm_omni.register()
    build = Courier.__init__

    def timed(self: Any, *args: Any) -> None:
        build(self, *args)
        self._events = TimedEvents()

    Courier.__init__ = timed  # type: ignore[method-assign]
    while (order := orders.recv()) is not None:
        a = arguments(*order[:3])
        adapter, _ = drive_adapter.make_adapter(a, stage)
        orders.send(type(adapter).__name__)
        word = orders.recv()
        cpu = time.process_time()
        if word == "idle":
            result = wait_idle(a, adapter, stage)
        elif stage == 0:
            result = drive_adapter.produce(a, adapter, started, done, stop)
        else:
            result = drive_adapter.consume(a, adapter, stage, started, done, stop)
            result["t_there"] = result["t_ready"]
            if order[0] == OURS:
                times = adapter._desk._loop._events.times
                result["t_there"] = {
                    (int(name.partition("-")[0][3:]), chunk): at
                    for name, all_of_it in times.items()
                    for chunk, at in enumerate(all_of_it)
                }
        result["cpu"] = result.get("cpu", time.process_time() - cpu)
        orders.send(result)
        orders.recv()
        adapter.shutdown()
        orders.send("over")


def wait_idle(a: Namespace, adapter: Any, stage: int) -> dict[str, Any]:
    """200 requests wait, and nothing comes."""
    import drive_adapter
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    if stage == 1:
        queue = FCFSRequestQueue()
        for at in range(200):
            queue.add_request(drive_adapter.new_request(f"idle{at}-{a.tag}"))
        adapter.process_pending_chunks(queue, [])
        adapter.restore_queues(queue, [])
    time.sleep(1.0)
    cpu = time.process_time()
    time.sleep(IDLE)
    return {"cpu": (time.process_time() - cpu) / IDLE}


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

    def begin(self, connector: str, mode: str, number: int) -> None:
        self.started.value = self.done.value = 0
        expected = "TrioChunkTransferAdapter" if connector == OURS else "OmniChunkTransferAdapter"
        kinds = self.say((connector, mode, number))
        if kinds != [expected] * 2:
            raise RuntimeError(f"the stages have made {kinds}")

    def turn(self, connector: str, mode: str, number: int) -> dict[str, float]:
        self.begin(connector, mode, number)
        sent, got = self.say("go")
        self.say("shut down")
        wanted = MODES[mode]["requests"] * CHUNKS
        figures: dict[str, float] = {}
        if len(got["t_ready"]) != wanted or got["corrupt"]:
            raise RuntimeError(
                f"{connector}, {mode}: {len(got['t_ready'])} of {wanted} chunks, {got['corrupt']} corrupt"
            )
        first = MODES[mode]["concurrency"]
        for name in ("there", "ready", "sched"):
            times = got[f"t_{name}"]
            late = sorted(times[k] - t for k, t in sent["t_save"].items() if k[0] >= first)
            label = "run" if name == "sched" else name
            figures[f"{label} p50 ms"] = late[len(late) // 2] / 1e6
            figures[f"{label} p99 ms"] = late[int(len(late) * 0.99)] / 1e6
        seconds = (max(got["t_ready"].values()) - sent["t0"]) / 1e9
        figures["chunks/s"] = wanted / seconds
        figures["sender cpu ms/chunk"] = sent["cpu"] * 1000 / wanted
        figures["receiver cpu ms/chunk"] = got["cpu"] * 1000 / wanted
        return figures

    def idle(self, connector: str, number: int) -> dict[str, float]:
        self.begin(connector, next(iter(MODES)), number)
        _, got = self.say("idle")
        self.say("shut down")
        return {"cpu %": got["cpu"] * 100}


def show(title: str, seen: dict[str, list[dict[str, float]]]) -> None:
    print(f"{title} ({len(seen[OURS])} rounds, load {os.getloadavg()[0]:.1f})", flush=True)
    for name in seen[OURS][0]:
        ours, stock = ([figures[name] for figures in seen[connector]] for connector in (OURS, STOCK))
        ratios = sorted(a / b for a, b in zip(ours, stock, strict=True) if b)
        ratio = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-"
        print(f"  {name:22s} ours {statistics.median(ours):9.3f}  stock {statistics.median(stock):9.3f}  ours {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="one mode, by a part of its name")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    pair, number = Pair(), 0
    for mode in [*MODES, "200 waiting"]:
        if given.only and given.only not in mode:
            continue
        seen: dict[str, list[dict[str, float]]] = {OURS: [], STOCK: []}
        for at in range(given.rounds + 1):
            for connector in (OURS, STOCK) if at % 2 else (STOCK, OURS):
                number += 1
                figures = pair.turn(connector, mode, number) if mode in MODES else pair.idle(connector, number)
                if at:  # the first round warms up
                    seen[connector].append(figures)
        show(mode, seen)
    for pipe in pair.pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
