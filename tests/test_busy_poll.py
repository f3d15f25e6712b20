"""`busy_poll_us`: a get that waits keeps its run, and so its core, from sleeping."""

from __future__ import annotations

import pytest
import torch
import trio
import trio.testing
from rig import Sleeps, begin, filled, open_pair
from trio.testing import MockClock

pytestmark = pytest.mark.deterministic

LONG = 100_000
SHORT = 1000


async def test_the_run_does_not_sleep_while_a_get_spins_and_other_tasks_have_their_turns(clock: MockClock) -> None:
    clock.rate = 0.05  # so that a machine that stops for a tenth of a second does not end the spinning
    async with open_pair(receiver={"busy_poll_us": LONG}) as pair, trio.open_nursery() as nursery:
        await pair.put("first", filled(1))
        await pair.get("first")  # the two have met
        sleeps = Sleeps()
        outcome = begin(nursery, pair.get, "a")
        await trio.lowlevel.checkpoint()
        trio.lowlevel.add_instrument(sleeps)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        await pair.put("a", filled(9))
        assert torch.equal(await outcome.wait(), filled(9))  # type: ignore[arg-type]
        trio.lowlevel.remove_instrument(sleeps)
    assert sleeps.slept == 0
    assert sleeps.looked >= 20


async def test_a_get_that_has_spun_long_enough_sleeps_and_is_woken_all_the_same() -> None:
    async with open_pair(receiver={"busy_poll_us": SHORT}) as pair, trio.open_nursery() as nursery:
        outcome = await pair.get_later(nursery, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert not outcome.over.is_set()
        await pair.put("a", filled(9))
        assert torch.equal(await outcome.wait(), filled(9))  # type: ignore[arg-type]


async def test_one_get_spins_for_all() -> None:
    async with open_pair(receiver={"busy_poll_us": LONG}) as pair, trio.open_nursery() as nursery:
        outcomes = [await pair.get_later(nursery, str(number)) for number in range(8)]
        waiting = [i.waiter for channel in pair.receiver._receiver.book.channels for i in channel.interests.values()]
        assert len(waiting) == 8
        assert sum(waiter is None for waiter in waiting) <= 1
        for number in range(8):
            await pair.put(str(number), filled(9))
        for outcome in outcomes:
            await outcome.wait()


async def test_a_get_that_is_cancelled_while_it_spins_leaves_its_payload_with_the_sender() -> None:
    async with open_pair(receiver={"busy_poll_us": LONG}) as pair, trio.open_nursery() as nursery:
        outcome = await pair.get_later(nursery, "a")
        outcome.scope.cancel()
        await outcome.over.wait()
        await pair.put("a", filled(9))
        assert torch.equal(await pair.get("a"), filled(9))  # type: ignore[arg-type]
        await pair.assert_whole()
