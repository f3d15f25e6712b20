"""Context managers that are entered and left in the loop, from a thread outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing
from portals import Stay, echo
from portals import open_portal as open_portal

from trio_mori._portal import Portal


def test_a_block_enters_and_leaves_in_the_loop(portal: Portal) -> None:
    log: list[str] = []
    with portal.enter(Stay(log).open) as value:
        assert (value, log) == ("stay", ["stay entered"])
    assert log == ["stay entered", "stay left"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_of_the_block_is_that_of_the_async_one_and_comes_out_unchanged(
    portal: Portal, kind: type[BaseException]
) -> None:
    log: list[str] = []
    error = kind("mine")
    with pytest.raises(kind) as caught:
        with portal.enter(Stay(log).open):
            raise error
    assert caught.value is error
    frames = [entry.name for entry in caught.traceback]
    assert "_stay" not in frames
    assert log == ["stay entered", f"stay left by {kind.__name__}"]
    assert portal.call(echo, 1) == 1


def test_what_entering_and_leaving_raise_comes_out(portal: Portal) -> None:
    @asynccontextmanager
    async def broken(*, entering: bool) -> AsyncIterator[None]:
        if entering:
            raise ValueError("entering")
        yield
        raise ValueError("leaving")

    with pytest.raises(ValueError, match="entering"):
        portal.enter(partial(broken, entering=True))
    with pytest.raises(ValueError, match="leaving"):
        with portal.enter(partial(broken, entering=False)):
            pass
    assert portal.call(echo, 1) == 1


def test_leaving_twice_is_leaving_once(portal: Portal) -> None:
    log: list[str] = []
    entered = portal.enter(Stay(log).open)
    entered.leave()
    entered.leave()
    assert log == ["stay entered", "stay left"]


def test_a_block_that_cannot_be_left_in_time_is_cancelled(portal: Portal) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def slow_to_leave() -> AsyncIterator[None]:
        async with Stay(log).open():
            yield
            await trio.sleep_forever()

    entered = portal.enter(slow_to_leave, what="the stream")
    entered._timeout = 0.02  # from now on: entering may take as long as it likes
    with pytest.raises(TimeoutError, match="the end of the stream did not end within"):
        entered.leave()
    portal.call(trio.testing.wait_all_tasks_blocked)
    assert log == ["stay entered", "stay left by Cancelled"]


def test_a_block_that_is_collected_in_the_loops_own_thread_waits_for_nobody(portal: Portal) -> None:
    log: list[str] = []

    def user() -> Iterator[None]:
        with portal.enter(Stay(log).open):
            yield

    generators = [user()]
    next(generators[0])
    portal.call_sync(generators.clear)
    portal.call(trio.testing.wait_all_tasks_blocked)
    assert log == ["stay entered", "stay left by GeneratorExit"]
