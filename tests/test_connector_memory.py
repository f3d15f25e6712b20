"""Memory that an engine may still touch: never reused, always returned, and told of meanwhile."""

from __future__ import annotations

import time

import pytest
import torch
import trio
from rig import (
    POOL,
    UNIT,
    Pair,
    assert_books_agree,
    assert_free,
    begin,
    filled,
    open_pair,
    port_of,
    start_stage,
    wait_until,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_mori import Expired, Gone, NoRoom, NotReady, TransferFailed
from trio_mori._protocol.extents import INBOUND, OUTBOUND

pytestmark = pytest.mark.deterministic

MARK = 0xAA


class Occupied:
    """All that is free of a pool, filled with a mark."""

    def __init__(self, pair: Pair, share: str) -> None:
        connector = pair.receiver if share == INBOUND else pair.sender
        self._pool = connector._pool
        self._extents = []
        while self._pool.extents.largest_free:
            extent = self._pool.extents.allocate(self._pool.extents.largest_free, share)
            self._pool.tensor(extent, extent.size).fill_(MARK)
            self._extents.append(extent)

    @property
    def size(self) -> int:
        return sum(e.size for e in self._extents)

    def free(self) -> None:
        """Give it back, unchanged."""
        for extent in self._extents:
            assert bool((self._pool.tensor(extent, extent.size) == MARK).all()), "somebody wrote into it"
            self._pool.extents.free(extent)


# --- the receiver's side ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrived", [0.0, 0.5, 1.0])
async def test_a_get_that_gave_up_keeps_its_destination_out_of_use_until_the_write_ended(arrived: float) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(3 * UNIT), arrived=arrived)
        outcome.scope.cancel()
        await outcome.over.wait()
        assert pair.receiver.health()["status"] == "degraded"
        quarantined = pair.receiver.health()["quarantined"]
        assert quarantined >= 3 * UNIT
        occupied = Occupied(pair, INBOUND)
        assert occupied.size == POOL - quarantined
        pair.sender_engine.release()
        await wait_until(lambda: pair.receiver.health()["quarantined"] == 0)
        assert pair.receiver.health()["status"] == "healthy"
        occupied.free()
        assert torch.equal(await pair.get("k"), filled(3 * UNIT)), "it stayed with the sender"
        await pair.assert_whole()


async def test_a_get_cancelled_while_its_write_fails_leaves_nothing_behind() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(UNIT))
        outcome.scope.cancel()
        await wait_until(lambda: pair.receiver.health()["quarantined"])
        pair.sender_engine.held[0].end(TransferFailed("the card says no"))
        pair.sender_engine.release()
        assert torch.equal(await pair.get("k"), filled(UNIT))
        await pair.assert_whole()


async def test_gets_that_were_cancelled_a_moment_ago_refuse_no_other() -> None:
    # A moment is two heartbeats, of which none comes here.
    receiver = {"quarantine_fraction": 0.25, "heartbeat_interval": 60, "peer_timeout": 200}
    async with open_pair(receiver=receiver) as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(POOL // 4))
        outcome.scope.cancel()
        await outcome.over.wait()
        assert pair.receiver.health()["quarantined"] == POOL // 4
        with pytest.raises(NotReady):
            pair.get_nowait("other")
        pair.sender_engine.release()
        await wait_until(lambda: pair.receiver.health()["quarantined"] == 0)
        await pair.put("other", filled(100))
        assert torch.equal(await pair.get("other"), filled(100))


async def test_gets_are_refused_when_too_much_of_the_pool_is_in_quarantine() -> None:
    receiver = {"quarantine_fraction": 0.25, "heartbeat_interval": 0.02}
    async with open_pair(receiver=receiver) as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(POOL // 4))
        outcome.scope.cancel()
        await outcome.over.wait()
        await wait_until(lambda: pair.receiver._receiver.book.held_back)
        with pytest.raises(NoRoom, match="quarantine_fraction") as caught:
            await pair.get("other")
        assert caught.value.quarantined == POOL // 4
        with pytest.raises(NoRoom):
            pair.get_nowait("other")
        pair.sender_engine.release()
        await wait_until(lambda: pair.receiver.health()["quarantined"] == 0)
        assert torch.equal(await pair.get("k"), filled(POOL // 4))
        await pair.assert_whole()


async def test_a_write_that_takes_too_long_is_told_and_its_memory_kept_at_both_ends_until_it_ended(
    clock: MockClock,
) -> None:
    async with open_pair(sender={"transfer_timeout_base": 5}) as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(1000))
        clock.jump(5)
        with pytest.raises(TransferFailed, match=r"within 5(\.0)? s") as caught:
            await outcome.wait()
        assert not caught.value.settled
        assert pair.receiver.health()["quarantined"] > 0
        assert pair.sender.health()["status"] == "degraded"
        assert pair.sender.health()["timeouts"] == 1
        assert pair.sender.statistics().held["pinned"] == UNIT
        assert_books_agree(pair.sender, pair.receiver)
        inbound, outbound = Occupied(pair, INBOUND), Occupied(pair, OUTBOUND)
        pair.sender_engine.release()
        await wait_until(lambda: pair.receiver.health()["quarantined"] == 0)
        inbound.free()
        outbound.free()
        assert torch.equal(await pair.get("k"), filled(1000))
        await pair.assert_whole()


# --- the sender's side --------------------------------------------------------------------------------------


async def test_the_time_to_live_never_ends_a_payload_that_is_being_written(clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 5}) as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(1000))
        await pair.put("later", b"x")
        clock.jump(5)
        await wait_until(lambda: pair.sender.statistics().events["out_expired"] == 1)
        assert pair.sender.statistics().held["pinned"] == UNIT
        occupied = Occupied(pair, OUTBOUND)
        pair.sender_engine.release()
        assert torch.equal(await outcome.wait(), filled(1000))
        occupied.free()
        await assert_free(pair.sender, pair.receiver)


async def test_a_payload_whose_write_failed_after_its_time_expires_then(clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 5}) as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(1000))
        await pair.put("later", b"x")
        clock.jump(5)
        await wait_until(lambda: pair.sender.statistics().events["out_expired"] == 1)
        pair.sender_engine.held[0].end(TransferFailed("the card says no"))
        with pytest.raises(TransferFailed):
            await outcome.wait()
        await assert_free(pair.sender, pair.receiver)
        with pytest.raises(Expired):
            await pair.get("k")


async def test_cleanup_during_a_write_frees_nothing_before_its_end_and_tells_the_get() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(1000))
        assert await pair.sender.cleanup("k") == 1
        assert pair.sender.statistics().held["pinned"] == UNIT
        occupied = Occupied(pair, OUTBOUND)
        await pair.sender.cleanup("k")
        pair.sender_engine.release()
        with pytest.raises(Gone):
            await outcome.wait()
        occupied.free()
        await pair.assert_whole()


async def test_a_put_on_the_key_of_a_payload_that_is_dying_is_a_payload_of_its_own() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(1000, 1))
        await pair.sender.cleanup("k")
        await pair.put("k", filled(1000, 2))
        pair.sender_engine.release()
        with pytest.raises(Gone):
            await outcome.wait()
        assert torch.equal(await pair.get("k"), filled(1000, 2))
        await pair.assert_whole()


async def test_writes_that_hang_delay_nobody_else_and_are_failed_in_time(clock: MockClock) -> None:
    """Many more than any pool of threads has, on their way to one receiver that is stuck."""
    count = 45
    async with open_pair(sender={"transfer_timeout_base": 5}) as pair, trio.open_nursery() as nursery:
        other = await start_stage(
            nursery, pair.fabric, role="receiver", sender_host="127.0.0.1", sender_zmq_port=port_of(pair.sender)
        )
        assert pair.parked() == 0
        outcomes = [begin(nursery, pair.get, f"stuck{i}") for i in range(count)]
        await wait_until(lambda: pair.parked() == count)
        pair.sender_engine.hold(pair.sender_engine.add_peer(pair.receiver_engine.descriptor))
        for index in range(count):
            await pair.put(f"stuck{index}", b"x")
        await wait_until(lambda: len(pair.sender_engine.held) == count)
        took = []
        for _ in range(10):
            begun = time.monotonic()
            await pair.put("k", b"quick")
            assert await other.connector.get("0", "1", "k") == b"quick"
            took.append(time.monotonic() - begun)
        assert min(took) < 0.05, "a put and a get"
        assert not any(outcome.over.is_set() for outcome in outcomes)
        clock.jump(5)
        for outcome in outcomes:
            with pytest.raises(TransferFailed):
                await outcome.wait()
        pair.sender_engine.release()
        await wait_until(lambda: pair.receiver.health()["quarantined"] == 0)
        for index in range(count):
            assert await pair.get(f"stuck{index}") == b"x"
        await pair.assert_whole()
        await other.close()


# --- the sweeper --------------------------------------------------------------------------------------------


class Steps(trio.abc.Instrument):
    """Counts how often a task of that name runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += self.name in task.name


async def test_the_sweeper_sleeps_until_the_next_deadline_whatever_comes_and_goes(clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 60}) as pair, trio.open_nursery() as nursery:
        waiting = await pair.get_later(nursery, "never")
        await pair.put("stays", b"x")
        steps = Steps("Sender.sweep")
        trio.lowlevel.add_instrument(steps)
        for number in range(50):
            await pair.put(f"k{number}", b"x")
            await pair.get(f"k{number}")
            clock.jump(0.2)
        await wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(steps)
        assert steps.count == 0
        waiting.scope.cancel()


async def test_the_sweeper_wakes_once_for_each_deadline(clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 5}) as pair:
        steps = Steps("Sender.sweep")
        trio.lowlevel.add_instrument(steps)
        for number in range(20):
            await pair.put(f"k{number}", b"x")
            clock.jump(0.1)
        for _ in range(60):
            clock.jump(0.1)
            await wait_all_tasks_blocked()
        assert pair.sender.statistics().events["out_expired"] == 20
        trio.lowlevel.remove_instrument(steps)
        assert steps.count <= 22, "at most one for each payload, and one to set the alarm"
        await pair.sender.cleanup("k0")
