"""The thread behind the blocking facade: what crosses into it, what comes back, and what is refused."""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest
import trio
import trio.testing
from portals import SOON, Parked, Stay, echo, fail, fail_now, run_program
from portals import open_portal as open_portal
from threads import Other

from trio_mori import ConnectorClosed, Misuse
from trio_mori._portal import Portal

# --- calls -------------------------------------------------------------------------------------------------


def test_calls_return_and_raise_where_they_were_made(portal: Portal) -> None:
    assert portal.call(echo, 3) == 3
    assert portal.call_sync(max, 3, 4) == 4
    with pytest.raises(KeyError, match="lost"):
        portal.call(fail, KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        portal.call_sync(fail_now, KeyError("lost"))
    with pytest.raises(StopAsyncIteration):
        portal.call(fail, StopAsyncIteration())
    with pytest.raises(SystemExit):
        portal.call_sync(fail_now, SystemExit(1))
    assert portal.call(echo, 5) == 5


def test_an_error_that_crossed_keeps_nothing_alive(portal: Portal) -> None:
    gone = threading.Event()

    class Watched:
        def __del__(self) -> None:
            gone.set()

    async def work() -> None:
        watched = Watched()
        await trio.lowlevel.checkpoint()
        raise ValueError(f"with {type(watched).__name__}")

    gc.disable()  # for what it would do, the caller need not wait
    try:
        with pytest.raises(ValueError, match="with Watched"):
            portal.call(work)
        portal.call(echo, None)  # the loop has let go of the task before, too
        assert gone.wait(SOON)
    finally:
        gc.enable()


def test_a_call_that_takes_too_long_is_cancelled_and_says_so(portal: Portal) -> None:
    parked = Parked()
    with pytest.raises(TimeoutError, match=r"^get of 'k' did not end within 0\.01 s$"):
        portal.call(parked.run, timeout=0.01, what="get of 'k'")
    assert parked.was_cancelled


def test_many_threads_call_at_once(portal: Portal) -> None:
    def work(first: int) -> list[object]:
        return [portal.call(echo, number) for number in range(first, first + 50)]

    others = [Other(work, first) for first in range(0, 400, 50)]
    assert [other.wait() for other in others] == [list(range(first, first + 50)) for first in range(0, 400, 50)]


# --- misuse ------------------------------------------------------------------------------------------------


def test_a_call_in_the_loops_own_thread_is_refused(portal: Portal) -> None:
    for call in (
        partial(portal.call, echo, 1, what="get of 'k'"),
        partial(portal.call_sync, int, what="get of 'k'"),
        partial(portal.enter, Stay([]).open, what="get of 'k'"),
    ):
        with pytest.raises(Misuse, match="get of 'k' was made in the connector's own event loop"):
            portal.call_sync(call)
    with pytest.raises(Misuse, match="close was made in the connector's own event loop"):
        portal.call_sync(portal.close)
    assert portal.call(echo, 1) == 1


def test_a_forked_child_is_refused_and_can_open_its_own() -> None:
    run = run_program("""
import os
from contextlib import asynccontextmanager
from trio_mori import ConnectorClosed, Misuse
from trio_mori._portal import Portal
from trio_mori._scope import open_service

async def echo(value):
    return value

@asynccontextmanager
async def stay():
    yield

portal = Portal()
entered = portal.enter(stay)
child = os.fork()
if not child:
    try:
        with entered:
            raise KeyError("own")
    except KeyError as error:
        print(error)
    for call in (lambda: portal.call(echo, 1, what="get of 'k'"), lambda: portal.post(int)):
        try:
            call()
        except Misuse as error:
            print(str(error).replace(str(os.getpid()), "CHILD").replace(str(os.getppid()), "PARENT"))
    portal.stop()
    portal.close()
    del portal
    own = Portal()
    print(own.call(echo, "own"))
    own.close()
    raise SystemExit(7)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(portal.call(echo, "the parent goes on"))
""")
    assert run.stderr == ""
    error, first, second, *rest = run.stdout.splitlines()
    assert error == "'own'"
    assert first.startswith("get of 'k' was made in process CHILD, which was forked from process PARENT")
    assert second.startswith("a call was made in process CHILD")
    assert rest == ["own", "child ended with 7", "the parent goes on"]


# --- calls that no thread waits for ----------------------------------------------------------------------------


class Answer:
    """What is told of a submitted call."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.count = 0

    def note(self) -> None:
        self.count += 1
        self.came.set()


def test_a_submitted_call_is_answered_once_and_then_returns_or_raises(portal: Portal) -> None:
    returned, raised = Answer(), Answer()
    first = portal.submit(partial(echo, 3), on_answer=returned.note)
    second = portal.submit(partial(fail, KeyError("lost")), on_answer=raised.note)
    assert returned.came.wait(SOON)
    assert raised.came.wait(SOON)
    assert first.result() == 3
    with pytest.raises(KeyError, match="lost"):
        second.result()
    assert (returned.count, raised.count) == (1, 1)
    assert not portal._waiting


def test_a_submitted_call_that_is_abandoned_is_cancelled_and_not_answered(portal: Portal) -> None:
    answer, parked = Answer(), Parked()
    call = portal.submit(parked.run, on_answer=answer.note)
    assert parked.began.wait(SOON)
    call.abandon()
    assert parked.ended.wait(SOON)
    assert parked.was_cancelled
    portal.call(trio.testing.wait_all_tasks_blocked)
    assert answer.count == 0
    assert not portal._waiting


def test_a_submitted_call_that_is_abandoned_before_it_began_never_begins(portal: Portal) -> None:
    answer, parked = Answer(), Parked()
    stuck, free = threading.Event(), threading.Event()

    def hold() -> None:
        stuck.set()
        free.wait(SOON)

    portal.post(hold)
    assert stuck.wait(SOON)
    portal.submit(parked.run, on_answer=answer.note).abandon()
    free.set()
    portal.call(trio.testing.wait_all_tasks_blocked)
    assert not parked.began.is_set()
    assert answer.count == 0
    assert not portal._waiting


@pytest.mark.parametrize("death", [None, KeyError("died of it")])
def test_a_submitted_call_is_told_of_the_end_of_the_loop(death: KeyError | None) -> None:
    portal = Portal()
    answer, parked = Answer(), Parked()
    call = portal.submit(parked.run, on_answer=answer.note, what="get of 'k'")
    assert parked.began.wait(SOON)
    if death is None:
        portal.close()
    else:
        portal.post(partial(fail_now, death))
    assert answer.came.wait(SOON)
    said = "the connector was closed" if death is None else "died of KeyError"
    with pytest.raises(ConnectorClosed, match=f"get of 'k' was cut off.*{said}"):
        call.result()
    portal.close()
    with pytest.raises(ConnectorClosed, match=f"get of 'l' came too late.*{said}"):
        portal.submit(parked.run, on_answer=answer.note, what="get of 'l'")
    assert answer.count == 1
    assert not portal._waiting
