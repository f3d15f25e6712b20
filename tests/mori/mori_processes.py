"""Processes that tests talk to by lines."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.reduction import DupFd
from typing import Any

import trio

SIZE = 1 << 20

# Forked from one that has imported what takes seconds, as far as it is there. Nothing of Mori or HIP runs in that one.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "trio", "moriemu", "trio_mori", "trio_mori._engines._mori", "msgspec", "zmq"])


class Talker:
    """A process that answers lines with lines."""

    def __init__(self, process: Any, stdin: int, stdout: int) -> None:
        self._process = process
        self._stdin = trio.lowlevel.FdStream(stdin)
        self._stdout = trio.lowlevel.FdStream(stdout)
        self._received = b""

    async def hear(self) -> str:
        """The next line that it says."""
        while b"\n" not in self._received:
            some = await self._stdout.receive_some()
            assert some, "the process ended"
            self._received += some
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    async def say(self, line: str) -> None:
        """Tell it a line."""
        await self._stdin.send_all(line.encode() + b"\n")

    async def kill(self) -> None:
        """Kill it by SIGKILL, and wait until it is gone."""
        self._process.kill()
        await trio.lowlevel.wait_readable(self._process.sentinel)
        self._process.join()

    async def aclose(self) -> None:
        """Kill it, and let go of it."""
        with trio.CancelScope(shield=True):
            await self.kill()
            await self._stdin.aclose()
            await self._stdout.aclose()
        self._process.close()


@asynccontextmanager
async def open_talker(script: str, *arguments: object) -> AsyncIterator[Talker]:
    """Run a script of this folder in a process of its own; it is killed in the end."""
    read, stdin = os.pipe()
    stdout, write = os.pipe()
    process = context.Process(target=_run, args=(script, [*map(str, arguments)], _Passed(read), _Passed(write)))
    process.start()
    os.close(read)
    os.close(write)
    talker = Talker(process, stdin, stdout)
    try:
        yield talker
    finally:
        await talker.aclose()


class _Passed:
    """A descriptor that is passed to the process as it starts."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _take, (DupFd(self._fd),)


def _take(passed: Any) -> int:
    fd: int = passed.detach()
    return fd


def _run(script: str, arguments: list[str], stdin: int, stdout: int) -> None:
    sys.stdin = open(stdin)  # noqa: SIM115 - they end with the process
    sys.stdout = open(stdout, "w")  # noqa: SIM115
    importlib.import_module(script).run(*arguments)
