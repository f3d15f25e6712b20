"""An interrupt of a thread whose work runs in the loop: it comes at once, and the work is cancelled."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from portals import SOON, Parked, Stay, echo, interrupted_at
from portals import open_portal as open_portal

from trio_mori._portal import Portal
from trio_mori._portal_calls import Call


def test_an_interrupt_ends_a_call_at_once_and_cancels_its_work(portal: Portal) -> None:
    parked = Parked()
    with interrupted_at(portal, parked.began):
        portal.call(parked.run)
    assert parked.ended.wait(SOON)
    assert parked.was_cancelled
    assert portal.call(echo, 1) == 1


def test_an_interrupt_is_not_held_up_by_work_that_cannot_be_cancelled(portal: Portal) -> None:
    began, may_end = threading.Event(), trio.Event()

    async def stubborn() -> None:
        with trio.CancelScope(shield=True):
            began.set()
            await may_end.wait()

    with interrupted_at(portal, began):
        portal.call(stubborn)
    portal.post(may_end.set)


def test_an_interrupt_while_the_loop_is_stuck_leaves_what_had_not_begun_undone(portal: Portal) -> None:
    stuck, free = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        stuck.set()
        free.wait(SOON)

    portal.post(hold)
    with interrupted_at(portal, stuck):
        portal.call_sync(done.append, "sync")
    with interrupted_at(portal, stuck):
        portal.call(Stay(done).open().__aenter__)
    free.set()
    portal.call(echo, 1)
    assert done == []


def test_an_interrupt_is_not_replaced_by_the_news_of_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    portal = Portal()
    parked = Parked()

    def interrupted(call: Call[None]) -> None:
        assert parked.began.wait(SOON)
        portal.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        portal.call(parked.run)
    assert parked.was_cancelled


def test_an_interrupt_while_entering_leaves_it_again(portal: Portal) -> None:
    log: list[str] = []
    began = threading.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        async with Stay(log).open():
            began.set()
            await trio.sleep_forever()
            yield

    with interrupted_at(portal, began):
        portal.enter(slow)
    portal.call(trio.testing.wait_all_tasks_blocked)
    assert log == ["stay entered", "stay left by Cancelled"]
