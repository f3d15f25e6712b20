"""One address for all instances of a stage: who listens when there are several, in one process and in two."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from contextlib import (
    AbstractAsyncContextManager,
)

import pytest
import torch
import trio
import trio.testing
from port_site import (
    another_process,
    get,
    get_later,
    open_site,
    put,
    standing,
)
from ports import free_port
from rig import (
    LIMIT,
    POOL,
    SOON,
    UNIT,
    Stage,
    assert_free,
    begin,
    filled,
    open_pair,
    port_of,
    start_stage,
    wait_until,
)
from stock_peers import open_stock_client

from trio_mori import (
    BindFailed,
    ConnectorClosed,
    NoDescriptors,
    NotReady,
    PortHeld,
    UnsupportedPayload,
    WrongRole,
    open_connector,
    plan_payload,
)
from trio_mori import _address as addresses
from trio_mori import _inquiry as inquiry
from trio_mori import _port as ports
from trio_mori._descriptors import no_descriptors
from trio_mori._offers import offers_of
from trio_mori._protocol import wire
from trio_mori._zmq_dialler import open_dialler
from trio_mori._zmq_listener import ListeningLink, open_listener
from trio_mori.abc import Connected, Disconnected
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without ZMQ are told by it sooner."""
    monkeypatch.setattr(inquiry, "CONNECT_TIMEOUT", 0.05)


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
async def test_a_put_that_finds_no_descriptors_to_listen_with_fails_and_a_later_one_gets_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(what: str) -> None:
        raise no_descriptors(what, errno.EMFILE)

    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        with monkeypatch.context() as patched:
            patched.setattr("trio_mori._zmq_listener.require_descriptors", refuse)
            with pytest.raises(NoDescriptors, match="a port that receivers connect to"):
                await put(second, "k", b"x")
        assert (standing(first), standing(second)) == ("held", "passive")
        await put(second, "k", b"x")
        assert (standing(first), standing(second)) == ("passive", "held")


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
        deaf.send(wire.encode(wire.Hello(1, 1, bytes(16), 1, 5.0, offers_of(engine), deployment)))
        await wait_until(lambda: first.connector.health()["peers"] == 1)
        began = time.monotonic()
        await put(second, "k", b"x")
        assert time.monotonic() - began < SOON
        assert first.connector.health()["peers"] == 0


@deterministic
async def test_a_receiver_that_comes_while_the_holder_says_farewell_is_not_welcomed_any_more() -> None:
    deployment = wire.Deployment("", 1, 0, 0, "")
    async with open_site() as site, site.fabric.open() as engine, open_dialler("127.0.0.1", site.port) as deaf:
        first, second = await site.open(), await site.open_elsewhere()
        assert await deaf.receive() == [Connected()]
        deaf.send(wire.encode(wire.Hello(1, 1, bytes(16), 1, 5.0, offers_of(engine), deployment)))
        await wait_until(lambda: first.connector.health()["peers"] == 1)
        async with open_dialler("127.0.0.1", site.port) as late:
            assert await late.receive() == [Connected()]
            outcome = begin(site.nursery, put, second, "k", b"x")
            while standing(first) != "yielding":  # and stays so until the deaf one is given up
                await trio.lowlevel.checkpoint()
            late.send(wire.encode(wire.Hello(1, 1, b"late" * 4, 1, 5.0, offers_of(engine), deployment)))
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
