"""The connector for asyncio: what waits holds no thread, and a cancellation loses nothing, whenever it comes."""

# ruff: noqa: ASYNC110, PT012 - nothing tells when something waits in the other loop; blocks raise as they are left
from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blocking_pair import ROOT, Both, both
from blocking_pair import open_both as open_both
from rig import LIMIT, POOL, SOON, UNIT, filled, receiver_config, sender_config
from threads import Other, count_threads

from trio_mori import ConnectorClosed, UnsupportedPayload, _events, aio, blocking
from trio_mori._pool import INLINE_COPY

# Bytes that are copied in the loop, and in a thread of it.
SIZES = (1000, INLINE_COPY + 1)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """In a loop of its own, and for no longer than a test may take. Nothing may want a thread of asyncio's."""

    async def bounded() -> None:
        executor = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        await asyncio.wait_for(main(), LIMIT)
        assert not executor._threads

    asyncio.run(bounded())


async def wait_parked(pair: Both, count: int) -> None:
    """Until so many gets wait at the sender."""
    while pair.portal.call_sync(pair.pair.parked) != count:
        await asyncio.sleep(0.001)


def receiver_of(pair: Both) -> aio.AsyncioConnector:
    return aio.AsyncioConnector(pair.receiver)


def test_sixty_four_gets_wait_and_the_puts_come_from_the_same_loop(pair: Both) -> None:
    async def main() -> None:
        sender, receiver = aio.AsyncioConnector(pair.sender), receiver_of(pair)
        waiting = [asyncio.create_task(receiver.get("0", "1", f"k{number}")) for number in range(64)]
        before = count_threads()
        await wait_parked(pair, 64)
        assert count_threads() <= before
        for number in range(64):
            receipt = await sender.put("0", "1", f"k{number}", {"number": number, "codes": filled(number + 1)})
            assert receipt.size == number + 1
        for number, value in enumerate(await asyncio.gather(*waiting)):
            assert isinstance(value, dict)
            assert value["number"] == number
            assert torch.equal(value["codes"], filled(number + 1))
        assert await sender.drain() == 0

    run(main)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_got_is_the_callers_own(pair: Both, size: int) -> None:
    async def main() -> None:
        pair.put("k", filled(size, 3))
        got = await receiver_of(pair).get("0", "1", "k")
        pair.put("l", filled(size, 4))
        await receiver_of(pair).get("0", "1", "l")
        assert torch.equal(got, filled(size, 3))  # type: ignore[arg-type]

    run(main)


def test_a_get_that_is_cancelled_while_it_waits_leaves_the_payload_and_nothing_else(pair: Both) -> None:
    async def main() -> None:
        receiver = receiver_of(pair)
        task = asyncio.create_task(receiver.get("0", "1", "k"))
        await wait_parked(pair, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_parked(pair, 0)
        pair.put("k", "here")
        assert await receiver.get("0", "1", "k") == "here"

    run(main)


@pytest.mark.parametrize("size", SIZES)
def test_a_get_that_is_cancelled_when_its_payload_is_here_already_gives_it_back(pair: Both, size: int) -> None:
    async def main() -> None:
        receiver = receiver_of(pair)
        task = asyncio.create_task(receiver.get("0", "1", "k"))
        await wait_parked(pair, 1)
        pair.put("k", filled(size))
        # This thread stands still until the news is on its way to it, and has the cancellation come right behind.
        pair.wait_until(lambda: not pair.portal._waiting.keys() - {*current(pair)})
        asyncio.get_running_loop().call_soon_threadsafe(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.pair.sender.statistics().events["out_delivered"] >= 1
        assert torch.equal(await receiver.get("0", "1", "k"), filled(size))  # type: ignore[arg-type]

    run(main)


def current(pair: Both) -> list[object]:
    """The call by which the condition itself is looked at."""
    return [call for call in pair.portal._waiting if call.what == "a condition"]


@pytest.mark.parametrize("size", SIZES)
def test_a_get_that_is_cancelled_at_any_turn_of_the_loop_loses_nothing(pair: Both, size: int) -> None:
    async def main() -> None:
        receiver = receiver_of(pair)
        for turns in range(40):
            pair.put("k", filled(size, turns))
            task = asyncio.create_task(receiver.get("0", "1", "k"))
            for _ in range(turns):
                await asyncio.sleep(0.0001 if turns > 10 else 0)
            task.cancel()
            try:
                value = await task
            except asyncio.CancelledError:
                value = await receiver.get("0", "1", "k")
            assert torch.equal(value, filled(size, turns))  # type: ignore[arg-type]

    run(main)


def test_a_put_that_is_cancelled_while_it_waits_for_room_puts_nothing() -> None:
    with both(pool=4 * UNIT) as pair:

        async def main() -> None:
            sender = aio.AsyncioConnector(pair.sender)
            await sender.put("0", "1", "full", filled(4 * UNIT))
            task = asyncio.create_task(sender.put("0", "1", "k", filled(UNIT)))
            while not sender.statistics().pool.waiting:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await sender.cleanup("full") == 1
            assert await sender.drain() == 0
            assert sender.statistics().put["0_1"].payloads == 1

        run(main)
        pair.receiver.cleanup("full")


def test_errors_are_raised_where_the_call_was_made(pair: Both) -> None:
    async def main() -> None:
        with pytest.raises(UnsupportedPayload, match="payload"):
            await aio.AsyncioConnector(pair.sender).put("0", "1", "k", object())

    run(main)


def test_calls_that_wait_are_told_of_a_close_and_later_ones_too() -> None:
    async def main() -> None:
        receiver = aio.AsyncioConnector(pair.receiver)
        waiting = [asyncio.create_task(receiver.get("0", "1", f"k{number}")) for number in range(8)]
        await wait_parked(pair, 8)
        closing = Other(pair.portal.close)
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, ConnectorClosed)
        closing.wait()
        with pytest.raises(ConnectorClosed, match="get of 'late' came too late"):
            await receiver.get("0", "1", "late")
        assert not pair.portal._waiting

    with both() as pair:
        run(main)


def test_a_run_ends_though_gets_wait_that_nobody_awaits(pair: Both) -> None:
    async def main() -> None:
        receiver = receiver_of(pair)
        tasks.extend(asyncio.create_task(receiver.get("0", "1", "k")) for _ in range(8))
        await wait_parked(pair, 8)

    tasks: list[object] = []
    run(main)
    pair.wait_until(lambda: not pair.pair.parked())
    pair.put("k", "still there")
    assert pair.get("k") == "still there"


def test_a_loop_that_was_closed_over_a_call_does_not_end_the_connector(pair: Both) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(receiver_of(pair).get("0", "1", "k"))
    loop.run_until_complete(asyncio.wait_for(asyncio.ensure_future(parked(pair), loop=loop), LIMIT))
    loop.close()
    pair.put("k", "for nobody")
    pair.wait_until(lambda: not pair.pair.parked())
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.get_coro().close()
    assert pair.get("k") == "for nobody"


async def parked(pair: Both) -> None:
    await wait_parked(pair, 1)


async def test_a_block_opens_and_closes_a_connector_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trio_mori")

    async def main() -> None:
        async with aio.open_connector(sender_config(memory_pool_size=POOL)) as sender:
            port = sender.get_connection_info()["zmq_port"]
            async with aio.open_connector(receiver_config(port, memory_pool_size=POOL)) as receiver:
                await sender.put("0", "1", "k", filled(10))
                assert torch.equal(await receiver.get("0", "1", "k"), filled(10))  # type: ignore[arg-type]
            await sender.put("0", "1", "left", b"x")
        with pytest.raises(ConnectorClosed):
            await sender.put("0", "1", "k", b"x")
        with pytest.raises(KeyError):
            async with aio.open_connector(sender_config(memory_pool_size=POOL)) as sender:
                await sender.put("0", "1", "left", b"x")
                raise KeyError("mine")

    Other(asyncio.run, main()).wait()
    levels = [record.levelno for record in caplog.records if getattr(record, "event", None) == _events.UNFETCHED]
    assert levels == [logging.WARNING, logging.INFO]


def test_a_block_is_left_though_blocking_calls_hold_all_threads_of_asyncio() -> None:
    async def main(port: int) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with aio.open_connector(receiver_config(port, memory_pool_size=POOL)) as conn:
            stuck = asyncio.create_task(asyncio.to_thread(conn.blocking.get, "0", "1", "never"))
            while not conn.statistics().parked:
                await asyncio.sleep(0.001)
        with pytest.raises(ConnectorClosed):
            await stuck

    with blocking.open_connector(sender_config(memory_pool_size=POOL)) as elsewhere:
        asyncio.run(asyncio.wait_for(main(elsewhere.get_connection_info()["zmq_port"]), LIMIT))


def test_an_opening_that_is_cancelled_leaves_nothing_open() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "trio_mori"}

    async def main() -> None:
        task = asyncio.create_task(opened())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def opened() -> None:
        async with aio.open_connector(sender_config(memory_pool_size=POOL)):
            raise AssertionError("it was cancelled before")

    asyncio.run(main())
    give_up = time.monotonic() + SOON
    while {thread for thread in threading.enumerate() if thread.name == "trio_mori"} - before:
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_an_interrupt_ends_a_program_whose_coroutines_wait() -> None:
    program = f"""
import asyncio
from trio_mori import aio

async def main():
    async with aio.open_connector({sender_config(memory_pool_size=POOL)!r}) as sender:
        config = {{"role": "receiver", "sender_host": "127.0.0.1", "memory_pool_size": {POOL}}}
        config["sender_zmq_port"] = sender.get_connection_info()["zmq_port"]
        async with aio.open_connector(config) as receiver:
            waiting = [asyncio.create_task(receiver.get("0", "1", f"k{{number}}")) for number in range(64)]
            while receiver.statistics().parked < 64:
                await asyncio.sleep(0.001)
            print("waiting", flush=True)
            await asyncio.gather(*waiting)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT)
    assert (output, errors) == ("interrupted\n", "")
    assert process.returncode == 0
