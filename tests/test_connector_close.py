"""Leaving the ``async with`` of a connector: what waits is told, what is written is waited for, nothing is left."""

# ruff: noqa: PT012 - what is raised comes out of the whole block
from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
import trio
import trio.testing
from rig import (
    FAST,
    LIMIT,
    POOL,
    SOON,
    UNIT,
    Crash,
    Outcome,
    Stage,
    assert_free,
    begin,
    fail,
    filled,
    open_pair,
    port_of,
    receiver_config,
    sender_config,
    start_stage,
    wait_until,
)
from threads import count_threads
from trio.testing import MockClock

from trio_mori import BindFailed, Connector, ConnectorClosed, NotReady, open_connector
from trio_mori._errors import TrioMoriError
from trio_mori.testing import MemoryFabric

pytestmark = pytest.mark.deterministic

BIG = 2 << 20


@asynccontextmanager
async def open_stages(pool: int = POOL, **config: object) -> AsyncIterator[tuple[Stage, Stage]]:
    """A sender and a receiver, each to be closed by itself, for a body that takes no longer than `LIMIT`."""
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            fabric = MemoryFabric()
            source = await start_stage(nursery, fabric, pool, role="sender", **config)
            target = await start_stage(
                nursery, fabric, pool, role="receiver", sender_host="127.0.0.1", sender_zmq_port=source.port, **config
            )
            yield source, target
            await target.close()
            await source.close()


async def assert_closed(*outcomes: Outcome) -> None:
    """Every call was told that the connector was closed."""
    for outcome in outcomes:
        with pytest.raises(ConnectorClosed):
            await outcome.wait()


# --- calls that wait ----------------------------------------------------------------------------------------


async def test_gets_that_wait_are_told() -> None:
    async with open_stages() as (source, target), trio.open_nursery() as nursery:
        get = target.connector.get

        async def lease() -> None:
            async with target.connector.lease("0", "1", "b"):
                raise AssertionError

        nowhere = {"source_host": "127.0.0.1", "source_port": 1}
        outcomes = [
            begin(nursery, get, "0", "1", "a"),
            begin(nursery, lease),
            begin(nursery, get, "0", "1", "c", nowhere),
        ]
        await wait_until(lambda: target.connector.statistics().parked == 2)
        began = time.monotonic()
        await target.close()
        await assert_closed(*outcomes)
        assert time.monotonic() - began < SOON
        await source.connector.put("0", "1", "a", b"x")


async def test_a_get_that_waits_for_room_is_told_and_its_payload_stays() -> None:
    async with open_stages() as (source, target), trio.open_nursery() as nursery:
        await source.connector.put("0", "1", "big", filled(POOL))
        async with target.connector.lease("0", "1", "big"):
            await source.connector.put("0", "1", "k", filled(UNIT))
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            await wait_until(lambda: source.connector.statistics().held.get("claimed"))
            await target.close()
            await assert_closed(outcome)
        await wait_until(lambda: source.connector.statistics().held.get("published") == UNIT)


async def test_a_put_that_waits_for_room_is_told_and_put_nothing() -> None:
    async with open_stages() as (source, _), trio.open_nursery() as nursery:
        await source.connector.put("0", "1", "big", filled(POOL))
        outcome = begin(nursery, source.connector.put, "0", "1", "k", filled(UNIT))
        await wait_until(lambda: source.connector.statistics().pool.waiting)
        await source.close()
        await assert_closed(outcome)
        assert source.connector.statistics().events["out_puts"] == 1


@asynccontextmanager
async def no_threads() -> AsyncIterator[None]:
    """Whoever needs a worker thread waits for one until this is left."""
    limiter = trio.to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1
    try:
        async with limiter:
            yield
    finally:
        limiter.total_tokens = before


async def test_a_put_that_copies_in_a_thread_is_told_and_harms_nothing() -> None:
    async with open_stages(2 * BIG, close_grace=0) as (source, _), trio.open_nursery() as nursery:
        async with no_threads():
            outcome = begin(nursery, source.connector.put, "0", "1", "k", filled(BIG))
            await wait_until(lambda: source.connector.statistics().held.get("staged"))
            await source.close()
            assert not outcome.over.is_set()
        await assert_closed(outcome)


async def test_a_get_that_copies_in_a_thread_ends_well_or_is_told_and_harms_nothing() -> None:
    async with open_stages(2 * BIG, close_grace=0) as (source, target), trio.open_nursery() as nursery:
        await source.connector.put("0", "1", "k", filled(BIG))
        async with no_threads():
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            await wait_until(lambda: target.connector.statistics().held["leased"])
            await target.close()
            assert not outcome.over.is_set()
        await assert_closed(outcome)
        await source.connector.cleanup("k")
        await assert_free(source.connector)


async def test_a_get_that_copies_in_a_thread_is_waited_for() -> None:
    async with open_stages(2 * BIG) as (source, target), trio.open_nursery() as nursery:
        await source.connector.put("0", "1", "k", filled(BIG))
        async with no_threads():
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            await wait_until(lambda: target.connector.statistics().held["leased"])
            nursery.start_soon(target.close)
            await wait_until(lambda: target.connector.health()["status"] == "unhealthy")
        assert torch.equal(await outcome.wait(), filled(BIG))
        await target.over.wait()
        await assert_free(source.connector)


@pytest.mark.parametrize("ticks", range(6))
async def test_a_get_whose_payload_arrived_just_then_ends_well_or_is_told(ticks: int) -> None:
    async with open_stages() as (source, target), trio.open_nursery() as nursery:
        with pytest.raises(NotReady):
            target.connector.get_nowait("0", "1", "k")
        await source.connector.put("0", "1", "k", b"x")
        await wait_until(lambda: target.connector.statistics().held["arrived"])
        target.left.set()
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        outcome = begin(nursery, target.connector.get, "0", "1", "k")
        await target.over.wait()
        try:
            assert await outcome.wait() == b"x"
        except ConnectorClosed:
            await source.connector.cleanup("k")
        await assert_free(source.connector)


async def test_a_chunk_receiver_that_had_asked_ahead_is_told() -> None:
    async with open_stages() as (source, target):
        async with source.connector.open_chunk_sender("r", "1", from_stage="0") as out:
            for number in range(3):
                await out.send(number)
            async with target.connector.open_chunk_receiver("r", "0", to_stage="1") as chunks:
                assert await chunks.__anext__() == 0
                await wait_until(lambda: target.connector.statistics().held["arrived"])
                await target.close()
                with pytest.raises(ConnectorClosed), trio.fail_after(SOON):
                    while True:
                        await chunks.__anext__()


# --- writes under way ---------------------------------------------------------------------------------------


async def test_a_sender_waits_for_a_write_under_way() -> None:
    async with open_stages() as (source, target), trio.open_nursery() as nursery:
        source.engine.hold()
        outcome = begin(nursery, target.connector.get, "0", "1", "k")
        await source.connector.put("0", "1", "k", filled(1000))
        await wait_until(lambda: source.engine.held)
        nursery.start_soon(source.close)
        await wait_until(lambda: source.connector.health()["status"] == "unhealthy")
        assert not source.over.is_set()
        source.engine.release()
        assert torch.equal(await outcome.wait(), filled(1000))
        await source.over.wait()
        await assert_free(target.connector)


async def test_a_receiver_waits_for_a_write_into_its_pool() -> None:
    async with open_stages() as (source, target), trio.open_nursery() as nursery:
        source.engine.hold()
        outcome = begin(nursery, target.connector.get, "0", "1", "k")
        await source.connector.put("0", "1", "k", filled(1000))
        await wait_until(lambda: source.engine.held)
        nursery.start_soon(target.close)
        await assert_closed(outcome)
        assert not target.over.is_set()
        source.engine.release()
        await target.over.wait()
        await wait_until(lambda: source.connector.statistics().held.get("published") == UNIT)


@pytest.mark.parametrize("who", ["source", "target"])
async def test_a_write_that_does_not_end_is_left_to_itself_after_the_grace_and_its_memory_with_it(
    who: str, clock: MockClock
) -> None:
    async with open_stages(close_grace=5) as (source, target), trio.open_nursery() as nursery:
        source.engine.hold()
        outcome = begin(nursery, target.connector.get, "0", "1", "k")
        await source.connector.put("0", "1", "k", filled(1000))
        await wait_until(lambda: source.engine.held)
        (held,) = source.engine.held
        outcome.scope.cancel()
        closing, other = (source, target) if who == "source" else (target, source)
        clock.rate = 0.1  # a machine that stops for half a second has not waited for the rest of the grace
        nursery.start_soon(closing.close)
        await wait_until(lambda: closing.connector.health()["status"] == "unhealthy")
        clock.jump(4.5)
        await trio.testing.wait_all_tasks_blocked()
        assert not closing.over.is_set()
        clock.jump(0.5)
        await closing.over.wait()
        assert any(call.method == "abandon" for call in closing.engine.calls), "its memory stays for ever"
        held.arrive(1000)
        at = held.write.destination
        assert torch.equal(target.engine.region.tensor[at : at + 1000], filled(1000)), "late, and nobody's harm"
        held.end(None)
        await wait_until(lambda: other.connector.health()["quarantined"] == 0)


async def test_a_service_that_fails_does_not_wait_for_ever_for_a_write_that_does_not_end() -> None:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            fabric = MemoryFabric()
            source = await start_stage(nursery, fabric, role="sender")
            target = await start_stage(
                nursery, fabric, role="receiver", sender_host="127.0.0.1", sender_zmq_port=source.port
            )
            source.engine.hold()
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            await source.connector.put("0", "1", "k", filled(1000))
            await wait_until(lambda: source.engine.held)
            source.connector._receiver.nursery.start_soon(fail, Crash())
            with trio.fail_after(SOON):
                await source.over.wait()
            outcome.scope.cancel()
            for held in source.engine.held:
                held.end(None)
            await assert_free(target.connector)
            await target.close()


# --- how the block is left ----------------------------------------------------------------------------------


async def test_an_exception_in_the_body_comes_out_as_itself() -> None:
    fabric = MemoryFabric()
    cause = KeyError("why")
    error = ZeroDivisionError("body")
    with trio.fail_after(LIMIT):
        async with fabric.open() as engine:
            with pytest.raises(ZeroDivisionError) as caught:
                async with open_connector(sender_config(), engine=engine):
                    raise error from cause
            assert caught.value is error
            assert caught.value.__cause__ is cause


async def test_an_exception_in_the_body_is_not_hidden_by_what_still_waits() -> None:
    async with MemoryFabric().open() as engine, trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            with pytest.raises(ZeroDivisionError):
                async with open_connector(
                    sender_config(sender_host="127.0.0.1", sender_zmq_port=1), engine=engine
                ) as c:
                    outcome = begin(nursery, c.get, "0", "1", "k")
                    await trio.testing.wait_all_tasks_blocked()
                    raise ZeroDivisionError
            await assert_closed(outcome)


async def test_cancelled_from_outside_it_still_says_goodbye() -> None:
    async with open_stages() as (source, _), trio.open_nursery() as nursery:
        fabric = source.engine._fabric
        entered = trio.Event()
        scope = trio.CancelScope()

        async def receive() -> None:
            with scope:
                async with fabric.open() as engine, open_connector(receiver_config(source.port), engine=engine) as c:
                    assert await c.get("0", "1", "k") == b"x"
                    with pytest.raises(NotReady):
                        c.get_nowait("0", "1", "other")
                    entered.set()
                    await trio.sleep_forever()

        await source.connector.put("0", "1", "k", b"x")
        nursery.start_soon(receive)
        await entered.wait()
        before = source.connector.health()["peers"]
        scope.cancel()
        await wait_until(lambda: source.connector.health()["peers"] == before - 1)
        await assert_free(source.connector)


async def test_a_cancelled_scope_opens_and_closes_without_a_trace() -> None:
    with trio.fail_after(LIMIT):
        async with MemoryFabric().open() as engine:
            with trio.CancelScope() as scope:
                scope.cancel()
                async with open_connector(sender_config(), engine=engine):
                    await trio.lowlevel.checkpoint()
                    raise AssertionError
            async with open_connector(sender_config(), engine=engine) as connector:
                await connector.put("0", "1", "k", b"x")


async def test_stock_requests_during_the_close_do_no_harm() -> None:
    # The pool is closed then, and a stock peer's encoding cannot be built any more.
    from stock_peers import open_stock_client

    async with open_stages() as (source, target), trio.open_nursery() as nursery:
        source.engine.hold()
        outcome = begin(nursery, target.connector.get, "0", "1", "k")
        await source.connector.put("0", "1", "k", filled(1000))
        await source.connector.put("0", "1", "structure", {"a": filled(1000)})
        await wait_until(lambda: source.engine.held)
        with open_stock_client(source.port, target.engine) as client:
            nursery.start_soon(source.close)
            await wait_until(lambda: source.connector.health()["status"] == "unhealthy")
            assert await client.query("structure@0_1") is None
            assert await client.pull("structure@0_1", 0, 1000) == b"trans_error"
        source.engine.release()
        assert torch.equal(await outcome.wait(), filled(1000))


# --- the port -----------------------------------------------------------------------------------------------


async def test_the_port_is_free_as_soon_as_the_block_is_left() -> None:
    with trio.fail_after(LIMIT):
        async with MemoryFabric().open() as engine:
            port = 0
            for _ in range(5):
                async with open_connector(sender_config(zmq_port=port), engine=engine) as connector:
                    port = port_of(connector)
                    await connector.put("0", "1", "k", b"x")


async def test_a_port_that_is_taken_fails_the_open_and_harms_nobody() -> None:
    async with open_pair() as pair, pair.fabric.open() as engine:
        port = port_of(pair.sender)
        before = open_descriptors()
        took = []
        for _ in range(3):
            begun = time.monotonic()
            with pytest.raises(BindFailed, match=f"127.0.0.1:{port}") as caught:
                async with open_connector(sender_config(zmq_port=port), engine=engine):
                    raise AssertionError
            took.append(time.monotonic() - begun)
        assert min(took) < 2
        await wait_until(lambda: open_descriptors() <= before)
        assert caught.value.port == port
        assert caught.value.errno is not None
        await pair.assert_whole()


async def test_an_address_that_is_not_of_this_host_fails_the_open() -> None:
    with trio.fail_after(LIMIT):
        async with MemoryFabric().open() as engine:
            took = []
            for _ in range(3):
                begun = time.monotonic()
                with pytest.raises(BindFailed, match=r"203\.0\.113\.7"):
                    async with open_connector(sender_config(host="203.0.113.7"), engine=engine):
                        raise AssertionError
                took.append(time.monotonic() - begun)
            assert min(took) < 2


# --- leaks --------------------------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_ten_rounds_leak_no_descriptor_task_thread_or_object() -> None:
    connectors: list[weakref.ref[object]] = []

    async def round_trip() -> None:
        async with open_pair(receiver={"role": "both", "host": "127.0.0.1", "zmq_port": 0}) as pair:
            await pair.put("k", filled(1000))
            await pair.get("k")
            with pytest.raises(NotReady):
                pair.get_nowait("other")
            connectors.extend(map(weakref.ref, (pair.sender, pair.receiver)))

    def tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living

    own = tasks()
    for _ in range(3):
        await round_trip()
    before = open_descriptors()
    threads = count_threads()
    for _ in range(10):
        await round_trip()
    await wait_until(lambda: open_descriptors() <= before)
    await wait_until(lambda: tasks() == own)
    await wait_until(lambda: count_threads() <= threads)
    gc.collect()
    assert [ref() for ref in connectors if ref() is not None] == []


def memory_of(connector: Connector) -> weakref.ref[object]:
    """A pool's mapping, which is unmapped when nobody holds it."""
    buffer = connector._engine.region.buffer
    assert buffer is not None
    return weakref.ref(buffer.obj)


async def test_the_pool_s_memory_goes_with_the_connector_and_not_with_a_collection_of_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        async with open_connector(sender_config(backend_type="shm", memory_pool_size=POOL)) as source:
            target_config = receiver_config(source, backend_type="shm", memory_pool_size=POOL)
            async with open_connector(target_config) as target:
                await source.put("0", "1", "k", filled(UNIT))
                assert torch.equal(await target.get("0", "1", "k"), filled(UNIT))
                pools = [memory_of(source), memory_of(target)]
        # A thread may have its last result in hand for a moment.
        await wait_until(lambda: [pool() for pool in pools] == [None, None])
    finally:
        gc.enable()


async def test_peers_that_come_and_go_leave_nothing_at_the_one_that_stays() -> None:
    async with open_pair(sender=FAST) as pair, trio.open_nursery() as nursery:

        async def visit(way: str) -> None:
            target = await start_stage(
                nursery, pair.fabric, role="receiver", sender_host="127.0.0.1", sender_zmq_port=port_of(pair.sender)
            )
            await pair.put("k", b"x")
            assert await target.connector.get("0", "1", "k") == b"x"
            await getattr(target, way)()

        for way in ("close", "crash"):
            await visit(way)
        await wait_until(lambda: pair.sender.health()["peers"] <= 1)
        before = open_descriptors(), trio.lowlevel.current_statistics().tasks_living
        for number in range(10):
            await visit("crash" if number % 2 else "close")
        await wait_until(lambda: open_descriptors() <= before[0])
        await wait_until(lambda: trio.lowlevel.current_statistics().tasks_living <= before[1])
        await wait_until(lambda: len(pair.sender_engine._peers) <= 1)
        await pair.sender.cleanup("k")  # the last one crashed before it had said that it took it
        await pair.assert_whole()


def count_tasks(name: str) -> int:
    """How many there are of a name, of whatever this run has begun."""
    tasks = [trio.lowlevel.current_root_task()]
    for task in tasks:
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return sum(task.name.endswith(name) for task in tasks)


async def test_receivers_beyond_max_peers_push_out_those_that_are_gone_without_a_trace() -> None:
    """They vanished without a word, and nothing proves that their processes are gone."""
    async with open_pair(sender={"max_peers": 2}) as pair, AsyncExitStack() as stack:
        assert pair.sender._sender is not None
        sessions = pair.sender._sender.book.sessions
        for _ in range(6):
            engine = await stack.enter_async_context(pair.fabric.open())
            await pair.put("k", b"x")
            with pytest.raises(Crash):
                async with open_connector(receiver_config(pair.sender), engine=engine) as connector:
                    assert await connector.get("0", "1", "k") == b"x"
                    await assert_free(pair.sender)
                    connector._receiver.nursery.start_soon(fail, Crash())
                    await trio.sleep_forever()
            for session in sessions.values():
                session.connected = False
            # One that waits for the end of its process, for each.
            await wait_until(lambda: count_tasks("Reception._watch") == len(sessions))
        assert len(sessions) == 2
        await wait_until(lambda: len(pair.sender_engine._peers) == 2)


async def test_closing_twice_at_once_is_no_error() -> None:
    async with open_stages() as (source, target):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.close)
            nursery.start_soon(target.close)
        assert source.connector.health()["status"] == target.connector.health()["status"] == "unhealthy"


def assert_typed(error: BaseException | None) -> None:
    assert error is None or isinstance(error, TrioMoriError), repr(error)


async def test_whatever_is_going_on_when_a_connector_closes_ends_with_a_typed_error_or_well() -> None:
    for ticks in range(0, 40, 7):
        async with open_stages(8 * POOL) as (source, target), trio.open_nursery() as nursery:
            outcomes = []
            for number in range(10):
                outcomes.append(begin(nursery, source.connector.put, "0", "1", f"k{number}", filled(UNIT)))
                outcomes.append(begin(nursery, target.connector.get, "0", "1", f"k{number}"))
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
            closing, other = (source, target) if ticks % 2 else (target, source)
            await closing.close()
            for outcome in outcomes:
                outcome.scope.cancel()
            for outcome in outcomes:
                await outcome.over.wait()
                assert_typed(outcome.error)
            for number in range(10):
                await other.connector.cleanup(f"k{number}")
            await assert_free(other.connector)
