"""The loop's half of the adapter, and the way into it from the scheduler's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from ._bench import Bench
from ._flows import Event, Inflow, Outflow, Outgoing
from ._mailbox import Command, Mailbox
from ._receiving import Receiving
from ._sending import Sending
from ._wire import Wire


class Courier:
    """A `Loop`. What is a task here lives in one nursery, in the block of `open`; after it nothing runs."""

    def __init__(self, post: Callable[[Command], None], wire: Wire, forget: Callable[[str], None]) -> None:
        """Store.

        Args:
            post: Has something done in the loop.
            forget: Clears what the input processors know of a request. Called in the worker.
        """
        self._mailbox = Mailbox(post)
        self._events: deque[Event] = deque()
        self._wire = wire
        self._forget = forget
        self._bench: Bench
        self._receiving: Receiving
        self._sending: Sending
        self._is_open = False

    # --- in the scheduler's thread ------------------------------------------------------------------------

    def receive(self, flow: Inflow) -> None:
        """See `Loop`."""
        self._put(lambda: self._receiving.begin(flow))

    def credit(self, flow: Inflow, count: int) -> None:
        """See `Loop`."""
        self._put(lambda: self._receiving.credit(flow, count))

    def drop(self, flow: Inflow) -> None:
        """See `Loop`."""
        self._put(lambda: self._receiving.drop(flow))

    def begin(self, flow: Outflow) -> None:
        """See `Loop`."""
        self._put(lambda: self._sending.begin(flow))

    def send(self, flow: Outflow, chunk: Outgoing) -> None:
        """See `Loop`."""
        self._put(lambda: self._sending.send(flow, chunk))

    def cut(self, flow: Outflow, failure: str | None) -> None:
        """See `Loop`."""
        self._put(lambda: self._sending.cut(flow, failure))

    def flush(self) -> None:
        """See `Loop`."""
        self._mailbox.flush()

    def events(self) -> list[Event]:
        """See `Loop`."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _put(self, command: Command) -> None:
        self._mailbox.put(partial(self._carry_out, command))

    # --- in the loop --------------------------------------------------------------------------------------

    def _carry_out(self, command: Command) -> None:
        if self._is_open:
            command()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Courier]:
        """Leaving the block cancels everything, and waits for it: queued terminal chunks still go, bounded."""
        self._bench = Bench()
        async with trio.open_nursery() as outer:
            outer.start_soon(self._bench.serve)
            try:
                async with trio.open_nursery() as tasks:
                    self._receiving = Receiving(self._wire, tasks, self._events.append)
                    self._sending = Sending(self._wire, self._bench, tasks, self._events.append, self._forget)
                    self._is_open = True
                    try:
                        yield self
                    finally:
                        self._is_open = False
                    tasks.cancel_scope.cancel()
            finally:
                outer.cancel_scope.cancel()  # after the tasks: it is their worker
