"""One trio thread for code that has no event loop: all threading of trio_mori is here and in the calls into it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

from ._descriptors import require_descriptors
from ._entered import Entered
from ._errors import ConnectorClosed, InternalError, Misuse
from ._portal_calls import Call, Step, Submitted, Task

T = TypeVar("T")

# How long closing waits for the thread beyond the grace of what runs there. A thread that has not ended then is stuck
# in foreign code, and is left behind as a daemon rather than hang the process.
JOIN_TIMEOUT = 30.0


class Portal:
    """A thread that runs trio, and ways into it from other threads.

    *Life.* It begins with the constructor. `close` ends it in order: calls in progress are cancelled, then what was
    entered is left, newest first, then the thread is joined. `stop` only sets this in motion, for finalisers.
    At the end of the interpreter it is closed if it was not.

    *Errors.* What a call raises is raised where it was called. When something fails that nobody waits for (a posted
    callback, a service that was entered, the loop itself), the portal ends, in order if it still can; every call in
    progress and every later one raises `ConnectorClosed` from the cause.

    *Interrupts.* A thread that is interrupted while it waits (KeyboardInterrupt) waits no more: its call is cancelled,
    and what comes of it is dropped.

    *Forks.* A forked child has no such thread: calls raise `Misuse` there, `stop` and `close` do nothing.
    """

    def __init__(self, name: str = "trio_mori", *, grace: float = 0.0) -> None:
        """Start the thread, and return when it takes calls. What keeps it from starting is raised.

        Args:
            name: Of the thread.
            grace: Seconds that leaving what will be entered may take.
        """
        self.death: BaseException | None = None
        self.exiting = False
        self.hosts: trio.Nursery
        self.tasks: trio.Nursery | None = None
        self.entered: list[Entered[Any]] = []
        self._grace = grace
        self._pid = os.getpid()
        self._token: trio.lowlevel.TrioToken | None = None
        self.ending = trio.Event()
        self._waiting: dict[Call[Any], None] = {}
        self._stopped = False
        self.death_is_told = False
        self._ready = threading.Event()
        self._over = threading.Event()
        require_descriptors("an event loop")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
            self._ready.wait()
        except BaseException:
            self.stop()
            raise
        if self._over.is_set() and self.death is not None:
            raise self.death
        # After whatever was imported until now, so that this comes before the ends of those at exit.
        atexit.register(self._close_at_exit)

    # --- from other threads -------------------------------------------------------------------------------

    @property
    def in_portal(self) -> bool:
        """Whether the caller is in the portal's own thread."""
        return threading.get_ident() == self._thread.ident and not self._over.is_set()

    def call(
        self, function: Callable[..., Awaitable[T]], *args: object, timeout: float | None = None, what: str = "a call"
    ) -> T:
        """Run an async function as a task of the loop, and wait for its outcome.

        Args:
            timeout: Seconds; then the function is cancelled.
            what: Names the call in errors.

        Raises:
            TimeoutError: it did not end in time. Whatever it did was undone, as by a cancellation.
            ConnectorClosed: the portal was closed, or its loop died, before or during the call.
            Misuse: called in the portal's own thread, which would wait for itself, or in a forked child.
        """
        return self._wait(Task(self, what, function, args, timeout))

    def call_sync(self, function: Callable[..., T], *args: object, what: str = "a call") -> T:
        """Run a function in the loop, between its tasks, and wait for its outcome.

        Raises:
            ConnectorClosed, Misuse: as `call`.
        """
        return self._wait(Step(self, what, function, args))

    def submit(
        self, function: Callable[[], Awaitable[T]], *, on_answer: Callable[[], None], what: str = "a call"
    ) -> Submitted[T]:
        """Run an async function as a task of the loop, and do not wait for it.

        Args:
            on_answer: Called once, soon and in the loop's thread, when there is an outcome, unless that was abandoned
                before. `Submitted.result` then returns or raises at once, as `call` does. It must not raise.

        Raises:
            ConnectorClosed: the portal was closed, or its loop died, before.
            Misuse: called in a forked child.
        """
        self._refuse_fork(what)
        call = Submitted(self, what, function, on_answer)
        try:
            self._waiting[call] = None  # before it is sent, as in `_wait`
            self._send(call.begin)
        except trio.RunFinishedError:
            self.forget(call)
            self._over.wait()
            self.death_is_told = True
            raise self.closed_error(what, "came too late") from self.death
        except BaseException:
            call.abandon()
            raise
        return call

    def forget(self, call: Call[Any]) -> None:
        """It needs no answer when the loop ends. Idempotent; from any thread."""
        self._waiting.pop(call, None)

    def post(self, callback: Callable[[], object]) -> None:
        """Have something done in the loop, soon. From any thread, signal handler or finaliser. It must not raise.

        Raises:
            ConnectorClosed: the portal is closed.
            Misuse: called in a forked child.
        """
        self._refuse_fork("a call")
        try:
            self._send(callback)
        except trio.RunFinishedError:
            raise self.closed_error("a call", "came too late") from self.death

    def enter(
        self,
        factory: Callable[[], AbstractAsyncContextManager[T]],
        *,
        timeout: float | None = None,
        what: str = "a block",
        is_whole: bool = False,
    ) -> Entered[T]:
        """Enter an async context manager in the loop, and hold it open there.

        Args:
            timeout: Seconds, for entering and for leaving it.
            is_whole: Its block ends when the portal is closed, and is not broken off then.

        Raises: as `call`.
        """
        entered = Entered(self, what, factory, timeout, is_whole=is_whole)
        try:
            entered.value = self.call(entered.begin, timeout=timeout, what=what)
        except BaseException:
            with suppress(ConnectorClosed, Misuse):
                self.post(entered.cancel)
            raise
        return entered

    def stop(self) -> None:
        """Have it end soon. From any thread, signal handler or finaliser. Idempotent."""
        if self._pid == os.getpid():
            self._stopped = True
            if self._token is not None:
                with suppress(ConnectorClosed):
                    self.post(self.ending.set)

    def close(self) -> None:
        """End it, and wait for that. From any thread but the portal's own. Idempotent.

        Raises:
            ConnectorClosed: from what it died of, if no call has said so.
            InternalError: it has not ended within its grace and 30 s.
        """
        if self._pid != os.getpid():
            return
        self._refuse_own_thread("close")
        self.stop()
        if not self._join():
            raise InternalError(
                "the event loop of the connector does not end: something that it called does not return"
            )
        atexit.unregister(self._close_at_exit)
        if self.death is not None and not self.death_is_told:
            self.death_is_told = True
            raise self.closed_error("close", "came too late") from self.death

    def closed_error(self, what: str, fate: str) -> ConnectorClosed:
        """Why nothing comes of a call."""
        if self.death is None:
            return ConnectorClosed(f"{what} {fate}: the connector was closed")
        cause = _innermost(self.death)
        death = f"{type(cause).__name__}: {cause}"
        return ConnectorClosed(f"{what} {fate}: the event loop of the connector died of {death}")

    def _wait(self, call: Call[T]) -> T:
        self._refuse_fork(call.what)
        self._refuse_own_thread(call.what)
        try:
            # In this order: a loop that ends from now on either finds the call here or is found over below.
            self._waiting[call] = None
            self._send(call.begin)
            call.wait()
        except trio.RunFinishedError:
            self._over.wait()  # at once; only then it is known what it died of
            self.death_is_told = True
            raise self.closed_error(call.what, "came too late") from self.death
        except BaseException:
            call.abandon()
            raise
        finally:
            self._waiting.pop(call, None)
        return call.result()

    def _send(self, callback: Callable[[], object]) -> None:
        if self._over.is_set():
            raise trio.RunFinishedError
        assert self._token is not None
        # OSError: trio has broken down, and `_run` is about to tell everybody who waits.
        with suppress(OSError):
            self._token.run_sync_soon(self._carry_out, callback)

    def _refuse_own_thread(self, what: str) -> None:
        if self.in_portal:
            raise Misuse(
                f"{what} was made in the connector's own event loop, where it would wait for itself; await the "
                "asynchronous method there, or call from another thread"
            )

    def _refuse_fork(self, what: str) -> None:
        if self._pid != os.getpid():
            raise Misuse(
                f"{what} was made in process {os.getpid()}, which was forked from process {self._pid}, and the "
                "connector stayed there; open one after the fork, or start processes by spawn"
            )

    def _close_at_exit(self) -> None:
        # Only daemon threads can be waiting now, and Python stops them where they are. They are left in their calls:
        # the end of one would be a traceback on the terminal.
        if self._pid == os.getpid():
            self.exiting = True
            self.stop()
            self._join()

    def _join(self) -> bool:
        self._thread.join(self._grace + JOIN_TIMEOUT)
        return not self._thread.is_alive()

    # --- in the loop --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - every later call raises from it
            self.death = error if self.death is None else self.death
        finally:
            self._over.set()
            self._ready.set()
            for call in list(self._waiting):
                call.answer()
            if not self.exiting:
                atexit.unregister(self._close_at_exit)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        if self._stopped:
            return
        async with trio.open_nursery() as self.hosts:
            async with trio.open_nursery() as self.tasks:
                tasks = self.tasks
                self._ready.set()
                try:
                    await self.ending.wait()
                finally:
                    self.tasks = None  # before it is closed, and would refuse tasks in its own way
                tasks.cancel_scope.cancel()
            for entered in reversed(self.entered.copy()):
                await entered.cut()

    def die(self, error: BaseException) -> None:
        """End, for something failed that nobody waits for."""
        self.death = error if self.death is None else self.death
        self.ending.set()

    def _carry_out(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except BaseException as error:  # noqa: BLE001 - every later call raises from it
            self.die(error)


def _innermost(error: BaseException) -> BaseException:
    """What trio has wrapped, which says of itself only that it is an internal error, or a group of one."""
    while True:
        if isinstance(error, trio.TrioInternalError) and error.__cause__ is not None:
            error = error.__cause__
        elif isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        else:
            return error
