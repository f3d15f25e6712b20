"""A stock sender that answers late or never: no memory is given away, and no answer is taken for another."""

from __future__ import annotations

import attrs
import pytest
import trio
from rig import LIMIT, POOL, UNIT, Outcome, assert_free, begin, filled, receiver_config, wait_until
from stock_edges import Receiving, open_descriptors, open_receiving
from stock_peers import open_stock_server
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_mori import NoRoom, TransferFailed, open_connector
from trio_mori._protocol.extents import INBOUND
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic


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


async def test_a_late_answer_to_a_query_is_never_taken_for_that_to_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, clock: MockClock
) -> None:
    """Two hundred times, with other sizes each time; the number of descriptors stays."""
    timeout = 0.05
    monkeypatch.setattr("trio_mori._stock.QUERY_TIMEOUT", timeout)
    async with open_receiving(within=3 * LIMIT) as r, trio.open_nursery() as nursery:
        r.server.put("warm@0_1", filled(1))
        await r.get_bytes("warm")
        open_at_most = 0
        for number in range(200):
            r.server.put(f"k{number}@0_1", filled(100 + number, number % 251))
            r.server.late = True
            asked = len(r.server.queries)
            waiting = begin(nursery, r.get, f"k{number}")
            await wait_until(lambda asked=asked: len(r.server.queries) > asked)
            clock.jump(timeout)
            if number % 2:
                await wait_until(lambda asked=asked: len(r.server.queries) > asked + 1)
            else:
                await wait_all_tasks_blocked()  # in the pause before it is asked again
            waiting.scope.cancel()
            await waiting.over.wait()
            assert waiting.scope.cancelled_caught, "it was not answered"
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
async def test_a_sender_that_answers_the_hello_late_is_waited_for() -> None:
    async with open_receiving(heartbeat_interval=0.05, peer_timeout=0.2) as r, trio.open_nursery() as nursery:
        r.server.late = True
        r.server.put("k@0_1", filled(10))
        outcome = begin(nursery, r.get_bytes, "k")
        await wait_until(lambda: r.server.hellos >= 3)
        assert not outcome.over.is_set()
        r.server.answer_late()
        assert await outcome.wait() == bytes([7] * 10)
