"""Cancelled and closed while a stage's address changes hands."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import (
    contextmanager,
    nullcontext,
)

import pytest
import trio
import trio.testing
from port_site import (
    another_process,
    get,
    open_holder,
    open_site,
    put,
    sender_at,
    standing,
)
from rig import (
    SOON,
    assert_free,
    begin,
)

from trio_mori import (
    ConnectorClosed,
    open_connector,
)
from trio_mori import _port as ports
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic


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


async def test_a_wait_for_the_address_that_is_cancelled_anywhere_leaves_it_to_be_had() -> None:
    for number in itertools.count(1):
        async with open_site() as site:
            first, second = await site.open(), await site.open_elsewhere()
            scope = trio.CancelScope()
            halt = Halt(number, scope.cancel)
            with halting(halt), scope:
                await second.connector.wait_listening()
            if scope.cancelled_caught:
                await second.connector.wait_listening()
            second.connector.put_nowait("0", "1", "k", b"x")
            receiver = await site.open_receiver()
            assert await get(receiver, "k") == b"x"
            await assert_free(first.connector, second.connector, receiver.connector)
        if not halt.reached:
            break
    assert number >= 5


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
            began = time.monotonic()
            await closing.close()
            assert time.monotonic() - began < SOON
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
