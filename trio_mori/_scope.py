"""A service that lives exactly as long as the body of its `async with`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import NoReturn

import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

# Longer than any drain of ours needs when peers answer, shorter than what one waits at Ctrl-C before the second one.
DRAIN_TIMEOUT = 5.0


@asynccontextmanager
async def open_service(
    *,
    drain: Callable[[], Awaitable[object]] | None = None,
    drain_timeout: float = DRAIN_TIMEOUT,
) -> AsyncIterator[trio.Nursery]:
    """Open a nursery for background tasks that the body relies on until its last line.

    In a plain nursery, body and tasks are equals: cancellation reaches both at once, and clean-up in the body finds
    the listener that it wants to say goodbye through already dead. Here they end in order:

    1. *The body ends*: it returns, raises, or is cancelled from outside. Outside cancellation, with its deadlines,
       reaches the body as usual and the service not at all.
    2. *The service drains*: `drain` is awaited while all tasks still run. It is shielded from outside, and
       bounded: after `drain_timeout` seconds it is cancelled, which is no error. A drain that has to report
       what it could not finish does so as it is cancelled.
    3. *The tasks are cancelled*, and waited for.

    The body may start tasks with the nursery that it gets; they need not end by themselves. A service whose last
    task has returned stays open, for more.

    When a task of the service fails, there is no service left to be orderly with: the other tasks, the body and a
    drain in progress are cancelled, no drain is begun, and the error comes out of the `async with`.

    Errors come out as they went in. One error, of the body, a task or the drain, is raised itself and not in a group,
    with the cause and context that it had. Several come out as one exception group. `Cancelled` comes out
    only when nothing else went wrong.
    """
    body_ended = trio.Event()

    async def serve(task_status: trio.TaskStatus[trio.Nursery]) -> None:
        # Ctrl-C can end start() before this begins; who is shielded would never hear of it, and start() would wait.
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as service:
                task_status.started(service)
                await body_ended.wait()
                if drain is not None:
                    with trio.move_on_after(drain_timeout):
                        await drain()
                service.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as both:
            try:
                with trio.CancelScope(shield=True):  # in a scope already cancelled, start() would never return
                    service = await both.start(serve)
                yield service
            finally:
                body_ended.set()
    except BaseExceptionGroup as group:
        error: BaseException = _ungrouped(group)
    else:
        return
    _raise_unchanged(error)


def _ungrouped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The only error in a group, or the group of those that there are, without `Cancelled`."""
    _, errors = group.split(trio.Cancelled)
    errors = errors or group
    leaves = _leaves(errors)
    only = next(leaves)
    return errors if any(True for _ in leaves) else only


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for child in error.exceptions:
            yield from _leaves(child)
    else:
        yield error


def _raise_unchanged(error: BaseException) -> NoReturn:
    """Raise without the context that Python would add: what is being handled here is not where it came from."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context
