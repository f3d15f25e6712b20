"""One round of the lane: stages, what is done to them, and what has to be so in the end."""

from __future__ import annotations

import heapq
import itertools
import multiprocessing
import os
import random
import select
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

from . import stage
from .ledger import Ledger, Violation
from .plan import Fault, Kind, Plan
from .proxy import QUIET, Proxy

# Seconds. Below the longest faults, so that both happen: peers that are given up, and peers that are not.
TIMES = {"heartbeat_interval": 0.2, "peer_timeout": 1.5, "acknowledge_timeout": 1.5, "close_grace": 3.0}

# Seconds without any progress after which what is awaited counts as hung, once the faults are over: many times
# `peer_timeout`, for a machine that has other things to do, too.
SETTLE = 40.0

# Seconds in which a payload is waited for after the faults, before the sources are stopped: a stage that was killed
# last has not begun. Where all expires, none may come.
RESUME = 10.0

# Forked from one that has imported what takes seconds.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "trio", "msgspec", "zmq", "numpy", "trio_mori", "trio_mori._opening"])


@attrs.define(eq=False)
class Process:
    """A stage, as the lane sees it.

    Attributes:
        first: The numbers that it began with.
        port: Where it listens; 0: not known yet, or it does not.
        closed: What it left behind.
    """

    place: int
    handle: Any
    pipe: Connection
    first: dict[int, int]
    port: int = 0
    ready: bool = False
    looked: tuple[dict[str, Any], list[str], list[str]] | None = None
    closed: dict[str, int] | None = None
    stopped: bool = False
    unsaid: deque[tuple[object, ...]] = attrs.field(factory=deque)

    def say(self, *command: object) -> None:
        """Tell it a command, as soon as it hears."""
        self.unsaid.append(command)
        self.speak()

    def speak(self) -> None:
        """Say what it can hear now: one that is stopped or slow hears the rest later, and one that was killed nothing.

        It reports by the same pipe. If both sides waited for the other one to read, they would do so for ever.
        """
        while self.unsaid and not self.stopped and not self.pipe.closed and _takes(self.pipe):
            with suppress(BrokenPipeError, ConnectionResetError):
                self.pipe.send(self.unsaid.popleft())

    def stop(self) -> None:
        """Stop it, wherever it is."""
        if self.pipe.closed:
            return
        self.stopped = True
        os.kill(self.handle.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self.stopped = False
        if self.pipe.closed:
            return  # killed meanwhile: its number may be another's
        os.kill(self.handle.pid, signal.SIGCONT)
        self.speak()


def _takes(pipe: Connection) -> bool:
    """Whether a command can be sent without waiting."""
    return bool(select.select([], [pipe], [], 0)[1])


class Round:
    """See `run_round`."""

    def __init__(self, plan: Plan, directory: Path, plant: str, settle: float) -> None:
        self._plan = plan
        self._directory = directory
        self._plant = plant
        self._settle = settle
        self._chance = random.Random(f"{plan.seed}.round")
        self._incarnations = 0
        self._processes: dict[int, Process] = {}
        self._ports = {place: free_port() for place in range(plan.stages - 1)}
        self._proxies = {place: Proxy(random.Random(f"{plan.seed}.{place}")) for place in range(plan.stages - 1)}
        self._ledgers = {place: Ledger(f"stage {place}", plan.streams) for place in range(1, plan.stages)}
        self._ends: dict[tuple[int, int], int] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._killed_takers: set[int] = set()
        self._dropped = False
        self._progress_at = 0.0
        self.counts: Counter[str] = Counter()

    # --- processes ----------------------------------------------------------------------------------------

    def _start(self, place: int, first: dict[int, int], full: stage.Full | None = None) -> None:
        plan = self._plan
        config: dict[str, object] = {
            "host": "127.0.0.1",
            "memory_pool_size": plan.pool,
            "same_host_link": "auto" if plan.local else "off",
            "buffer_ttl_seconds": plan.ttl,
            **TIMES,
        }
        last = place == plan.stages - 1
        config["role"] = "sender" if place == 0 else "receiver" if last else "both"
        if not last:
            config["zmq_port"] = self._ports[place]
        if place:
            config |= {"sender_host": "127.0.0.1", "sender_zmq_port": self._proxies[place - 1].port}
        if place == 0:
            self._incarnations += 1
        spec = stage.Spec(
            place=place,
            last=last,
            incarnation=self._incarnations - 1,
            config=config,
            first=first,
            seed=plan.seed,
            largest=plan.largest,
            pace=plan.paces[place],
            ahead=plan.ahead,
            taking=plan.taking,
            impatience=plan.impatience,
            again=plan.kills,
            slow_copies=plan.slow_copies,
            plant=self._plant,
            full=full,
            log=str(self._directory / f"stage-{place}"),
        )
        ours, theirs = context.Pipe()
        handle = context.Process(target=stage.main, args=(theirs, spec), daemon=True)
        handle.start()
        theirs.close()
        self._processes[place] = Process(place, handle, ours, first)

    def _kill(self, place: int) -> None:
        process = self._processes[place]
        process.handle.kill()
        process.handle.join()
        self._hear(process)  # what it said before is true
        process.pipe.close()
        self._proxies_of(place)
        if place:
            self._killed_takers.add(place)

    def _proxies_of(self, place: int) -> None:
        if place in self._proxies:
            self._proxies[place].target = 0

    def _replace(self, place: int, full: stage.Full | None = None) -> None:
        """Start a stage in the place of one that was killed."""
        plan = self._plan
        if place == plan.stages - 1:
            self._start(place, dict(self._ledgers[place].next), full)
            return
        # What the stage behind it does not have. It may have said so only after this, and then it is told.
        first = dict(self._ledgers[place + 1].next)
        self._start(place, first, full)
        if place:
            self._ledgers[place].rewind(first)
            self._processes[place - 1].say("rewind", first)

    # --- what they say ------------------------------------------------------------------------------------

    def _hear(self, process: Process) -> None:
        with suppress(EOFError, OSError):
            while process.pipe.poll():
                what, *rest = process.pipe.recv()
                getattr(self, f"_on_{what}")(process, *rest)

    def _on_ready(self, process: Process, port: int) -> None:
        process.ready, process.port = True, port
        if process.place in self._proxies:
            self._proxies[process.place].target = port

    def _on_put(self, process: Process, stream: int, number: int) -> None:
        self.counts["puts"] += 1

    def _on_full(self, process: Process) -> None:
        self.counts["puts into a full pool"] += 1

    def _on_refused(self, process: Process, message: str) -> None:
        if "shm: memory ran out" not in message or "lower memory_pool_size" not in message:
            raise Violation(f"stage {process.place} has no shared memory, and is told: {message or 'nothing'}")
        self._progress_at = time.monotonic()
        self.counts["opened without shared memory: refused"] += 1

    def _on_took(self, process: Process, stream: int, number: int, read: Any) -> None:
        self._progress_at = time.monotonic()
        self._ledgers[process.place].took(stream, number, read, self._incarnations)
        if read.end and process.place < self._plan.stages - 1:
            self._ends[process.place, stream] = number
            self._end_again(process.place, stream)
        self._spare(process.place - 1, stream, number)
        self._end_again(process.place - 1, stream)

    def _on_lost(self, process: Process, stream: int, number: int, reason: str) -> None:
        self._progress_at = time.monotonic()
        allowed = {"Expired"} if self._plan.ttl else set()
        if self._dropped:
            allowed.add("Gone")
        self._ledgers[process.place].lost(stream, number, reason, frozenset(allowed))
        self._end_again(process.place - 1, stream)

    def _end_again(self, place: int, stream: int) -> None:
        """What ends a stream may be lost, too, or have the number of a payload that had arrived already."""
        after = self._ledgers[place + 1].next[stream]
        if after > self._ends.get((place, stream), after):
            self._ends[place, stream] = after
            self._processes[place].say("end", stream, after)

    def _spare(self, place: int, stream: int, number: int) -> None:
        """A stage that took the place of another one puts what that one had; this one had arrived already."""
        process = self._processes[place]
        if (self._incarnations > 1 or place) and process.first[stream] <= number < process.first[stream] + 100:
            process.say("skip", stream, number)

    def _on_told(self, process: Process, stream: int, number: int, reason: str) -> None:
        self.counts[f"told {reason}"] += 1

    def _on_ended(self, process: Process, stream: int, number: int) -> None:
        self._ends[process.place, stream] = number
        self._end_again(process.place, stream)

    def _on_looked(self, process: Process, statistics: dict[str, Any], kept: list[str], matters: list[str]) -> None:
        process.looked = (statistics, kept, matters)

    def _on_closed(self, process: Process, more: dict[str, int]) -> None:
        process.closed = more

    # --- time ---------------------------------------------------------------------------------------------

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))

    def _settles(self, condition: Callable[[], object]) -> bool:
        """Listen to all until a condition holds; False: it does not, and nothing else happens either."""
        self._progress_at = time.monotonic()
        while not self._wait(1.0, condition):
            if time.monotonic() - self._progress_at > self._settle:
                return False
        return True

    def _wait(self, limit: float, condition: Callable[[], object] = lambda: False) -> bool:
        """Listen to all until a condition holds; False: it did not in time."""
        until = time.monotonic() + limit
        while not condition():
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            if now >= until:
                return False
            pause = min(until - now, 0.05, *(due - now for due, *_ in self._due[:1]))
            pipes = {each.pipe: each for each in self._processes.values() if not each.pipe.closed}
            for pipe in wait(list(pipes), max(pause, 0)):
                self._hear(pipes[pipe])  # type: ignore[index]
            for process in self._processes.values():
                process.speak()
            self._check_alive()
        return True

    def _check_alive(self) -> None:
        for process in self._processes.values():
            if not process.pipe.closed and process.handle.exitcode is not None and process.closed is None:
                self._hear(process)
                if process.closed is None:
                    raise Violation(f"stage {process.place} ended by itself, status {process.handle.exitcode}")

    # --- faults -------------------------------------------------------------------------------------------

    def _inflict(self, fault: Fault) -> None:
        place, seconds = fault.place, fault.seconds
        self.counts[f"{fault.kind.name.lower()}, {self._plan.role_of(place)}"] += 1
        process = self._processes[place]
        if fault.kind is Kind.KILL or fault.kind is Kind.REPLACE:
            self._kill(place)
            self._later(seconds, lambda: self._replace(place))
        elif fault.kind is Kind.STOP:
            process.stop()
            self._later(seconds, process.go_on)
        elif fault.kind is Kind.STARVE:
            process.say("starve", fault.amount, seconds)
        elif fault.kind is Kind.FULL:
            process.say("fill", stage.Full(fault.amount, seconds))
        elif fault.kind is Kind.RETURN:
            self._kill(place)
            self._replace(place, stage.Full(fault.amount, seconds))
        elif fault.kind is Kind.STEP:
            process.say("step", fault.amount)
        elif fault.kind is Kind.CUT:
            self._proxies[place].cut()
        elif fault.kind is Kind.HOLD:
            self._set_holding(place, holding=True)
            self._later(seconds, lambda: self._set_holding(place, holding=False))
        elif fault.kind is Kind.DROP:
            self._dropped = True
            for stream, number in self._ledgers[1].next.items():
                process.say("drop", stream, number + self._chance.randrange(3))

    def _set_holding(self, place: int, *, holding: bool) -> None:
        self._proxies[place].holding = holding

    # --- the round ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """All of it.

        Raises:
            Violation: something was not as it has to be.
        """
        plan = self._plan
        self.counts["rounds with a slow reader"] += plan.paces[-1] > max(plan.paces[:-1])
        for place in range(plan.stages):
            self._start(place, dict.fromkeys(range(plan.streams), 0))
        if not self._wait(3 * SETTLE, lambda: all(each.ready for each in self._processes.values())):
            raise Violation("a stage does not come up")
        for proxy in self._proxies.values():
            proxy.noise = plan.noise
        for fault in plan.faults:
            self._later(fault.at, lambda fault=fault: self._inflict(fault))  # type: ignore[misc]
        self._wait(plan.seconds)
        self._settles(lambda: not self._due)
        last = self._ledgers[plan.stages - 1].counts
        before = last["payloads"]
        self._wait(RESUME, lambda: last["payloads"] > before)
        for proxy in self._proxies.values():
            proxy.noise = QUIET
        self._finish()
        self._look_for_leaks()
        self._close()

    def _finish(self) -> None:
        """Let all that is under way arrive."""
        self._processes[0].say("stop")
        last = self._ledgers[self._plan.stages - 1]
        if not self._settles(lambda: len(last.ends) == self._plan.streams):
            missing = {stream: last.next[stream] for stream in last.next if stream not in last.ends}
            raise Violation(f"hung: the last stage waits for {missing}, and has got all else")
        for stream, number in last.ends.items():
            if number != self._ends.get((self._plan.stages - 2, stream), number):
                raise Violation(f"stream {stream} ends at {number}, but it was ended at {self._ends}")
        self.counts.update(last.counts)

    def _look_for_leaks(self) -> None:
        """Both pools of each edge are wholly free, but for what a killed receiver had taken and not acknowledged."""
        until = time.monotonic() + self._settle
        while wrong := self._look():
            if time.monotonic() > until:
                raise Violation(f"leaked: {wrong}")
            self._wait(0.2)

    def _look(self) -> str:
        for process in self._processes.values():
            process.looked = None
            process.say("look")
        if not self._settles(lambda: all(each.looked for each in self._processes.values())):
            return "a stage does not answer"
        for process in self._processes.values():
            assert process.looked is not None
            statistics, kept, _ = process.looked
            for key in kept:
                # Delivered to a process that was killed before it could say so: nobody asks for it any more.
                stream, number = map(int, key.partition("@")[0].split("."))
                killed = {process.place, process.place + 1} & self._killed_takers
                if killed and number < self._ledgers[process.place + 1].next[stream]:
                    process.say("drop", stream, number)
                    self.counts["unacknowledged by the dead"] += 1
            held = {state: size for state, size in statistics["held"].items() if size and state != "free"}
            if held or statistics["in_flight"] or statistics["parked"]:
                return f"stage {process.place}: {held}, {statistics['in_flight']} writes, {kept[:20]}"
        return ""

    def _close(self) -> None:
        order = list(self._processes.values())
        self._chance.shuffle(order)
        for process in order:
            process.say("close")
        if not self._settles(lambda: all(each.closed is not None for each in order)):
            raise Violation(f"does not close: {[f'stage {each.place}' for each in order if each.closed is None]}")
        for process in order:
            process.handle.join(10)
            if process.handle.exitcode != 0:
                raise Violation(f"stage {process.place} ended with status {process.handle.exitcode}")
            if any(process.closed.values()):  # type: ignore[union-attr]
                raise Violation(f"stage {process.place} left behind: {process.closed}")

    def look_closely(self) -> None:
        """Ask all for how they are, as far as they still answer."""
        for process in self._processes.values():
            process.looked = None
            process.say("look")
        if not self._wait(20, lambda: all(each.looked for each in self._processes.values())):
            for process in self._processes.values():
                if process.looked is None and process.handle.is_alive():
                    os.kill(process.handle.pid, signal.SIGUSR1)  # where is it?
            self._wait(1)

    def _describe(self) -> str:
        lines = []
        for process in self._processes.values():
            statistics, kept, matters = process.looked or ({}, [], [])
            lines.append(f"stage {process.place}: {statistics} keeps {kept[:20]}")
            lines += matters
            log = self._directory / f"stage-{process.place}"
            if log.exists():
                lines += log.read_text(errors="replace").splitlines()[-30:]
        for place, proxy in self._proxies.items():
            lines += [f"proxy of stage {place}: {line}" for line in proxy.describe()]
        return "\n".join(lines)

    def clear(self) -> None:
        """End whatever is left."""
        for process in self._processes.values():
            if process.handle.is_alive():
                process.handle.kill()
            process.handle.join()
            process.pipe.close()
        for proxy in self._proxies.values():
            self.counts.update({f"link {name}": count for name, count in proxy.counts.items()})
            proxy.close()


def free_port() -> int:
    """A port where nobody listens, outside of those that connections are given."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_round(plan: Plan, directory: Path, *, plant: str = "", settle: float = SETTLE) -> Counter[str]:
    """Run a round; returns what was done, and what came.

    Args:
        directory: For the logs of the stages.
        plant: A fault in the code itself, see `plants`.
        settle: Seconds until everything has to be in order, once the faults are over.

    Raises:
        Violation: something was not as it has to be.
    """
    for old in directory.iterdir():
        old.unlink()
    round_ = Round(plan, directory, plant, settle)
    try:
        round_.run()
    except Violation as violation:
        with suppress(Violation):
            round_.look_closely()
        raise Violation(f"{violation}\n--- the round (seed {plan.seed}): {plan}\n{round_._describe()}") from None
    finally:
        round_.clear()
    return round_.counts
