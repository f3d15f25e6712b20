"""One trio thread for code that has no event loop: the only threading in trio_mori."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar, cast

import trio

from ._errors import ConnectorClosed, InternalError

T = TypeVar("T")

# How long closing waits for the trio thread. Everything that runs there ends within its own grace; a thread that does
# not is stuck in foreign code, and is left behind as a daemon rather than hang the process.
JOIN_TIMEOUT = 30.0


class _Call(Generic[T]):
    """One call into the trio thread, waited for in another one. Without value and error it was cut off."""

    def __init__(self, function: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> None:
        self.function = function
        self.args = args
        self.done = threading.Event()
        self.scope = trio.CancelScope()
        self.finished = False
        self.value: T | None = None
        self.error: Exception | None = None

    async def run(self, timeout: float | None) -> None:
        """Carry it out, as a task."""
        if timeout is not None:
            self.scope.deadline = trio.current_time() + timeout
        try:
            with self.scope:
                self.value = await self.function(*self.args)
            if self.scope.cancelled_caught:
                self.error = TimeoutError(f"the call did not end within {timeout} s")
            self.finished = True
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error, self.finished = error, True
        finally:
            self.done.set()


class _Hosted(Generic[T]):
    """An async context manager that a task of the portal holds open."""

    def __init__(self, factory: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.left = threading.Event()
        self.failure: Exception | None = None
        self._factory = factory
        self._ended = trio.Event()
        self._error: Exception | None = None

    def end(self, error: BaseException | None) -> None:
        """Let the task leave it."""
        # KeyboardInterrupt and the like belong to the thread that they hit; in the trio thread they are only news.
        self._error = error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))
        self._ended.set()

    async def run(self, *, task_status: trio.TaskStatus[T]) -> None:
        """Enter it, wait, leave it."""
        entered = False
        try:
            async with self._factory() as value:
                entered = True
                task_status.started(value)
                await self._ended.wait()
                if self._error is not None:
                    raise self._error
        except Exception as error:  # raised again in the thread that leaves
            if not entered:
                raise
            if error is not self._error:
                self.failure = error
        finally:
            self.left.set()


class Portal:
    """A thread that runs trio, and ways into it. Thread-safe.

    Calls run as tasks of the portal's own nursery. Closing the portal cancels what still runs there; whoever waits for
    it gets `ConnectorClosed`. When the event loop dies of an error, every later call says so.
    """

    def __init__(self, name: str = "trio_mori") -> None:
        """Start the thread, and return when it takes calls."""
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._started = threading.Event()
        self._over = threading.Event()
        self._waited_for: dict[threading.Event, None] = {}
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - it crosses the thread: every later call raises from it
            self._death = error
        finally:
            self._over.set()
            self._started.set()
            for event in list(self._waited_for):
                event.set()

    async def _main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._started.set()
            await trio.sleep_forever()

    @property
    def in_portal(self) -> bool:
        """Whether the caller is the portal's own thread."""
        return threading.get_ident() == self._thread.ident

    def post(self, callback: Callable[[], object]) -> None:
        """Have something done in the trio thread, soon. From any thread or finaliser.

        Raises:
            ConnectorClosed: the portal is closed.
        """
        try:
            if self._token is None:
                raise trio.RunFinishedError
            self._token.run_sync_soon(callback)
        except trio.RunFinishedError:
            raise self._closed_error() from self._death

    def call(self, function: Callable[..., Awaitable[T]], *args: object, timeout: float | None = None) -> T:
        """Run an async function in the trio thread and wait for its result.

        Args:
            timeout: Seconds; then the function is cancelled.

        Raises:
            TimeoutError: it did not end in time. Whatever it did was undone, as by a cancellation.
            ConnectorClosed: the portal was closed before or during the call.
            InternalError: called in the portal's own thread, which would wait for itself.
        """
        self._refuse_own_thread()
        call = _Call(function, args)

        def spawn() -> None:
            assert self._nursery is not None
            self._nursery.start_soon(call.run, timeout)

        try:
            self._wait(call.done, spawn)
        except BaseException:
            self._abandon(call)
            raise
        if call.error is not None:
            raise call.error
        if not call.finished:
            raise self._closed_error() from self._death
        return cast(T, call.value)

    def _abandon(self, call: _Call[Any]) -> None:
        """Its caller was interrupted (KeyboardInterrupt): it must not go on alone."""
        if not self._over.is_set():
            self.post(call.scope.cancel)

    def _wait(self, event: threading.Event, begin: Callable[[], object]) -> None:
        self._waited_for[event] = None
        try:
            self.post(begin)
            event.wait()
        finally:
            del self._waited_for[event]

    def _refuse_own_thread(self) -> None:
        if self.in_portal:
            raise InternalError(
                "a blocking call of trio_mori was made in its own trio thread, where it would wait for itself; await "
                "the asynchronous method instead, or call from another thread"
            )

    @contextmanager
    def entered(self, factory: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
        """Hold an async context manager open in the trio thread for the length of a ``with`` block.

        An exception in the block reaches the context manager, as it would in an ``async with``.
        """
        value, leave = self.enter(factory)
        try:
            yield value
        except BaseException as error:
            leave(error)
            raise
        leave(None)

    def enter(
        self, factory: Callable[[], AbstractAsyncContextManager[T]]
    ) -> tuple[T, Callable[[BaseException | None], None]]:
        """As `entered`, in two halves.

        Returns:
            What the context manager gave, and a function that leaves it, by an exception if one is given, and
            waits until it has been left. Idempotent.
        """
        hosted = _Hosted(factory)

        async def begin() -> T:
            assert self._nursery is not None
            return cast(T, await self._nursery.start(hosted.run))

        value = self.call(begin)

        def leave(error: BaseException | None) -> None:
            if not hosted.left.is_set() and not self._over.is_set():
                self._refuse_own_thread()
                self._wait(hosted.left, lambda: hosted.end(error))
            if hosted.failure is not None:
                failure, hosted.failure = hosted.failure, None
                raise failure

        return value, leave

    def close(self) -> None:
        """Cancel what runs, and join the thread. Idempotent; from any thread but the portal's own."""
        if self._over.is_set():
            return
        self._refuse_own_thread()

        def stop() -> None:
            assert self._nursery is not None
            self._nursery.cancel_scope.cancel()

        self.post(stop)
        self._thread.join(JOIN_TIMEOUT)

    def _closed_error(self) -> ConnectorClosed:
        if self._death is not None:
            return ConnectorClosed(f"the event loop of trio_mori has died: {type(self._death).__name__}: {self._death}")
        return ConnectorClosed("the connector was closed")
