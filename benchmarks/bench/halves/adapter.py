"""A connector under a chunk adapter, as vllm-omni's scheduler drives it: save_async here, a ready request there.

The loops of a producing and of a consuming scheduler come from the set-up of the environment (drive_adapter.py).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from argparse import Namespace
from typing import Any

import drive_adapter
import torch
import trio_mori_vllm_omni

from ..half import GIVE_UP, Half, Ready
from ..turn import Turn

MORI = "MoriTransferEngineConnector"
MEMORY = "SharedMemoryConnector"

STREAMS = 1024  # at once, as the adapter is made for; as many as are ever parked


class Counts:
    """Two numbers that both processes see: streams that were started, and streams that are over."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")

    def at(self, index: int) -> Count:
        return Count(self._words, index)


class Count:
    """One of them, as the loops want it."""

    def __init__(self, words: memoryview, index: int) -> None:
        self._words = words
        self._index = index

    @property
    def value(self) -> int:
        return int(self._words[self._index])

    @value.setter
    def value(self, value: int) -> None:
        self._words[self._index] = value


class Stage(Half):
    """`connector`: its name in vllm-omni's registry. `ours`: the chunk adapter of trio_mori drives it."""

    def __init__(self, role: str, connector: str, ours: bool = False) -> None:
        super().__init__(role)
        self._name = connector
        self._ours = ours

    def open(self, pool: int, other: Any) -> Any:
        torch.set_num_threads(1)
        trio_mori_vllm_omni.register()
        if self.role == "send":
            self._path = f"/dev/shm/trio-mori-bench-{os.getpid()}"
            with open(self._path, "wb") as file:
                file.truncate(16)
            other = [other, self._path]
        port, path = other
        self._counts = Counts(path)
        if self.role == "receive":
            os.unlink(path)
        self._extra: dict[str, Any] = {}
        if self._name != MEMORY:
            self._extra = {"host": "127.0.0.1", "zmq_port": port, "memory_pool_size": pool, "chunk_adapter": self._ours}
        self._adapter, _ = drive_adapter.make_adapter(self._arguments(Turn("streams", streams=STREAMS)), self._stage)
        return other

    @property
    def _stage(self) -> int:
        return 0 if self.role == "send" else 1

    def _arguments(self, turn: Turn) -> Namespace:
        # Stock Mori finds nothing with what the orchestrator tells a request of its sender; without, it asks.
        return Namespace(
            connector=self._name, extra=self._extra, plugin="", load_plugins=False, stages=2, requests=turn.streams,
            concurrency=turn.streams, chunks=turn.chunks, chunk_bytes=turn.size, interval_ms=turn.interval * 1000,
            tick_ms=1.0, timeout=GIVE_UP, stop_on_failure=True, tag=turn.tag,
            sender_info="none" if self._name == MORI else "orchestrator",
        )  # fmt: skip

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        if turn.scenario == "parked":
            return self._park(turn, ready) if self.role == "receive" else watch(turn)
        arguments, stop = self._arguments(turn), threading.Event()
        started, done = self._counts.at(0), self._counts.at(1)
        if self.role == "send":
            result = drive_adapter.produce(arguments, self._adapter, started, done, stop)
            if result["failed_sends"]:
                raise RuntimeError(f"{self._name} failed to send {result['failed_sends']}")
            return {"starts": table(turn, result["t_save"])}
        started.value = done.value = 0
        self._adapter._finished_load_reqs = drive_adapter.TimedSet()
        ready()
        result = drive_adapter.consume(arguments, self._adapter, 1, started, done, stop)
        if result["corrupt"] or len(result["t_ready"]) != turn.total:
            raise RuntimeError(
                f"{self._name}: {len(result['t_ready'])} of {turn.total} chunks came, {result['corrupt']} corrupt"
            )
        # Stock marks a request in its receiving thread, ours in a step of the scheduler; the step is the same for both.
        return {"ends": table(turn, result["t_ready"]), "steps": table(turn, result["t_sched"])}

    def _park(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        """Register requests, as a scheduler's step does, and make no further step."""
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue

        arguments = self._arguments(turn)
        info = drive_adapter.sender_info(arguments, 1)
        waiting, running, requests = FCFSRequestQueue(), list[Any](), {}
        for stream in range(turn.streams):
            request = drive_adapter.new_request(f"req{stream}-{turn.tag}")
            if info:
                request.payload_sender_info = dict(info)
            requests[request.request_id] = request
            waiting.add_request(request)
        self._adapter.process_pending_chunks(waiting, running, scheduler_requests=requests)
        time.sleep(1)  # until all of them have been asked for
        ready()
        result = watch(turn)
        for request_id in requests:
            self._adapter.cleanup_receiver(request_id)
        return result

    def close(self) -> None:
        self._adapter.shutdown()


def table(turn: Turn, times: dict[tuple[int, int], int]) -> list[list[int]]:
    return [[times[stream, chunk] for chunk in range(turn.chunks)] for stream in range(turn.streams)]


def watch(turn: Turn) -> dict[str, Any]:
    """What this process uses while nothing happens."""
    before = time.process_time_ns()
    time.sleep(turn.seconds)
    return {"idle_us": (time.process_time_ns() - before) / 1000}
