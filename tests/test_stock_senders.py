"""A stock sender at our receiver: what is got, asked for again, refused, and told."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import trio
from rig import assert_free, begin, filled, receiver_config, wait_until
from stock_edges import STRUCTURE, Receiving, assert_structure, open_receiving
from stock_peers import encode

from trio_mori import ManagedBuffer, NotReady, RemoteProtocolError, TransferFailed, open_connector

deterministic = pytest.mark.deterministic


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
