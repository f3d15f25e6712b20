"""What a sender may leave behind: `drain` waits until it is nothing, and a close says what it was."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import trio
import trio.testing
from blocking_pair import Both
from blocking_pair import open_both as open_both
from port_site import open_site, put
from rig import (
    LIMIT,
    POOL,
    SOON,
    UNIT,
    assert_free,
    begin,
    filled,
    open_pair,
    receiver_config,
    sender_config,
    start_stage,
    wait_until,
)
from threads import Other

from trio_mori import ConnectorClosed, PeerLost, StreamFailed, _events, blocking, open_connector
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic

DROPPED = "payloads that nobody has fetched are dropped with their connector"


# --- drain --------------------------------------------------------------------------------------------------


@deterministic
async def test_drain_waits_until_the_last_payload_is_fetched_and_acknowledged() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        await pair.put("a", filled(100))
        await pair.put("b", {"no tensor": 1})
        first, second = begin(nursery, pair.sender.drain), begin(nursery, pair.sender.drain)
        await pair.get("a")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not first.over.is_set()
        await pair.get("b")
        assert await first.wait() == await second.wait() == 0
        await assert_free(pair.sender)


@deterministic
async def test_drain_of_one_that_holds_nothing_returns_at_once() -> None:
    async with open_pair() as pair:
        assert await pair.sender.drain() == 0
        assert await pair.receiver.drain() == 0
        await pair.put("a", b"x")
        await pair.get("a")
        assert await pair.sender.drain() == 0


@deterministic
async def test_drain_waits_for_what_is_put_meanwhile_and_for_a_put_that_copies() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        await pair.put("a", b"x")
        outcome = begin(nursery, pair.sender.drain)
        await trio.testing.wait_all_tasks_blocked()
        await pair.put("b", b"y")
        await pair.get("a")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not outcome.over.is_set()
        await pair.get("b")
        await outcome.wait()


@deterministic
async def test_drain_returns_when_a_payload_is_cleaned_up_and_says_how_many_were() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        for key in ("a", "b", "c"):
            await pair.put(key, b"x")
        outcome = begin(nursery, pair.sender.drain)
        await pair.get("a")
        for key in ("b", "c"):
            assert await pair.sender.cleanup(key) == 1
        assert await outcome.wait() == 2


@deterministic
async def test_drain_returns_when_a_payload_expires_and_says_so() -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 0.05}) as pair:
        await pair.put("a", b"x")
        assert await pair.sender.drain() == 1


@deterministic
async def test_drain_does_not_wait_for_memory_that_a_write_still_reads_when_its_payload_was_given_up() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        get = await pair.hold_one(nursery, "k", filled(UNIT))
        outcome = begin(nursery, pair.sender.drain)
        await trio.testing.wait_all_tasks_blocked()
        assert not outcome.over.is_set()
        assert await pair.sender.cleanup("k") == 1
        assert await outcome.wait() == 1
        assert pair.sender.statistics().held["pinned"] == UNIT
        pair.sender_engine.release()
        get.scope.cancel()


@deterministic
async def test_a_drain_that_is_cancelled_changes_nothing() -> None:
    async with open_pair() as pair:
        await pair.put("a", b"x")
        with trio.move_on_after(0.01) as scope:
            await pair.sender.drain()
        assert scope.cancelled_caught
        assert await pair.get("a") == b"x"
        assert await pair.sender.drain() == 0


@deterministic
async def test_a_drain_is_told_when_the_connector_is_closed_and_so_is_one_afterwards() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            stage = await start_stage(nursery, fabric, role="sender")
            await stage.connector.put("0", "1", "a", b"x")
            outcome = begin(nursery, stage.connector.drain)
            await trio.testing.wait_all_tasks_blocked()
            await stage.close()
            with pytest.raises(ConnectorClosed, match="before all that was put had been fetched"):
                await outcome.wait()
            with pytest.raises(ConnectorClosed, match="drain after the connector was closed"):
                await stage.connector.drain()


@deterministic
async def test_drain_of_an_instance_that_puts_by_way_of_another_waits_for_that() -> None:
    async with open_site() as site, trio.open_nursery() as nursery:
        first, second = await site.open(), await site.open()
        await put(second, "a", b"x")
        outcome = begin(nursery, second.connector.drain)
        await trio.testing.wait_all_tasks_blocked()
        assert not outcome.over.is_set()
        await second.close()
        with pytest.raises(ConnectorClosed, match="closed during drain"):
            await outcome.wait()
        outcome = begin(nursery, first.connector.drain)
        await trio.testing.wait_all_tasks_blocked()
        await first.connector.cleanup("a")
        assert await outcome.wait() == 1


def test_a_thread_can_wait_for_it_and_for_no_longer_than_it_likes(pair: Both) -> None:
    pair.put("a", b"x")
    with pytest.raises(TimeoutError, match=r"drain did not end within 0\.02 s"):
        pair.sender.drain(timeout=0.02)
    other = Other(pair.sender.drain)
    pair.get("a")
    assert other.wait() == 0
    with pytest.raises(ValueError, match="above zero"):
        pair.sender.drain(timeout=0)


# --- what a close drops -------------------------------------------------------------------------------------


def unfetched(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", None) == _events.UNFETCHED]


@pytest.fixture(autouse=True)
def listen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trio_mori")


@deterministic
async def test_a_close_warns_once_of_what_nobody_has_fetched(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair() as pair:
        await pair.put("got", filled(100))
        await pair.get("got")
        for number in range(7):
            await pair.put(f"k{number}", filled(100))
        await pair.sender.cleanup("k0")
    [record] = unfetched(caplog)
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{DROPPED}: 6, of 600 bytes in all (")
    assert "(k1@0_1, k2@0_1, k3@0_1, k4@0_1, k5@0_1, ...); `drain()`" in record.getMessage()
    assert (record.count, record.size, len(record.keys)) == (6, 600, 6)  # type: ignore[attr-defined]


@deterministic
async def test_a_close_says_nothing_of_what_was_fetched_expired_or_cleaned_up(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 0.2}) as pair:
        await pair.put("cleaned", b"x")
        await pair.sender.cleanup("cleaned")
        await pair.put("expired", b"x")
        await wait_until(lambda: pair.sender.statistics().events["out_expired"])
        await pair.put("got", b"x")
        await pair.get("got")
    assert unfetched(caplog) == []


@deterministic
async def test_what_is_written_while_a_connector_closes_was_fetched(caplog: pytest.LogCaptureFixture) -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            source = await start_stage(nursery, fabric, role="sender")
            target = await start_stage(nursery, fabric, **receiver_config(source.port))
            source.engine.hold()
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            await source.connector.put("0", "1", "k", filled(UNIT))
            await wait_until(lambda: source.engine.held)
            nursery.start_soon(source.close)
            await trio.testing.wait_all_tasks_blocked()
            source.engine.release()
            assert await outcome.wait() is not None
            await source.over.wait()
            await target.close()
    assert unfetched(caplog) == []


@deterministic
@pytest.mark.parametrize("how", ["error", "cancellation"])
async def test_a_block_that_ends_by_an_error_or_a_cancellation_is_not_warned_of(
    caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async with MemoryFabric().open(pool_size=POOL) as engine:
        with trio.CancelScope() as scope:
            try:
                async with open_connector(sender_config(), engine=engine) as connector:
                    await connector.put("0", "1", "k", b"x")
                    if how == "error":
                        raise KeyError("mine")
                    scope.cancel()
                    await trio.sleep_forever()
            except KeyError:
                pass
    [record] = unfetched(caplog)
    assert record.levelno == logging.INFO


@pytest.mark.parametrize("is_error", [False, True])
def test_a_blocking_connector_warns_as_well_unless_its_block_ends_by_an_error(
    caplog: pytest.LogCaptureFixture, is_error: bool
) -> None:
    try:
        with blocking.open_connector(sender_config(memory_pool_size=POOL)) as connector:
            connector.put("0", "1", "k", b"x")
            if is_error:
                raise KeyError("mine")
    except KeyError:
        pass
    [record] = unfetched(caplog)
    assert record.levelno == (logging.INFO if is_error else logging.WARNING)


def test_a_program_that_ends_with_something_unfetched_says_so_on_its_terminal() -> None:
    program = f"""
from trio_mori import blocking
conn = blocking.open_connector({sender_config(memory_pool_size=POOL)!r})
conn.put("0", "1", "k", b"x")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.startswith(f"{DROPPED}: 1, of 1 bytes in all (k@0_1); `drain()`")
    assert done.stderr.count("\n") == 1


def test_a_stream_that_is_open_when_a_blocking_connector_closes_fails_at_its_receiver_all_the_same() -> None:
    sender = blocking.open_connector(sender_config(memory_pool_size=POOL, stage_id=0))
    port = sender.get_connection_info()["zmq_port"]
    with blocking.open_connector(receiver_config(port, memory_pool_size=POOL, stage_id=1)) as receiver:
        block = sender.open_chunk_sender("r", "1")
        out = block.__enter__()
        out.send(b"first")
        with receiver.open_chunk_receiver("r", "0", timeout=SOON) as chunks:
            assert next(chunks) == b"first"
            other = Other(next, chunks)
            sender.close()
            with pytest.raises((StreamFailed, PeerLost)):
                other.wait()
