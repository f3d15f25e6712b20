"""The memory engine: it keeps the contract, and breaks it exactly as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from rig import EVERY_ENGINE_CHECK
from trio.testing import wait_all_tasks_blocked

from trio_mori import ConnectorClosed, DescriptorRefused, TransferFailed
from trio_mori.abc import Engine, EnginePeer, Write
from trio_mori.testing import EngineBench, MemoryEngine, MemoryFabric, check_engine
from trio_mori.testing._engine_bench import Check
from trio_mori.testing._engine_checks import check_bytes_arrive_exactly

deterministic = pytest.mark.deterministic

SIZE = 4096
WHOLE = Write(0, 0, SIZE)


def bench(*, inline: bool = True) -> EngineBench:
    fabric = MemoryFabric()

    def hold(engine: Engine, peer: EnginePeer) -> None:
        assert isinstance(engine, MemoryEngine)
        engine.hold(peer)

    def release(engine: Engine) -> None:
        assert isinstance(engine, MemoryEngine)
        engine.release()

    return EngineBench(
        open=lambda size: fabric.open(pool_size=size, inline=inline), hold=hold, release=release, closing_fences=True
    )


def pair() -> tuple[MemoryEngine, MemoryEngine, EnginePeer]:
    """A writer with a region full of ones, an owner, and the owner as the writer's peer."""
    fabric = MemoryFabric()
    writer, owner = MemoryEngine(fabric, pool_size=SIZE), MemoryEngine(fabric, pool_size=SIZE)
    writer.region.tensor.fill_(1)
    return writer, owner, writer.add_peer(owner.descriptor)


def arrived(owner: MemoryEngine) -> int:
    return int(owner.region.tensor.sum())


@pytest.mark.parametrize("check", EVERY_ENGINE_CHECK)
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "not_inline"])
async def test_it_keeps_the_contract(check: Check, inline: bool) -> None:
    with trio.fail_after(60):
        await check(bench(inline=inline))


@deterministic
async def test_check_engine_runs_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, EngineBench]] = []

    async def one(bench: EngineBench) -> None:
        ran.append(("one", bench))

    async def other(bench: EngineBench) -> None:
        ran.append(("other", bench))
        await trio.sleep_forever()

    monkeypatch.setattr("trio_mori.testing._engine_checks.ENGINE_CHECKS", (one, other))
    checked = bench()
    with pytest.raises(trio.TooSlowError):
        await check_engine(checked, timeout=0.01)
    assert ran == [("one", checked), ("other", checked)]


async def test_a_check_notices_a_careless_engine() -> None:
    class Careless(MemoryEngine):
        async def write(self, peer: EnginePeer, write: Write) -> None:
            await trio.lowlevel.checkpoint()  # and the bytes stay where they are

    @asynccontextmanager
    async def open_careless(size: int) -> AsyncIterator[Engine]:
        yield Careless(fabric, pool_size=size)

    fabric = MemoryFabric()
    with pytest.raises(AssertionError, match="a write of 1 bytes arrived altered"):
        await check_bytes_arrive_exactly(EngineBench(open_careless))


@deterministic
async def test_a_held_write_ends_when_it_is_released_and_reads_its_source_only_then() -> None:
    writer, owner, peer = pair()
    writer.hold()
    assert not writer.write_nowait(peer, WHOLE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.write, peer, WHOLE)
        await wait_all_tasks_blocked()
        assert arrived(owner) == 0
        writer.region.tensor.fill_(2)
        writer.release()
    assert arrived(owner) == 2 * SIZE
    assert writer.write_nowait(peer, WHOLE)


@deterministic
async def test_release_of_a_few_ends_the_oldest_and_keeps_holding() -> None:
    writer, owner, peer = pair()
    writer.hold()
    async with trio.open_nursery() as nursery:
        for place in range(3):
            nursery.start_soon(writer.write, peer, Write(place, place, 1))
            await wait_all_tasks_blocked()
        writer.release(2)
        await wait_all_tasks_blocked()
        assert owner.region.tensor[:3].tolist() == [1, 1, 0]
        assert not writer.write_nowait(peer, WHOLE)
        [last] = writer.held
        last.finish()
    assert arrived(owner) == 3


@deterministic
async def test_a_held_write_may_have_arrived_in_part_or_whole() -> None:
    writer, owner, peer = pair()
    for part in (0.25, 1.0):
        owner.region.tensor.zero_()
        writer.hold(peer, arrived=part)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.write, peer, WHOLE)
            await wait_all_tasks_blocked()
            assert arrived(owner) == part * SIZE
            writer.release()
        assert arrived(owner) == SIZE


@deterministic
@pytest.mark.parametrize("part", [0.0, 0.5])
async def test_a_settled_failure_moves_no_byte_after_it_was_raised(part: float) -> None:
    writer, owner, peer = pair()
    writer.fail(2, arrived=part)
    with pytest.raises(TransferFailed) as caught:
        writer.write_nowait(peer, WHOLE)
    assert caught.value.settled
    with pytest.raises(TransferFailed):
        await writer.write(peer, WHOLE)
    assert arrived(owner) == part * SIZE
    writer.release()
    assert arrived(owner) == part * SIZE
    await writer.write(peer, WHOLE)
    assert arrived(owner) == SIZE


@deterministic
async def test_an_unsettled_failure_raises_at_once_and_its_bytes_arrive_at_release() -> None:
    writer, owner, peer = pair()
    writer.fail(settled=False, arrived=0.5)
    with pytest.raises(TransferFailed) as caught:
        await writer.write(peer, WHOLE)
    assert not caught.value.settled
    assert arrived(owner) == SIZE / 2
    [held] = writer.held
    assert held.told
    writer.release()
    assert arrived(owner) == SIZE
    assert not writer.held


@deterministic
async def test_a_fenced_peer_moves_nothing_more_and_its_writers_are_told() -> None:
    writer, owner, peer = pair()
    back = owner.add_peer(writer.descriptor)
    writer.hold()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(TransferFailed) as caught:
                    await writer.write(peer, WHOLE)
                assert caught.value.settled

            nursery.start_soon(write)
            nursery.start_soon(owner.wait_fenced, back)
            await wait_all_tasks_blocked()
            owner.fence(back)
            writer.release()
    assert arrived(owner) == 0
    with pytest.raises(TransferFailed, match="revoked"):
        writer.write_nowait(peer, WHOLE)
    assert not writer.violations


@deterministic
@pytest.mark.parametrize("land", [True, False])
async def test_a_killed_engine_is_fenced_at_once_whatever_was_under_way(land: bool) -> None:
    writer, owner, peer = pair()
    back = owner.add_peer(writer.descriptor)
    writer.hold(arrived=0.5)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(TransferFailed, match="killed"):
                    await writer.write(peer, WHOLE)

            nursery.start_soon(write)
            await wait_all_tasks_blocked()
            writer.kill(land=land)
        await owner.wait_fenced(back)
    assert arrived(owner) == (SIZE if land else SIZE / 2)
    with pytest.raises(TransferFailed, match="killed"):
        owner.write_nowait(back, WHOLE)
    owner.drop_peer(back)
    with pytest.raises(DescriptorRefused, match="killed"):
        owner.add_peer(writer.descriptor)


@deterministic
async def test_an_abandoned_engine_is_fenced_when_its_last_write_has_landed() -> None:
    writer, owner, peer = pair()
    back = owner.add_peer(writer.descriptor)
    writer.fail(settled=False)
    with pytest.raises(TransferFailed):
        await writer.write(peer, WHOLE)
    writer.abandon()
    writer.close()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(owner.wait_fenced, back)
        await wait_all_tasks_blocked()
        assert nursery.child_tasks
        writer.release()
    assert arrived(owner) == SIZE
    assert not writer.violations


@deterministic
async def test_what_the_contract_forbids_is_refused_and_noted() -> None:
    writer, owner, peer = pair()
    stranger = MemoryEngine(MemoryFabric(), pool_size=SIZE)
    dropped = owner.add_peer(writer.descriptor)
    owner.drop_peer(dropped)
    for target, write in ((peer, Write(0, 1, SIZE)), (stranger.add_peer(stranger.descriptor), WHOLE)):
        with pytest.raises(TransferFailed):
            await writer.write(target, write)
    with pytest.raises(TransferFailed):
        await owner.write(dropped, WHOLE)
    assert len(owner.violations) == 1
    writer.hold()
    writer.fail(settled=False)
    with pytest.raises(TransferFailed):
        await writer.write(peer, WHOLE)
    writer.close()
    writer.close()
    with pytest.raises(TransferFailed):
        await writer.write(peer, WHOLE)
    with pytest.raises(ConnectorClosed):
        writer.add_peer(owner.descriptor)
    with pytest.raises(DescriptorRefused):
        stranger.add_peer(writer.descriptor)
    assert [what.split(" ")[0] for what in writer.violations] == ["write", "write", "closed", "write"]


@deterministic
async def test_it_remembers_its_calls() -> None:
    writer, owner, peer = pair()
    writer.inline = False
    assert not writer.write_nowait(peer, WHOLE)
    await writer.write(peer, WHOLE)
    assert [call.method for call in writer.calls] == ["add_peer", "write_nowait", "write"]
    assert writer.calls[-1].peer == owner.identity
    assert writer.calls[-1].write == WHOLE


@deterministic
async def test_an_engine_may_write_to_itself_and_overlapping() -> None:
    engine = MemoryEngine(MemoryFabric(), pool_size=SIZE)
    engine.region.tensor[:4] = 1
    await engine.write(engine.add_peer(engine.descriptor), Write(0, 2, 4))
    assert engine.region.tensor[:7].tolist() == [1, 1, 1, 1, 1, 1, 0]
