"""A sender and a receiver, and all that `Connector` promises of put, get, lease, cleanup and what it tells."""

from __future__ import annotations

import msgspec
import pytest
import torch
import trio
import trio.testing
from rig import (
    POOL,
    UNIT,
    Outcome,
    Pair,
    assert_books_agree,
    assert_free,
    begin,
    filled,
    open_pair,
    port_of,
    receiver_config,
    start_stage,
    wait_until,
)
from trio.testing import MockClock

from trio_mori import (
    ConfigError,
    ConnectorClosed,
    Expired,
    Gone,
    KeyBusy,
    LeaseError,
    ManagedBuffer,
    NoRoom,
    NotReady,
    TooBig,
    TransferFailed,
    UnsupportedPayload,
)

pytestmark = pytest.mark.deterministic


# --- put and get --------------------------------------------------------------------------------------------


async def test_a_payload_put_first_is_got_later() -> None:
    async with open_pair() as pair:
        await pair.put("k", torch.arange(10))
        assert torch.equal(await pair.get("k"), torch.arange(10))
        await pair.assert_whole()


async def test_a_get_waits_for_its_payload() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await pair.get_later(nursery, "k")
        assert not outcome.over.is_set()
        await pair.put("k", {"a": filled(5000), "b": [1, None]})
        value = await outcome.wait()
        assert isinstance(value, dict)
        assert value["b"] == [1, None]
        assert torch.equal(value["a"], filled(5000))
        await pair.assert_whole()


async def test_each_payload_is_delivered_once() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        first = await pair.get_later(nursery, "k")
        second = await pair.get_later(nursery, "k")
        await pair.put("k", b"one")
        await wait_until(lambda: first.over.is_set() or second.over.is_set())
        await pair.put("k", b"two")
        assert {await first.wait(), await second.wait()} == {b"one", b"two"}
        await pair.assert_whole()


async def test_the_source_may_be_overwritten_when_put_returns() -> None:
    async with open_pair() as pair:
        source = filled(3 << 14, 1)
        await pair.put("k", source)
        source.fill_(9)
        assert torch.equal(await pair.get("k"), filled(3 << 14, 1))


async def test_whether_a_put_has_a_place_is_told_to_any_thread() -> None:
    async with open_pair() as pair:
        has_place = pair.sender.has_place
        assert await trio.to_thread.run_sync(has_place, "0", "1", "k", POOL)
        assert not has_place("0", "1", "k", POOL + 1)
        assert not pair.receiver.has_place("0", "1", "k", 1)
        await pair.put("k", b"x")
        assert not has_place("0", "1", "k", 1)
        assert has_place("0", "1", "l", 1)
    assert not has_place("0", "1", "l", 1)


async def test_what_get_returned_does_not_alias_the_pool() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000, 1))
        value = await pair.get("k")
        for _ in range(3):
            await pair.put("k", filled(1000, 2))
            await pair.get("k")
        assert torch.equal(value, filled(1000, 1))


async def test_a_payload_larger_than_an_inline_copy_comes_across() -> None:
    async with open_pair(sender_pool=8 << 20, receiver_pool=8 << 20) as pair:
        data = torch.arange(2 << 17, dtype=torch.int64)
        await pair.put("k", data)
        assert torch.equal(await pair.get("k"), data)
        await pair.assert_whole()


@pytest.mark.parametrize("inline", [True, False])
async def test_payloads_of_many_sizes_come_across_in_any_order(inline: bool) -> None:
    async with open_pair(inline=inline, sender_pool=4 * POOL, receiver_pool=4 * POOL) as pair:

        async def put_all() -> None:
            for number in range(200):
                await pair.put(f"k{number}", filled(1 + number * 137 % 20000, number))

        async def get(number: int) -> None:
            assert torch.equal(await pair.get(f"k{number}"), filled(1 + number * 137 % 20000, number))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put_all)
            for start in range(0, 200, 20):
                async with trio.open_nursery() as batch:
                    for number in range(start, start + 20):
                        batch.start_soon(get, number)
        await pair.assert_whole()


@pytest.mark.parametrize("empty", [b"", torch.empty(0), torch.empty(3, 0)])
async def test_an_empty_payload_is_refused(empty: object) -> None:
    async with open_pair() as pair:
        with pytest.raises(UnsupportedPayload):
            await pair.put("k", empty)
        await pair.assert_whole()


async def test_a_payload_without_tensors_takes_no_room_worth_speaking_of_and_comes_across() -> None:
    async with open_pair() as pair:
        for value in ({}, [], None, 0, "", {"a": (1, 2)}):
            await pair.put("k", value)
            assert await pair.get("k") == value
        await pair.assert_whole()


async def test_put_is_always_a_checkpoint() -> None:
    async with open_pair() as pair:
        with trio.testing.assert_checkpoints():
            await pair.put("k", b"x")
        with trio.testing.assert_checkpoints():
            await pair.sender.cleanup("k")


# --- metadata -----------------------------------------------------------------------------------------------


async def test_metadata_of_put_is_what_vllm_omni_expects() -> None:
    async with open_pair() as pair:
        receipt = await pair.put("k", filled(1000))
        assert receipt.size == 1000
        assert receipt.is_raw
        assert receipt.metadata == {
            "source_host": "127.0.0.1",
            "source_port": port_of(pair.sender),
            "data_size": 1000,
            "is_fast_path": True,
        }


async def test_metadata_of_a_payload_with_a_long_description_is_known_too() -> None:
    async with open_pair() as pair:
        data = [f"name {index}" for index in range(5000)]
        receipt = await pair.put("a", data)
        assert receipt.metadata["data_size"] == len(msgspec.msgpack.encode(data))
        assert await pair.get("a") == data


async def test_get_finds_its_sender_by_metadata_whole_or_partial() -> None:
    async with open_pair(receiver={"sender_host": None, "sender_zmq_port": None}) as pair:
        receipt = await pair.put("a", b"whole")
        assert await pair.receiver.get("0", "1", "a", receipt.metadata) == b"whole"
        await pair.put("b", b"partial")
        partial = {"source_host": "127.0.0.1", "source_port": port_of(pair.sender)}
        assert await pair.receiver.get("0", "1", "b", partial) == b"partial"


@pytest.mark.parametrize(
    "metadata",
    [
        {"source_host": "127.0.0.1"},
        {"source_port": 5},
        {"source_host": "", "source_port": 5},
        {"source_host": "127.0.0.1", "source_port": "5"},
        {"source_host": "127.0.0.1", "source_port": 0},
        {"source_host": "127.0.0.1", "source_port": 65536},
    ],
)
async def test_metadata_that_names_no_sender_is_an_error_that_shows_it(metadata: dict[str, object]) -> None:
    async with open_pair() as pair:
        with pytest.raises(ConfigError, match="get of 'k': metadata names the sender"):
            await pair.receiver.get("0", "1", "k", metadata)


async def test_other_metadata_leaves_the_configured_sender() -> None:
    async with open_pair() as pair:
        await pair.put("k", b"x")
        assert await pair.receiver.get("0", "1", "k", {"data_size": 1, "is_fast_path": True}) == b"x"


# --- the calls that never wait ------------------------------------------------------------------------------


async def test_put_nowait_puts_here_and_now_or_says_that_there_is_no_room() -> None:
    async with open_pair() as pair:
        pair.sender.put_nowait("0", "1", "a", filled(POOL - UNIT))
        with pytest.raises(NoRoom) as caught:
            pair.sender.put_nowait("0", "1", "b", filled(UNIT + 1))
        assert caught.value.size == UNIT + 1
        assert caught.value.free == UNIT
        pair.sender.put_nowait("0", "1", "b", filled(UNIT))
        assert torch.equal(await pair.get("b"), filled(UNIT))
        await pair.sender.cleanup("a")
        await pair.assert_whole()


async def test_get_nowait_asks_once_and_says_not_ready_until_it_came() -> None:
    async with open_pair() as pair:
        for _ in range(5):
            with pytest.raises(NotReady):
                pair.get_nowait("k")
        await wait_until(lambda: pair.parked() == 1)
        await pair.put("k", b"x")
        await wait_until(lambda: pair.receiver.statistics().held["arrived"])
        assert pair.get_nowait("k") == b"x"
        await pair.assert_whole()


async def test_what_get_nowait_asked_for_is_handed_to_a_get_that_waits() -> None:
    async with open_pair() as pair:
        with pytest.raises(NotReady):
            pair.get_nowait("k")
        await pair.put("k", b"x")
        assert await pair.get("k") == b"x"
        await pair.assert_whole()


async def test_cleanup_takes_back_what_get_nowait_asked_for() -> None:
    async with open_pair() as pair:
        with pytest.raises(NotReady):
            pair.get_nowait("k")
        await wait_until(lambda: pair.parked() == 1)
        assert await pair.receiver.cleanup("k") == 1
        await wait_until(lambda: pair.parked() == 0)
        await pair.put("k", b"x")
        assert await pair.get("k") == b"x"
        await pair.assert_whole()


async def test_cleanup_gives_back_what_came_for_get_nowait_and_was_not_taken() -> None:
    async with open_pair() as pair:
        with pytest.raises(NotReady):
            pair.get_nowait("k")
        await pair.put("k", b"x")
        await wait_until(lambda: pair.receiver.statistics().held["arrived"])
        assert await pair.receiver.cleanup("k", "0", "1") == 1
        assert await pair.get("k") == b"x"
        await pair.assert_whole()


async def test_get_nowait_says_when_the_payload_waits_for_room_here() -> None:
    async with open_pair() as pair:
        await pair.put("big", filled(POOL - UNIT))
        async with pair.receiver.lease("0", "1", "big"):
            await pair.put("k", filled(2 * UNIT))
            with pytest.raises(NotReady):
                pair.get_nowait("k")
            await wait_until(lambda: is_offered(pair, "k"))
            with pytest.raises(NoRoom) as caught:
                pair.get_nowait("k")
            assert caught.value.size == 2 * UNIT
        await wait_until(lambda: pair.receiver.statistics().held["arrived"])
        assert torch.equal(pair.get_nowait("k"), filled(2 * UNIT))
        await pair.assert_whole()


def is_offered(pair: Pair, key: str) -> bool:
    try:
        pair.get_nowait(key)
    except NotReady:
        return False
    except NoRoom:
        return True
    raise AssertionError("it came")


# --- leases and managed buffers -----------------------------------------------------------------------------


async def test_a_lease_shows_the_payload_where_it_arrived() -> None:
    async with open_pair() as pair:
        data = torch.arange(64, dtype=torch.bfloat16).reshape(4, 16)
        await pair.put("k", data)
        async with pair.receiver.lease("0", "1", "k") as lease:
            assert lease.size == 128
            assert torch.equal(lease.as_tensor(torch.bfloat16, (4, 16)), data)
            value = lease.value()
            assert torch.equal(value, data)
            address = pair.receiver_engine.region.tensor.data_ptr()
            assert address <= value.data_ptr() < address + POOL
            assert pair.receiver.statistics().held["leased"] > 0
            del value
        await pair.assert_whole()


async def test_a_lease_of_a_structure_without_tensors_has_its_value() -> None:
    async with open_pair() as pair:
        await pair.put("k", {"a": 1})
        async with pair.receiver.lease("0", "1", "k") as lease:
            assert lease.value() == {"a": 1}
        await pair.assert_whole()


async def test_a_tensor_that_outlives_its_lease_keeps_the_memory_and_is_reported() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        with pytest.raises(LeaseError):
            async with pair.receiver.lease("0", "1", "k") as lease:
                kept = lease.tensor
        assert pair.receiver.statistics().held["leased"] > 0
        assert torch.equal(kept, filled(1000))
        del kept
        await pair.assert_whole()


async def test_a_lease_whose_block_fails_raises_that_error_and_gives_the_memory_back() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        with pytest.raises(ZeroDivisionError):
            async with pair.receiver.lease("0", "1", "k"):
                raise ZeroDivisionError
        await pair.assert_whole()


async def test_a_managed_buffer_of_this_pool_is_put_on_without_a_copy() -> None:
    async with open_pair(receiver={"role": "both", "host": "127.0.0.1", "zmq_port": 0}) as pair:
        await pair.put("k", filled(1000))
        async with pair.receiver.lease("0", "1", "k") as lease:
            receipt = await pair.receiver.put("1", "2", "on", lease.buffer)
            assert lease.buffer.released
        assert receipt.size == 1000
        held = pair.receiver.statistics().held
        assert held["published"] > 0
        assert held["leased"] == 0
        assert_books_agree(pair.receiver)
        assert await pair.receiver.cleanup("on") == 1
        await pair.assert_whole()


async def test_a_managed_buffer_stays_the_callers_when_its_key_became_busy_while_it_waited() -> None:
    async with open_pair(receiver={"role": "both", "host": "127.0.0.1", "zmq_port": 0}) as pair:
        middle = pair.receiver
        await pair.put("k", filled(POOL // 4))
        await middle.put("1", "2", "fill", filled(POOL * 5 // 8))
        await middle.put("1", "2", "on", b"before")
        async with trio.open_nursery() as nursery, middle.lease("0", "1", "k") as lease:
            last = await start_stage(nursery, pair.fabric, **receiver_config(middle))
            put = begin(nursery, middle.put, "1", "2", "on", lease.buffer)
            await wait_until(lambda: middle.statistics().pool.waiting)
            pair.receiver_engine.hold()
            got = begin(nursery, last.connector.get, "1", "2", "on")
            await wait_until(lambda: pair.receiver_engine.held)
            assert await middle.cleanup("fill") == 1
            with pytest.raises(KeyBusy):
                await put.wait()
            assert bool((lease.tensor == 7).all())
            assert_books_agree(middle)
            pair.receiver_engine.release()
            assert await got.wait() == b"before"
            await middle.put("1", "2", "on", lease.buffer)
            assert bool((await last.connector.get("1", "2", "on") == 7).all())
            await last.close()
        await pair.assert_whole()


async def test_a_managed_buffer_of_another_pool_is_copied() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        async with pair.receiver.lease("0", "1", "k") as lease:
            assert isinstance(lease.buffer, ManagedBuffer)
            await pair.put("again", lease.buffer)
        assert torch.equal(await pair.get("again"), filled(1000))
        await pair.assert_whole()


# --- cleanup, expiry and replacement ------------------------------------------------------------------------


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


async def fill_receiver(pair: Pair, nursery: trio.Nursery) -> Outcome:
    """Lease all of the receiver's pool, until the outcome's scope is cancelled."""
    leased = trio.Event()

    async def hold() -> None:
        async with pair.receiver.lease("0", "1", "big"):
            leased.set()
            await trio.sleep_forever()

    await pair.put("big", filled(POOL))
    outcome = begin(nursery, hold)
    await leased.wait()
    return outcome


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


# --- what it tells ------------------------------------------------------------------------------------------


async def test_health_has_the_stock_keys_and_the_pool_by_state() -> None:
    async with open_pair() as pair:
        await pair.put("a", filled(1000))
        await pair.put("b", filled(500))
        await pair.get("a")
        sender, receiver = pair.sender.health(), pair.receiver.health()
        stock = {
            "status",
            "host",
            "pool_device",
            "pool_size",
            "engine_key",
            "puts",
            "gets",
            "bytes_transferred",
            "errors",
            "timeouts",
        }
        more = {"pool", "in_flight", "quarantined", "quarantine", "parked", "peers"}
        assert stock | more <= sender.keys()
        assert (sender["status"], sender["puts"], sender["gets"], sender["bytes_transferred"]) == (
            "healthy",
            2,
            0,
            1500,
        )
        assert (receiver["puts"], receiver["gets"], receiver["bytes_transferred"]) == (0, 1, 1000)
        assert sender["pool_size"] == POOL
        assert sender["pool_device"] == pair.sender_engine.region.device
        assert sender["engine_key"] == pair.sender_engine.key != receiver["engine_key"]
        assert sender["peers"] == receiver["peers"] == 1
        assert sender["errors"] == sender["timeouts"] == 0


async def test_the_pool_by_state_always_sums_to_the_pool() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await pair.hold_one(nursery, "k", filled(1000))
        await pair.put("other", filled(1000))
        assert_books_agree(pair.sender, pair.receiver)
        assert pair.sender.statistics().held["pinned"] == UNIT
        assert pair.sender.statistics().in_flight == 1
        assert pair.receiver.statistics().parked == 1
        outcome.scope.cancel()
        await wait_until(lambda: pair.receiver.health()["quarantined"])
        assert_books_agree(pair.sender, pair.receiver)
        pair.sender_engine.release()
        await pair.get("other")
        assert_books_agree(pair.sender, pair.receiver)
        await pair.get("k")


async def test_statistics_count_each_edge_by_itself() -> None:
    async with open_pair() as pair:
        await pair.sender.put("0", "1", "k", filled(100))
        await pair.sender.put("0", "2", "k", filled(200))
        await pair.receiver.get("0", "1", "k")
        now = pair.sender.statistics()
        assert {edge: (t.payloads, t.bytes) for edge, t in now.put.items()} == {"0_1": (1, 100), "0_2": (1, 200)}
        assert {edge: t.payloads for edge, t in pair.receiver.statistics().got.items()} == {"0_1": 1}
        assert now.engine == "memory"


async def test_connection_info_is_what_a_peer_needs() -> None:
    async with open_pair(receiver={"sender_host": None, "sender_zmq_port": None}) as pair:
        there, here = pair.sender.get_connection_info(), pair.receiver.get_connection_info()
        assert there == {
            "host": "127.0.0.1",
            "zmq_port": port_of(pair.sender),
            "engine_key": pair.sender.engine_key,
            "can_put": True,
        }
        assert not here["can_put"]
        pair.receiver.update_sender_info(there["host"], there["zmq_port"])
        await pair.put("k", b"x")
        assert await pair.get("k") == b"x"


@pytest.mark.parametrize(("host", "port"), [("", 5), ("127.0.0.1", 0), ("127.0.0.1", 70000), ("127.0.0.1", "5")])
async def test_update_sender_info_refuses_what_is_no_endpoint(host: str, port: int) -> None:
    async with open_pair() as pair:
        with pytest.raises(ConfigError):
            pair.receiver.update_sender_info(host, port)
        await pair.put("k", b"x")
        assert await pair.get("k") == b"x", "the endpoint before is still used"


async def test_every_call_on_a_closed_connector_says_so() -> None:
    async with open_pair() as pair:
        pass
    with pytest.raises(ConnectorClosed):
        await pair.put("k", b"x")
    with pytest.raises(ConnectorClosed):
        pair.sender.put_nowait("0", "1", "k", b"x")
    with pytest.raises(ConnectorClosed):
        await pair.get("k")
    with pytest.raises(ConnectorClosed):
        pair.get_nowait("k")
    with pytest.raises(ConnectorClosed):
        async with pair.receiver.lease("0", "1", "k"):
            pass
    with pytest.raises(ConnectorClosed):
        pair.sender.open_chunk_sender("r", "1", from_stage="0")
    with pytest.raises(ConnectorClosed):
        pair.receiver.open_chunk_receiver("r", "0", to_stage="1")
    assert pair.sender.health()["status"] == "unhealthy"
    assert await pair.sender.cleanup("k") == 0
