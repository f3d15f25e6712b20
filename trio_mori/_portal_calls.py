"""Calls into a portal's loop: what other threads have done there, and how they hear what came of it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar, cast

import trio

from ._errors import ConnectorClosed

T = TypeVar("T")


class Loop(Protocol):
    """What a call needs of the portal to its loop.

    Attributes:
        tasks: Where async functions run; None when the loop takes no more.
        ending: Set when it was told to end, or has failed.
        exiting: The interpreter ends, and whoever waits is left in its call.
        death: What it died of.
        death_is_told: A call has raised from that.
    """

    tasks: trio.Nursery | None
    ending: trio.Event
    exiting: bool
    death: BaseException | None
    death_is_told: bool

    def post(self, callback: Callable[[], object]) -> None:
        """Have something done in the loop, soon."""

    def forget(self, call: Call[Any]) -> None:
        """It needs no answer when the loop ends."""

    def closed_error(self, what: str, fate: str) -> ConnectorClosed:
        """Why nothing comes of a call."""


class Call(ABC, Generic[T]):
    """Something that runs in the loop, and whose outcome another thread waits for."""

    def __init__(self, loop: Loop, what: str) -> None:
        self.abandoned = False
        self._loop = loop
        self.what = what
        self.value: T | None = None
        self.error: BaseException | None = None
        self.is_cut = True  # until there is an outcome
        self._is_answered = False
        self._gate = threading.Lock()  # taken until there is an answer; half the cost of an Event
        self._gate.acquire()

    # --- in the loop --------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Carry it out, unless it was abandoned."""

    def finish(self) -> None:
        """There is an outcome."""
        self.is_cut = False
        if self.abandoned:
            self.drop()
        self.answer()

    def drop(self) -> None:
        """Nobody takes the outcome. The traceback of whoever left may refer to this call until the loop has ended."""
        self.value = None

    def answer(self) -> None:
        """Let the thread that waits go on. Idempotent."""
        if not self._is_answered and not self._loop.exiting:
            self._is_answered = True
            self._gate.release()

    # --- in the thread that waits -------------------------------------------------------------------------

    def wait(self) -> None:
        """Until there is an answer. Signals are handled meanwhile."""
        self._gate.acquire()

    def abandon(self) -> None:
        """Nobody waits any more."""
        self.abandoned = True
        with suppress(ConnectorClosed):
            self._loop.post(self.drop)

    def result(self) -> T:
        """What it returned, or raise what it raised."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # which refers to this frame
        if self.is_cut:
            self._loop.death_is_told = True
            raise self._loop.closed_error(self.what, "was cut off") from self._loop.death
        return cast(T, self.value)


class Step(Call[T]):
    """A function that runs between two tasks."""

    def __init__(self, loop: Loop, what: str, function: Callable[..., T], args: tuple[object, ...]) -> None:
        super().__init__(loop, what)
        self._function = function
        self._args = args

    def begin(self) -> None:
        if self.abandoned:
            return
        try:
            self.value = self._function(*self._args)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        self.finish()


class Task(Call[T]):
    """An async function that runs as a task."""

    def __init__(
        self,
        loop: Loop,
        what: str,
        function: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        timeout: float | None,
    ) -> None:
        super().__init__(loop, what)
        self._function = function
        self._args = args
        self._timeout = timeout
        self._scope = trio.CancelScope()

    def begin(self) -> None:
        if self.abandoned:
            return
        if self._loop.tasks is None:
            self._cut_off()
        else:
            self._loop.tasks.start_soon(self._run)

    async def _run(self) -> None:
        if self._timeout is not None:
            self._scope.deadline = trio.current_time() + self._timeout
        try:
            with self._scope:
                self.value = await self._function(*self._args)
            if self._scope.cancelled_caught:
                self.error = TimeoutError(f"{self.what} did not end within {self._timeout} s")
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        except BaseException:
            self._cut_off()
            raise
        self.finish()

    def _cut_off(self) -> None:
        # Otherwise trio has broken down: when it is known by what, whoever still waits is told.
        if self._loop.ending.is_set():
            self.answer()

    def drop(self) -> None:
        self._scope.cancel()
        super().drop()


class Submitted(Task[T]):
    """A task of the loop that no thread waits for. Made by `Portal.submit`."""

    def __init__(
        self, loop: Loop, what: str, function: Callable[[], Awaitable[T]], on_answer: Callable[[], None]
    ) -> None:
        super().__init__(loop, what, function, (), None)
        self._on_answer = on_answer

    def answer(self) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._loop.forget(self)
            if not (self.abandoned or self._loop.exiting):
                self._on_answer()

    def abandon(self) -> None:
        """Nobody takes the outcome: it is cancelled if it can still be, and what it has returned is dropped."""
        super().abandon()
        self._loop.forget(self)


def ask(post: Callable[[Callable[[], object]], object], function: Callable[[], T], seconds: float) -> T | None:
    """What a function returns that a loop calls between two tasks; None if it does not come to it in time.

    Args:
        post: Has a function called in that loop.

    Raises:
        trio.RunFinishedError, ConnectorClosed, Misuse: there is no such loop any more, or not in this process.
    """
    answered = threading.Event()
    answers: list[T] = []
    errors: list[Exception] = []

    def answer() -> None:
        try:
            answers.append(function())
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asks
            errors.append(error)
        answered.set()

    post(answer)
    answered.wait(seconds)
    if errors:
        raise errors[0]
    return answers[0] if answers else None
