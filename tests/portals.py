"""A portal in a thread of its own, and work that shows what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from threads import Other

from trio_mori._portal import Portal

ROOT = Path(__file__).parent.parent

# Seconds for what is over at once, on a machine that may be busy.
SOON = 10.0


@pytest.fixture(name="portal")
def open_portal() -> Iterator[Portal]:
    """A portal that is closed in the end."""
    portal = Portal()
    yield portal
    portal.close()


class Parked:
    """An async function that waits for ever and notes how it ends."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()
        self.was_cancelled = False

    async def run(self) -> None:
        self.began.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.was_cancelled = True
            raise
        finally:
            self.ended.set()


def park(portal: Portal) -> tuple[Parked, Other]:
    """A call of another thread that is in progress."""
    parked = Parked()
    other = Other(partial(portal.call, parked.run, what="get of 'k'"))
    assert parked.began.wait(SOON)
    return parked, other


@contextmanager
def interrupted_at(portal: Portal, began: threading.Event) -> Iterator[None]:
    """Expect that Ctrl-C, pressed as soon as something began, interrupts a call of this thread at once."""

    def press() -> None:
        assert began.wait(SOON)
        while not portal._waiting:  # nothing tells that the thread is in its call
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    presser = Other(press)
    with pytest.raises(KeyboardInterrupt):
        yield
    presser.wait()


async def echo(value: object) -> object:
    """A call that returns."""
    await trio.lowlevel.checkpoint()
    return value


async def fail(error: BaseException) -> None:
    """A call that raises."""
    await trio.lowlevel.checkpoint()
    raise error


def fail_now(error: BaseException) -> None:
    """The same at once."""
    raise error


class Stay:
    """An async context manager that notes by what it is left."""

    def __init__(self, log: list[str], name: str = "stay") -> None:
        self.log = log
        self.name = name

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self.log.append(f"{self.name} entered")
        try:
            yield self.name
        except BaseException as error:
            self.log.append(f"{self.name} left by {type(error).__name__}")
            raise
        self.log.append(f"{self.name} left")


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],  # forking beside threads is one
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
