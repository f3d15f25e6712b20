"""One address for all instances of a stage: who listens when there are several, in one process and in two."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial

import pytest
import torch
import trio
import trio.testing
import zmq
from rig import (
    LIMIT,
    POOL,
    SOON,
    UNIT,
    Outcome,
    Stage,
    assert_free,
    begin,
    filled,
    free_port,
    open_pair,
    port_of,
    receiver_config,
    start_stage,
    wait_until,
)
from stock_peers import open_stock_client, open_stock_server

from trio_mori import (
    BindFailed,
    Connector,
    ConnectorClosed,
    ConnectorConfig,
    NotReady,
    PortHeld,
    RemoteProtocolError,
    UnsupportedPayload,
    WrongRole,
    blocking,
    open_connector,
    plan_payload,
)
from trio_mori import _address as addresses
from trio_mori import _inquiry as inquiry
from trio_mori import _port as ports
from trio_mori._offers import offer_of
from trio_mori._protocol import wire
from trio_mori._zmq import ListeningLink, open_dialler, open_listener
from trio_mori.abc import Arrived, Connected, Disconnected, Link
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without ZMQ are told by it sooner."""
    monkeypatch.setattr(inquiry, "CONNECT_TIMEOUT", 0.05)


@contextmanager
def another_process() -> Iterator[None]:
    """What is opened in here knows of no port that was opened outside, as in another process."""
    token = ports.FAMILIES.set({})
    try:
        yield
    finally:
        ports.FAMILIES.reset(token)


class Site:
    """A stage's address, its instances, and a receiver of it."""

    def __init__(self, nursery: trio.Nursery, fabric: MemoryFabric) -> None:
        self.nursery = nursery
        self.fabric = fabric
        self.port = free_port()
        self.stages: list[Stage] = []

    async def open(self, **config: object) -> Stage:
        """One more instance in this process."""
        stage = await start_stage(
            self.nursery, self.fabric, **{"role": "sender", "zmq_port": self.port, "stage_id": 0, **config}
        )
        self.stages.append(stage)
        return stage

    async def open_elsewhere(self, **config: object) -> Stage:
        """One more instance in another process, as far as it knows."""
        with another_process():
            return await self.open(**config)

    async def open_receiver(self) -> Stage:
        """A receiver of this address."""
        stage = await start_stage(
            self.nursery, self.fabric, role="receiver", sender_host="127.0.0.1", sender_zmq_port=self.port
        )
        self.stages.insert(0, stage)
        return stage


@asynccontextmanager
async def open_site() -> AsyncIterator[Site]:
    """An address on loopback, for a body that takes no longer than `LIMIT`; what is still open then is closed."""
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            site = Site(nursery, MemoryFabric())
            yield site
            for stage in site.stages:
                await stage.close()
    assert ports.known_families() == {}


def standing(stage: Stage) -> object:
    """How an instance stands to the address."""
    return stage.connector.health()["port"]


async def put(stage: Stage, key: str, data: object) -> None:
    """Put on the edge from 0 to 1."""
    await stage.connector.put("0", "1", key, data)


async def get(stage: Stage, key: str) -> object:
    """Get on that edge, or fail."""
    with trio.fail_after(SOON):
        return await stage.connector.get("0", "1", key)


async def get_later(site: Site, receiver: Stage, key: str) -> Outcome:
    """A get that waits: whoever listens has heard of it."""
    before = receiver.connector.health()["peers"]
    outcome = begin(site.nursery, receiver.connector.get, "0", "1", key)
    await wait_until(lambda: receiver.connector.health()["peers"] >= max(1, before))
    await wait_until(lambda: receiver.connector.statistics().parked)
    return outcome


# --- several in one process ---------------------------------------------------------------------------------


@deterministic
async def test_two_of_one_configuration_put_at_one_address_and_each_is_received() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open()
        receiver = await site.open_receiver()
        assert (standing(first), standing(second)) == ("held", "shared")
        assert first.port == second.port == site.port
        assert first.connector.get_connection_info()["can_put"]
        assert second.connector.get_connection_info()["can_put"]
        await put(first, "a", b"a")
        receipt = await second.connector.put("0", "1", "b", b"b")
        assert receipt.metadata["source_port"] == site.port
        second.connector.put_nowait("0", "1", "c", b"c")
        assert [await get(receiver, key) for key in "abc"] == [b"a", b"b", b"c"]
        assert receiver.connector.health()["peers"] == 1
        await assert_free(first.connector, second.connector, receiver.connector)


@deterministic
async def test_what_one_puts_lies_in_the_pool_of_the_one_that_listens_and_either_cleans_it_up() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open()
        await put(second, "k", filled(UNIT))
        assert first.connector.statistics().held["published"] == UNIT
        assert second.connector.statistics().pool.free == POOL
        assert await second.connector.cleanup("k") == 1
        await put(second, "k", filled(UNIT))
        assert await first.connector.cleanup("k") == 1
        await assert_free(first.connector, second.connector)


@deterministic
async def test_the_gets_of_one_that_shares_are_its_own() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        port = free_port()
        config = {"role": "both", "zmq_port": port, "sender_host": "127.0.0.1", "sender_zmq_port": port_of(pair.sender)}
        first = await start_stage(nursery, pair.fabric, **config)
        second = await start_stage(nursery, pair.fabric, **config)
        await pair.put("a", filled(UNIT, 1))
        await pair.put("b", filled(UNIT, 2))
        assert torch.equal(await second.connector.get("0", "1", "b"), filled(UNIT, 2))
        assert torch.equal(await first.connector.get("0", "1", "a"), filled(UNIT, 1))
        assert (first.connector.health()["gets"], second.connector.health()["gets"]) == (1, 1)
        async with second.connector.open_chunk_sender("r", "2", from_stage="1") as out:
            await out.send(b"chunk")
        assert first.connector.statistics().held["published"]
        await second.close()
        await first.connector.cleanup("r")
        await first.close()


@deterministic
async def test_a_free_port_is_shared_with_nobody() -> None:
    async with open_site() as site:
        first, second = await site.open(zmq_port=0), await site.open(zmq_port=0)
        assert first.port != second.port
        assert standing(first) == standing(second) == "held"


@deterministic
async def test_another_configuration_in_the_same_process_fails_and_says_what_differs() -> None:
    async with open_site() as site, site.fabric.open() as engine:
        first = await site.open()
        config = {"role": "sender", "host": "127.0.0.1", "zmq_port": site.port, "stage_id": 3}
        with pytest.raises(BindFailed, match="stage 0 where ours is 3") as caught:
            async with open_connector(config, engine=engine):
                raise AssertionError
        text = str(caught.value)
        assert f"tcp://127.0.0.1:{site.port}" in text
        assert f"process {os.getpid()}" in text
        assert "configuration" in text
        assert isinstance(caught.value.__cause__, BindFailed)
        assert caught.value.__cause__.__cause__ is not None, "the cause that the system gave"
        await put(first, "k", b"x")
        await first.connector.cleanup("k")


@deterministic
async def test_when_the_one_that_listens_closes_the_next_one_does_and_is_asked_for_what_was_waited_for() -> None:
    async with open_site() as site:
        first, second, third = await site.open(), await site.open(), await site.open()
        receiver = await site.open_receiver()
        waiting = await get_later(site, receiver, "k")
        await first.close()
        await wait_until(lambda: standing(second) == "held")
        assert standing(third) == "shared"
        await put(third, "k", b"x")
        assert await waiting.wait() == b"x"
        await second.close()
        await put(third, "other", b"y")
        assert standing(third) == "held"
        assert await get(receiver, "other") == b"y"


@deterministic
async def test_what_was_put_and_not_fetched_goes_with_the_one_that_listened() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open()
        receiver = await site.open_receiver()
        await put(second, "k", b"old")
        await first.close()
        await put(second, "k", b"new")
        assert await get(receiver, "k") == b"new"
        await assert_free(second.connector)


@deterministic
async def test_a_put_that_waits_for_room_when_the_listener_closes_goes_to_the_next() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open()
        await put(first, "big", filled(POOL))
        outcome = begin(site.nursery, put, second, "k", filled(UNIT))
        await wait_until(lambda: first.connector.statistics().pool.waiting)
        await first.close()
        await outcome.wait()
        assert second.connector.statistics().held["published"] == UNIT


@deterministic
async def test_one_that_closes_while_its_put_waits_for_room_is_told_and_the_listener_goes_on() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open()
        receiver = await site.open_receiver()
        await put(first, "big", filled(POOL))
        outcome = begin(site.nursery, put, second, "k", filled(UNIT))
        await wait_until(lambda: first.connector.statistics().pool.waiting)
        await second.close()
        with pytest.raises(ConnectorClosed):
            await outcome.wait()
        with pytest.raises(ConnectorClosed):
            await put(second, "k", b"x")
        await wait_until(lambda: not first.connector.statistics().pool.waiting)
        assert torch.equal(await get(receiver, "big"), filled(POOL))


@deterministic
async def test_one_that_opens_while_the_listener_closes_waits_for_the_address() -> None:
    async with open_site() as site:
        first = await site.open()
        receiver = await site.open_receiver()
        first.engine.hold()
        outcome = begin(site.nursery, receiver.connector.get, "0", "1", "k")
        await put(first, "k", filled(UNIT))
        await wait_until(lambda: first.engine.held)
        site.nursery.start_soon(first.close)
        await wait_until(lambda: standing(first) == "closing")
        opened = begin(site.nursery, site.open)
        await trio.testing.wait_all_tasks_blocked()
        assert not opened.over.is_set()
        first.engine.release()
        await outcome.wait()
        second = await opened.wait()
        assert isinstance(second, Stage)
        assert standing(second) == "held"


@deterministic
@pytest.mark.usefixtures("impatient")
async def test_none_of_several_that_open_at_once_opens_where_a_stranger_listens() -> None:
    with trio.fail_after(LIMIT), socket.create_server(("127.0.0.1", 0)) as stranger:
        config = {"role": "sender", "host": "127.0.0.1", "zmq_port": stranger.getsockname()[1]}
        failures = 0

        async def open_one() -> None:
            nonlocal failures
            async with MemoryFabric().open() as engine:
                with pytest.raises(BindFailed, match="took no ZMQ connection"):
                    async with open_connector(config, engine=engine):
                        raise AssertionError
            failures += 1

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(open_one)
        assert failures == 2
        assert ports.known_families() == {}


# --- in another process -------------------------------------------------------------------------------------


@deterministic
async def test_one_of_another_process_stays_passive_and_gets() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        port = free_port()
        config = {"role": "both", "zmq_port": port, "sender_host": "127.0.0.1", "sender_zmq_port": port_of(pair.sender)}
        first = await start_stage(nursery, pair.fabric, **config)
        with another_process():
            second = await start_stage(nursery, pair.fabric, **config)
        assert (standing(first), standing(second)) == ("held", "passive")
        info = second.connector.get_connection_info()
        assert (info["zmq_port"], info["can_put"]) == (port, True)
        await pair.put("k", b"x")
        assert await second.connector.get("0", "1", "k") == b"x"
        await second.close()
        await first.close()


@deterministic
async def test_the_first_put_gets_the_address_from_one_that_never_put_and_the_waiting_are_served() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        receiver = await site.open_receiver()
        waiting = await get_later(site, receiver, "k")
        await put(second, "k", filled(UNIT))
        assert (standing(first), standing(second)) == ("passive", "held")
        assert torch.equal(await waiting.wait(), filled(UNIT))
        assert first.connector.health()["status"] == receiver.connector.health()["status"] == "healthy"
        await put(second, "other", b"y")
        assert await get(receiver, "other") == b"y"
        await assert_free(first.connector, second.connector, receiver.connector)


@deterministic
async def test_a_chunk_stream_may_be_what_gets_the_address() -> None:
    async with open_site() as site:
        await site.open()
        second = await site.open_elsewhere()
        receiver = await site.open_receiver()
        async with receiver.connector.open_chunk_receiver("r", "0", to_stage="1") as chunks:
            await wait_until(lambda: receiver.connector.health()["peers"])
            async with second.connector.open_chunk_sender("r", "1") as out:
                await out.send(b"chunk")
            assert [chunk async for chunk in chunks] == [b"chunk"]


@deterministic
async def test_one_that_put_keeps_the_address_and_the_other_put_says_so() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        receiver = await site.open_receiver()
        await put(first, "k", b"x")
        for _ in range(2):
            with pytest.raises(PortHeld, match=f"tcp://127.0.0.1:{site.port}") as caught:
                await put(second, "other", b"y")
            assert caught.value.port == site.port
            assert caught.value.pid == os.getpid()
            assert isinstance(caught.value.__cause__, BindFailed)
        with pytest.raises(NotReady):  # it asks once more, and does not repeat what was told
            second.connector.put_nowait("0", "1", "other", b"y")
        await wait_until(lambda: standing(second) == "passive")
        assert await get(receiver, "k") == b"x"
        assert (standing(first), standing(second)) == ("held", "passive")


@deterministic
async def test_one_whose_put_is_under_way_keeps_the_address() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        reservation = first.connector.reserve_nowait("0", "1", "k", plan_payload(b"x"))
        with pytest.raises(PortHeld):
            await put(second, "k", b"y")
        reservation.release()
        await put(second, "k", b"y")
        assert standing(first) == "passive"


@deterministic
async def test_one_whose_put_waits_for_room_keeps_the_address() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        source = {"sender_host": "127.0.0.1", "sender_zmq_port": port_of(pair.sender)}
        config = {"role": "both", "zmq_port": free_port(), **source}
        first = await start_stage(nursery, pair.fabric, **config)
        with another_process():
            second = await start_stage(nursery, pair.fabric, **config)
        await pair.put("big", filled(POOL * 3 // 4))
        async with first.connector.lease("0", "1", "big"):
            outcome = begin(nursery, first.connector.put, "1", "2", "k", filled(POOL // 2))
            await wait_until(lambda: first.connector.statistics().pool.waiting)
            with pytest.raises(PortHeld):
                await second.connector.put("1", "2", "k", b"y")
        await outcome.wait()
        await second.close()
        await first.close()


@deterministic
async def test_a_put_that_cannot_be_is_none_and_the_address_can_be_had_back() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        with pytest.raises(UnsupportedPayload):
            await put(second, "k", object())
        assert standing(second) == "held"
        await put(first, "k", b"x")
        assert (standing(first), standing(second)) == ("held", "passive")


@deterministic
async def test_a_put_that_may_not_wait_asks_for_the_address_and_is_told_how_it_went() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        third = await site.open_elsewhere()
        with pytest.raises(NotReady, match=f"127.0.0.1:{site.port}"):
            second.connector.put_nowait("0", "1", "k", b"x")
        await wait_until(lambda: standing(second) == "held")
        with pytest.raises(PortHeld):
            await put(third, "k", b"y")  # whoever asked will put, and keeps it
        second.connector.put_nowait("0", "1", "k", b"x")
        with pytest.raises(NotReady):
            first.connector.put_nowait("0", "1", "k", b"z")
        await wait_until(lambda: standing(first) == "passive")
        with pytest.raises(PortHeld):
            first.connector.put_nowait("0", "1", "k", b"z")
        with pytest.raises(NotReady):
            first.connector.put_nowait("0", "1", "k", b"z")
        await wait_until(lambda: standing(first) == "passive")
        await second.close()
        await put(first, "k", b"z")


@deterministic
async def test_the_address_can_be_waited_for_and_is_kept_for_the_put_that_does_not_wait() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        await second.connector.wait_listening()
        with pytest.raises(PortHeld):
            await first.connector.wait_listening()
        second.connector.reserve_nowait("0", "1", "k", plan_payload(b"x")).release()
        receiver = await site.open_receiver()
        with pytest.raises(WrongRole):
            await receiver.connector.wait_listening()
        await second.close()
        with pytest.raises(ConnectorClosed):
            await second.connector.wait_listening()
        await first.connector.wait_listening()
        first.connector.put_nowait("0", "1", "k", b"y")
        assert await get(receiver, "k") == b"y"


@deterministic
async def test_a_wait_for_the_address_that_is_cancelled_keeps_it_for_nobody() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        outcome = begin(site.nursery, second.connector.wait_listening)
        while standing(second) != "opening":  # and stays so for many ticks
            await trio.lowlevel.checkpoint()
        outcome.scope.cancel()
        await wait_until(lambda: standing(second) == "held")
        await put(first, "k", b"x")
        assert standing(first) == "held"


@deterministic
@pytest.mark.parametrize("way", ["close", "crash"])
async def test_when_the_holder_has_gone_a_put_simply_listens(way: str) -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        receiver = await site.open_receiver()
        await put(first, "old", b"x")
        assert await get(receiver, "old") == b"x"
        await getattr(first, way)()
        await put(second, "k", b"y")
        assert await get(receiver, "k") == b"y"
        assert standing(second) == "held"


@deterministic
async def test_the_address_goes_to_and_fro_between_those_that_put_nothing_that_stayed() -> None:
    async with open_site() as site:
        stages = [await site.open(), await site.open_elsewhere(), await site.open_elsewhere()]
        receiver = await site.open_receiver()
        waiting = await get_later(site, receiver, "k")
        incarnations = set()
        for number in range(9):
            with pytest.raises(UnsupportedPayload):
                await put(stages[number % 3], "k", object())
            assert standing(stages[number % 3]) == "held"
            sender = stages[number % 3].connector._sender
            assert sender is not None
            incarnations.add(sender.epoch)
        assert len(incarnations) == 9
        await put(stages[1], "k", b"x")
        assert await waiting.wait() == b"x"
        assert receiver.connector.health()["quarantined"] == 0
        await assert_free(receiver.connector)


@deterministic
async def test_all_of_a_process_yield_and_put_together() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open()
        with another_process():
            third = await site.open()
            fourth = await site.open()
        assert [standing(s) for s in site.stages] == ["held", "shared", "passive", "shared"]
        await put(fourth, "k", b"x")
        assert [standing(s) for s in site.stages] == ["passive", "shared", "held", "shared"]
        with pytest.raises(PortHeld):
            await put(second, "k", b"y")
        await third.close()
        await wait_until(lambda: standing(fourth) == "held")
        await put(second, "k", b"y")
        assert [standing(s) for s in (first, second, fourth)] == ["held", "shared", "passive"]
        assert first.connector.statistics().held["published"]


@deterministic
@pytest.mark.parametrize("ticks", range(0, 30, 9))
async def test_of_two_that_put_at_once_one_puts_and_the_other_is_told(ticks: int) -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        two = begin(site.nursery, put, second, "k", b"two")
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        one = begin(site.nursery, put, first, "k", b"one")
        await one.over.wait()
        await two.over.wait()
        errors = [outcome.error for outcome in (one, two)]
        (loser,) = [error for error in errors if error is not None]
        assert isinstance(loser, PortHeld)
        winner = first if one.error is None else second
        receiver = await site.open_receiver()
        assert await get(receiver, "k") == (b"one" if winner is first else b"two")


@deterministic
async def test_of_two_that_ask_at_once_where_nobody_listens_any_more_one_puts_and_the_other_is_told() -> None:
    async with open_site() as site:
        first = await site.open()
        others = [await site.open_elsewhere() for _ in range(4)]
        await first.close()
        outcomes = [begin(site.nursery, put, each, "k", b"x") for each in others]
        for outcome in outcomes:
            await outcome.over.wait()
        assert [type(outcome.error) for outcome in outcomes if outcome.error] == [PortHeld] * 3
        assert sorted(str(standing(each)) for each in others) == ["held", "passive", "passive", "passive"]


@deterministic
async def test_of_two_that_ask_one_holder_at_once_one_puts_and_the_other_is_told() -> None:
    async with open_site() as site:
        first = await site.open()
        others = [await site.open_elsewhere() for _ in range(2)]
        receiver = await site.open_receiver()
        waiting = await get_later(site, receiver, "k")
        outcomes = [begin(site.nursery, put, each, "k", b"x") for each in others]
        for outcome in outcomes:
            await outcome.over.wait()
        assert [type(outcome.error) for outcome in outcomes if outcome.error] == [PortHeld]
        assert await waiting.wait() == b"x"
        assert standing(first) == "passive"


@deterministic
@pytest.mark.parametrize("host", ["auto", "0.0.0.0", "localhost"])
async def test_the_address_may_be_several(host: str) -> None:
    async with open_site() as site:
        config: dict[str, object] = {"host": host, "same_host_link": "off"}
        first, second, third = await site.open(**config), await site.open(**config), await site.open_elsewhere(**config)
        assert [standing(each) for each in site.stages] == ["held", "shared", "passive"]
        receiver = await site.open_receiver()
        waiting = await get_later(site, receiver, "k")
        await put(third, "k", b"x")
        assert await waiting.wait() == b"x"
        with pytest.raises(PortHeld):
            await put(second, "k", b"y")
        await third.close()
        await put(second, "k", b"y")
        assert standing(first) == "held"
        assert await get(receiver, "k") == b"y"


@deterministic
async def test_a_stock_receiver_that_polls_finds_the_new_holder() -> None:
    async with open_site() as site:
        await site.open()
        second = await site.open_elsewhere()
        with open_stock_client(site.port, second.engine) as client:
            assert await client.query("k@0_1") is None
        await put(second, "k", b"x")
        found = None
        while found is None:
            # What it asks while the address changes hands may be lost. Then it asks again, by a new socket.
            with open_stock_client(site.port, second.engine) as client, trio.move_on_after(0.5):
                found = await client.query("k@0_1")
        assert found == {"request_id": "k@0_1", "data_size": 1, "is_fast_path": True}


@deterministic
async def test_a_receiver_that_does_not_hear_keeps_nobody_from_the_address_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trio_mori._sender.FAREWELL", 0.02)
    async with open_site() as site, site.fabric.open() as engine, open_dialler("127.0.0.1", site.port) as deaf:
        first, second = await site.open(), await site.open_elsewhere()
        assert await deaf.receive() == [Connected()]
        deployment = wire.Deployment("", 1, 0, 0, "")
        deaf.send(wire.encode(wire.Hello(1, 1, bytes(16), 1, 5.0, [offer_of(engine)], deployment)))
        await wait_until(lambda: first.connector.health()["peers"] == 1)
        started = trio.current_time()
        await put(second, "k", b"x")
        assert trio.current_time() - started < SOON
        assert first.connector.health()["peers"] == 0


@deterministic
async def test_a_receiver_that_comes_while_the_holder_says_farewell_is_not_welcomed_any_more() -> None:
    deployment = wire.Deployment("", 1, 0, 0, "")
    async with open_site() as site, site.fabric.open() as engine, open_dialler("127.0.0.1", site.port) as deaf:
        first, second = await site.open(), await site.open_elsewhere()
        assert await deaf.receive() == [Connected()]
        deaf.send(wire.encode(wire.Hello(1, 1, bytes(16), 1, 5.0, [offer_of(engine)], deployment)))
        await wait_until(lambda: first.connector.health()["peers"] == 1)
        async with open_dialler("127.0.0.1", site.port) as late:
            assert await late.receive() == [Connected()]
            outcome = begin(site.nursery, put, second, "k", b"x")
            while standing(first) != "yielding":  # and stays so until the deaf one is given up
                await trio.lowlevel.checkpoint()
            late.send(wire.encode(wire.Hello(1, 1, b"late" * 4, 1, 5.0, [offer_of(engine)], deployment)))
            assert await late.receive() == [Disconnected()]
        await outcome.wait()


@deterministic
@pytest.mark.usefixtures("impatient")
async def test_an_heir_to_whom_a_stranger_was_first_says_so_at_its_put(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as stranger:

        def open_second(hosts: Sequence[str], port: int, *, keys: None) -> AbstractAsyncContextManager[ListeningLink]:
            if stranger.getsockname()[1] == 0:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                stranger.bind(("127.0.0.1", port))
                stranger.listen()
            return open_listener(hosts, port)

        async with open_site() as site:
            first, second = await site.open(), await site.open()
            monkeypatch.setattr(addresses, "open_listener", open_second)
            await first.close()
            with pytest.raises(BindFailed, match="took no ZMQ connection"), trio.fail_after(2 * SOON):
                await put(second, "k", b"x")
            stranger.close()
            monkeypatch.undo()
            await put(second, "k", b"x")


# --- cancelled and closed in the middle ---------------------------------------------------------------------


class Halt(trio.abc.Instrument):
    """Does something when any task has come to a halt for so many times since it was made."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()

    @property
    def reached(self) -> bool:
        """Whether it did."""
        return self._left <= 0


@contextmanager
def halting(halt: Halt) -> Iterator[None]:
    """Have it count."""
    trio.lowlevel.add_instrument(halt)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(halt)


@pytest.mark.parametrize("part", [pytest.param(0, marks=deterministic), *range(1, 16)])
async def test_a_first_put_that_is_cancelled_anywhere_put_nothing_and_the_next_one_puts(part: int) -> None:
    for number in range(1 + part, 1000, 16):
        async with open_site() as site:
            first, second = await site.open(), await site.open_elsewhere()
            scope = trio.CancelScope()
            halt = Halt(number, scope.cancel)
            with halting(halt), scope:
                await put(second, "k", b"x")
            holders = [s for s in (first, second) if standing(s) == "held" and s.connector.statistics().held]
            put_before = sum(s.connector.statistics().events["out_puts"] for s in (first, second))
            assert put_before == (0 if scope.cancelled_caught else 1)
            assert len(holders) <= 1
            if scope.cancelled_caught:
                await put(first if number % 2 else second, "k", b"y")
            receiver = await site.open_receiver()
            assert await get(receiver, "k") == (b"y" if scope.cancelled_caught else b"x")
            await assert_free(first.connector, second.connector, receiver.connector)
            if not halt.reached:
                return
    raise AssertionError("it did not end")


@pytest.mark.parametrize("who", ["asker", "holder"])
@pytest.mark.parametrize("part", [pytest.param(0, marks=deterministic), 1, 2])
async def test_whoever_closes_while_the_address_changes_hands_does_so_soon_and_cleanly(who: str, part: int) -> None:
    for number in range(1 + part * 5, 300, 15):
        async with open_site() as site:
            first, second = await site.open(), await site.open_elsewhere()
            receiver = await site.open_receiver()
            closing, other = (second, first) if who == "asker" else (first, second)
            halt = Halt(number, closing.left.set)
            with halting(halt):
                outcome = begin(site.nursery, put, second, "k", b"x")
                await outcome.over.wait()
            started = trio.current_time()
            await closing.close()
            assert trio.current_time() - started < SOON
            if who == "asker":
                assert outcome.error is None or isinstance(outcome.error, ConnectorClosed)
                await put(first, "k", b"y")
                assert await get(receiver, "k") == b"y"
            else:
                assert outcome.error is None
                assert await get(receiver, "k") == b"x"
            await assert_free(other.connector, receiver.connector)
            if not halt.reached:
                return


@pytest.mark.parametrize("process", ["same", "another"])
async def test_an_open_that_is_cancelled_anywhere_leaves_the_holder_alone(process: str) -> None:
    async with open_site() as site:
        first = await site.open()
        config = {**sender_at(site.port), "stage_id": 0}
        halt = None
        for number in itertools.count(1):
            async with site.fabric.open() as engine:
                scope = trio.CancelScope()
                halt = Halt(number, scope.cancel)
                with another_process() if process == "another" else nullcontext(), halting(halt), scope:
                    async with open_connector(config, engine=engine) as connector:
                        assert connector.health()["port"] == ("shared" if process == "same" else "passive")
            assert standing(first) == "held"
            if not halt.reached:
                break
        receiver = await site.open_receiver()
        await put(first, "k", b"x")
        assert await get(receiver, "k") == b"x"


@deterministic
async def test_opening_is_cancelled_while_a_silent_holder_is_asked() -> None:
    async with open_holder(lambda _: None) as port:
        async with MemoryFabric().open() as engine:
            with trio.move_on_after(0.02) as scope:
                async with open_connector(sender_at(port), engine=engine):
                    raise AssertionError
            assert scope.cancelled_caught
    assert ports.known_families() == {}


@deterministic
async def test_a_put_that_asks_a_silent_holder_ends_when_its_connector_closes() -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        await first.close()
        async with open_holder(lambda _: None, site.port):
            outcome = begin(site.nursery, put, second, "k", b"x")
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(SOON):
                await second.close()
            with pytest.raises(ConnectorClosed):
                await outcome.wait()


# --- who else may listen there ------------------------------------------------------------------------------


def sender_at(port: int) -> dict[str, object]:
    """A sender on a port of loopback."""
    return {"role": "sender", "host": "127.0.0.1", "zmq_port": port}


def holder_of(port: int, *, yields: bool, digest: str | None = None, **config: object) -> wire.Holder:
    """What another instance of `sender_at` answers."""
    own = ConnectorConfig.from_dict({**sender_at(port), **config}).digest
    return wire.Holder(1, wire.Deployment(socket.gethostname(), -1, 0, 0, digest or own), 4711, yields)


Script = Callable[[wire.Inquiry], "list[bytes] | None"]


@asynccontextmanager
async def open_holder(script: Script, port: int = 0) -> AsyncIterator[int]:
    """A ZMQ listener that answers inquiries as it is told; yields its port."""

    async def serve(link: Link) -> None:
        while True:
            for event in await link.receive():
                if isinstance(event, Arrived):
                    body = wire.decode_from_receiver(event.frames)
                    assert isinstance(body, wire.Inquiry)
                    answer = script(body)
                    if answer is not None:
                        link.send(answer, event.route)

    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], port) as link, trio.open_nursery() as nursery:
            nursery.start_soon(serve, link)
            yield link.port
            nursery.cancel_scope.cancel()


async def open_and_fail(port: int) -> BindFailed:
    """Open a sender that cannot be opened; returns why."""
    async with MemoryFabric().open() as engine:
        with pytest.raises(BindFailed) as caught, trio.fail_after(SOON):
            async with open_connector(sender_at(port), engine=engine):
                raise AssertionError
    assert f"tcp://127.0.0.1:{port}" in str(caught.value)
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
    assert caught.value.__cause__ is not None
    assert ports.known_families() == {}
    return caught.value


async def test_a_program_without_zmq_fails_the_open_in_less_than_two_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        started = trio.current_time()
        error = await open_and_fail(stranger.getsockname()[1])
        assert trio.current_time() - started < 2
        assert "took no ZMQ connection" in str(error)
        assert "ss -tanp" in str(error)


@deterministic
async def test_a_sender_that_says_nothing_fails_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_TIMEOUT", 0.02)
    async with open_holder(lambda _: None) as port:
        assert "does not say who it is" in str(await open_and_fail(port))


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.REP, zmq.PULL], ids=["router", "rep", "pull"])
async def test_a_silent_zmq_program_fails_the_open_in_less_than_two_seconds(kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as stranger:
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        started = trio.current_time()
        error = await open_and_fail(port)
        assert trio.current_time() - started < 2
        assert "a process that" in str(error)


@deterministic
async def test_a_sender_that_is_busy_is_given_more_time_than_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "STRANGER_TIMEOUT", 0.001)
    async with open_listener(["127.0.0.1"], 0) as link, trio.open_nursery() as nursery:
        port = link.port
        nursery.start_soon(open_and_close, port)
        event = (await link.receive())[0]
        await trio.sleep(0.02)
        assert isinstance(event, Arrived)
        link.send(wire.encode(holder_of(port, yields=False)), event.route)


async def open_and_close(port: int) -> None:
    """Open a sender beside another one of its stage."""
    with another_process():
        async with MemoryFabric().open() as engine, open_connector(sender_at(port), engine=engine) as connector:
            assert connector.health()["port"] == "passive"


@deterministic
async def test_a_connection_that_has_the_port_as_its_own_end_fails_the_open() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.1", port)):
            started = trio.current_time()
            assert "a connection that has it as its own end" in str(await open_and_fail(port))
            assert trio.current_time() - started < 2


@deterministic
async def test_a_program_that_hangs_up_fails_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PAUSE", 0.0001)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def hang_up(stream: trio.SocketStream) -> None:
            await stream.aclose()

        nursery.start_soon(trio.serve_listeners, hang_up, [listener])
        assert "hang up" in str(await open_and_fail(listener.socket.getsockname()[1]))
        nursery.cancel_scope.cancel()


@deterministic
async def test_what_listens_for_a_while_only_is_not_waited_for() -> None:
    """Where it was, nobody is: a link would go on dialling."""
    async with trio.open_nursery() as nursery, MemoryFabric().open() as engine:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def end(stream: trio.SocketStream) -> None:
            await listener.aclose()
            await stream.aclose()

        async def serve() -> None:
            with suppress(trio.ClosedResourceError):
                await end(await listener.accept())

        nursery.start_soon(serve)
        started = trio.current_time()
        async with open_connector(sender_at(listener.socket.getsockname()[1]), engine=engine) as connector:
            assert connector.health()["port"] == "held"
        assert trio.current_time() - started < 1


@deterministic
async def test_a_stock_sender_fails_the_open_and_is_named() -> None:
    async with open_stock_server(MemoryFabric()) as server:
        assert "a sender of vllm-omni itself" in str(await open_and_fail(server.port))
        assert server.hellos == 1


@deterministic
@pytest.mark.parametrize(
    "answer",
    [
        [b"", b"info_not_found"],
        [b"", b"\xc0"],
        [b"hello"],
        [wire.MAGIC, b"\xc1\x90"],
        wire.encode(wire.Stale(bytes(16), 1, bytes(16))),
    ],
    ids=["stock", "none", "text", "empty", "native"],
)
async def test_a_socket_that_answers_something_else_fails_the_open(answer: list[bytes]) -> None:
    async with open_holder(lambda _: answer) as port:
        assert "a program that speaks another protocol" in str(await open_and_fail(port))


@deterministic
async def test_a_trio_mori_of_another_release_fails_the_open_and_is_named() -> None:
    async with open_holder(lambda _: wire.encode(wire.VersionRange(7, 9))) as port:
        assert "protocol versions 7 to 9, ours 1 to 1" in str(await open_and_fail(port))


@deterministic
@pytest.mark.parametrize("yields", [False, True])
async def test_a_trio_mori_of_another_deployment_fails_the_open_and_is_named(yields: bool) -> None:
    async with open_holder(lambda _: wire.encode(holder_of(port, yields=yields, digest="else"))) as port:
        error = await open_and_fail(port)
        assert "a trio_mori of another deployment, process 4711 (configuration 'else' where ours is" in str(error)


@deterministic
async def test_a_holder_that_ends_instead_of_answering_leaves_the_address() -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery, MemoryFabric().open() as engine:
            asked = trio.Event()

            def ask(_: wire.Inquiry) -> None:
                asked.set()

            async def hold(*, task_status: trio.TaskStatus[int]) -> None:
                async with open_holder(ask) as port:
                    task_status.started(port)
                    await asked.wait()

            port = await nursery.start(hold)
            async with open_connector(sender_at(port), engine=engine) as connector:
                assert connector.health()["port"] == "held"


@deterministic
async def test_a_holder_that_says_that_it_yields_and_does_not_fails_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PATIENCE", 0.02)
    asked: list[bool] = []

    def answer(question: wire.Inquiry) -> list[bytes]:
        asked.append(question.wanted)
        return wire.encode(holder_of(port, yields=question.wanted, close_grace=0))

    async with open_holder(answer) as port, MemoryFabric().open() as engine:
        async with open_connector({**sender_at(port), "close_grace": 0}, engine=engine) as connector:
            assert connector.health()["port"] == "passive"
            assert asked == [False]
            with pytest.raises(BindFailed, match=r"process 4711, which said 0\.02 s ago that it gives it up"):
                await connector.put("0", "1", "k", b"x")
            assert asked == [False, True]


@deterministic
async def test_holders_that_come_and_go_are_asked_for_a_while_and_then_fail_the_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def ask_one_that_goes(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(addresses, "PAUSE", 0.0001)
    monkeypatch.setattr(addresses, "ask_holder", ask_one_that_goes)
    with socket.create_server(("127.0.0.1", 0)) as next_one:
        assert "processes that come and go" in str(await open_and_fail(next_one.getsockname()[1]))
    assert asked == addresses.ATTEMPTS - 1


@deterministic
async def test_a_program_that_took_the_address_meanwhile_fails_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        third = await site.open()
        monkeypatch.setattr(inquiry, "CONNECT_TIMEOUT", 0.05)
        await first.close()
        await third.close()
        with socket.create_server(("127.0.0.1", site.port)):
            with pytest.raises(BindFailed, match="took no ZMQ connection"):
                await put(second, "k", b"x")
        await put(second, "k", b"x")


# --- the question itself ------------------------------------------------------------------------------------


async def ask(port: int, frames: list[bytes]) -> list[bytes]:
    """Say something to a sender; returns the answer."""
    async with open_dialler("127.0.0.1", port) as link:
        while True:
            for event in await link.receive():
                if isinstance(event, Connected):
                    link.send(frames)
                elif isinstance(event, Arrived):
                    return list(event.frames)


@deterministic
async def test_a_sender_says_who_it_is_and_yields_to_its_own_deployment_only() -> None:
    async with open_site() as site:
        stage = await site.open()
        own = wire.Deployment(socket.gethostname(), 0, 0, 0, stage.connector.config.digest)
        other = wire.Deployment("elsewhere", 0, 0, 0, stage.connector.config.digest)
        for deployment, wanted in ((own, False), (other, False), (other, True)):
            answer = wire.decode_from_holder(await ask(site.port, wire.encode(wire.Inquiry(1, 1, wanted, deployment))))
            assert answer == wire.Holder(1, own, os.getpid(), False)
            assert standing(stage) == "held"
        answer = wire.decode_from_holder(await ask(site.port, wire.encode(wire.Inquiry(1, 9, True, own))))
        assert answer == wire.Holder(1, own, os.getpid(), True)
        await wait_until(lambda: standing(stage) == "passive")
        await put(stage, "k", b"x")
        assert standing(stage) == "held"


@deterministic
async def test_a_question_of_another_version_is_answered_by_ours() -> None:
    async with open_site() as site:
        await site.open()
        question = wire.Inquiry(2, 9, True, wire.Deployment("", 0, 0, 0, ""))
        answer = wire.decode_from_holder(await ask(site.port, wire.encode(question)))
        assert answer == wire.VersionRange(wire.OLDEST_VERSION, wire.VERSION)


@deterministic
async def test_an_answer_that_nobody_asked_for_does_a_receiver_no_harm() -> None:
    async with open_holder_of_hellos() as port, MemoryFabric().open() as engine:
        async with open_connector(receiver_config(port), engine=engine) as connector, trio.open_nursery() as nursery:
            outcome = begin(nursery, connector.get, "0", "1", "k")
            await wait_until(lambda: connector.statistics().events["malformed_in"])
            assert not outcome.over.is_set()
            outcome.scope.cancel()


@asynccontextmanager
async def open_holder_of_hellos() -> AsyncIterator[int]:
    """A listener that answers whatever it is told as if it had been asked who it is."""

    async def serve(link: Link) -> None:
        while True:
            for event in await link.receive():
                if isinstance(event, Arrived):
                    link.send(wire.encode(holder_of(link_port, yields=True)), event.route)

    async with open_listener(["127.0.0.1"], 0) as link, trio.open_nursery() as nursery:
        link_port = link.port
        nursery.start_soon(serve, link)
        yield link.port
        nursery.cancel_scope.cancel()


@deterministic
def test_what_is_no_answer_is_refused() -> None:
    good = wire.encode(holder_of(1, yields=True))
    assert wire.decode_from_holder(good) == holder_of(1, yields=True)
    stale = wire.encode(wire.Stale(bytes(16), 1, bytes(16)))
    for frames in ([], good[1:], [good[0], good[1][:-1]], stale):
        with pytest.raises(RemoteProtocolError):
            wire.decode_from_holder(frames)


# --- leaks --------------------------------------------------------------------------------------------------


@deterministic
async def test_ten_changes_of_hands_leave_no_descriptor_and_no_task() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living

    async def once() -> None:
        async with open_site() as site:
            first, second = await site.open(), await site.open()
            third = await site.open_elsewhere()
            await put(third, "k", b"x")
            await first.close()
            with pytest.raises(PortHeld):
                await put(second, "k", b"y")

    for _ in range(2):
        await once()
    before = count()
    for _ in range(10):
        await once()
    await wait_until(lambda: count() <= before)


# --- two trio runs, two processes ---------------------------------------------------------------------------


def test_two_trio_runs_of_one_process_do_as_two_processes_do() -> None:
    config = {"role": "sender", "host": "127.0.0.1", "zmq_port": free_port(), "memory_pool_size": 1 << 20}
    with blocking.open_connector(config) as first, blocking.open_connector(config) as second:
        second.put("0", "1", "k", b"x", timeout=5)
        assert (first.health()["port"], second.health()["port"]) == ("passive", "held")
        with pytest.raises(PortHeld):
            first.put("0", "1", "k", b"y", timeout=5)
        with pytest.raises(PortHeld):
            first.wait_listening(timeout=5)


INSTANCE = """
    import json, sys, trio
    from trio_mori import PortHeld, open_connector

    async def main():
        async with open_connector(json.loads(sys.argv[1])) as conn:
            print(conn.health()["port"], flush=True)
            async for line in trio.wrap_file(sys.stdin):
                try:
                    await conn.put("0", "1", line.strip(), line.strip().encode())
                    print("put", flush=True)
                except PortHeld as error:
                    print("held by", error.pid, flush=True)

    trio.run(main)
"""


class Instance:
    """A sender in a process of its own that puts what it is told."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._seen = b""

    async def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        while b"\n" not in self._seen:
            self._seen += await self.process.stdout.receive_some()
        line, _, self._seen = self._seen.partition(b"\n")
        return line.decode()

    async def put(self, key: str) -> str:
        """Have it put; returns what came of it."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(f"{key}\n".encode())
        return await self.hear()


async def start_instance(nursery: trio.Nursery, config: dict[str, object]) -> Instance:
    """Start one."""
    command = [sys.executable, "-c", textwrap.dedent(INSTANCE), json.dumps(config)]
    run = partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
    return Instance(await nursery.start(run))


async def test_two_processes_of_one_stage_give_the_address_to_the_one_that_puts() -> None:
    config: dict[str, object] = {**sender_at(free_port()), "memory_pool_size": 1 << 20}
    with trio.fail_after(2 * LIMIT):
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            one = await start_instance(nursery, config)
            assert await one.hear() == "held"
            two = await start_instance(nursery, config)
            assert await two.hear() == "passive"
            port = config["zmq_port"]
            assert isinstance(port, int)
            receiver: Connector = await stack.enter_async_context(
                open_connector(receiver_config(port, memory_pool_size=1 << 20))
            )
            waiting = begin(nursery, receiver.get, "0", "1", "k")
            await wait_until(lambda: receiver.health()["peers"])
            assert await two.put("k") == "put"
            assert await waiting.wait() == b"k"
            assert await one.put("other") == f"held by {two.process.pid}"
            two.process.kill()
            await two.process.wait()
            assert await one.put("other") == "put"
            assert await receiver.get("0", "1", "other") == b"other"
            one.process.kill()
