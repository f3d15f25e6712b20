"""How a loop in a thread ends: by a close, by its death, and with the interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing
from descriptors import no_descriptors_left
from portals import SOON, Stay, echo, fail, fail_now, park, run_program
from portals import open_portal as open_portal
from threads import Other

from trio_mori import ConnectorClosed, InternalError, NoDescriptors
from trio_mori._portal import Portal
from trio_mori._scope import open_service

# --- closing -----------------------------------------------------------------------------------------------


def test_a_close_ends_calls_of_other_threads_and_refuses_later_ones() -> None:
    portal = Portal()
    parked, other = park(portal)
    portal.close()
    with pytest.raises(ConnectorClosed, match="get of 'k' was cut off: the connector was closed"):
        other.wait()
    assert parked.was_cancelled
    for call in (partial(portal.call, echo, 1), partial(portal.call_sync, int), partial(portal.post, int)):
        with pytest.raises(ConnectorClosed, match="a call came too late: the connector was closed"):
            call()
    with pytest.raises(ConnectorClosed):
        portal.enter(Stay([]).open)


def test_a_close_is_idempotent_and_may_come_from_any_thread() -> None:
    portal = Portal()
    others = [Other(portal.close) for _ in range(4)]
    portal.close()
    for other in others:
        other.wait()
    portal.close()
    assert not portal._thread.is_alive()


def test_a_close_leaves_what_was_entered_newest_first_after_the_calls() -> None:
    portal, log = Portal(), list[str]()
    portal.enter(Stay(log, "connector").open)
    second = portal.enter(Stay(log, "stream").open)
    parked, other = park(portal)
    log.clear()
    portal.close()
    assert log == ["stream left by Cancelled", "connector left by Cancelled"]
    assert parked.ended.is_set()
    with pytest.raises(ConnectorClosed):
        other.wait()
    with pytest.raises(ConnectorClosed):
        second.leave()
    second.leave()


def test_a_block_that_a_close_cut_off_says_so_unless_an_exception_does() -> None:
    def close_within(error: Exception | None) -> None:
        portal = Portal()
        with portal.enter(Stay([]).open):
            portal.close()
            if error is not None:
                raise error

    with pytest.raises(ConnectorClosed):
        close_within(None)
    with pytest.raises(ValueError, match="mine"):
        close_within(ValueError("mine"))


def test_calls_that_arrive_while_it_closes_are_told_and_kill_nothing() -> None:
    portal = Portal()
    closing = threading.Event()
    may_end: list[trio.Event] = []

    @asynccontextmanager
    async def slow_to_leave() -> AsyncIterator[None]:
        may_end.append(trio.Event())
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                closing.set()
                await may_end[0].wait()

    portal.enter(slow_to_leave)
    other = Other(portal.close)
    assert closing.wait(SOON)
    with pytest.raises(ConnectorClosed, match="was cut off"):
        portal.call(echo, 1)
    assert portal.call_sync(max, 1, 2) == 2  # what has begun can still be settled
    portal.post(may_end[0].set)
    other.wait()


def test_stopping_in_the_loops_own_thread_returns_at_once() -> None:
    portal, log = Portal(), list[str]()
    portal.enter(Stay(log).open)
    portal.call_sync(portal.stop)
    portal._thread.join(SOON)
    assert not portal._thread.is_alive()
    assert log == ["stay entered", "stay left by Cancelled"]


def test_a_close_of_a_loop_that_is_stuck_says_so_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    portal = Portal(grace=0.01)
    free = threading.Event()
    portal.post(free.wait)
    monkeypatch.setattr("trio_mori._portal.JOIN_TIMEOUT", 0.01)
    with pytest.raises(InternalError, match="does not end"):
        portal.close()
    free.set()
    portal._thread.join(SOON)
    portal.close()


# --- death -------------------------------------------------------------------------------------------------


def break_by_callback(portal: Portal) -> None:
    """Post what raises."""
    portal.post(partial(fail_now, ValueError("broken")))


def break_by_service(portal: Portal) -> None:
    """Have a task of what was entered fail."""
    nursery = portal.enter(open_service).value
    portal.call_sync(nursery.start_soon, fail, ValueError("broken"))


def break_trio(portal: Portal) -> None:
    """Have trio itself fail: what it is given without going through the portal is not caught."""
    portal.call_sync(trio.lowlevel.current_trio_token).run_sync_soon(fail_now, ValueError("broken"))


@pytest.mark.parametrize("breaking", [break_by_callback, break_by_service, break_trio])
def test_a_loop_that_dies_tells_every_call_within_a_second(breaking: Callable[[Portal], None]) -> None:
    portal = Portal()
    parked, other = park(portal)
    began = time.monotonic()
    breaking(portal)
    with pytest.raises(
        ConnectorClosed, match=r"^get of 'k' was cut off: the event loop .* died of ValueError: broken$"
    ):
        other.wait()
    assert time.monotonic() - began < 1
    assert parked.ended.is_set()
    for call in (partial(portal.call, echo, 1), partial(portal.enter, Stay([]).open)):
        with pytest.raises(ConnectorClosed, match="the event loop of the connector died of"):
            call()
    assert portal._over.wait(SOON)
    for late in (partial(portal.call_sync, int), partial(portal.post, int)):
        with pytest.raises(ConnectorClosed, match="the event loop of the connector died of"):
            late()
    portal.close()  # it has been said


def test_a_close_says_what_the_loop_died_of_if_nothing_else_did() -> None:
    portal = Portal()
    break_by_callback(portal)
    with pytest.raises(ConnectorClosed, match="died of ValueError: broken"):
        portal.close()
    portal.close()


def test_a_service_that_dies_does_not_keep_the_others_from_ending_in_order() -> None:
    portal, log = Portal(), list[str]()
    portal.enter(Stay(log, "connector").open)
    break_by_service(portal)
    with pytest.raises(ConnectorClosed):
        portal.close()
    assert log == ["connector entered", "connector left by Cancelled"]


def test_a_loop_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())

    def refuse(main: Callable[[], Awaitable[None]]) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(trio, "run", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Portal()
    monkeypatch.undo()
    assert set(threading.enumerate()) <= before, "fewer: an idle worker of an earlier test may have ended"
    portal = Portal()
    portal.close()


def test_a_start_without_descriptors_left_says_so() -> None:
    with no_descriptors_left() as limit:
        with pytest.raises(NoDescriptors, match=rf"cannot open an event loop: too few .* the {limit} .*`ulimit -n`"):
            Portal()


# --- the end of the interpreter ----------------------------------------------------------------------------


OPEN = """
import threading, trio
from contextlib import asynccontextmanager
from trio_mori._portal import Portal
from trio_mori._scope import open_service

@asynccontextmanager
async def stay():
    try:
        yield
    finally:
        print("left", flush=True)

portal = Portal()
portal.enter(stay)
"""


ENDS = {
    "the last line": ("", 0),
    "exit": ("raise SystemExit(3)", 3),
    "a daemon thread in a call": (
        "threading.Thread(target=portal.call, args=(trio.sleep_forever,), daemon=True).start()",
        0,
    ),
    "a thread that goes on": (
        "import time\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    print(portal.call_sync(int), flush=True)\n"
        "threading.Thread(target=work).start()",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_forgets_to_close_ends_in_order_and_quietly(end: str) -> None:
    line, status = ENDS[end]
    run = run_program(OPEN + line)
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1] == "left"
    assert run.returncode == status
