"""Puts and gets in two halves, with the copy in a thread of the caller's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trio
import trio.testing
from rig import POOL, UNIT, assert_books_agree, assert_free, filled, open_pair, wait_until

from trio_mori import ConnectorClosed, InternalError, KeyBusy, NoRoom, NotReady, WrongRole, plan_payload
from trio_mori._errors import UnsupportedPayload

pytestmark = pytest.mark.deterministic


async def test_a_payload_is_copied_in_one_thread_and_restored_in_another() -> None:
    async with open_pair() as pair:
        data = {"hidden": torch.arange(600, dtype=torch.float32), "step": 3}
        plan = await trio.to_thread.run_sync(plan_payload, data)
        reservation = pair.sender.reserve_nowait("0", "1", "k", plan)
        assert reservation.size == plan.size
        assert pair.sender.statistics().held["staged"] == UNIT
        await trio.to_thread.run_sync(reservation.fill)
        data["hidden"].zero_()
        receipt = reservation.publish()
        assert receipt.size == plan.size
        arrival = await pair.receiver.take("0", "1", "k")
        value = await trio.to_thread.run_sync(arrival.restore)
        assert_books_agree(pair.sender, pair.receiver)
        assert pair.receiver.statistics().held["leased"]
        arrival.finish()
        assert isinstance(value, dict)
        assert torch.equal(value["hidden"], torch.arange(600, dtype=torch.float32))
        await pair.assert_whole()


class Begun:
    """A copy by a GPU that is still under way."""

    def __init__(self, is_free: Callable[[], bool], *, fails: bool) -> None:
        self._is_free = is_free
        self._fails = fails
        self.was_free: bool | None = None

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.was_free = self._is_free()
        if self._fails:
            raise RuntimeError("the GPU has failed")


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
async def test_a_reservation_that_is_released_while_a_gpu_copies_keeps_its_memory_until_that_is_over(
    fails: bool,
) -> None:
    async with open_pair() as pair:
        reservation = pair.sender.reserve_nowait("0", "1", "k", plan_payload(filled(1000)))
        begun = Begun(lambda: pair.sender.statistics().held["staged"] == 0, fails=fails)
        reservation._moments = [begun]  # type: ignore[list-item]
        reservation.release()
        assert begun.was_free is False
        await pair.assert_whole()


async def test_a_reservation_that_is_released_leaves_no_trace() -> None:
    async with open_pair() as pair:
        reservation = pair.sender.reserve_nowait("0", "1", "k", plan_payload(filled(1000)))
        reservation.fill()
        reservation.release()
        with pytest.raises(NotReady):
            pair.get_nowait("k")
        await pair.receiver.cleanup("k")
        await pair.assert_whole()


async def test_a_reservation_is_filled_once() -> None:
    async with open_pair() as pair:
        reservation = pair.sender.reserve_nowait("0", "1", "k", plan_payload(b"x"))
        reservation.fill()
        with pytest.raises(InternalError, match="'k@0_1' was filled or ended before"):
            reservation.fill()
        reservation.publish()
        assert await pair.get("k") == b"x"


async def test_a_reservation_is_refused_as_a_put_is() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        with pytest.raises(WrongRole):
            pair.receiver.reserve_nowait("0", "1", "k", plan_payload(b"x"))
        kept = pair.sender.reserve_nowait("0", "1", "k", plan_payload(filled(POOL - UNIT)))
        with pytest.raises(NoRoom):
            pair.sender.reserve_nowait("0", "1", "l", plan_payload(filled(2 * UNIT)))
        kept.release()
        outcome = await pair.hold_one(nursery, "k", filled(1000))
        with pytest.raises(KeyBusy):
            pair.sender.reserve_nowait("0", "1", "k", plan_payload(b"x"))
        pair.sender_engine.release()
        await outcome.wait()
        await pair.assert_whole()


async def test_a_key_that_became_busy_meanwhile_refuses_to_be_published() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        reservation = pair.sender.reserve_nowait("0", "1", "k", plan_payload(b"new"))
        reservation.fill()
        outcome = await pair.hold_one(nursery, "k", filled(1000))
        with pytest.raises(KeyBusy):
            reservation.publish()
        pair.sender_engine.release()
        await outcome.wait()
        await pair.assert_whole()


async def test_what_was_taken_and_given_back_is_there_for_the_next_get() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        arrival = await pair.receiver.take("0", "1", "k")
        arrival.give_back()
        assert torch.equal(await pair.get("k"), filled(1000))
        await pair.assert_whole()


async def test_what_was_taken_can_stay_where_it_arrived() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        await pair.put("empty", {})
        lease = (await pair.receiver.take("0", "1", "k")).keep()
        assert torch.equal(lease.tensor, filled(1000))
        await wait_until(lambda: not pair.sender.statistics().held.get("delivered"))
        assert pair.receiver.statistics().held["leased"] == 16 * UNIT
        nothing = (await pair.receiver.take("0", "1", "empty")).keep()
        assert nothing.value() == {}
        lease.buffer.release()
        nothing.buffer.release()
        await pair.assert_whole()


@pytest.mark.parametrize(
    ("data", "raw"), [(filled(10), True), (b"x", True), ({"x": filled(10)}, False), ([filled(10)], False), ("x", False)]
)
async def test_an_arrival_knows_whether_it_is_raw(data: object, raw: bool) -> None:
    async with open_pair() as pair:
        receipt = await pair.put("k", data)
        arrival = await pair.receiver.take("0", "1", "k")
        assert arrival.is_raw is receipt.is_raw is raw
        arrival.give_back()


async def test_take_nowait_asks_once_and_finds_it_later() -> None:
    async with open_pair() as pair:
        with pytest.raises(NotReady):
            pair.receiver.take_nowait("0", "1", "k")
        await pair.put("k", filled(1000))
        arrival = None
        while arrival is None:
            await trio.sleep(0.001)
            try:
                arrival = pair.receiver.take_nowait("0", "1", "k")
            except NotReady:
                continue
        assert torch.equal(arrival.restore(), filled(1000))
        arrival.finish()
        await pair.assert_whole()


async def test_a_source_that_changed_its_length_is_named_and_the_room_given_back() -> None:
    async with open_pair() as pair:
        data = bytearray(b"x" * 100)
        plan = plan_payload({"data": data})
        reservation = pair.sender.reserve_nowait("0", "1", "k", plan)
        del data[10:]
        with pytest.raises(UnsupportedPayload):
            reservation.fill()
        reservation.release()
        await pair.assert_whole()


async def test_a_close_waits_for_the_copy_into_the_pool_and_refuses_to_publish_it() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        reservation = pair.sender.reserve_nowait("0", "1", "k", plan_payload(filled(1000)))
        over = trio.Event()

        async def drain() -> None:
            await pair.sender._wind_up()
            over.set()

        nursery.start_soon(drain)
        await trio.testing.wait_all_tasks_blocked()
        assert not over.is_set()
        reservation.fill()
        with pytest.raises(ConnectorClosed):
            reservation.publish()
        await over.wait()
        await assert_free(pair.sender)


async def test_a_close_during_a_copy_out_of_the_pool_keeps_the_memory_and_the_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair(receiver={"close_grace": 0}) as pair:
        await pair.put("k", filled(1000))
        arrival = await pair.receiver.take("0", "1", "k")
        await pair.receiver._wind_up()
        monkeypatch.setattr("trio_mori._receiver.FAREWELL", 0.01)  # nobody answers the one at its end
        assert torch.equal(arrival.restore(), filled(1000))
        with pytest.raises(ConnectorClosed):
            arrival.finish()
        assert "abandon" in [call.method for call in pair.receiver_engine.calls]
        await wait_until(lambda: pair.sender.statistics().held["published"] == UNIT)
