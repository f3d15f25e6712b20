"""Stock peers at the other end: byte for byte as the vllm-omni dialect is described, and as stock misbehaves."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import attrs
import msgspec
import pytest
import torch
import trio
from rig import (
    LIMIT,
    POOL,
    UNIT,
    Outcome,
    assert_books_agree,
    assert_free,
    begin,
    filled,
    port_of,
    receiver_config,
    sender_config,
    wait_until,
)
from stock_peers import (
    StockClient,
    StockServer,
    encode,
    open_stock_client,
    open_stock_server,
    restored,
    serialised,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_mori import (
    Connector,
    ManagedBuffer,
    NoRoom,
    NotReady,
    PeerLost,
    PeerRestarted,
    RemoteProtocolError,
    TransferFailed,
    open_connector,
)
from trio_mori._protocol.extents import INBOUND
from trio_mori.testing import MemoryEngine, MemoryFabric

deterministic = pytest.mark.deterministic

STRUCTURE = {"hidden": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "ids": [1, 2], "name": "x", "none": None}


def assert_structure(value: object) -> None:
    assert isinstance(value, dict)
    assert torch.equal(value["hidden"], STRUCTURE["hidden"])  # type: ignore[arg-type]
    assert value["hidden"].dtype == torch.bfloat16
    assert [value["ids"], value["name"], value["none"]] == [[1, 2], "x", None]


# === a stock receiver, our sender ===========================================================================


@attrs.frozen
class Sending:
    """Our sender, a stock receiver, and both engines."""

    fabric: MemoryFabric
    sender: Connector
    engine: MemoryEngine
    client: StockClient

    async def put(self, key: str, data: object) -> dict[str, object]:
        return (await self.sender.put("0", "1", key, data)).metadata


@asynccontextmanager
async def open_sending(*, pool: int = POOL, **config: object) -> AsyncIterator[Sending]:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=pool) as ours, fabric.open(pool_size=POOL) as theirs:
            async with open_connector(sender_config(**config), engine=ours) as sender:
                with open_stock_client(port_of(sender), theirs) as client:
                    yield Sending(fabric, sender, ours, client)
            assert ours.violations == []


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
            assert await second.query("other@0_1") is not None
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


# === a stock sender, our receiver ===========================================================================


@attrs.frozen
class Receiving:
    """A stock sender, our receiver, and its engine."""

    fabric: MemoryFabric
    server: StockServer
    receiver: Connector
    engine: MemoryEngine

    async def get(self, key: str, metadata: dict[str, object] | None = None) -> object:
        return await self.receiver.get("0", "1", key, metadata)

    async def get_bytes(self, key: str, metadata: dict[str, object] | None = None) -> bytes:
        value = await self.get(key, metadata)
        assert isinstance(value, ManagedBuffer)
        with value:
            return value.to_bytes()


@asynccontextmanager
async def open_receiving(**config: object) -> AsyncIterator[Receiving]:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with open_stock_server(fabric) as server, fabric.open(pool_size=POOL) as engine:
            async with open_connector(receiver_config(server.port, **config), engine=engine) as receiver:
                yield Receiving(fabric, server, receiver, engine)


@deterministic
async def test_a_raw_payload_arrives_as_a_managed_buffer_of_its_bytes() -> None:
    async with open_receiving() as r:
        data = torch.arange(500, dtype=torch.int16)
        r.server.put("k@0_1", data)
        value = await r.get("k")
        assert isinstance(value, ManagedBuffer)
        with value:
            assert value.size == 1000
            assert value.tensor.dtype == torch.uint8
            assert torch.equal(value.as_tensor(torch.int16, (500,)), data)
        assert r.server.hellos == 1, "it was asked once what it speaks"
        await assert_free(r.receiver)


@deterministic
async def test_a_serialised_payload_arrives_decoded() -> None:
    async with open_receiving() as r:
        r.server.put("k@0_1", STRUCTURE)
        assert_structure(await r.get("k"))
        await assert_free(r.receiver)


@deterministic
async def test_whole_metadata_saves_the_query_and_partial_metadata_does_not() -> None:
    async with open_receiving(sender_host=None, sender_zmq_port=None) as r:
        whole = r.server.put("a@0_1", filled(10))
        assert await r.get_bytes("a", whole) == bytes([7] * 10)
        assert r.server.queries == []
        r.server.put("b@0_1", filled(10))
        partial = {"source_host": "127.0.0.1", "source_port": r.server.port}
        assert await r.get_bytes("b", partial) == bytes([7] * 10)
        assert r.server.queries == ["b@0_1"]


@deterministic
async def test_a_lease_of_a_stock_payload_shows_it_in_place() -> None:
    async with open_receiving() as r:
        r.server.put("raw@0_1", filled(1000))
        async with r.receiver.lease("0", "1", "raw") as lease:
            value = lease.value()
            assert torch.equal(value, filled(1000))
            del value
        r.server.put("structure@0_1", STRUCTURE)
        async with r.receiver.lease("0", "1", "structure") as lease:
            assert_structure(lease.value())
        await assert_free(r.receiver)


@deterministic
async def test_a_get_asks_again_until_the_payload_is_there() -> None:
    async with open_receiving() as r, trio.open_nursery() as nursery:
        outcome = begin(nursery, r.get_bytes, "k")
        await wait_until(lambda: len(r.server.queries) >= 3)
        r.server.put("k@0_1", filled(10))
        assert await outcome.wait() == bytes([7] * 10)
        await assert_free(r.receiver)


@deterministic
async def test_get_nowait_asks_once_per_call_and_hands_out_what_came() -> None:
    async with open_receiving() as r:
        with pytest.raises(NotReady):
            r.receiver.get_nowait("0", "1", "other")
        await wait_until(lambda: r.receiver._receiver.upstreams and "other@0_1" in asked(r))
        await r.receiver.cleanup("other")
        r.server.put("k@0_1", filled(10))
        value = await nowait(r, "k")
        assert isinstance(value, ManagedBuffer)
        value.release()
        await assert_free(r.receiver)


def asked(r: Receiving) -> list[str]:
    """What the server was asked for; asks for it itself meanwhile, as an adapter does."""
    with suppress(NotReady):
        r.receiver.get_nowait("0", "1", "other")
    return r.server.queries


async def nowait(r: Receiving, key: str) -> object:
    """Ask as an adapter does, until it is there."""
    while True:
        try:
            return r.receiver.get_nowait("0", "1", key)
        except NotReady:
            await trio.sleep(0.001)


@deterministic
async def test_cleanup_frees_what_came_for_get_nowait_and_was_not_taken() -> None:
    async with open_receiving() as r:
        r.server.put("k@0_1", filled(10))
        await wait_until(lambda: leased_after_asking(r) > 0)
        assert await r.receiver.cleanup("k") == 1
        await assert_free(r.receiver)
        assert await r.receiver.cleanup("k") == 0


def leased_after_asking(r: Receiving) -> int:
    if not r.receiver.statistics().held["leased"] and not r.server.pulls:
        with pytest.raises(NotReady):
            r.receiver.get_nowait("0", "1", "k")
    return r.receiver.statistics().held["leased"]


@deterministic
async def test_a_refused_pull_is_an_error_and_the_payload_is_got_later() -> None:
    async with open_receiving() as r:
        r.server.put("k@0_1", filled(10))
        r.server.refused = 1
        with pytest.raises(TransferFailed, match="trans_error") as caught:
            await r.get("k")
        assert caught.value.settled
        await assert_free(r.receiver)
        assert await r.get_bytes("k") == bytes([7] * 10)


@deterministic
async def test_metadata_with_a_wrong_size_is_an_error_and_leaves_nothing() -> None:
    async with open_receiving() as r:
        metadata = r.server.put("k@0_1", filled(10))
        with pytest.raises(TransferFailed):
            await r.get("k", {**metadata, "data_size": 11})
        await assert_free(r.receiver)
        assert await r.get_bytes("k", metadata) == bytes([7] * 10)


async def time_out_a_pull(r: Receiving, clock: MockClock, key: str = "k") -> None:
    """Let a pull run out of time while its bytes are on their way."""
    r.server.put(f"{key}@0_1", filled(1000))
    r.server.engine.hold(arrived=0.5)
    held = len(r.server.engine.held)
    async with trio.open_nursery() as nursery:
        outcome = begin(nursery, r.get, key)
        await wait_until(lambda: len(r.server.engine.held) > held)
        clock.jump(r.receiver.config.transfer_timeout_base)
        with pytest.raises(TransferFailed, match="quarantine") as caught:
            await outcome.wait()
    assert not caught.value.settled


@deterministic
async def test_a_pull_that_ran_out_of_time_keeps_its_memory_until_the_late_answer(clock: MockClock) -> None:
    async with open_receiving(transfer_timeout_base=5) as r:
        await time_out_a_pull(r, clock)
        assert r.receiver.health()["quarantined"] == UNIT
        assert r.receiver.health()["status"] == "degraded"
        pool = r.receiver._pool
        rest = pool.extents.allocate(pool.extents.largest_free, INBOUND)
        pool.tensor(rest, rest.size).fill_(0xAA)
        r.server.engine.release()
        await wait_until(lambda: r.receiver.health()["quarantined"] == 0)
        assert bool((pool.tensor(rest, rest.size) == 0xAA).all())
        pool.extents.free(rest)
        await assert_free(r.receiver)


@deterministic
async def test_a_get_cancelled_during_its_pull_keeps_its_memory_until_the_late_answer() -> None:
    async with open_receiving() as r, trio.open_nursery() as nursery:
        r.server.put("k@0_1", filled(1000))
        r.server.engine.hold()
        outcome = begin(nursery, r.get, "k")
        await wait_until(lambda: r.server.engine.held)
        outcome.scope.cancel()
        await outcome.over.wait()
        assert r.receiver.health()["quarantined"] == UNIT
        r.server.engine.release()
        await assert_free(r.receiver)


@deterministic
async def test_pulls_are_refused_when_too_much_of_the_pool_waits_for_late_answers(clock: MockClock) -> None:
    async with open_receiving(transfer_timeout_base=5, quarantine_fraction=2 * UNIT / POOL) as r:
        await time_out_a_pull(r, clock, "a")
        await time_out_a_pull(r, clock, "b")
        with pytest.raises(NoRoom) as caught:
            await r.get("c")
        assert caught.value.quarantined == 2 * UNIT
        r.server.engine.release()
        await assert_free(r.receiver)
        r.server.put("c@0_1", filled(10))
        assert await r.get_bytes("c") == bytes([7] * 10)


@deterministic
async def test_memory_of_a_pull_whose_connection_broke_stays_out_of_use() -> None:
    async with open_receiving(close_grace=0) as r, trio.open_nursery() as nursery:
        r.server.put("k@0_1", filled(1000))
        r.server.engine.hold()
        outcome = begin(nursery, r.get, "k")
        await wait_until(lambda: r.server.engine.held)
        r.server.hang_up()
        await wait_until(lambda: r.receiver.health()["quarantined"] == UNIT)
        outcome.scope.cancel()
        r.server.engine.release()


@deterministic
@pytest.mark.parametrize("ends", [True, False])
async def test_a_close_waits_for_a_pull_under_way_and_abandons_the_engine_if_it_does_not_end(
    ends: bool, clock: MockClock
) -> None:
    fabric = MemoryFabric()

    async def end() -> None:
        await wait_until(lambda: receiver.health()["status"] == "unhealthy")
        if ends:
            server.engine.release()
        else:
            clock.jump(5)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery, open_stock_server(fabric) as server:
            async with fabric.open(pool_size=POOL) as engine:
                async with open_connector(receiver_config(server.port, close_grace=5), engine=engine) as receiver:
                    server.put("k@0_1", filled(1000))
                    server.engine.hold()
                    outcome = begin(nursery, receiver.get, "0", "1", "k")
                    await wait_until(lambda: server.engine.held)
                    nursery.start_soon(end)
                assert any(call.method == "abandon" for call in engine.calls) is not ends
                await assert_told_or_got(outcome)
                server.engine.release()


async def assert_told_or_got(outcome: Outcome) -> None:
    await outcome.over.wait()
    if outcome.error is not None:
        assert type(outcome.error).__name__ == "ConnectorClosed", repr(outcome.error)


@deterministic
async def test_gets_that_wait_for_a_stock_sender_are_told_when_the_connector_closes() -> None:
    async with open_receiving() as r, trio.open_nursery() as nursery:
        for _ in range(3):
            async with r.fabric.open() as engine:
                async with open_connector(receiver_config(r.server.port), engine=engine) as receiver:
                    r.server.queries.clear()
                    outcomes = [begin(nursery, receiver.get, "0", "1", f"k{i}") for i in range(8)]
                    with pytest.raises(NotReady):
                        receiver.get_nowait("0", "1", "parked")
                    await wait_until(lambda: len(set(r.server.queries)) == 8)
                for outcome in outcomes:
                    await outcome.over.wait()
                    assert type(outcome.error).__name__ == "ConnectorClosed", repr(outcome.error)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_late_answer_to_a_query_is_never_taken_for_that_to_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hundred times, with other sizes each time; the number of descriptors stays."""
    monkeypatch.setattr("trio_mori._stock.QUERY_TIMEOUT", 0.004)
    async with open_receiving() as r:
        r.server.put("warm@0_1", filled(1))
        await r.get_bytes("warm")
        open_at_most = 0
        for number in range(200):
            r.server.put(f"k{number}@0_1", filled(100 + number, number % 251))
            r.server.late = True
            with trio.move_on_after(0.008):
                await r.get(f"k{number}")
                raise AssertionError("it was not answered")
            r.server.entries[f"k{number}@0_1"] = attrs.evolve(
                r.server.entries[f"k{number}@0_1"], data=bytes([number % 251]) * (200 + number)
            )
            r.server.answer_late()
            assert await r.get_bytes(f"k{number}") == bytes([number % 251]) * (200 + number)
            if number < 20:
                open_at_most = max(open_at_most, open_descriptors())
        await wait_until(lambda: open_descriptors() <= open_at_most)
        await assert_free(r.receiver)


@deterministic
async def test_a_query_that_is_not_answered_is_asked_again_by_a_new_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mori._stock.QUERY_TIMEOUT", 0.05)
    async with open_receiving() as r:
        r.server.put("k@0_1", filled(10))
        r.server.ignored = 2
        assert await r.get_bytes("k") == bytes([7] * 10)
        assert len(r.server.peers) >= 4, "the hello's, two that were given up, and one that was answered"


@deterministic
@pytest.mark.parametrize(
    "answer", [b"", b"rubbish", b"\xc1", encode({"request_id": "k@0_1"}), encode({"data_size": 0}), encode([])]
)
async def test_a_rubbish_answer_to_a_query_is_as_none_and_the_socket_is_given_up(answer: bytes) -> None:
    async with open_receiving() as r:
        r.server.put("k@0_1", filled(10))
        r.server.rubbish = [answer]
        assert await r.get_bytes("k") == bytes([7] * 10)


@deterministic
async def test_a_payload_of_no_bytes_is_a_protocol_error() -> None:
    async with open_receiving() as r:
        r.server.rubbish = [encode({"request_id": "k@0_1", "data_size": 0, "is_fast_path": True})]
        with pytest.raises(RemoteProtocolError, match="0 bytes"):
            await r.get("k")


@deterministic
async def test_a_sender_that_answers_the_hello_late_is_waited_for() -> None:
    async with open_receiving(heartbeat_interval=0.05, peer_timeout=0.2) as r, trio.open_nursery() as nursery:
        r.server.late = True
        r.server.put("k@0_1", filled(10))
        outcome = begin(nursery, r.get_bytes, "k")
        await wait_until(lambda: r.server.hellos >= 3)
        assert not outcome.over.is_set()
        r.server.answer_late()
        assert await outcome.wait() == bytes([7] * 10)


@deterministic
async def test_many_gets_share_a_few_sockets_and_one_slow_pull_delays_none() -> None:
    async with open_receiving() as r, trio.open_nursery() as nursery:
        r.server.put("slow@0_1", filled(10))
        r.server.engine.hold()
        slow = begin(nursery, r.get_bytes, "slow")
        await wait_until(lambda: r.server.engine.held)
        held = r.server.engine.held[0]
        r.server.engine._gates.clear()
        for number in range(40):
            r.server.put(f"k{number}@0_1", filled(100, number))
        outcomes = [begin(nursery, r.get_bytes, f"k{number}") for number in range(40)]
        for number, outcome in enumerate(outcomes):
            assert await outcome.wait() == bytes([number]) * 100
        assert not slow.over.is_set()
        assert len(r.server.peers) <= 5
        held.finish()
        assert await slow.wait() == bytes([7] * 10)
        await assert_free(r.receiver)


# --- senders that change what they speak --------------------------------------------------------------------


@deterministic
async def test_a_stock_sender_is_replaced_by_a_native_one_on_its_address_and_back() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, AsyncNursery() as nursery:
            async with open_stock_server(fabric) as server:
                port = server.port
                server.put("k@0_1", filled(10, 0))
                receiver = await nursery.start_connector(receiver_config(port), engine)
                value = await receiver.get("0", "1", "k")
                assert isinstance(value, ManagedBuffer)
                value.release()
                waiting = begin(nursery.tasks, receiver.get, "0", "1", "native")
                await wait_until(lambda: "native@0_1" in server.queries)
            before = open_descriptors()
            for number in range(1, 6):
                async with fabric.open(pool_size=POOL) as native_engine:
                    async with open_connector(sender_config(zmq_port=port), engine=native_engine) as native:
                        await native.put("0", "1", "native", filled(10, number))
                        assert torch.equal(await waiting.wait(), filled(10, number))
                        waiting = begin(nursery.tasks, receiver.get, "0", "1", "stock")
                        await wait_until(lambda: receiver.statistics().parked == 1)
                async with open_stock_server(fabric, port) as server:
                    server.put("stock@0_1", filled(10, number))
                    value = await waiting.wait()
                    assert isinstance(value, ManagedBuffer)
                    with value:
                        assert value.to_bytes() == bytes([number] * 10)
                    waiting = begin(nursery.tasks, receiver.get, "0", "1", "native")
                    await wait_until(lambda server=server: "native@0_1" in server.queries)
            await wait_until(lambda: open_descriptors() <= before)
            waiting.scope.cancel()
            await assert_free(receiver)
            nursery.tasks.cancel_scope.cancel()


class AsyncNursery:
    """A nursery that can hold a connector open."""

    def __init__(self) -> None:
        self._manager = trio.open_nursery()

    async def __aenter__(self) -> AsyncNursery:
        self.tasks = await self._manager.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> object:
        return await self._manager.__aexit__(*error)  # type: ignore[arg-type]

    async def start_connector(self, config: dict[str, object], engine: MemoryEngine) -> Connector:
        async def run(*, task_status: trio.TaskStatus[Connector]) -> None:
            async with open_connector(config, engine=engine) as connector:
                task_status.started(connector)
                await trio.sleep_forever()

        connector: Connector = await self.tasks.start(run)
        return connector


@deterministic
async def test_what_had_arrived_from_a_native_sender_is_not_lost_when_a_stock_one_takes_its_place() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, fabric.open(pool_size=POOL) as native_engine:
            async with AsyncNursery() as nursery:
                async with open_connector(sender_config(), engine=native_engine) as native:
                    port = port_of(native)
                    receiver = await nursery.start_connector(receiver_config(port), engine)
                    with pytest.raises(NotReady):
                        receiver.get_nowait("0", "1", "k")
                    await native.put("0", "1", "k", b"arrived")
                    await wait_until(lambda: receiver.statistics().held["arrived"])
                async with open_stock_server(fabric, port) as server:
                    server.put("other@0_1", filled(10))
                    value = await receiver.get("0", "1", "other")
                    assert isinstance(value, ManagedBuffer)
                    value.release()
                    assert receiver.get_nowait("0", "1", "k") == b"arrived"
                    await assert_free(receiver)
                nursery.tasks.cancel_scope.cancel()


@deterministic
async def test_a_stream_does_not_go_on_with_a_stock_sender_in_the_place_of_its_own() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, fabric.open(pool_size=POOL) as native_engine:
            async with AsyncNursery() as nursery:
                async with open_connector(sender_config(), engine=native_engine) as native:
                    port = port_of(native)
                    receiver = await nursery.start_connector(receiver_config(port), engine)
                    await native.put("0", "1", "r_0_0", (0, 5, "first"))  # as a chunk sender wraps it, which goes on
                    chunks = receiver.open_chunk_receiver("r", "0", to_stage="1")
                    stream = await chunks.__aenter__()
                    assert await stream.__anext__() == "first"
                async with open_stock_server(fabric, port):
                    with pytest.raises((PeerRestarted, PeerLost)):
                        await stream.__anext__()
                    with pytest.raises((PeerRestarted, PeerLost)):
                        await stream.__anext__()
                    await chunks.__aexit__(None, None, None)
                    await assert_free(receiver)
                nursery.tasks.cancel_scope.cancel()


@deterministic
async def test_a_stock_sender_that_is_gone_for_peer_timeout_is_lost(clock: MockClock) -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, AsyncNursery() as nursery:
            async with open_stock_server(fabric) as server:
                port = server.port
                receiver = await nursery.start_connector(
                    receiver_config(port, heartbeat_interval=1, peer_timeout=10), engine
                )
                outcome = begin(nursery.tasks, receiver.get, "0", "1", "k")
                await wait_until(lambda: server.queries)
            await wait_until(lambda: receiver.health()["peers"] == 0)
            clock.jump(9)
            await wait_all_tasks_blocked()
            assert not outcome.over.is_set()
            clock.jump(2)
            with pytest.raises(PeerLost):
                await outcome.wait()
            again = begin(nursery.tasks, receiver.get, "0", "1", "k")
            async with open_stock_server(fabric, port) as server:
                server.put("k@0_1", filled(10))
                value = await again.wait()
                assert isinstance(value, ManagedBuffer)
                value.release()
                await assert_free(receiver)
            nursery.tasks.cancel_scope.cancel()
