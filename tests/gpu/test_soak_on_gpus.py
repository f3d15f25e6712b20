"""Ten thousand transfers, and processes that are killed in the middle of one, twenty on each side."""

from __future__ import annotations

import random

import pytest
import torch
import trio
from gpu_lane import COUNT, PLACES, needs_gpu
from gpu_stage import Stage, Work, config, memory, open_stages
from rig import wait_until

from trio_mori import Connector, open_connector

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs_gpu]

MB = 1 << 20

TRANSFERS = 10_000
SIZES = (4096, 64 << 10, MB, 100_001, 4 * MB)

# Processes that are killed on each side.
KILLED = 20
LARGE = 64 * MB

# Of torch's memory, the GPU's and the process's, from a tenth of the transfers to the end: less than a byte for each
# kilobyte that was moved, so that nothing of one transfer in a hundred can stay.
SLACK = 8 * MB


@pytest.mark.parametrize("devices", PLACES)
async def test_every_one_of_ten_thousand_transfers_is_right_and_memory_stays_as_it_was(
    devices: tuple[str, str],
) -> None:
    with trio.fail_after(300):
        async with open_stages("source", devices[0]) as (source,):
            await source.say(0, "soak", 0, TRANSFERS, *SIZES)
            port = int(await source.hear())
            async with open_connector(config("receiver", devices[1], port)) as receiver:
                work = Work(receiver, devices[1], "soak", 0, TRANSFERS, list(SIZES))
                right: list[bool] = []
                await work.get(right.append)
                assert right.count(True) == len(right) == TRANSFERS
                after = memory(devices[1])
            await source.say("end")
            theirs = list(map(int, (await source.hear()).split()))
    for before, now in ((work.memory, after), (theirs[:3], theirs[3:])):
        growth = [late - early for early, late in zip(before, now, strict=True)]
        print("memory (torch's on the GPU, all on the GPU, the process's on the host) grew by", growth)
        assert max(growth) < SLACK


async def run_on(stage: Stage, port: int, name: str) -> int:
    """Have a stage put, or get, large payloads for ever; returns its port."""
    await stage.say(port, name, 0, 0, LARGE)
    return int(await stage.hear())


async def get_some(receiver: Connector, device: str, name: str, count: int) -> None:
    """Get so many, all of which are right."""
    results: list[bool] = []
    await Work(receiver, device, name, 0, count, [LARGE]).get(results.append)
    assert results == [True] * count


@pytest.mark.parametrize("devices", PLACES[COUNT > 1 :][:1])
async def test_what_comes_after_a_sender_that_was_killed_is_right(devices: tuple[str, str]) -> None:
    with trio.fail_after(300):
        async with open_stages("source", devices[0], KILLED + 1) as stages:
            port = await run_on(stages[0], 0, "0")
            async with open_connector(config("receiver", devices[1], port)) as receiver:
                for number, stage in enumerate(stages[:-1]):
                    await get_some(receiver, devices[1], str(number), 3)
                    rest = Work(receiver, devices[1], str(number), 3, 0, [LARGE])
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(rest.get, lambda right: None)
                        await trio.sleep(random.uniform(0.0, 0.1))
                        await stage.kill()
                        nursery.cancel_scope.cancel()
                    assert await run_on(stages[number + 1], port, str(number + 1)) == port
                await get_some(receiver, devices[1], str(KILLED), 3)
                assert receiver.health()["quarantined"] == 0
    assert float(torch.ones(9, device=devices[1]).sum()) == 9


@pytest.mark.parametrize("devices", PLACES[COUNT > 1 :][:1])
async def test_what_comes_to_the_receiver_after_one_that_was_killed_is_right(devices: tuple[str, str]) -> None:
    with trio.fail_after(300):
        async with open_stages("sink", devices[1], KILLED + 1) as stages:
            async with open_connector(config("sender", devices[0], 0)) as sender:
                port = sender.get_connection_info()["zmq_port"]
                for number, stage in enumerate(stages):
                    await run_on(stage, port, str(number))
                    work = Work(sender, devices[0], str(number), 0, 0, [LARGE])
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(work.put)
                        for _ in range(3):
                            assert await stage.hear() == "1"
                        if stage is not stages[-1]:
                            await trio.sleep(random.uniform(0.0, 0.1))
                        await stage.kill()
                        nursery.cancel_scope.cancel()
                    for other in range(1000):
                        await sender.cleanup(f"{number}-{other}")
                await wait_until(lambda: sender.health()["status"] == "healthy")
                assert sender.health()["quarantined"] == 0
    assert float(torch.ones(9, device=devices[0]).sum()) == 9
