"""A stock receiver at our sender: byte for byte as the vllm-omni dialect is described."""

from __future__ import annotations

import os
import time

import msgspec
import pytest
import torch
import trio
from rig import POOL, UNIT, assert_books_agree, assert_free, begin, filled, port_of, receiver_config, wait_until
from stock_edges import STRUCTURE, assert_structure, open_sending
from stock_peers import encode, open_stock_client, restored, serialised
from trio.testing import MockClock

from trio_mori import open_connector

deterministic = pytest.mark.deterministic


@deterministic
async def test_a_query_tells_size_and_kind_or_that_there_is_nothing() -> None:
    async with open_sending() as s:
        assert await s.client.ask(b"query_info" + encode({"request_id": "k@0_1"})) == b"info_not_found"
        await s.put("k", filled(1000))
        await s.put("structure", STRUCTURE)
        assert await s.client.query("k@0_1") == {"request_id": "k@0_1", "data_size": 1000, "is_fast_path": True}
        size = len(serialised(STRUCTURE))
        found = {"request_id": "structure@0_1", "data_size": size, "is_fast_path": False}
        assert await s.client.query("structure@0_1") == found
        assert await s.client.query("k@0_2") is None


@deterministic
async def test_put_s_metadata_is_what_a_query_would_tell() -> None:
    async with open_sending() as s:
        for key, data in (("raw", filled(1000)), ("structure", STRUCTURE), ("small", {"a": 1})):
            metadata = await s.put(key, data)
            found = await s.client.query(f"{key}@0_1")
            assert found is not None
            assert (metadata["data_size"], metadata["is_fast_path"]) == (found["data_size"], found["is_fast_path"])


@deterministic
async def test_metadata_of_a_structure_with_a_long_description_can_be_read_when_it_has_left_too() -> None:
    async with open_sending(pool=4 << 20) as s:
        data = {f"a rather long name of a field {number}": number for number in range(5000)}
        receipt = await s.sender.put("0", "1", "k", data)
        found = await s.client.query("k@0_1")
        assert found is not None
        assert receipt.metadata["data_size"] == found["data_size"] == len(serialised(data))
        await s.sender.cleanup("k")
        assert receipt.metadata["data_size"] == found["data_size"]


@deterministic
async def test_a_raw_payload_is_pulled_to_where_it_was_asked_for() -> None:
    async with open_sending() as s:
        data = torch.arange(500, dtype=torch.int16)
        await s.put("k", data)
        s.client.engine.region.tensor.fill_(0xAA)
        assert await s.client.pull("k@0_1", 3 * UNIT, 1000) == b"trans_done"
        assert torch.equal(s.client.region(3 * UNIT, 1000).view(torch.int16), data)
        rest = s.client.engine.region.tensor
        assert bool((rest[: 3 * UNIT] == 0xAA).all())
        assert bool((rest[3 * UNIT + 1000 :] == 0xAA).all())


@deterministic
async def test_a_structure_is_pulled_in_the_stock_encoding() -> None:
    async with open_sending() as s:
        metadata = await s.put("k", STRUCTURE)
        size = int(str(metadata["data_size"]))
        assert await s.client.pull("k@0_1", 0, size) == b"trans_done"
        assert_structure(restored(bytes(s.client.region(0, size).tolist())))


@deterministic
@pytest.mark.parametrize("length", [0, 1, 999, 1001, UNIT, 1 << 62])
async def test_a_pull_of_a_wrong_length_is_refused_and_the_payload_stays(length: int) -> None:
    async with open_sending() as s:
        await s.put("k", filled(1000))
        assert await s.client.pull("k@0_1", 0, length) == b"trans_error"
        assert s.sender.statistics().events["out_refused_pulls"] == 1
        assert await s.client.pull("k@0_1", 0, 1000) == b"trans_done"


@deterministic
@pytest.mark.parametrize("offset", [POOL - 999, POOL, 1 << 62])
async def test_a_pull_past_the_receivers_region_is_refused(offset: int) -> None:
    async with open_sending() as s:
        await s.put("k", filled(1000))
        assert await s.client.pull("k@0_1", offset, 1000) == b"trans_error"
        assert await s.client.pull("k@0_1", POOL - 1000, 1000) == b"trans_done"


@deterministic
async def test_a_pull_of_an_unknown_key_is_refused() -> None:
    async with open_sending() as s:
        assert await s.client.pull("nothing@0_1", 0, 1000) == b"trans_error"


GARBAGE = [
    b"",
    b"\xc1",
    b"\x00",
    b"query_info",
    b"query_info\xc1",
    b"query_info" + encode([1]),
    b"query_info" + encode({"request_id": 5}),
    b"query_info" + encode({"request_id": ""}),
    encode({"request_id": "k@0_1"}),
    encode(
        {"request_id": "k@0_1", "dst_offset": -1, "length": 1000, "engine_desc_packed": b"", "mem_desc_packed": b""}
    ),
    encode({"request_id": "k@0_1", "dst_offset": 0, "length": "x", "engine_desc_packed": b"", "mem_desc_packed": b""}),
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 100_000,
    os.urandom(64),
    b"x" * 2_000_000,
]


@deterministic
async def test_garbage_is_answered_by_an_error_and_counted_and_harms_nobody() -> None:
    async with open_sending() as s:
        await s.put("k", filled(1000))
        for payload in GARBAGE:
            assert await s.client.ask(payload) == b"trans_error", payload[:40]
        assert s.sender.statistics().events["malformed_out"] == len(GARBAGE)
        assert await s.client.pull("k@0_1", 0, 1000) == b"trans_done"


@deterministic
@pytest.mark.parametrize("which", ["engine_desc_packed", "mem_desc_packed"])
async def test_a_pull_with_a_forged_descriptor_is_refused(which: str) -> None:
    async with open_sending() as s:
        await s.put("k", filled(1000))
        request = msgspec.msgpack.decode(s.client.pull_request("k@0_1", 0, 1000))
        request[which] = b"forged"
        assert await s.client.ask(encode(request)) == b"trans_error"
        assert await s.client.pull("k@0_1", 0, 1000) == b"trans_done"


@deterministic
async def test_a_delivered_payload_is_freed_at_the_sockets_next_request() -> None:
    async with open_sending() as s:
        await s.put("k", filled(1000))
        assert await s.client.pull("k@0_1", 0, 1000) == b"trans_done"
        assert s.sender.statistics().held["delivered"] == UNIT
        await s.client.query("other@0_1")
        await assert_free(s.sender)
        assert await s.client.query("k@0_1") is None


@deterministic
async def test_a_delivered_payload_is_freed_after_a_while_without_a_request(clock: MockClock) -> None:
    async with open_sending(stock_keep=5) as s:
        await s.put("k", filled(1000))
        assert await s.client.pull("k@0_1", 0, 1000) == b"trans_done"
        assert s.sender.statistics().held["delivered"] == UNIT
        clock.jump(5)
        await assert_free(s.sender)


@deterministic
async def test_a_receiver_that_lost_the_answer_gets_the_payload_again_by_the_same_socket() -> None:
    async with open_sending() as s:
        await s.put("k", filled(1000))
        for _ in range(3):
            assert await s.client.pull("k@0_1", 0, 1000) == b"trans_done"
        await s.client.query("other@0_1")
        await assert_free(s.sender)


@deterministic
async def test_a_structure_gives_back_the_room_of_both_its_forms() -> None:
    async with open_sending() as s:
        metadata = await s.put("k", {"a": filled(5000)})
        await s.client.query("k@0_1")
        assert s.sender.statistics().held["published"] >= 4 * UNIT
        assert_books_agree(s.sender)
        assert await s.client.pull("k@0_1", 0, int(str(metadata["data_size"]))) == b"trans_done"
        await s.client.query("other@0_1")
        await assert_free(s.sender)


@deterministic
async def test_a_structure_for_whose_encoding_there_is_no_room_is_not_found_and_stays() -> None:
    async with open_sending(pool=6 * UNIT) as s:
        await s.put("k", {"a": filled(2 * UNIT)})
        await s.put("more", filled(2 * UNIT))
        assert await s.client.query("k@0_1") is None
        await s.sender.cleanup("more")
        assert await s.client.query("k@0_1") is not None


@deterministic
async def test_a_failed_write_is_an_error_and_the_payload_stays() -> None:
    async with open_sending() as s:
        await s.put("k", filled(1000))
        s.engine.fail()
        assert await s.client.pull("k@0_1", 0, 1000) == b"trans_error"
        assert await s.client.pull("k@0_1", 0, 1000) == b"trans_done"


@deterministic
async def test_a_write_that_hangs_delays_no_query_of_others() -> None:
    async with open_sending() as s, trio.open_nursery() as nursery:
        await s.put("k", filled(1000))
        await s.put("other", filled(10))
        s.engine.hold()
        outcome = begin(nursery, s.client.pull, "k@0_1", 0, 1000)
        await wait_until(lambda: s.engine.held)
        with open_stock_client(port_of(s.sender), s.client.engine) as second:
            took = []
            for _ in range(10):
                begun = time.monotonic()
                assert await second.query("other@0_1") is not None
                took.append(time.monotonic() - begun)
            assert min(took) < 0.05
            assert await second.pull("k@0_1", 0, 1000) == b"trans_error", "it is being transferred"
        s.engine.release()
        assert await outcome.wait() == b"trans_done"


@deterministic
async def test_a_stock_and_a_native_receiver_share_a_sender() -> None:
    async with open_sending() as s, s.fabric.open() as engine:
        async with open_connector(receiver_config(s.sender), engine=engine) as native:
            for number in range(20):
                await s.put(f"a{number}", filled(100, number))
                await s.put(f"b{number}", filled(100, number))
                assert await s.client.pull(f"a{number}@0_1", 0, 100) == b"trans_done"
                assert torch.equal(await native.get("0", "1", f"b{number}"), filled(100, number))
                assert torch.equal(s.client.region(0, 100), filled(100, number))
            await s.client.query("x@0_1")
            await assert_free(s.sender, native)
