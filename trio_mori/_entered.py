"""An async context manager that a loop holds open for another thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

import trio

from ._errors import ConnectorClosed, Misuse

T = TypeVar("T")


class Loop(Protocol):
    """What a block needs of the portal to its loop.

    Attributes:
        hosts: Where blocks are tasks.
        entered: Those that are open, oldest first.
    """

    hosts: trio.Nursery
    entered: list[Entered[Any]]

    @property
    def in_portal(self) -> bool:
        """Whether the caller is in the loop's own thread."""

    def call(
        self, function: Callable[..., Awaitable[T]], *args: object, timeout: float | None = None, what: str = ...
    ) -> T:
        """Run it in the loop, and wait for its outcome."""

    def die(self, error: BaseException) -> None:
        """End, for something failed that nobody waits for."""


class Entered(Generic[T]):
    """An async context manager that the loop holds open, as a context manager of the thread. Made by `Portal.enter`.

    An exception in the block reaches the async one, as it would in an ``async with``. If the portal is closed
    meanwhile, the async one is left by a cancellation, and leaving the block raises `ConnectorClosed`.

    Attributes:
        value: What it gave.
        is_whole: The portal's close is the end of its block: it is left as if that had been reached, not cancelled.
    """

    value: T

    def __init__(
        self,
        loop: Loop,
        what: str,
        factory: Callable[[], AbstractAsyncContextManager[T]],
        timeout: float | None,
        *,
        is_whole: bool = False,
    ) -> None:
        self.is_whole = is_whole
        self._loop = loop
        self._what = what
        self._timeout = timeout
        self._factory = factory
        self._scope = trio.CancelScope()
        self._wanted = trio.Event()  # that it is left
        self._left = trio.Event()
        self._error: BaseException | None = None  # that it is left by
        self._failure: Exception | None = None  # that leaving it raised
        self._is_over = False

    def leave(self, error: BaseException | None = None) -> None:
        """Leave it, by an exception if one is given, and wait until it has been left. Idempotent.

        Raises:
            TimeoutError: it was not left in time, and is cancelled now.
            ConnectorClosed: the portal was closed before.
            others: what leaving it raised, unless that is `error` itself.
        """
        if self._is_over:
            return
        traceback = None if error is None else error.__traceback__
        try:
            self._loop.call(self._leave, error, timeout=self._timeout, what=f"the end of {self._what}")
        finally:
            self._is_over = True
            if error is not None:
                error.__traceback__ = traceback  # without the frames of the loop

    def __enter__(self) -> T:
        return self.value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loop.in_portal:  # a generator that is collected there: nothing may be waited for
            self._want(error)
            return
        try:
            self.leave(error)
        except (ConnectorClosed, Misuse):  # no loop to leave it in, which is no reason to hide an error of the block
            if error is None:
                raise

    # --- in the loop --------------------------------------------------------------------------------------

    async def begin(self) -> T:
        """Enter it."""
        return cast(T, await self._loop.hosts.start(self._stay))

    async def _stay(self, *, task_status: trio.TaskStatus[T]) -> None:
        is_open = False
        try:
            with self._scope:
                async with self._factory() as value:
                    is_open = True
                    self._loop.entered.append(self)
                    task_status.started(value)
                    await self._wanted.wait()
                    if self._error is not None:
                        raise self._error
        except BaseException as error:
            if error is self._error:
                pass  # it goes on in the thread that leaves
            elif not is_open or not isinstance(error, Exception):
                raise
            elif self._wanted.is_set():
                self._failure = error
            else:
                self._loop.die(error)
        finally:
            if is_open:
                self._loop.entered.remove(self)
            self._left.set()

    def _want(self, error: BaseException | None) -> None:
        if not self._wanted.is_set():
            self._error = error
            self._wanted.set()

    async def _leave(self, error: BaseException | None) -> None:
        self._want(error)
        try:
            await self._left.wait()
        except trio.Cancelled:
            self._scope.cancel()
            raise
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def cancel(self) -> None:
        """Leave it soon."""
        self._scope.cancel()

    async def cut(self) -> None:
        """Leave it, for the portal is closed."""
        if self.is_whole:
            self._want(None)
        else:
            self._scope.cancel()
        await self._left.wait()
        if self.is_whole and self._failure is not None:
            self._loop.die(self._failure)
