from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import trio
import trio.testing

from trio_mori import _errors
from trio_mori._pool import Pool
from trio_mori._protocol.extents import INBOUND, OUTBOUND, Extent, Extents
from trio_mori.abc import Region

pytestmark = pytest.mark.deterministic

UNIT = 4096


def open_pool(units: int, **guarantees: int) -> Pool:
    memory = bytearray(units * UNIT)
    region = Region(tensor=torch.frombuffer(memory, dtype=torch.uint8), buffer=memoryview(memory), device="cpu")
    kept = {share: count * UNIT for share, count in guarantees.items()}
    return Pool(region, Extents(units * UNIT, guarantees=kept))


class Requests:
    """Tasks that reserve, with the order in which they got their extents."""

    def __init__(self, pool: Pool, nursery: trio.Nursery) -> None:
        self.pool = pool
        self.nursery = nursery
        self.granted: dict[str, Extent] = {}
        self.failed: dict[str, BaseException] = {}
        self.scopes: dict[str, trio.CancelScope] = {}

    async def start(self, name: str, units: int, share: str = OUTBOUND) -> None:
        self.nursery.start_soon(self._reserve, name, units * UNIT, share)
        await trio.testing.wait_all_tasks_blocked()

    async def _reserve(self, name: str, size: int, share: str) -> None:
        with trio.CancelScope() as self.scopes[name]:
            try:
                self.granted[name] = await self.pool.reserve(size, share)
            except _errors.TrioMoriError as error:
                self.failed[name] = error


async def test_an_extent_is_seen_as_a_tensor_and_as_a_memoryview_of_exactly_its_bytes() -> None:
    pool = open_pool(4)
    pool.reserve_nowait(UNIT, INBOUND)
    extent = pool.reserve_nowait(10, INBOUND)
    tensor, buffer = pool.tensor(extent, 10), pool.buffer(extent, 10)
    buffer[:] = bytes(range(10))
    assert tensor.tolist() == list(range(10))
    assert tensor.dtype == torch.uint8
    assert pool.region.tensor[UNIT + 9] == 9
    for view in (pool.tensor, pool.buffer):
        with pytest.raises(_errors.InternalError, match="4097 bytes were asked for of an extent of 4096"):
            view(extent, UNIT + 1)


async def test_a_region_elsewhere_has_no_memoryview() -> None:
    region = Region(tensor=torch.zeros(UNIT, dtype=torch.uint8, device="meta"), buffer=None, device="meta")
    pool = Pool(region, Extents(UNIT))
    extent = pool.reserve_nowait(1, INBOUND)
    assert pool.tensor(extent, 1).device.type == "meta"
    with pytest.raises(_errors.InternalError, match="memory on meta"):
        pool.buffer(extent, 1)


async def test_an_allocator_larger_than_its_region_is_refused() -> None:
    with pytest.raises(_errors.InternalError):
        Pool(open_pool(1).region, Extents(2 * UNIT))


async def test_reserve_takes_room_that_is_there_and_is_a_checkpoint() -> None:
    pool = open_pool(2)
    with trio.testing.assert_checkpoints():
        extent = await pool.reserve(UNIT, OUTBOUND)
    assert list(pool.extents) == [extent]


async def test_reserve_waits_until_somebody_frees_through_the_books() -> None:
    pool = open_pool(2)
    held = pool.extents.allocate(2 * UNIT, INBOUND)
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("a", 2)
        assert pool.statistics().waiting == 1
        pool.extents.free(held)
        assert pool.extents.free_bytes == 0, "the room is booked before anybody can come between"
    assert list(pool.extents) == [requests.granted["a"]]


async def test_waiters_of_one_size_are_served_in_order() -> None:
    pool = open_pool(4)
    held = [pool.reserve_nowait(UNIT, OUTBOUND) for _ in range(4)]
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        for name in ("a", "b", "c"):
            await requests.start(name, 1)
        for extent in held[:3]:
            pool.extents.free(extent)
            with pytest.raises(_errors.NoRoom):
                pool.reserve_nowait(UNIT, OUTBOUND)
            await trio.testing.wait_all_tasks_blocked()
    assert list(requests.granted) == ["a", "b", "c"]
    assert pool.statistics().waiting == 0


async def test_a_small_waiter_passes_a_large_one_where_it_is_not_in_its_way() -> None:
    pool = open_pool(4)
    held = [pool.reserve_nowait(UNIT, OUTBOUND) for _ in range(4)]
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("large", 3)
        await requests.start("small", 1)
        await requests.start("small too", 1)
        for index, granted in ((1, []), (3, ["small"]), (0, ["small"]), (2, ["small", "large"])):
            pool.extents.free(held[index])
            with pytest.raises(_errors.NoRoom):
                pool.reserve_nowait(UNIT, OUTBOUND)
            await trio.testing.wait_all_tasks_blocked()
            assert list(requests.granted) == granted
        pool.extents.free(requests.granted["large"])


async def test_a_large_waiter_is_not_starved_by_the_other_share() -> None:
    pool = open_pool(8, inbound=2, outbound=2)
    held = [pool.reserve_nowait(UNIT, OUTBOUND) for _ in range(6)]
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("large", 6, INBOUND)
        for _ in range(12):
            pool.extents.free(held.pop(0))
            for _ in range(2):
                with suppress(_errors.NoRoom):
                    held.append(pool.reserve_nowait(UNIT, OUTBOUND))
            await trio.testing.wait_all_tasks_blocked()
    assert requests.granted["large"].size == 6 * UNIT
    assert len(held) == 2


async def test_memory_that_moves_to_another_share_does_not_stand_behind_one_that_waits_for_it() -> None:
    pool = open_pool(8, inbound=1, outbound=1)
    received = pool.reserve_nowait(4 * UNIT, INBOUND)
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("large", 7, OUTBOUND)
        sent = await pool.transfer(received, OUTBOUND)
        assert not requests.granted
        pool.extents.free(sent)
    assert list(requests.granted) == ["large"]


async def test_one_share_does_not_wait_behind_the_other() -> None:
    pool = open_pool(4, inbound=1, outbound=1)
    pool.reserve_nowait(3 * UNIT, INBOUND)
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("received", 2, INBOUND)
        await requests.start("sent", 1, OUTBOUND)
        assert list(requests.granted) == ["sent"]
        nursery.cancel_scope.cancel()


async def test_a_cancelled_waiter_takes_nothing_and_leaves_its_place_to_others() -> None:
    pool = open_pool(2)
    pool.reserve_nowait(UNIT, OUTBOUND)
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("large", 2)
        await requests.start("small", 1)
        assert not requests.granted
        requests.scopes["large"].cancel()
        await trio.testing.wait_all_tasks_blocked()
    assert list(requests.granted) == ["small"]
    assert requests.scopes["large"].cancelled_caught
    assert pool.extents.live == 2


@pytest.mark.parametrize("freed_first", [True, False])
async def test_a_grant_that_meets_a_cancel_leaks_nothing(freed_first: bool) -> None:
    pool = open_pool(1)
    held = pool.reserve_nowait(UNIT, OUTBOUND)
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("a", 1)
        acts: list[Callable[[], None]] = [lambda: pool.extents.free(held), requests.scopes["a"].cancel]
        for act in acts if freed_first else reversed(acts):
            act()
    assert list(requests.granted.values()) == list(pool.extents)
    assert len(requests.granted) == freed_first
    pool.extents.check()


async def test_waiters_that_are_cancelled_together_leave_the_pool_usable() -> None:
    pool = open_pool(2)
    held = pool.reserve_nowait(UNIT, OUTBOUND)
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        for name, units in (("a", 2), ("b", 1), ("c", 1)):
            await requests.start(name, units)
        nursery.cancel_scope.cancel()
    pool.extents.free(held)
    for extent in requests.granted.values():
        pool.extents.free(extent)
    assert pool.reserve_nowait(2 * UNIT, OUTBOUND).size == 2 * UNIT


async def test_a_reserve_in_a_cancelled_scope_has_no_effect() -> None:
    pool = open_pool(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await pool.reserve(1, OUTBOUND)
    assert scope.cancelled_caught
    assert pool.extents.live == 0


async def test_what_can_never_fit_is_refused_at_once_also_behind_waiters() -> None:
    pool = open_pool(2)
    pool.reserve_nowait(2 * UNIT, OUTBOUND)
    async with trio.open_nursery() as nursery:
        await Requests(pool, nursery).start("a", 1)
        with pytest.raises(_errors.TooBig):
            await pool.reserve(3 * UNIT, OUTBOUND)
        with pytest.raises(_errors.TooBig):
            pool.reserve_nowait(3 * UNIT, OUTBOUND)
        nursery.cancel_scope.cancel()


async def test_close_ends_all_waiting_and_refuses_new_calls_but_extents_can_still_be_freed() -> None:
    pool = open_pool(1)
    held = pool.reserve_nowait(UNIT, OUTBOUND)
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("a", 1, INBOUND)
        await requests.start("b", 1, OUTBOUND)
        pool.close()
        pool.close()
    assert [type(error) for error in requests.failed.values()] == [_errors.ConnectorClosed] * 2
    with pytest.raises(_errors.ConnectorClosed):
        await pool.reserve(1, OUTBOUND)
    with pytest.raises(_errors.ConnectorClosed):
        pool.transfer_nowait(held, INBOUND)
    pool.extents.free(held)
    assert pool.statistics().free == UNIT


async def test_a_transfer_waits_until_no_guarantee_is_in_its_way() -> None:
    pool = open_pool(4, inbound=2)
    sent = pool.reserve_nowait(2 * UNIT, OUTBOUND)
    received = pool.reserve_nowait(2 * UNIT, INBOUND)
    moved: list[Extent] = []

    async def transfer() -> None:
        moved.append(await pool.transfer(received, OUTBOUND))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(transfer)
        await trio.testing.wait_all_tasks_blocked()
        assert not moved
        pool.extents.free(sent)
    assert list(pool.extents) == moved
    assert moved[0].share == OUTBOUND


async def test_a_cancelled_transfer_leaves_the_extent_as_it_was() -> None:
    pool = open_pool(2, inbound=1)
    pool.reserve_nowait(UNIT, OUTBOUND)
    received = pool.reserve_nowait(UNIT, INBOUND)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.transfer, received, OUTBOUND)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert received in list(pool.extents)
    pool.extents.free(received)
    pool.extents.check()


async def test_a_transfer_makes_room_for_a_waiter_whom_a_guarantee_held_up() -> None:
    pool = open_pool(8, inbound=2, outbound=2)
    received = await pool.transfer(pool.reserve_nowait(2 * UNIT, OUTBOUND), INBOUND)  # lies where others are kept out
    async with trio.open_nursery() as nursery:
        requests = Requests(pool, nursery)
        await requests.start("a", 5, INBOUND)
        assert not requests.granted
        with trio.testing.assert_checkpoints():
            await pool.transfer(received, OUTBOUND)
    assert list(requests.granted) == ["a"]


async def test_on_room_is_called_when_the_waiters_have_taken_theirs() -> None:
    pool = open_pool(3)
    held = pool.reserve_nowait(3 * UNIT, OUTBOUND)
    seen: list[int] = []
    pool.on_room = lambda: seen.append(pool.extents.free_bytes // UNIT)
    async with trio.open_nursery() as nursery:
        await Requests(pool, nursery).start("a", 2)
        pool.extents.free(held)
    assert set(seen) == {1}


async def test_statistics_are_a_snapshot_by_share() -> None:
    pool = open_pool(8)
    extents = [pool.reserve_nowait(units * UNIT, share) for units, share in ((1, INBOUND), (2, OUTBOUND), (1, INBOUND))]
    before = pool.statistics()
    pool.extents.free(extents[0])
    assert (before.size, before.free, before.largest_free) == (8 * UNIT, 4 * UNIT, 4 * UNIT)
    assert (before.inbound, before.outbound, before.waiting) == (2 * UNIT, 2 * UNIT, 0)
    assert (pool.statistics().free, pool.statistics().largest_free) == (5 * UNIT, 4 * UNIT)


async def test_a_call_from_the_pool_s_own_run_is_done_at_once_and_one_from_a_thread_soon() -> None:
    pool = open_pool(1)
    done_in: list[int] = []
    pool.call(lambda: done_in.append(threading.get_ident()))
    assert done_in == [threading.get_ident()]
    called = trio.Event()
    with trio.fail_after(10):
        await trio.to_thread.run_sync(pool.call, called.set)
        await called.wait()


def test_a_post_after_the_run_is_dropped() -> None:
    async def main() -> Pool:
        return open_pool(1)

    pool = trio.run(main)
    done: list[None] = []
    pool.post(lambda: done.append(None))
    pool.call(lambda: done.append(None))
    assert not done
