"""Every awaited call of the asyncio connector, cancelled ever later until it is over before: it did all or nothing.

What it waits for is answered by another thread, so that where exactly it is cancelled differs from run to run; what
holds afterwards does not.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

import pytest
import torch
from blocking_pair import Both, both
from rig import LIMIT, POOL, UNIT, filled

from trio_mori import aio

pytestmark = pytest.mark.deterministic

ROUNDS = 30


def same(value: object) -> bool:
    return isinstance(value, torch.Tensor) and torch.equal(value, filled(UNIT))


class Case(ABC):
    """A call, and how it is seen afterwards whether it had its effect."""

    def __init__(self, pair: Both, number: int) -> None:
        self.key = f"k{number}"
        self.sender = aio.AsyncioConnector(pair.sender)
        self.receiver = aio.AsyncioConnector(pair.receiver)

    async def before(self) -> None:
        """What has to be there."""
        await self.sender.put("0", "1", self.key, filled(UNIT))

    @abstractmethod
    def call(self) -> Awaitable[object]:
        """The call that is cancelled."""

    async def meanwhile(self) -> None:  # noqa: B027 - most wait for nothing
        """What it waits for, if it does."""

    @abstractmethod
    async def check(self, value: object, *, cancelled: bool) -> None:
        """Whether it had all of its effect, or none; and clean up."""


class Put(Case):
    async def before(self) -> None:
        pass

    def call(self) -> Awaitable[object]:
        return self.sender.put("0", "1", self.key, filled(UNIT))

    async def check(self, value: object, *, cancelled: bool) -> None:
        if not cancelled:
            assert same(await self.receiver.get("0", "1", self.key))
        else:  # if it was put in that very moment, it stays
            assert await self.sender.cleanup(self.key) in (0, 1)


class Get(Case):
    def call(self) -> Awaitable[object]:
        return self.receiver.get("0", "1", self.key)

    async def check(self, value: object, *, cancelled: bool) -> None:
        assert same(await self.receiver.get("0", "1", self.key) if cancelled else value)


class Cleanup(Case):
    def call(self) -> Awaitable[object]:
        return self.sender.cleanup(self.key)

    async def check(self, value: object, *, cancelled: bool) -> None:
        assert cancelled or value == 1
        assert await self.sender.cleanup(self.key) <= int(cancelled)


class Drain(Case):
    def call(self) -> Awaitable[object]:
        return self.sender.drain()

    async def meanwhile(self) -> None:
        assert same(await self.receiver.get("0", "1", self.key))

    async def check(self, value: object, *, cancelled: bool) -> None:
        assert cancelled or value == 0
        assert await self.sender.drain() == 0


class WaitListening(Case):
    def call(self) -> Awaitable[object]:
        return self.sender.wait_listening()

    async def check(self, value: object, *, cancelled: bool) -> None:
        await self.sender.wait_listening()
        assert same(await self.receiver.get("0", "1", self.key))


CASES = {"put": Put, "get": Get, "cleanup": Cleanup, "drain": Drain, "wait_listening": WaitListening}


def test_every_public_call_that_is_awaited_is_among_them() -> None:
    members = vars(aio.AsyncioConnector).items()
    awaited = {name for name, each in members if inspect.iscoroutinefunction(each) and not name.startswith("_")}
    assert awaited == set(CASES)


@pytest.mark.parametrize("kind", CASES.values(), ids=CASES)
def test_a_call_that_is_cancelled_at_any_turn_of_the_loop_did_all_of_it_or_nothing(kind: type[Case]) -> None:
    async def cancel_after(pair: Both, number: int, pause: Callable[[], Awaitable[None]]) -> bool:
        case = kind(pair, number)
        await case.before()
        task = asyncio.ensure_future(case.call())
        await pause()
        task.cancel()
        await case.meanwhile()
        await asyncio.wait([task])
        await case.check(None if task.cancelled() else task.result(), cancelled=task.cancelled())
        return task.cancelled()

    async def turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def main(pair: Both) -> None:
        assert await cancel_after(pair, 0, lambda: turns(0)), "cancelled before it begins it is always cancelled"
        for number in range(1, ROUNDS):
            pause = turns(number) if number < 10 else asyncio.sleep(0.0001 * (number - 9))
            await cancel_after(pair, number, lambda pause=pause: pause)

    with both(pool=POOL) as pair:
        asyncio.run(asyncio.wait_for(main(pair), LIMIT))
        pair.assert_whole()
