"""The examples as a user starts them: as processes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

ROOT = Path(__file__).parent.parent
STAGES = ("thinker", "talker", "code2wav")
LIMIT = 180  # seconds; a run takes six on two idle cores, and tests run on busy ones
WITHIN_SECONDS = 15  # from a stage's death to the end of all; half a second on two idle cores


def children_of(pid: int) -> dict[str, int]:
    """The demo's stage processes by their role, from the process table."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and b"examples.pipeline.process" in command:
            found[command[-2].decode()] = int(entry.name)
    return found


class Demo:
    """A demo that runs, its stages, and what it printed when it ended."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.stages = children_of(process.pid)
        self._pidfds = [os.pidfd_open(pid) for pid in self.stages.values()]
        self.output = b""
        self.errors = b""

    async def wait(self) -> int:
        """Read all that it prints until it ends; returns its exit status."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_errors, self.process.stderr)
            async for part in self.process.stdout:
                self.output += part
        return await self.process.wait()

    async def _read_errors(self, stream: trio.abc.ReceiveStream) -> None:
        async for part in stream:
            self.errors += part

    async def wait_stages(self) -> None:
        """Wait until no stage is left; a stage that stays is a failure."""
        with trio.fail_after(LIMIT):
            for pidfd in self._pidfds:
                await trio.lowlevel.wait_readable(pidfd)

    def close(self) -> None:
        for pidfd in self._pidfds:
            os.close(pidfd)


@asynccontextmanager
async def running_demo(folder: Path) -> AsyncIterator[Demo]:
    """A demo in the middle of its work, slow enough that there is time to disturb it."""
    (folder / "tmp").mkdir()
    command = [
        sys.executable,
        "-m",
        "examples.pipeline",
        "--speed",
        "0.5",
        "--out",
        str(folder / "out.wav"),
    ]
    run = partial(
        trio.run_process,
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
    )
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(run)
            assert process.stdout is not None
            first = await process.stdout.receive_some()
            assert b"code2wav" in first, first
            demo = Demo(process)
            try:
                yield demo
            finally:
                demo.close()
            nursery.cancel_scope.cancel()


# --- the demo ----------------------------------------------------------------------------------------------


def run_demo(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.pipeline", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_the_demo_makes_what_one_process_makes_and_shows_what_passed(tmp_path: Path) -> None:
    run = run_demo(tmp_path / "new" / "out.wav", "--speed", "0")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1] == "bit-identical: yes"
    assert [file.name for file in sorted((tmp_path / "new").iterdir())] == [
        "out-1.wav",
        "out-2.wav",
        "out-3.wav",
        "out.wav",
    ]
    rows = re.findall(r"(\d) -> (\d) [a-z ]+? +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +([\d,]+) ", run.stdout)
    assert [row[:2] for row in rows] == [("0", "1"), ("1", "2")]
    assert rows[0][3] == rows[1][2]  # stage 1 is one process
    assert len({rows[0][2], rows[0][3], rows[1][3]}) == 3
    for row in rows:
        assert row[4] == row[5] == row[6]  # all that was put was written, and got
        assert int(row[7].replace(",", "")) > 1_000_000


async def test_two_demos_on_one_machine_do_not_meet(tmp_path: Path) -> None:
    async def one(name: str) -> None:
        run = await trio.to_thread.run_sync(run_demo, tmp_path / name, "--requests", "1")
        assert run.returncode == 0, run.stderr

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "a.wav")
        nursery.start_soon(one, "b.wav")
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_all_of_it_quietly(tmp_path: Path, number: signal.Signals) -> None:
    async with running_demo(tmp_path) as demo:
        assert len(demo.stages) == 3
        demo.process.send_signal(number)
        with trio.fail_after(LIMIT):
            assert await demo.wait() == 130
        assert demo.errors == b"interrupted; all stages are closed\n"
        await demo.wait_stages()
        assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_killed_stage_ends_the_others_and_is_named(tmp_path: Path, stage: int) -> None:
    async with running_demo(tmp_path) as demo:
        victim = demo.stages[str(stage)]
        os.kill(victim, signal.SIGKILL)
        with trio.fail_after(WITHIN_SECONDS):
            assert await demo.wait() == 1
        message = f"stage {stage} ({STAGES[stage]}), process {victim}, was killed by SIGKILL before the work was done"
        assert demo.errors.decode() == f"{message}; the other stages were ended\n"
        await demo.wait_stages()


async def test_stages_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    async with running_demo(tmp_path) as demo:
        demo.process.kill()
        assert await demo.wait() == -signal.SIGKILL
        await demo.wait_stages()
        assert demo.errors == b""


def test_a_recording_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.wav"
    wrong.write_bytes(b"no sound at all")
    run = run_demo(tmp_path / "out.wav", "--wav", str(wrong))
    assert run.returncode == 1
    assert run.stderr.startswith(f"stage 0 (thinker) failed: {wrong}: not a RIFF/WAVE file")
    assert run.stderr.count("\n") == 1


def test_a_stage_that_fails_is_named_once_and_not_those_that_hear_of_it(tmp_path: Path) -> None:
    deploy = (ROOT / "examples" / "pipeline" / "pipeline.yaml").read_text()
    assert "memory_pool_size: 67108864" in deploy
    (tmp_path / "small.yaml").write_text(deploy.replace("67108864", "16384"))
    run = run_demo(tmp_path / "out.wav", "--deploy", str(tmp_path / "small.yaml"))
    assert run.returncode == 1
    assert run.stderr.startswith("stage 0 (thinker) failed: TooBig: ")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--wav", "nowhere.wav"), "nowhere.wav: no such file"),
        (("--requests", "0"), "--requests 0: at least 1 is needed"),
        (("--speed", "nan"), "--speed nan: a number from 0 up is needed"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    run = run_demo(tmp_path / "new" / "out.wav", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert not (tmp_path / "new").exists()


def test_on_a_terminal_the_progress_line_is_rewritten_in_place(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "examples.pipeline", "--requests", "1", "--out", str(tmp_path / "out.wav")]
    with subprocess.Popen(command, cwd=ROOT, stdin=end, stdout=end, stderr=end) as process:
        os.close(end)
        output = b""
        while part := read_terminal(terminal):
            output += part
        assert process.wait(LIMIT) == 0
    os.close(terminal)
    progress, _, table = output.decode().partition("\r\n")
    assert progress.count("\r1 requests   thinker") > 5
    assert progress.endswith("code2wav 100%")
    assert "\r" not in table.replace("\r\n", "")


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: nobody has the other end open any more
        return b""


# --- the small ones ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "lines"),
    [
        ("two_tasks.py", ["got step-2, torch.bfloat16, (2, 4), all 2"]),
        ("two_processes.py", ["child: the table arrived intact", "parent: put 2 payloads, "]),
        ("chunk_streams.py", ["first: 125 frames", "second: 200 frames", "third: 75 frames"]),
        ("blocking_thread.py", ["got step-2, 1000 values, all 2", "gave up: "]),
        ("from_asyncio.py", ["64 answers: [0, 10, 20], ...", "gave up, and later got b'still to be had'"]),
    ],
)
def test_a_small_example_runs_and_says_what_its_docstring_promises(example: str, lines: list[str]) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    for line in lines:
        assert line in run.stdout


def test_small_examples_stay_small() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        assert len(example.read_text().splitlines()) < 80, example.name
