"""The cuda_ipc engine on real GPUs: its contract, other processes, and what is left when one of them is killed."""

from __future__ import annotations

import gc

import pytest
import torch
import trio
from gpu_lane import PLACES, ask, bench, needs_gpu, owner_process

from trio_mori import EngineUnavailable, TransferFailed, open_engine
from trio_mori.abc import Write
from trio_mori.testing import ENGINE_CHECKS
from trio_mori.testing._engine_bench import Check

pytestmark = [pytest.mark.gpu, needs_gpu]

POOL = 64 << 20


def alive(device: str) -> bool:
    """Whether work on a GPU still comes to its end."""
    return float(torch.ones(10, device=device).sum()) == 10


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("check", ENGINE_CHECKS)
async def test_it_keeps_the_contract(check: Check, devices: tuple[str, str]) -> None:
    with trio.fail_after(60):
        await check(bench(devices))


@pytest.mark.parametrize("devices", PLACES)
async def test_bytes_cross_to_another_process_beside_work_on_its_streams(devices: tuple[str, str]) -> None:
    ours, theirs = devices
    with owner_process(theirs, POOL) as (process, descriptor), trio.fail_after(60):
        async with open_engine("cuda_ipc", pool_size=POOL, device=ours) as engine:
            engine.region.tensor.fill_(42)
            torch.cuda.synchronize(ours)
            torch.cuda.set_device(theirs)
            with torch.cuda.device(ours):
                torch.cuda._sleep(2_000_000_000)  # a second of work on the default stream, which nobody waits for
            peer = engine.add_peer(descriptor)
            with trio.fail_after(0.5):
                await engine.write(peer, Write(0, 100, 10))
                await engine.write(peer, Write(0, 5000, POOL - 5000))
            assert torch.cuda.current_device() == torch.device(theirs).index
            assert [ask(process, at) for at in (99, 100, 109, 110, 5000, POOL - 1)] == [0, 42, 42, 0, 42, 42]
            torch.cuda.synchronize(ours)
            torch.cuda.set_device(0)


async def test_a_gpu_that_the_writer_does_not_see_is_written_to_all_the_same_where_the_driver_maps_it() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with owner_process("cuda:0", POOL, CUDA_VISIBLE_DEVICES="1") as (process, descriptor), trio.fail_after(60):
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda:0") as engine:
            engine.region.tensor.fill_(7)
            torch.cuda.synchronize()
            await engine.write(engine.add_peer(descriptor), Write(0, 0, POOL))
            assert ask(process, POOL - 1) == 7


@pytest.mark.parametrize("devices", PLACES)
async def test_a_process_that_is_killed_during_writes_is_fenced_and_the_next_is_written_to(
    devices: tuple[str, str],
) -> None:
    ours, theirs = devices
    with trio.fail_after(90):
        async with open_engine("cuda_ipc", pool_size=POOL, device=ours) as engine:
            engine.region.tensor.fill_(3)
            torch.cuda.synchronize()
            with owner_process(theirs, POOL) as (process, descriptor):
                peer = engine.add_peer(descriptor)

                async def write_for_ever() -> None:
                    while True:
                        await engine.write(peer, Write(0, 0, POOL))

                async def write_on() -> None:
                    with pytest.raises(TransferFailed, match="its process has exited"):
                        await write_for_ever()

                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(write_on)
                    await trio.sleep(0.05)
                    process.kill()
                    await engine.wait_fenced(peer)
            engine.drop_peer(peer)
            assert alive(ours)
            with owner_process(theirs, POOL) as (process, descriptor):
                await engine.write(engine.add_peer(descriptor), Write(0, 0, POOL))
                assert ask(process, POOL - 1) == 3
    assert alive(theirs)


async def test_a_pool_is_given_back_when_its_engine_closes_and_a_mapping_when_its_peer_is_dropped() -> None:
    size = 256 << 20

    def taken() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    with owner_process("cuda:0", size) as (_, descriptor), trio.fail_after(60):
        before = taken()
        for _ in range(4):
            async with open_engine("cuda_ipc", pool_size=size, device="cuda:0") as engine:
                peer = engine.add_peer(descriptor)
                await engine.write(peer, Write(0, 0, size))
                engine.drop_peer(peer)
            del engine, peer
        assert taken() - before < size // 2


async def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineUnavailable, match=r"(?s)cuda:77.*torch sees"):
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda:77"):
            pass
