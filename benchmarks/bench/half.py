"""One half of a peer: the process that sends, or the one that receives. Only the standard library."""

from __future__ import annotations

import abc
import contextlib
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .turn import Pipe, Turn

Ready = Callable[[], None]

GIVE_UP = 60.0  # seconds; nothing here takes a tenth of it
PAUSE = 0.001  # seconds before each put and get of a payload that is there, as between the chunks of a stream


def cpu_us() -> float:
    """CPU time of this process so far, all threads, in microseconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 1e6


def memory_kb(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def forget_peak() -> None:
    """Let `VmHWM` start again from now. Where the kernel forbids it, the peak is that of the process's whole life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def busy_thread(share: float) -> Iterator[None]:
    """Another thread that runs Python for this share of the time, in pieces of 10 ms, as a scheduler's steps are."""
    if not share:
        yield
        return
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            until = time.perf_counter() + 0.010 * share
            while time.perf_counter() < until:
                pass
            time.sleep(0.010 * (1 - share))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Half(abc.ABC):
    """What the controlling process drives: `open`, any number of turns, `close`.

    The receiving half of ``streams`` and ``parked`` calls `ready` when it waits; only then is the sending one told to
    begin. Times are CLOCK_MONOTONIC in nanoseconds, which all processes of a host share.
    """

    def __init__(self, role: str) -> None:
        self.role = role

    @abc.abstractmethod
    def open(self, pool: int, other: Any) -> Any:
        """Be ready for turns with a pool of that size.

        `other`: for a sender a port that is free, as the next one is; for a receiver what its sender's `open` returned.
        """

    @abc.abstractmethod
    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        """Do it. What comes back is merged with what the other half returns; see `measure`."""

    def meet(self, other: Any) -> None:  # noqa: B027
        """A sender is told what its receiver's `open` returned."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it."""

    def serve(self, pipe: Pipe) -> None:
        """Do what is ordered until the pipe ends, or `close`."""
        self._base = memory_kb("VmRSS")
        while True:
            order = pipe.receive()
            try:
                answer = self._do(order, pipe)
            except Exception:  # noqa: BLE001 - carried over to the controlling process
                answer = {"error": traceback.format_exc()}
            pipe.send(answer)
            if order["do"] == "close":
                return

    def _do(self, order: dict[str, Any], pipe: Pipe) -> dict[str, Any]:
        if order["do"] == "open":
            return {"other": self.open(order["pool"], order["other"])}
        if order["do"] == "meet":
            self.meet(order["other"])
            return {}
        if order["do"] == "close":
            self.close()
            return {}
        with measured(order["turn"], self._base) as result:
            result |= self.turn(Turn(**order["turn"]), lambda: pipe.send({"ready": True}))
        return result


@contextlib.contextmanager
def measured(turn: dict[str, Any], base_kb: int) -> Iterator[dict[str, Any]]:
    """Around a turn: what this process used. A receiver's begins before it says that it waits."""
    result: dict[str, Any] = {}
    forget_peak()
    before = cpu_us()
    with busy_thread(turn["busy"]):
        yield result
    result["cpu_us"] = cpu_us() - before
    result["peak_mb"] = (memory_kb("VmHWM") - base_kb) / 1024


def pace(begin: float, turn: Turn, chunk: int) -> float:
    """Seconds until the next chunk of every stream is due."""
    return begin + chunk * turn.interval - time.monotonic() if turn.interval else 0.0
