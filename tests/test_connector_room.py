"""Pools that are full, payloads that do not fit, and engines that fail: the payload stays."""

from __future__ import annotations

import threading

import pytest
import torch
import trio
import trio.testing
from rig import POOL, UNIT, assert_free, begin, fill_receiver, filled, open_pair, wait_until

from trio_mori import TooBig, TransferFailed
from trio_mori._staging import Reservation

pytestmark = pytest.mark.deterministic


# --- room ---------------------------------------------------------------------------------------------------


async def test_a_put_waits_for_room_and_goes_on_when_there_is_some() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        await pair.put("a", filled(POOL - UNIT))
        outcome = begin(nursery, pair.put, "b", filled(2 * UNIT, 2))
        await wait_until(lambda: pair.sender.statistics().pool.waiting == 1)
        assert torch.equal(await pair.get("a"), filled(POOL - UNIT))
        await outcome.wait()
        assert torch.equal(await pair.get("b"), filled(2 * UNIT, 2))
        await pair.assert_whole()


async def test_a_put_that_is_cancelled_as_it_is_given_room_publishes_nothing() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        await pair.put("a", filled(POOL - UNIT))
        outcome = begin(nursery, pair.put, "b", filled(2 * UNIT, 2))
        await wait_until(lambda: pair.sender.statistics().pool.waiting == 1)
        pair.sender.cleanup_nowait("a", "0", "1")
        outcome.scope.cancel()
        await outcome.over.wait()
        assert outcome.value is None
        assert not pair.sender.statistics().held.get("published")
        await pair.assert_whole()


async def test_a_put_that_is_cancelled_while_a_thread_copies_publishes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, may_end = threading.Event(), threading.Event()
    fill = Reservation.fill

    def slowly(reservation: Reservation) -> None:
        copies.set()
        assert may_end.wait(10)
        fill(reservation)

    monkeypatch.setattr(Reservation, "fill", slowly)
    monkeypatch.setattr("trio_mori._sender.INLINE_COPY", 0)
    async with open_pair() as pair, trio.open_nursery() as nursery:
        waiting = begin(nursery, pair.get, "k")
        outcome = begin(nursery, pair.put, "k", filled(UNIT))
        await trio.to_thread.run_sync(copies.wait)
        outcome.scope.cancel()
        may_end.set()
        await outcome.over.wait()
        assert outcome.value is None
        assert not pair.sender.statistics().held.get("published")
        waiting.scope.cancel()
        await waiting.over.wait()
        await pair.assert_whole()


async def test_a_payload_that_can_never_fit_is_refused_by_put_at_once() -> None:
    async with open_pair() as pair:
        await pair.put("full", filled(POOL))
        for _ in range(2):
            with pytest.raises(TooBig) as caught:
                await pair.put("k", filled(POOL + 1))
            assert (caught.value.size, caught.value.limit) == (POOL + 1, POOL)
        await pair.sender.cleanup("full")
        await pair.assert_whole()


async def test_a_payload_too_big_for_the_receiver_stays_at_the_sender() -> None:
    async with open_pair(sender_pool=2 * POOL) as pair:
        await pair.put("k", filled(POOL + 1))
        for _ in range(2):
            with pytest.raises(TooBig) as caught:
                await pair.get("k")
            assert (caught.value.size, caught.value.limit) == (POOL + 1, POOL)
        await wait_until(lambda: pair.sender.statistics().held.get("published") == POOL + UNIT)
        await pair.sender.cleanup("k")
        await pair.assert_whole()


async def test_a_full_receiver_leaves_the_payload_at_the_sender_and_gets_it_when_there_is_room() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        full = await fill_receiver(pair, nursery)
        await pair.put("k", filled(UNIT, 3))
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: pair.sender.statistics().held.get("claimed") == UNIT)
        assert not outcome.over.is_set()
        full.scope.cancel()
        assert torch.equal(await outcome.wait(), filled(UNIT, 3))
        await pair.assert_whole()


async def test_a_get_that_gave_up_waiting_for_room_leaves_the_payload_for_the_next() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        full = await fill_receiver(pair, nursery)
        await pair.put("k", filled(UNIT, 3))
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: pair.sender.statistics().held.get("claimed") == UNIT)
        outcome.scope.cancel()
        await wait_until(lambda: pair.sender.statistics().held.get("published") == UNIT)
        full.scope.cancel()
        assert torch.equal(await pair.get("k"), filled(UNIT, 3))
        await pair.assert_whole()


# --- engines that fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [True, False])
async def test_a_failed_write_is_told_and_the_payload_stays_for_the_next_get(inline: bool) -> None:
    async with open_pair(inline=inline) as pair:
        pair.sender_engine.fail(arrived=0.5)
        await pair.put("k", filled(1000))
        with pytest.raises(TransferFailed) as caught:
            await pair.get("k")
        assert "stays at the sender" in str(caught.value)
        assert torch.equal(await pair.get("k"), filled(1000))
        assert pair.sender.health()["errors"] == 1
        assert pair.receiver.health()["errors"] == 1
        await pair.assert_whole()


async def test_a_write_that_failed_but_may_still_move_keeps_its_memory_until_the_receiver_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trio_mori._receiver.FAREWELL", 0.01)  # nobody answers a receiver that is held to be dead
    async with open_pair(sender={"close_grace": 0}, receiver={"close_grace": 0}) as pair:
        pair.sender_engine.fail(settled=False, arrived=0.5)
        await pair.put("k", filled(1000))
        with pytest.raises(TransferFailed) as caught:
            await pair.get("k")
        assert not caught.value.settled
        assert pair.receiver.health()["quarantined"] > 0
        assert pair.receiver.health()["status"] == "degraded"
        assert pair.sender.statistics().in_flight == 1
        assert torch.equal(await pair.get("k"), filled(1000)), "meanwhile it is read, which hurts nobody"
        await wait_until(lambda: pair.sender.statistics().events["out_acknowledged"] == 1)
        assert pair.sender.statistics().held["pinned"] == UNIT
        pair.receiver_engine.kill()
        await assert_free(pair.sender)


async def test_a_write_that_failed_but_may_still_move_keeps_its_memory_until_the_sender_is_dead() -> None:
    async with open_pair(sender={"close_grace": 0}, receiver={"close_grace": 0}) as pair:
        pair.sender_engine.fail(settled=False)
        await pair.put("k", filled(1000))
        with pytest.raises(TransferFailed):
            await pair.get("k")
        assert pair.receiver.health()["quarantined"] > 0
        pair.sender_engine.kill()
        await assert_free(pair.receiver)
