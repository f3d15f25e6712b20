"""What a connector tells of itself: health, statistics, its address, and that it is closed."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from rig import POOL, UNIT, assert_books_agree, filled, open_pair, port_of, wait_until

from trio_mori import ConfigError, ConnectorClosed

pytestmark = pytest.mark.deterministic


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
        more = {"pool", "in_flight", "quarantined", "quarantine", "parked", "waiting_puts", "peers", "senders"}
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
