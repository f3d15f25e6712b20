"""`open_service`: the body ends first, then the drain, then the tasks; errors come out as they went in."""

# ruff: noqa: PT012 - the errors come out of the whole scope
from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_mori._scope import open_service

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

pytestmark = pytest.mark.deterministic


class Log(list[str]):
    """What happened, in order."""

    async def sleep(self, name: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait to be cancelled and note when it happens."""
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self.append(f"{name} cancelled")

    def drain(self, *, error: Exception | None = None, takes: float = 0) -> Callable[[], Awaitable[None]]:
        async def drain() -> None:
            self.append("drain")
            try:
                await trio.sleep(takes)
            except trio.Cancelled:
                self.append("drain cancelled")
                raise
            self.append("drained")
            if error is not None:
                raise error

        return drain


class Cause(Exception):
    """Something that went wrong before."""


async def fail(error: BaseException) -> None:
    raise error


async def test_the_body_ends_then_the_service_drains_then_its_tasks_are_cancelled() -> None:
    log = Log()
    async with open_service(drain=log.drain()) as service:
        await service.start(log.sleep, "task")
        log.append("body")
    assert log == ["body", "drain", "drained", "task cancelled"]


async def test_without_a_drain_the_tasks_are_cancelled_when_the_body_ends() -> None:
    log = Log()
    async with open_service() as service:
        await service.start(log.sleep, "task")
        log.append("body")
    assert log == ["body", "task cancelled"]


async def test_a_service_whose_tasks_have_all_returned_takes_new_ones() -> None:
    log = Log()
    async with open_service() as service:
        service.start_soon(trio.lowlevel.checkpoint)
        await wait_all_tasks_blocked()
        await service.start(log.sleep, "late task")
    assert log == ["late task cancelled"]


async def test_a_task_may_cancel_a_scope_around_the_service_that_it_belongs_to() -> None:
    log = Log()

    async def cancel() -> None:
        scope.cancel()

    with trio.CancelScope() as scope:
        async with open_service(drain=log.drain()) as service:
            await service.start(log.sleep, "task")
            service.start_soon(cancel)
            await log.sleep("body")
    assert scope.cancelled_caught
    assert log == ["body cancelled", "drain", "drained", "task cancelled"]


# --- outside cancellation -----------------------------------------------------------------------------------


async def test_outside_cancellation_unwinds_the_body_while_the_service_still_runs() -> None:
    log = Log()
    with trio.CancelScope() as outside:
        async with open_service(drain=log.drain()) as service:
            await service.start(log.sleep, "task")
            try:
                outside.cancel()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                log.append("body")
        log.append("never reached")
    assert outside.cancelled_caught
    assert log == ["body", "drain", "drained", "task cancelled"]


async def test_the_body_sees_deadlines_from_outside_and_the_service_does_not(autojump_clock: trio.abc.Clock) -> None:
    deadlines = []

    async def look() -> None:
        deadlines.append(trio.current_effective_deadline())

    with trio.move_on_after(7):
        async with open_service() as service:
            service.start_soon(look)
            await wait_all_tasks_blocked()
            assert trio.current_effective_deadline() == trio.current_time() + 7
    assert deadlines == [float("inf")]


async def test_opening_in_a_scope_that_is_cancelled_cancels_the_body_at_its_first_checkpoint() -> None:
    log = Log()
    with trio.CancelScope() as outside:
        outside.cancel()
        async with open_service(drain=log.drain()):
            log.append("body")
            await trio.lowlevel.checkpoint()
            log.append("never reached")
    assert outside.cancelled_caught
    assert log == ["body", "drain", "drained"]


async def test_cancellation_during_the_drain_waits_for_it_and_is_met_at_the_next_checkpoint(
    autojump_clock: trio.abc.Clock,
) -> None:
    log = Log()

    async def drain() -> None:
        outside.cancel()
        await trio.sleep(1)
        log.append("drained")

    with trio.CancelScope() as outside:
        async with open_service(drain=drain) as service:
            await service.start(log.sleep, "task")
            log.append("body")
        log.append("after")
        await trio.lowlevel.checkpoint()
        log.append("never reached")
    assert outside.cancelled_caught
    assert log == ["body", "drained", "task cancelled", "after"]


async def test_a_drain_is_cancelled_at_its_time_limit_and_that_is_no_error(autojump_clock: trio.abc.Clock) -> None:
    log = Log()
    start = trio.current_time()
    async with open_service(drain=log.drain(takes=60), drain_timeout=2) as service:
        await service.start(log.sleep, "task")
    assert trio.current_time() - start == pytest.approx(2)
    assert log == ["drain", "drain cancelled", "task cancelled"]


# --- errors -------------------------------------------------------------------------------------------------


async def test_an_error_in_the_body_comes_out_itself_after_the_drain() -> None:
    log = Log()
    error = ValueError("body")
    with pytest.raises(ValueError, match="body") as caught:
        async with open_service(drain=log.drain()) as service:
            await service.start(log.sleep, "task")
            raise error from Cause()
    assert caught.value is error
    assert isinstance(error.__cause__, Cause)
    assert log == ["drain", "drained", "task cancelled"]


async def test_an_error_in_the_service_cancels_the_body_and_comes_out_itself_without_a_drain() -> None:
    log = Log()
    error = ValueError("service")
    cause = Cause()
    error.__cause__ = cause
    with pytest.raises(ValueError, match="service") as caught:
        async with open_service(drain=log.drain()) as service:
            await service.start(log.sleep, "task")
            service.start_soon(fail, error)
            await log.sleep("body")
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__context__ is None
    assert sorted(log) == ["body cancelled", "task cancelled"]


async def test_the_context_of_a_lone_error_survives() -> None:
    async def fail_while_handling() -> None:
        try:
            raise Cause
        except Cause:
            raise ValueError("service")  # noqa: B904

    with pytest.raises(ValueError, match="service") as caught:
        async with open_service() as service:
            service.start_soon(fail_while_handling)
            await trio.sleep_forever()
    assert isinstance(caught.value.__context__, Cause)
    assert not caught.value.__suppress_context__


async def test_errors_in_the_body_and_in_the_service_come_out_as_a_group() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_service() as service:
            service.start_soon(fail, KeyError("service"))
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("body")
    assert caught.group_contains(KeyError)
    assert caught.group_contains(ValueError)


async def test_an_error_in_the_drain_comes_out_itself_and_ends_the_service() -> None:
    log = Log()
    with pytest.raises(KeyError, match="drain"):
        async with open_service(drain=log.drain(error=KeyError("drain"))) as service:
            await service.start(log.sleep, "task")
    assert log == ["drain", "drained", "task cancelled"]


async def test_errors_in_the_body_and_in_the_drain_come_out_as_a_group() -> None:
    log = Log()
    with pytest.raises(ExceptionGroup) as caught:
        async with open_service(drain=log.drain(error=KeyError("drain"))):
            raise ValueError("body")
    assert caught.group_contains(KeyError)
    assert caught.group_contains(ValueError)


async def test_an_error_in_the_service_ends_a_drain_in_progress() -> None:
    log = Log()

    async def drain() -> None:
        service.start_soon(fail, ValueError("service"))
        await log.sleep("drain")

    with pytest.raises(ValueError, match="service"):
        async with open_service(drain=drain) as service:
            pass
    assert log == ["drain cancelled"]


async def test_an_error_in_the_body_is_not_lost_among_cancellations() -> None:
    error = ValueError("body")
    with trio.CancelScope() as outside:
        with pytest.raises(ValueError, match="body") as caught:
            async with open_service() as service:
                service.start_soon(trio.sleep_forever)
                try:
                    outside.cancel()
                    await trio.sleep_forever()
                finally:
                    raise error
    assert caught.value is error


async def test_an_error_in_the_service_is_not_lost_among_cancellations() -> None:
    error = ValueError("service")
    with trio.CancelScope() as outside:
        with pytest.raises(ValueError, match="service") as caught:
            async with open_service() as service:
                service.start_soon(fail, error)
                outside.cancel()
                await trio.sleep_forever()
    assert caught.value is error


async def test_an_error_in_the_drain_is_not_lost_among_cancellations() -> None:
    with trio.CancelScope() as outside:
        with pytest.raises(KeyError, match="drain"):
            async with open_service(drain=Log().drain(error=KeyError("drain"))):
                outside.cancel()
                await trio.sleep_forever()


async def test_a_group_raised_by_a_task_stays_a_group_when_it_holds_several_errors() -> None:
    group = ExceptionGroup("both", [ValueError("one"), ExceptionGroup("nested", [KeyError("two")])])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_service() as service:
            service.start_soon(fail, group)
            await trio.sleep_forever()
    assert caught.group_contains(ValueError)
    assert caught.group_contains(KeyError)


async def test_a_keyboard_interrupt_comes_out_itself() -> None:
    with pytest.raises(KeyboardInterrupt):
        async with open_service() as service:
            service.start_soon(fail, KeyboardInterrupt())
            await trio.sleep_forever()


# --- nested services ----------------------------------------------------------------------------------------


async def test_nested_services_end_from_the_inside_out() -> None:
    log = Log()
    with trio.CancelScope() as outside:
        async with open_service(drain=log.drain()) as outer:
            await outer.start(log.sleep, "outer task")
            async with open_service(drain=log.drain()) as inner:
                await inner.start(log.sleep, "inner task")
                outside.cancel()
                await trio.sleep_forever()
    assert log == ["drain", "drained", "inner task cancelled", "drain", "drained", "outer task cancelled"]


async def test_an_error_in_an_outer_service_lets_the_inner_one_drain() -> None:
    log = Log()
    error = ValueError("outer")
    with pytest.raises(ValueError, match="outer") as caught:
        async with open_service() as outer:
            async with open_service(drain=log.drain()) as inner:
                await inner.start(log.sleep, "inner task")
                outer.start_soon(fail, error)
                await trio.sleep_forever()
    assert caught.value is error
    assert log == ["drain", "drained", "inner task cancelled"]


async def test_an_error_in_an_inner_service_passes_an_outer_one_ungrouped() -> None:
    log = Log()
    error = ValueError("inner")
    with pytest.raises(ValueError, match="inner") as caught:
        async with open_service(drain=log.drain()):
            async with open_service() as inner:
                inner.start_soon(fail, error)
                await trio.sleep_forever()
    assert caught.value is error
    assert log == ["drain", "drained"]


class InterruptAt(trio.abc.Instrument):
    """Presses Ctrl-C when the main task has come to a halt for the n-th time; trio delivers it there.

    Attributes:
        reached: Whether it came so far.
    """

    def __init__(self, number: int) -> None:
        self.reached = False
        self._number = number
        self._main: trio.lowlevel.Task | None = None

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        if task.name.endswith("press_somewhere"):
            self._main = task

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._main:
            if self._number == 0:
                self.reached = True
                signal.raise_signal(signal.SIGINT)
            self._number -= 1


def test_ctrl_c_at_any_halt_of_the_main_task_ends_a_service() -> None:
    async def press_somewhere() -> None:
        async with open_service(drain=trio.lowlevel.checkpoint) as service:
            service.start_soon(trio.sleep_forever)
            await trio.lowlevel.checkpoint()

    def give_up(*_: object) -> None:
        raise AssertionError("a service waits for ever after Ctrl-C")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    try:
        for number in (number for number in range(100) for _ in range(8)):  # trio shuffles tasks that are ready
            instrument = InterruptAt(number)
            try:
                trio.run(press_somewhere, instruments=[instrument])
            except KeyboardInterrupt:
                assert instrument.reached
            if not instrument.reached:
                break
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert 3 <= number < 100
