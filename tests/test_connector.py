"""A sender and a receiver, and what `Connector` promises of put and get, their metadata and their nowait twins."""

from __future__ import annotations

import time
from statistics import median

import msgspec
import pytest
import torch
import trio
import trio.testing
from rig import POOL, UNIT, Pair, filled, open_pair, port_of, wait_until

from trio_mori import ConfigError, NoRoom, NotReady, UnsupportedPayload

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
        for _ in range(50):
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
        for value in ({}, [], None, False, 0, "", {"a": (1, 2)}):
            await pair.put("k", value)
            got = await pair.get("k")
            assert (got, type(got)) == (value, type(value))
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


async def test_get_finds_its_sender_by_the_receipt_itself_whatever_was_put() -> None:
    async with open_pair(receiver={"sender_host": None, "sender_zmq_port": None}) as pair:
        for data in (b"raw", {"codes": [1, 2]}, {"without a stock form": 1 << 70}):
            receipt = await pair.put("a", data)
            assert await pair.receiver.get("0", "1", "a", receipt) == data
        async with pair.receiver.lease("0", "1", "b", await pair.put("b", b"leased")) as lease:
            assert lease.buffer.to_bytes() == b"leased"
        receipt = await pair.put("c", b"now")
        with pytest.raises(NotReady):
            pair.receiver.get_nowait("0", "1", "c", receipt)
        await wait_until(lambda: pair.receiver.statistics().held.get("arrived"))
        assert pair.receiver.get_nowait("0", "1", "c", receipt) == b"now"


async def test_a_receipt_is_shown_in_a_few_words() -> None:
    async with open_pair() as pair:
        receipt = await pair.put("a", {"codes": list(range(1000))})
        address = f"tcp://127.0.0.1:{port_of(pair.sender)}"
        assert repr(receipt) == f"Receipt(size={receipt.size}, is_raw=False, endpoint={address})"
        await pair.get("a")


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


async def test_a_put_that_found_no_room_changes_nothing_and_succeeds_when_a_payload_was_read() -> None:
    async with open_pair() as pair:
        for number in range(4):
            pair.sender.put_nowait("0", "1", f"k{number}", filled(POOL // 4, number))
        with pytest.raises(NoRoom):
            pair.sender.put_nowait("0", "1", "more", filled(POOL // 4, 9))
        assert pair.sender.statistics().held["published"] == POOL
        assert torch.equal(await pair.get("k0"), filled(POOL // 4, 0))
        await wait_until(lambda: pair.sender.statistics().pool.free == POOL // 4)
        pair.sender.put_nowait("0", "1", "more", filled(POOL // 4, 9))
        for number, key in ((1, "k1"), (2, "k2"), (3, "k3"), (9, "more")):
            assert torch.equal(await pair.get(key), filled(POOL // 4, number))
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


async def test_looks_for_what_is_not_there_keep_the_connection_as_it_is() -> None:
    remote = {"same_host_link": "off"}
    async with open_pair(sender=remote, receiver=remote) as pair:
        await pair.put("first", b"x")
        assert await pair.get("first") == b"x"
        [upstream] = pair.receiver._receiver.upstreams.values()
        link, generation = upstream._links.remote, upstream.channel.generation
        took = []
        for number in range(100):
            begun = time.monotonic()
            with pytest.raises(NotReady):
                pair.get_nowait(f"k{number}")
            took.append(time.monotonic() - begun)
        assert median(took) < 0.05
        await wait_until(lambda: pair.parked() == 100)
        assert (upstream._links.remote, upstream.channel.generation) == (link, generation)
        for number in range(100):
            assert await pair.receiver.cleanup(f"k{number}") == 1
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
