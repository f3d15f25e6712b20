"""The loop's half of the adapter, and the way into it from the scheduler's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from trio_mori import ConnectorClosed

from ._bench import Bench
from ._building import Building, Built
from ._flows import Event, Inflow, Outflow, Outgoing
from ._mailbox import Command, Mailbox
from ._receiving import Receiving
from ._sending import TERMINAL_GRACE, Sending
from ._wire import Wire


class Courier:
    """A `Loop`. What is a task here lives in one nursery, in the block of `open`; after it nothing runs."""

    def __init__(
        self,
        post: Callable[[Command], None],
        wire: Wire,
        forget: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Store.

        Args:
            post: Has something done in the loop.
            forget: Clears what the input processors know of a request. Called in the worker.
            clock: Of what the worker holds back.
        """
        self._wire = wire
        self._post = post
        self._mailbox = Mailbox(self._post_if_open)
        self._building = Building(Mailbox(self._post_if_open), self._take_built, forget, clock)
        self._bench = Bench(self._building.flush)
        self._events: deque[Event] = deque()
        self._receiving: Receiving
        self._sending: Sending
        self._is_open = False

    # --- in the scheduler's thread ------------------------------------------------------------------------

    def receive(self, flow: Inflow) -> None:
        """See `Loop`."""
        self._mailbox.put(partial(self._carry_out, lambda: self._receiving.begin(flow)))

    def credit(self, flow: Inflow, count: int) -> None:
        """See `Loop`."""
        self._mailbox.put(partial(self._carry_out, lambda: self._receiving.credit(flow, count)))

    def drop(self, flow: Inflow) -> None:
        """See `Loop`."""
        self._mailbox.put(partial(self._carry_out, lambda: self._receiving.drop(flow)))

    # What is sent goes by way of the worker, all of it, so that its order stays. A cut goes ahead as well.

    def begin(self, flow: Outflow) -> None:
        """See `Loop`."""
        then = partial(self._carry_out, lambda: self._sending.begin(flow))
        self._bench.put_up(partial(self._building.begin, flow, then))

    def send(self, flow: Outflow, chunk: Outgoing) -> None:
        """See `Loop`."""
        self._bench.put_up(partial(self._building.build, flow, chunk))

    def cut(self, flow: Outflow, failure: str | None) -> None:
        """See `Loop`."""
        then = partial(self._carry_out, lambda: self._sending.cut(flow, failure))
        if failure is None:
            # Not behind a worker that may be long at a chunk: nobody is to have what was put, and the next stage
            # may ask for the next life under the same name as soon as this call has returned.
            self._mailbox.put(then)
        self._bench.put_up(partial(self._building.cut, flow, then))

    def flush(self) -> None:
        """See `Loop`."""
        self._mailbox.flush()

    def events(self) -> list[Event]:
        """See `Loop`."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _post_if_open(self, command: Command) -> None:
        with suppress(ConnectorClosed):  # the loop is over, and with it whatever this is about
            self._post(command)

    # --- in the loop --------------------------------------------------------------------------------------

    def _carry_out(self, command: Command) -> None:
        if self._is_open:
            command()

    def _take_built(self, flow: Outflow, chunk: Built) -> None:
        if self._is_open:
            self._sending.send(flow, chunk)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Courier]:
        """Leaving the block cancels everything, and waits for it: queued terminal chunks still go, bounded."""
        async with trio.open_nursery() as outer:
            outer.start_soon(self._bench.serve)
            try:
                async with trio.open_nursery() as tasks:
                    self._receiving = Receiving(self._wire, tasks, self._events.append)
                    self._sending = Sending(self._wire, tasks, self._events.append)
                    self._is_open = True
                    tasks.start_soon(self._wire.prepare)
                    try:
                        yield self
                    finally:
                        await self._have_built()
                        self._is_open = False
                    tasks.cancel_scope.cancel()
            finally:
                self._bench.stop()

    async def _have_built(self) -> None:
        """Wait until the worker has built what was offered, for a while."""
        built = trio.Event()
        self._bench.put_up(partial(self._building.pass_on, built.set))
        with trio.move_on_after(TERMINAL_GRACE, shield=True):
            await built.wait()
