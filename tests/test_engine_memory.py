"""The memory engine keeps the contract of an engine, and its hooks do what tests rely on."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_mori import TransferFailed
from trio_mori.abc import Engine, EnginePeer, Write
from trio_mori.testing import ENGINE_CHECKS, EngineBench, MemoryEngine, MemoryFabric
from trio_mori.testing._engine_bench import Check

pytestmark = pytest.mark.deterministic


def bench(*, inline: bool) -> EngineBench:
    fabric = MemoryFabric()

    def hold(engine: Engine, peer: EnginePeer) -> None:
        assert isinstance(engine, MemoryEngine)
        engine.hold(peer)

    def release(engine: Engine) -> None:
        assert isinstance(engine, MemoryEngine)
        engine.release()

    return EngineBench(
        lambda size: fabric.open(pool_size=size, inline=inline), hold=hold, release=release, closing_fences=True
    )


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("check", ENGINE_CHECKS)
async def test_it_keeps_the_contract(check: Check, inline: bool) -> None:
    with trio.fail_after(20):
        await check(bench(inline=inline))


async def test_a_write_that_fails_unsettled_still_arrives_when_it_is_released() -> None:
    fabric = MemoryFabric()
    async with fabric.open() as writer, fabric.open() as owner:
        peer = writer.add_peer(owner.descriptor)
        writer.region.tensor[:100] = 7
        writer.fail(settled=False)
        with pytest.raises(TransferFailed) as caught:
            await writer.write(peer, Write(0, 0, 100))
        assert not caught.value.settled
        assert int(owner.region.tensor[:100].sum()) == 0
        writer.release()
        assert int(owner.region.tensor[:100].sum()) == 700


async def test_a_held_write_arrives_in_part_and_ends_when_it_is_released() -> None:
    fabric = MemoryFabric()
    async with fabric.open() as writer, fabric.open() as owner, trio.open_nursery() as nursery:
        peer = writer.add_peer(owner.descriptor)
        writer.region.tensor[:100] = 1
        writer.hold(peer, arrived=0.5)
        assert not writer.write_nowait(peer, Write(0, 0, 100))
        nursery.start_soon(writer.write, peer, Write(0, 0, 100))
        await wait_all_tasks_blocked()
        assert int(owner.region.tensor[:100].sum()) == 50
        writer.release()
        await wait_all_tasks_blocked()
        assert int(owner.region.tensor[:100].sum()) == 100


async def test_a_killed_engine_is_fenced_for_its_peers() -> None:
    fabric = MemoryFabric()
    async with fabric.open() as writer, fabric.open() as owner:
        seen = owner.add_peer(writer.descriptor)
        writer.kill()
        with trio.fail_after(1):
            await owner.wait_fenced(seen)
