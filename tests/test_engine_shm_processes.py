"""The shm engine between processes, and what is left when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from trio_mori import TransferFailed, open_engine
from trio_mori.abc import Descriptor, Write

POOL = 1 << 20
OWNER = Path(__file__).with_name("shm_owner.py")


@contextmanager
def owner_process() -> Iterator[tuple[subprocess.Popen[str], Descriptor]]:
    with subprocess.Popen(
        [sys.executable, str(OWNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        try:
            engine, memory = map(bytes.fromhex, process.stdout.readline().split())
            yield process, Descriptor(engine, memory)
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], offset: int) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{offset}\n")
    return int(process.stdout.readline())


async def test_bytes_cross_to_another_process() -> None:
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            engine.region.tensor.fill_(42)
            peer = engine.add_peer(descriptor)
            assert engine.write_nowait(peer, Write(0, 100, 10))
            await engine.write(peer, Write(0, 5000, POOL - 5000))
            assert [ask(process, at) for at in (99, 100, 109, 110, 5000, POOL - 1)] == [0, 42, 42, 0, 42, 42]


async def test_a_killed_process_is_fenced_and_writes_to_it_fail() -> None:
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            peer = engine.add_peer(descriptor)
            await engine.write(peer, Write(0, 0, POOL))
            with trio.move_on_after(0.1) as alive:
                await engine.wait_fenced(peer)
            assert alive.cancelled_caught
            process.send_signal(signal.SIGKILL)
            await engine.wait_fenced(peer)
            with pytest.raises(TransferFailed) as caught:
                await engine.write(peer, Write(0, 0, POOL))
            assert caught.value.settled


async def test_a_stopped_process_is_not_fenced_and_can_be_written_to() -> None:
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            engine.region.tensor.fill_(9)
            peer = engine.add_peer(descriptor)
            process.send_signal(signal.SIGSTOP)
            with trio.move_on_after(0.1) as alive:
                await engine.wait_fenced(peer)
            assert alive.cancelled_caught
            await engine.write(peer, Write(0, 0, 4096))
            process.send_signal(signal.SIGCONT)
            assert ask(process, 4095) == 9


async def test_a_killed_process_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            peer = engine.add_peer(descriptor)
            await engine.write(peer, Write(0, 0, POOL))
            process.send_signal(signal.SIGKILL)
            await engine.wait_fenced(peer)
    assert set(os.listdir("/dev/shm")) <= before
