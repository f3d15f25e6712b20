"""Stages whose pools are full: whatever may pass does pass, if callers release what they hold."""

from __future__ import annotations

import random

import trio
from ports import free_port
from rig import LIMIT, POOL, UNIT, assert_free, open_pair, start_stage

from trio_mori import Connector
from trio_mori.testing import MemoryFabric

GUARANTEED = POOL // 4


def payload(number: int, size: int) -> bytes:
    """No tensor: torch fills one in several threads, which wait for each other on a busy machine."""
    return bytes([number % 251]) * size


async def put_all(connector: Connector, edge: tuple[str, str], sizes: list[int]) -> None:
    """All at once: the pool decides when."""
    async with trio.open_nursery() as nursery:
        for number, size in enumerate(sizes):
            nursery.start_soon(connector.put, *edge, f"k{number}", payload(number, size))


async def get_all(connector: Connector, edge: tuple[str, str], sizes: list[int], rng: random.Random) -> None:
    """All at once, in some order; every third stays in the pool for a while."""

    async def get(number: int) -> None:
        key = f"k{number}"
        if number % 3:
            assert await connector.get(*edge, key) == payload(number, sizes[number])
            return
        async with connector.lease(*edge, key) as lease:
            await trio.sleep(rng.uniform(0, 0.002))
            assert lease.buffer.to_bytes() == payload(number, sizes[number])

    async with trio.open_nursery() as nursery:
        for number in rng.sample(range(len(sizes)), len(sizes)):
            nursery.start_soon(get, number)


async def test_two_stages_that_feed_each_other_from_full_pools_never_stand_still() -> None:
    rng = random.Random(11)
    count = 500
    fabric = MemoryFabric()
    with trio.fail_after(3 * LIMIT):  # a thousand payloads
        async with trio.open_nursery() as nursery:
            first_port, second_port = free_port(), free_port()
            here = {"role": "both", "sender_host": "127.0.0.1"}
            first = await start_stage(nursery, fabric, zmq_port=first_port, sender_zmq_port=second_port, **here)
            second = await start_stage(nursery, fabric, zmq_port=second_port, sender_zmq_port=first_port, **here)
            async with trio.open_nursery() as calls:
                for source, target, edge in ((first, second, ("0", "1")), (second, first, ("1", "0"))):
                    sizes = [rng.choice((100, 5 * UNIT, GUARANTEED - 100, GUARANTEED)) for _ in range(count)]
                    calls.start_soon(put_all, source.connector, edge, sizes)
                    calls.start_soon(get_all, target.connector, edge, sizes, rng)
            await assert_free(first.connector, second.connector)
            await first.close()
            await second.close()


async def test_a_payload_larger_than_what_is_guaranteed_gets_through_beside_a_stream_that_fills_the_pool() -> None:
    """In a middle stage, where what is received could starve by what is sent, and the other way round."""
    rng = random.Random(12)
    sizes = [POOL - GUARANTEED if number % 10 == 0 else 3 * UNIT for number in range(100)]
    async with open_pair(sender_pool=4 * POOL, receiver={"role": "both", "zmq_port": 0}) as pair:
        fabric, middle = pair.fabric, pair.receiver
        async with trio.open_nursery() as nursery:
            port = middle.get_connection_info()["zmq_port"]
            last = await start_stage(nursery, fabric, role="receiver", sender_host="127.0.0.1", sender_zmq_port=port)
            async with trio.open_nursery() as calls:
                calls.start_soon(put_all, pair.sender, ("0", "1"), sizes)
                calls.start_soon(get_all, middle, ("0", "1"), sizes, rng)
                calls.start_soon(put_all, middle, ("1", "2"), sizes)
                calls.start_soon(get_all, last.connector, ("1", "2"), sizes, rng)
            await assert_free(pair.sender, middle, last.connector)
            await last.close()
