"""Calls that are made where there is no trio, or another one, are told where to go, and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

import pytest
import trio
from rig import Pair, open_pair, sender_config

from trio_mori import Misuse, open_connector, plan_payload

CALLS: dict[str, Callable[[Pair], object]] = {
    "put": lambda pair: pair.sender.put("0", "1", "k", b"x"),
    "put_nowait": lambda pair: pair.sender.put_nowait("0", "1", "k", b"x"),
    "reserve_nowait": lambda pair: pair.sender.reserve_nowait("0", "1", "k", plan_payload(b"x")),
    "drain": lambda pair: pair.sender.drain(),
    "wait_listening": lambda pair: pair.sender.wait_listening(),
    "open_chunk_sender": lambda pair: pair.sender.open_chunk_sender("k", "1", from_stage="0"),
    "get": lambda pair: pair.receiver.get("0", "1", "k"),
    "get_nowait": lambda pair: pair.receiver.get_nowait("0", "1", "k"),
    "take": lambda pair: pair.receiver.take("0", "1", "k"),
    "take_nowait": lambda pair: pair.receiver.take_nowait("0", "1", "k"),
    "lease": lambda pair: pair.receiver.lease("0", "1", "k").__aenter__(),
    "open_chunk_receiver": lambda pair: pair.receiver.open_chunk_receiver("k", "0", to_stage="1"),
    "cleanup_nowait": lambda pair: pair.sender.cleanup_nowait("k"),
}


async def carry_out(call: Callable[[], object]) -> None:
    """Make a call, and await what it gives if that can be."""
    outcome = call()
    if isinstance(outcome, Coroutine):
        await outcome


def by_asyncio(call: Callable[[], object]) -> None:
    asyncio.run(carry_out(call))


def by_another_trio_run(call: Callable[[], object]) -> None:
    trio.run(carry_out, call)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("runner", [by_asyncio, by_another_trio_run])
async def test_a_call_in_another_thread_is_refused_and_changes_nothing(
    call: Callable[[Pair], object], runner: Callable[[Callable[[], object]], None]
) -> None:
    async with open_pair() as pair:
        with pytest.raises(
            Misuse, match=r"threads use trio_mori\.blocking\.open_connector, asyncio code trio_mori\.aio"
        ):
            await trio.to_thread.run_sync(runner, partial(call, pair))
        await pair.assert_whole()


def test_a_connector_is_not_opened_outside_of_trio() -> None:
    async def main() -> None:
        async with open_connector(sender_config()):
            raise AssertionError

    with pytest.raises(Misuse, match=r"asyncio code enters trio_mori\.aio\.open_connector"):
        asyncio.run(main())
