"""What a get leaves to be done when it has returned: nobody can tell that it is done a tick later."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from rig import POOL, assert_free, filled, open_pair

from trio_mori._afterwork import Afterwork
from trio_mori._pool import INLINE_COPY
from trio_mori._receiver import Receiver

pytestmark = pytest.mark.deterministic


async def test_what_a_get_has_just_returned_is_counted_and_its_room_is_free() -> None:
    async with open_pair() as pair:
        await pair.put("a", filled(4096))
        await pair.get("a")
        now = pair.receiver.statistics()
        assert now.got["0_1"].payloads == 1
        assert now.held["leased"] == 0
        assert now.pool.free == now.pool.size


async def test_room_that_a_get_has_just_left_is_there_for_a_put_that_cannot_wait() -> None:
    async with open_pair(receiver={"role": "both", "host": "127.0.0.1", "zmq_port": 0}) as pair:
        await pair.put("a", filled(POOL // 2))
        await pair.get("a")
        receipt = pair.receiver.put_nowait("1", "2", "b", filled(POOL * 3 // 4))
        assert receipt.size == POOL * 3 // 4


async def test_the_sender_forgets_what_a_get_has_returned_though_nothing_else_happens_at_the_receiver() -> None:
    async with open_pair() as pair:
        await pair.put("a", filled(4096))
        await pair.get("a")
        await pair.sender.drain()
        await assert_free(pair.sender)


async def test_the_sender_of_a_large_payload_is_told_before_the_get_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    large = filled(INLINE_COPY + 1)
    async with open_pair(sender_pool=2 * len(large), receiver_pool=2 * len(large)) as pair:
        monkeypatch.setattr(Receiver, "tidy", lambda self: None)  # as if the loop did not go on after it
        await pair.put("large", large)
        await pair.get("large")
        await pair.sender.drain()


async def test_what_is_left_in_one_tick_is_done_once_in_the_next() -> None:
    left: list[int] = []
    done: list[list[int]] = []

    def do() -> None:
        if left:
            done.append(left.copy())
            left.clear()

    async with trio.open_nursery() as nursery:
        afterwork = Afterwork(do)
        nursery.start_soon(afterwork.do_forever)
        for first in (0, 2):  # also before its task has begun
            left.append(first)
            afterwork.soon()
            left.append(first + 1)
            afterwork.soon()
            assert len(done) == first // 2
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert done == [[0, 1], [2, 3]]
    afterwork.soon()  # its task has ended: nothing to wake
