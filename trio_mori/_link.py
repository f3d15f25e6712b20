"""What every link with a descriptor shares: messages leave together once a tick, and arrive in batches."""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import attrs
import trio

from ._errors import ConnectorClosed
from .abc import Arrived, Disconnected, Link, LinkEvent

# Messages that one `receive` returns at most: about 1 ms of work before other tasks run.
MAX_BATCH = 256

# A link that has sent nothing for so long is not in a burst: its next message leaves at once, which saves a tick of
# 15 to 30 us. Bursts have their messages closer together than this.
QUIET = 0.0005

Message = Sequence[bytes] | Callable[[], Sequence[bytes] | None]


@attrs.define
class LinkStatistics:
    """What a link has done since it was opened.

    Attributes:
        sent: Messages handed to the transport.
        received: Messages taken from it, and not dropped as oversized.
        dropped_unconnected: Messages of a dialling link that was not connected when they were to leave.
        dropped_unroutable: Messages of a listening link whose route was gone.
        oversized: Messages dropped on arrival: too many frames or bytes.
        rescued: Times that `recheck` found input nobody had been woken for. Anything but zero is a bug.
    """

    sent: int = 0
    received: int = 0
    dropped_unconnected: int = 0
    dropped_unroutable: int = 0
    oversized: int = 0
    rescued: int = 0


class Transport(ABC):
    """A socket that messages come by, and whether it may have any.

    A descriptor may be `edge_triggered`, as ZMQ's is: it becomes readable once when there is *news* for the socket, and
    every call on the socket takes the news in, a send too. A task that waits on the descriptor is then never
    woken for messages that were part of it. Hence the rule: whoever calls anything on the socket calls `settle`
    before the next checkpoint, and while `readable` is true nobody waits on the descriptor.

    Attributes:
        edge_triggered: What was just said; if not, sending needs no look at the input.
        fd: The descriptor.
        readable: False only if the socket said that it has no input, and was not touched since.
        is_skipping: A message that is too large is being left out, in pieces: the next `read` goes on with it.
    """

    edge_triggered = True

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.readable = True
        self.is_skipping = False

    @abstractmethod
    def settle(self) -> bool:
        """Ask the socket whether it has input, and keep the answer in `readable`."""

    @abstractmethod
    def read(self) -> Arrived | None:
        """Take one message, which is there; None if it is too large and dropped, or `is_skipping`."""

    @abstractmethod
    def write(self, frames: Sequence[bytes], route: bytes) -> bool:
        """Send one message without waiting; False if there is nobody to send it to."""

    def is_silent(self) -> bool:
        """Whether the descriptor has nothing to tell. Touches nothing."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)


class QueuedLink(Link):
    """A link over one transport, or none while it is not connected.

    `send` queues, and the flusher task sends all that is queued one tick later: twice the throughput of sending each
    message at once. The first message after a pause has nothing to wait for, and leaves at once. `receive` reads the
    transport itself, so that nothing is ever between the two for a cancelled call to lose. What does not come from the
    transport waits in `_events`, and goes first.

    **Leading.** A task that waits for what a message brings is woken by the task in `receive`, one tick later and after
    that has gone back to waiting: a third of the time from message to caller. So it may wait in the place of that one,
    by `wait_input`, take what arrived by `take_nowait`, and see to it that `hand_over` is called. One task at a time
    waits for the transport; the one in `receive` does not while another does.
    """

    def __init__(self) -> None:
        self._transport: Transport | None = None
        self._outbox: deque[tuple[Message, bytes]] = deque()
        self._flusher = trio.lowlevel.ParkingLot()
        self._events: deque[LinkEvent] = deque()
        self._receiver = trio.lowlevel.ParkingLot()
        self._watched: Transport | None = None  # what is waited for
        self._watcher: trio.lowlevel.Task | None = None  # by whom
        self._is_led = False  # and that is not the task in `receive`
        self._woken = True
        self._closed = False
        self._failure: Exception | None = None
        self._flushed_at = -inf
        self._counts = LinkStatistics()

    def send(self, frames: Message, route: bytes = b"", *, urgent: bool = True) -> None:
        if self._closed:
            raise self._closed_error()
        self._outbox.append((frames, route))
        if urgent and (now := trio.current_time()) - self._flushed_at > QUIET:
            self._flush(now)
        elif len(self._outbox) == 1:
            self._flusher.unpark()

    async def receive(self) -> list[LinkEvent]:
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        while True:
            if self._closed:
                raise self._closed_error()
            if self._failure is not None:
                raise self._failure
            if waited or not self._has_input():
                batch = self._take()
                if batch:
                    return batch
                await self._wait()
            else:
                # Before the batch is taken: by whoever leads meanwhile, later messages would go ahead of it.
                await trio.lowlevel.checkpoint()
            waited = True

    @property
    def is_watched(self) -> bool:
        """Whether a task waits for something to arrive."""
        return self._watched is not None

    @property
    def may_lead(self) -> bool:
        """Whether `wait_input` may be called: nobody leads, and there is nothing for `receive` to do."""
        transport = self._transport
        if transport is None or transport.readable or self._events or self._closed:
            return False
        return self._watched is None or not self._is_led

    async def wait_input(self) -> None:
        """Wait until something has arrived, or `rouse`, in the place of the task that waits, which goes on after
        `hand_over`. Only if `may_lead`.

        Cancellation: at any time, and then it is to be handed over, too.
        """
        assert self._transport is not None
        self.rouse()
        await self._watch(self._transport, leads=True)

    def take_nowait(self) -> list[Arrived]:
        """What has arrived, after `wait_input`."""
        if self._transport is None or self._events:
            return []
        return self._read(self._transport, MAX_BATCH)

    def hand_over(self, failure: Exception | None = None) -> None:
        """Have the task in `receive` wait again, if no other one does; or raise what the one that leads failed with."""
        self._failure = failure
        if self._watched is None:
            self._is_led = False
            self._receiver.unpark_all()

    def rouse(self) -> None:
        """End the wait for the transport, whoever waits."""
        watched, self._watched, self._watcher = self._watched, None, None
        if watched is not None:
            # Wakes the waiting task and forgets the descriptor, closed or not. A cancel scope around each wait is the
            # plain way, and costs 24 of 105 us of a round trip.
            trio.lowlevel.notify_closing(watched.fd)

    def recheck(self) -> None:
        transport = self._watched
        if transport is None:
            return
        # Only if nothing has woken the receiver since the last call, and nothing is about to: a message that came
        # just now is not a lost one.
        if self._woken:
            self._woken = False
        elif transport.is_silent() and transport.settle():
            self._counts.rescued += 1
            self._wake()

    def statistics(self) -> LinkStatistics:
        """A copy of the counters."""
        return attrs.evolve(self._counts)

    async def flush_forever(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what is queued one tick after the first of it was. Run by whoever opened the link."""
        task_status.started()
        while True:
            await self._flusher.park()
            self._flush(trio.current_time())

    def close(self) -> None:
        """Send what is queued and end `receive`. The transport is closed afterwards, by whoever opened it."""
        try:
            self._flush(trio.current_time())
        finally:
            self._closed = True
            self._wake()

    def _closed_error(self) -> ConnectorClosed:
        return ConnectorClosed(f"the link {self.address} is closed")

    def _flush(self, now: float) -> None:
        self._flushed_at = now
        while self._outbox:
            message, route = self._outbox.popleft()
            # Called even if it then cannot be sent: its owner takes the call as the sign that it may queue the next.
            frames = message() if callable(message) else message
            if frames is None:
                continue
            if self._transport is not None and self._transport.write(frames, route):
                self._counts.sent += 1
            else:
                self._count_dropped(route)
        transport = self._transport
        # Looking may itself bring an event: that a connection is over.
        if (transport is not None and transport.edge_triggered and transport.settle()) or self._events:
            self._wake()

    def _count_dropped(self, route: bytes) -> None:
        if not route:
            self._counts.dropped_unconnected += 1
            return
        self._counts.dropped_unroutable += 1
        gone = Disconnected(route)
        if gone not in self._events:
            self._events.append(gone)

    def _has_input(self) -> bool:
        transport = self._transport
        return bool(self._events) or (transport is not None and transport.readable and transport.settle())

    def _take(self) -> list[LinkEvent]:
        batch: list[LinkEvent] = []
        while self._events and len(batch) < MAX_BATCH:
            batch.append(self._events.popleft())
        if self._transport is not None:
            batch += self._read(self._transport, MAX_BATCH - len(batch))
        while self._events and not batch:  # came by reading
            batch.append(self._events.popleft())
        return batch

    def _read(self, transport: Transport, limit: int) -> list[Arrived]:
        arrived = []
        while limit and transport.readable and transport.settle():
            limit -= 1
            message = transport.read()
            if message is None:
                self._counts.oversized += not transport.is_skipping
            else:
                self._counts.received += 1
                arrived.append(message)
        return arrived

    async def _wait(self) -> None:
        transport = self._transport
        if transport is None or self._watched is not None:  # or another task waits
            await self._receiver.park()
        elif transport.readable:  # a whole batch of oversized messages
            await trio.lowlevel.checkpoint()
        else:
            await self._watch(transport, leads=False)

    async def _watch(self, transport: Transport, *, leads: bool) -> None:
        task = trio.lowlevel.current_task()
        self._watched, self._watcher, self._is_led = transport, task, leads
        try:
            await trio.lowlevel.wait_readable(transport.fd)
        except trio.ClosedResourceError:
            pass  # see rouse
        finally:
            if self._watcher is None or self._watcher is task:  # else that one looks
                self._watched = self._watcher = None
                transport.readable = True
            self._woken = True

    def _wake(self) -> None:
        """Let `receive` look again, or who leads, if it is not for `receive`."""
        if not self._is_led or self._events or self._closed:
            self._receiver.unpark_all()
        self.rouse()
