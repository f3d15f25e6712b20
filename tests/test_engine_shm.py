"""The shm engine keeps the contract of an engine, within one process and with share directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trio

from trio_mori import ConfigError, DescriptorRefused, EngineUnavailable, open_engine
from trio_mori.abc import Descriptor, Write
from trio_mori.testing import ENGINE_CHECKS, EngineBench
from trio_mori.testing._engine_bench import Check

pytestmark = pytest.mark.deterministic

POOL = 1 << 20


@pytest.fixture
def share_directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "share"
    directory.mkdir(mode=0o700)
    yield directory
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("check", ENGINE_CHECKS)
async def test_it_keeps_the_contract(check: Check) -> None:
    with trio.fail_after(30):
        await check(EngineBench(lambda size: open_engine("shm", pool_size=size), closing_fences=True))


@pytest.mark.parametrize("check", ENGINE_CHECKS)
async def test_it_keeps_the_contract_with_a_share_directory(check: Check, share_directory: Path) -> None:
    options = {"share_directory": str(share_directory)}
    with trio.fail_after(30):
        await check(EngineBench(lambda size: open_engine("shm", pool_size=size, options=options), closing_fences=True))


async def test_opening_and_closing_leaves_no_descriptor_open() -> None:
    async def once() -> None:
        async with open_engine("shm", pool_size=POOL) as one, open_engine("shm", pool_size=POOL) as other:
            peer = one.add_peer(other.descriptor)
            await one.write(peer, Write(0, 0, POOL))

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        await once()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_large_write_lets_other_tasks_run() -> None:
    size = 64 << 20
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with open_engine("shm", pool_size=size) as one, open_engine("shm", pool_size=size) as other:
        peer = one.add_peer(other.descriptor)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await one.write(peer, Write(0, 0, size))
            nursery.cancel_scope.cancel()
    assert turns > 10


async def test_memory_outlives_the_engine_while_a_tensor_does() -> None:
    async with open_engine("shm", pool_size=POOL) as engine:
        tensor = engine.region.tensor[:4096]
        tensor.fill_(7)
    assert int(tensor.sum()) == 7 * 4096
    assert torch.equal(tensor, torch.full((4096,), 7, dtype=torch.uint8))


async def test_descriptors_of_nobody_say_what_is_wrong() -> None:
    async with open_engine("shm", pool_size=POOL) as engine:
        with pytest.raises(DescriptorRefused, match="shm"):
            engine.add_peer(Descriptor(b"/proc/1/mem", b"\0"))


@pytest.mark.parametrize("options", [{"share_directory": "relative"}, {"share_directory": 5}, {"speed": "high"}])
async def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises((ConfigError, EngineUnavailable), match=next(iter(options))):
        async with open_engine("shm", pool_size=POOL, options=options):
            pass


async def test_other_engines_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"memory.*shm"):
        open_engine("memory", pool_size=POOL)
    with pytest.raises(ConfigError, match="cuda:0"):
        async with open_engine("shm", pool_size=POOL, device="cuda:0"):
            pass
