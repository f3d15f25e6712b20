"""Payloads that nobody gets: cleaned up, expired, or replaced; and who is told."""

from __future__ import annotations

import pytest
import torch
import trio
import trio.testing
from rig import UNIT, assert_free, begin, fill_receiver, filled, open_pair, wait_until
from trio.testing import MockClock

from trio_mori import Expired, Gone, KeyBusy, NotReady

pytestmark = pytest.mark.deterministic


async def test_cleanup_drops_a_request_with_its_chunks_and_no_other() -> None:
    async with open_pair() as pair:
        for key in ("req", "req_0_0", "req_0_1", "req_extra_0_0", "req1_0_0", "req_1_0"):
            await pair.put(key, b"x")
        await pair.sender.put("0", "2", "req", b"x")
        assert await pair.sender.cleanup("req", "0", "1") == 3
        assert await pair.sender.cleanup("req") == 1
        assert await pair.sender.cleanup("req") == 0
        for key in ("req_extra_0_0", "req1_0_0", "req_1_0"):
            assert await pair.get(key) == b"x"
        await pair.assert_whole()


async def test_cleanup_frees_exactly_the_five_chunks_of_a_request() -> None:
    async with open_pair() as pair:
        for request in ("req-1", "req-10"):
            for chunk in range(5):
                await pair.put(f"{request}_0_{chunk}", filled(1000, chunk))
        await pair.put("req-1_extra_0_0", filled(1000, 9))
        before = pair.sender.statistics().held["published"]
        assert await pair.sender.cleanup("req-1") == 5
        assert pair.sender.statistics().held["published"] == before - 5 * UNIT
        assert await pair.sender.cleanup("req-1") == 0
        for chunk in range(5):
            assert torch.equal(await pair.get(f"req-10_0_{chunk}"), filled(1000, chunk))
        assert torch.equal(await pair.get("req-1_extra_0_0"), filled(1000, 9))
        await pair.assert_whole()


async def test_cleanup_wants_both_stages_or_neither() -> None:
    async with open_pair() as pair:
        with pytest.raises(ValueError, match="give both or neither"):
            await pair.sender.cleanup("k", "0")
        with pytest.raises(ValueError, match="give both or neither"):
            pair.sender.cleanup_nowait("k", to_stage="1")


async def test_a_get_after_a_cleanup_is_told_once_that_the_payload_is_gone() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        await pair.put("k", b"x")
        await pair.sender.cleanup("k")
        with pytest.raises(Gone) as caught:
            await pair.get("k")
        assert caught.value.key == "k@0_1"
        again = await pair.get_later(nursery, "k")
        await pair.put("k", b"y")
        assert await again.wait() == b"y"
        await pair.assert_whole()


async def test_a_get_after_a_quiet_cleanup_waits_whatever_became_of_payloads_before() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        await pair.put("r_0_0", b"old")
        await pair.sender.cleanup("r", "0", "1")
        pair.sender.lose("0", "1", "r_0_1")
        assert pair.sender.cleanup_nowait("r", "0", "1", tell=False) == 0
        outcomes = [await pair.get_later(nursery, key) for key in ("r_0_0", "r_0_1")]
        for key in ("r_0_0", "r_0_1"):
            await pair.put(key, b"new")
        assert [await outcome.wait() for outcome in outcomes] == [b"new", b"new"]
        await pair.assert_whole()


async def test_a_get_that_waits_for_room_is_told_when_the_payload_is_cleaned_up() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        full = await fill_receiver(pair, nursery)
        await pair.put("k", filled(UNIT))
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: pair.sender.statistics().held.get("claimed"))
        await pair.sender.cleanup("k")
        with pytest.raises(Gone):
            await outcome.wait()
        full.scope.cancel()
        await pair.assert_whole()


async def test_a_payload_that_nobody_fetched_in_time_expires_and_the_next_get_is_told(clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 5}) as pair:
        await pair.put("k", filled(1000))
        clock.jump(5)
        await assert_free(pair.sender)
        with pytest.raises(Expired) as caught:
            await pair.get("k")
        assert caught.value.key == "k@0_1"
        assert pair.sender.statistics().events["out_expired"] == 1
        await pair.assert_whole()


async def test_a_get_that_waits_for_room_is_told_when_the_payload_expires(clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 5}) as pair, trio.open_nursery() as nursery:
        full = await fill_receiver(pair, nursery)
        await pair.put("k", filled(UNIT))
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: pair.sender.statistics().held.get("claimed"))
        clock.jump(5)
        with pytest.raises(Expired):
            await outcome.wait()
        full.scope.cancel()
        await assert_free(pair.sender, pair.receiver)


async def test_the_newest_put_wins_and_frees_the_one_before() -> None:
    async with open_pair() as pair:
        for value in (b"one", b"two", b"three"):
            await pair.put("k", value)
        assert pair.sender.statistics().held["published"] == UNIT
        assert await pair.get("k") == b"three"
        await pair.assert_whole()


async def test_a_put_on_a_key_that_is_being_transferred_is_refused_without_a_trace() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", b"first")
        before = pair.sender.statistics()
        with pytest.raises(KeyBusy):
            await pair.put("k", b"second")
        with pytest.raises(KeyBusy):
            pair.sender.put_nowait("0", "1", "k", b"second")
        assert pair.sender.statistics() == before
        pair.sender_engine.release()
        assert await outcome.wait() == b"first"
        await pair.put("k", b"second")
        assert await pair.get("k") == b"second"
        await pair.assert_whole()


async def test_whoever_gets_what_expired_is_told_its_size_its_time_to_live_and_what_to_do(clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 10}) as pair:
        await pair.put("k", filled(1000))
        clock.jump(10)
        await wait_until(lambda: pair.sender.statistics().events["out_expired"])
        with pytest.raises(Expired) as caught:
            await pair.get("k")
    text = str(caught.value)
    assert "'k@0_1' expired at the sender tcp://127.0.0.1:" in text
    assert "(1000 bytes, not fetched within 10 s): get it sooner, or raise buffer_ttl_seconds" in text
    assert text == text.strip()


async def test_whoever_gets_what_was_cleaned_up_is_told_its_size_and_what_a_get_waits_for() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        await pair.sender.cleanup("k")
        with pytest.raises(Gone, match=r"\(1000 bytes\): it was cleaned up, or .* waits until it is put again$"):
            await pair.get("k")
        pair.sender.lose("0", "1", "k")
        with pytest.raises(Gone, match=r"sender tcp://127.0.0.1:\d+: it was cleaned up"):
            await pair.get("k")


async def test_whoever_asks_too_early_is_told_to_ask_again_or_to_wait() -> None:
    async with open_pair() as pair:
        with pytest.raises(NotReady, match="ask again later, or wait for it in get"):
            pair.get_nowait("k")
