"""The thread behind the blocking facade: what crosses into it, what comes back, and how it ends."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from threads import Other

from trio_mori import ConnectorClosed, InternalError, Misuse
from trio_mori._portal import Portal, _Call
from trio_mori._scope import open_service

ROOT = Path(__file__).parent.parent

# Seconds for what is over at once, on a machine that may be busy.
SOON = 10.0


@pytest.fixture(name="portal")
def open_portal() -> Iterator[Portal]:
    """A portal that is closed in the end."""
    portal = Portal()
    yield portal
    portal.close()


class Parked:
    """An async function that waits for ever and notes how it ends."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()
        self.was_cancelled = False

    async def run(self) -> None:
        self.began.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.was_cancelled = True
            raise
        finally:
            self.ended.set()


def park(portal: Portal) -> tuple[Parked, Other]:
    """A call of another thread that is in progress."""
    parked = Parked()
    other = Other(partial(portal.call, parked.run, what="get of 'k'"))
    assert parked.began.wait(SOON)
    return parked, other


@contextmanager
def interrupted_at(portal: Portal, began: threading.Event) -> Iterator[None]:
    """Expect that Ctrl-C, pressed as soon as something began, interrupts a call of this thread at once."""

    def press() -> None:
        assert began.wait(SOON)
        while not portal._waiting:  # nothing tells that the thread is in its call
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    presser = Other(press)
    with pytest.raises(KeyboardInterrupt):
        yield
    presser.wait()


async def echo(value: object) -> object:
    """A call that returns."""
    await trio.lowlevel.checkpoint()
    return value


async def fail(error: BaseException) -> None:
    """A call that raises."""
    await trio.lowlevel.checkpoint()
    raise error


def fail_now(error: BaseException) -> None:
    """The same at once."""
    raise error


class Stay:
    """An async context manager that notes by what it is left."""

    def __init__(self, log: list[str], name: str = "stay") -> None:
        self.log = log
        self.name = name

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self.log.append(f"{self.name} entered")
        try:
            yield self.name
        except BaseException as error:
            self.log.append(f"{self.name} left by {type(error).__name__}")
            raise
        self.log.append(f"{self.name} left")


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


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],  # forking beside threads is one
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_forked_child_is_refused_and_can_open_its_own() -> None:
    run = run_program("""
import os
from contextlib import asynccontextmanager
from trio_mori import Misuse
from trio_mori._portal import Portal, _Call
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


# --- interrupts --------------------------------------------------------------------------------------------


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

    def interrupted(call: _Call[None]) -> None:
        assert parked.began.wait(SOON)
        portal.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(_Call, "wait", interrupted)
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


# --- context managers --------------------------------------------------------------------------------------


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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Portal()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- the end of the interpreter ----------------------------------------------------------------------------

OPEN = """
import threading, trio
from contextlib import asynccontextmanager
from trio_mori._portal import Portal, _Call
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
