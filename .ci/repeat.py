"""See `repeat`, which starts this.

The imports and the collection, most of all that of torch, take as long as the tests. They are done once; each run is a
child that is forked there, with an order and a directory of its own. As many children run at once as there are cores,
so that none has a machine to itself.

A run takes a share of the tests, drawn by its seed, so that it lasts 5 s at most: nobody waits for a thousand longer
ones. So in N runs each test has its turn N / SHARE times, each time after others. Its seed alone brings a run back.

Left out are tests of modules that have no tasks, threads and sockets, more than half of all: what is computed alone is
the same each time, and `make test` runs those in random order, too.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

import attrs
import pytest

# Seconds for one run: many times what it takes on a machine that is busy with other things too.
LIMIT = 300

# One test of so many is in a run.
SHARE = 3


@attrs.frozen
class Run:
    """A run in a child."""

    seed: int
    pid: int
    pidfd: int
    started: float
    directory: Path

    @property
    def log(self) -> Path:
        """What its failed tests said."""
        return self.directory / "log"


class Repeat:
    """In place of pytest's own loop over the tests: many, each in a child.

    Attributes:
        failed: Seeds of the runs that failed.
        seconds: Of processor time, for each run.
    """

    def __init__(self, runs: int, first: int) -> None:
        self.failed: list[int] = []
        self.seconds: list[float] = []
        self._seeds = iter(range(first, first + runs))
        self._running: dict[int, Run] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _may_differ(item)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for seed in self._seeds:
            self._start(session, seed)
            while len(self._running) >= (os.cpu_count() or 1):
                self._wait()
        while self._running:
            self._wait()
        return True

    def _start(self, session: pytest.Session, seed: int) -> None:
        directory = Path(tempfile.mkdtemp(prefix=f"repeat-{seed}-"))
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _be_run(session, seed, directory)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = Run(seed, pid, pidfd, time.monotonic(), directory)

    def _wait(self) -> None:
        """Wait until one has ended; one that hangs is made to say where."""
        ended, _, _ = select.select(list(self._running), [], [], 1)
        for run in list(self._running.values()):
            late = time.monotonic() - run.started > LIMIT
            if late:
                os.kill(run.pid, signal.SIGABRT)
            if late or run.pidfd in ended:
                self._end(run)

    def _end(self, run: Run) -> None:
        _, status, used = os.wait4(run.pid, 0)
        self.seconds.append(used.ru_utime + used.ru_stime)
        if status:
            self.failed.append(run.seed)
            print(f"seed {run.seed} failed (status {status}):\n{run.log.read_text(errors='replace')}", flush=True)
        os.close(run.pidfd)
        del self._running[run.pidfd]
        shutil.rmtree(run.directory)


def _may_differ(item: pytest.Item) -> bool:
    """Whether something beside the code decides how a test goes: who is first, and which numbers are taken."""
    assert isinstance(item, pytest.Function)
    used = {"trio", "threading", "socket", "subprocess", "blocking"}
    return inspect.iscoroutinefunction(item.obj) or not used.isdisjoint(vars(item.module))


def _be_run(session: pytest.Session, seed: int, directory: Path) -> None:
    """One run, and the end of this process."""
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(directory)
    status = 1
    try:
        with (directory / "log").open("w", buffering=1) as log:
            faulthandler.enable(log)
            report = Report(log)
            plugins, hook = session.config.pluginmanager, session.config.hook
            plugins.unregister(plugins.getplugin("terminalreporter"))
            plugins.register(report)
            session.config.option.randomly_seed = seed
            session.items = random.Random(seed).sample(session.items, len(session.items) // SHARE)
            hook.pytest_collection_modifyitems(session=session, config=session.config, items=session.items)
            for item, following in zip(session.items, [*session.items[1:], None], strict=True):
                hook.pytest_runtest_protocol(item=item, nextitem=following)
            status = int(report.failed or report.passed == 0)
    finally:
        os._exit(status)


class Report:
    """Says what failed, and counts."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self.failed = False
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            self.failed = True
            print(f"--- {report.nodeid} ({report.when})\n{report.longreprtext}\n{report.caplog}", file=self._log)


def main(runs: int, first: int) -> int:
    repeat = Repeat(runs, first)
    started = time.monotonic()
    status = pytest.main(["-q", "-m", "deterministic", "-p", "no:cacheprovider"], plugins=[repeat])
    if status or not repeat.seconds:
        return int(status) or 1
    took = time.monotonic() - started
    print(
        f"deterministic tests: {runs} runs of one in {SHARE} in random order, {len(repeat.failed)} failed"
        f"{f' (seeds {sorted(repeat.failed)})' if repeat.failed else ''}, "
        f"{took:.0f} s, {took / runs:.1f} s a run ({sum(repeat.seconds) / runs:.1f} s of processor time)"
    )
    return 1 if repeat.failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
