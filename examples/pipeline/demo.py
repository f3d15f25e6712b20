"""The parent: starts the stage processes, tells each where the one before it listens, and watches them to their end.
No tensor passes through it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import msgspec
import trio

from examples.pipeline.messages import (
    NAMES,
    Compared,
    Done,
    Failed,
    Finished,
    Listening,
    Message,
    Order,
    Progress,
    heard,
    line_of,
)
from examples.pipeline.report import Live

QUIET = ("-W", "ignore:Failed to initialize NumPy")  # torch says so when it is imported; nothing here needs numpy
# Seconds for a failed stage to be heard of after its neighbours said so: it closes its connector first, which may take
# the 5 s of close_grace.
ECHO_GRACE = 10.0
LEAVE_GRACE = 20.0  # seconds for a stage that is told to leave: on a busy machine, loading torch alone may take ten


class Stage:
    """A stage process as the parent sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"stage {number} ({NAMES[number]})"
        self.process: trio.Process | None = None
        self.listening = trio.Event()
        self.port: int | None = None
        self.done = trio.Event()
        self.finished: Finished | None = None
        self.failure: str | None = None

    def ended_early(self) -> str:
        """How a stage that has not finished ended."""
        assert self.process is not None
        assert self.process.returncode is not None
        return (
            f"{self.name}, process {self.process.pid}, {fate(self.process.returncode)} before the work was done; "
            "the other stages were ended"
        )


class Demo:
    """One run of the pipeline. The first thing that goes wrong is what the user is told; the rest follows from it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.stages = [Stage(number) for number in range(len(NAMES))]
        self.live = Live(len(order.requests))
        self.failure: str | None = None
        self.interrupted = False
        self.different: list[str] | None = None
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        """Everything, from the first process to the comparison."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.stop_on, signals)
                await self.run_stages()
                self.live.end()
                if not any(stage.failure for stage in self.stages):
                    await self.compare()
                nursery.cancel_scope.cancel()
        self.live.end()
        for stage in self.stages:
            self.failure = self.failure or stage.failure

    async def stop_on(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            self.interrupted = True
            self.scope.cancel()

    def fail(self, message: str) -> None:
        """End everything, because of this unless something failed before."""
        self.failure = self.failure or message
        self.scope.cancel()

    def blame_the_killed(self) -> None:
        """Fail if a stage was killed: it may show before we hear so from that stage, in what its neighbours say."""
        for stage in self.stages:
            if stage.process and (stage.process.returncode or 0) < 0:
                self.fail(stage.ended_early())

    async def run_stages(self) -> None:
        async with trio.open_nursery() as nursery:
            for stage in self.stages:
                nursery.start_soon(self.run_stage, stage)

    async def run_stage(self, stage: Stage) -> None:
        """Start a stage, direct it, and listen to it until it ends."""
        async with trio.open_nursery() as nursery:
            process = stage.process = await start(nursery, str(stage.number))
            nursery.start_soon(self.direct, stage, process)
            async for message in said_by(process):
                self.take(stage, message)
            await process.wait()
            nursery.cancel_scope.cancel()
        if stage.finished is None and stage.failure is None:
            self.blame_the_killed()
            self.fail(stage.ended_early())

    async def direct(self, stage: Stage, process: trio.Process) -> None:
        """Give a stage its order once the one before it listens; let it begin when all do, and go when all are done."""
        port = None
        if stage.number:
            upstream = self.stages[stage.number - 1]
            await upstream.listening.wait()
            port = upstream.port
        await say(process, line_of(msgspec.structs.replace(self.order, sender_port=port)))
        for each in self.stages:
            await each.listening.wait()
        await say(process, b"\n")
        for each in self.stages:
            await each.done.wait()
        assert process.stdin is not None
        await process.stdin.aclose()

    def take(self, stage: Stage, message: Message) -> None:
        """Act on what a stage says."""
        match message:
            case Listening(port):
                stage.port = port
                stage.listening.set()
            case Progress(frames, total):
                self.live.show(stage.number, frames, total)
            case Done():
                stage.done.set()
            case Finished():
                stage.finished = message
            case Failed(text, echo):
                stage.failure = f"{stage.name} failed: {text}; the other stages were ended"
                self.blame_the_killed()
                if echo:
                    self.scope.deadline = trio.current_time() + ECHO_GRACE
                else:
                    self.fail(stage.failure)
            case Compared():
                raise AssertionError("stages do not compare")

    async def compare(self) -> None:
        """Have the three functions run in one process, and its files compared with those of the stages."""
        async with trio.open_nursery() as nursery:
            process = await start(nursery, "compare")
            await say(process, line_of(self.order))
            async for message in said_by(process):
                match message:
                    case Compared(different):
                        self.different = different
                    case Failed(text):
                        self.fail(f"the run in one process failed: {text}")
            status = await process.wait()
        if self.different is None:
            self.fail(f"the run in one process, process {process.pid}, {fate(status)} before it was over")

    def results(self) -> list[Finished]:
        """What the stages said at their end, in their order."""
        return [stage.finished for stage in self.stages if stage.finished]


async def start(nursery: trio.Nursery, role: str) -> trio.Process:
    """Start a stage process. It gets a process group of its own: Ctrl-C reaches this process only, which then ends
    the stages in order; when the nursery is cancelled they are told to `leave`.
    """
    command = [sys.executable, *QUIET, "-m", "examples.pipeline.process", role]
    run = partial(
        trio.run_process,
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        check=False,
        start_new_session=True,
        deliver_cancel=leave,
    )
    process: trio.Process = await nursery.start(run)
    return process


async def leave(process: trio.Process) -> None:
    """End a process by SIGTERM, or at last by SIGKILL. Cancelled when it has ended."""
    process.terminate()
    await trio.sleep(LEAVE_GRACE)
    process.kill()


async def say(process: trio.Process, line: bytes) -> None:
    """Write to a process, if it still lives."""
    assert process.stdin is not None
    with suppress(trio.BrokenResourceError):  # it does not, and whoever listens to it will notice
        await process.stdin.send_all(line)


async def said_by(process: trio.Process) -> AsyncIterator[Message]:
    """What a process says, until it ends; a last line that it could not finish is left out."""
    assert process.stdout is not None
    rest = b""
    async for part in process.stdout:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield heard(line)


def fate(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status > 128:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"
