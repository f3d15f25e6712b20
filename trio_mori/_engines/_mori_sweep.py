"""One thread that asks after every transfer under way."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import trio

from ._mori_library import RAISES, Code, PeerFailure, Status
from ._mori_outlet import Outlet

T = TypeVar("T")

logger = logging.getLogger("trio_mori.engine")

# Pauses between two questions after one transfer, in seconds. The shortest is what a timed wait of a thread takes
# here at the least (60 us). After that an eighth of the transfer's age: it is noticed that much late at most, and a
# transfer of 200 ms is asked after 60 times. The longest keeps 64 stuck ones below 1% of a core.
SHORTEST = 50e-6
LONGEST = 20e-3

# How long the thread stays for more: reaching one anew costs 180 us, which the next write of a stream is spared.
LINGER = 10e-3

# How often Mori is asked for peers that it lost, while there are transfers; an event is no more urgent than that.
FAILURES = 20e-3


@attrs.define(eq=False)
class Pending:
    """A posted transfer. Whatever it touches has to stay until `over`.

    Attributes:
        peer: Key of the engine that is written to.
        outlet: Whose transfer it is.
        done: Set when whoever posted it need not wait any longer: it is over, or `lost`.
        over: Its status is terminal.
        lost: Why it was given up before that.
        error: What asking for it raised.
    """

    status: Status
    peer: str
    outlet: Outlet
    began: float
    due: float = 0.0
    done: trio.Event = attrs.field(factory=trio.Event)
    over: bool = False
    lost: str | None = None
    error: Exception | None = None


@attrs.frozen
class Lost:
    """A peer that Mori has lost.

    Attributes:
        peer: Key of its engine.
        why: In Mori's words.
    """

    peer: str
    why: str


class Sweep:
    """Polls in a trio thread, from the first transfer until there are none, and never longer than `WaitFor(0)` takes.

    `WaitFor` with a time sleeps all of it; `Wait` cannot be interrupted, and would meet the destructor. A thread for
    each would let stuck transfers use them up. So one thread asks after all, and each rarer the older it is.

    Attributes:
        open: The transfers that are watched.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        in_progress: Code,
        progress: trio.lowlevel.ParkingLot,
        pop_failure: Callable[[], PeerFailure | None] | None = None,
    ) -> None:
        """`progress` is unparked whenever transfers have ended."""
        self.open: set[Pending] = set()
        self._nursery = nursery
        self._in_progress = in_progress
        self._progress = progress
        self._pop_failure = pop_failure
        self._token = trio.lowlevel.current_trio_token()
        self._threads = trio.CapacityLimiter(1)
        # Not a SimpleQueue, whose `get` waits for ever if its time is over between two tries of its lock: once in
        # 10,000 transfers on a busy machine (Python 3.10 to 3.12).
        self._mailbox: queue.Queue[Pending | None] = queue.Queue()
        self._running = False
        self._stopped = False

    def add(self, pending: Pending) -> None:
        """Watch a transfer from now on."""
        self.open.add(pending)
        self._mailbox.put(pending)
        if not self._running and not self._stopped:
            self._running = True
            self._nursery.start_soon(self._run)

    def stop(self) -> None:
        """Ask no more, whatever is under way."""
        self._stopped = True
        self._mailbox.put(None)

    @trio.lowlevel.enable_ki_protection
    async def _run(self) -> None:
        with trio.CancelScope(shield=True):  # it ends by itself, soon after the last transfer
            while not self._stopped and not self._mailbox.empty():
                await trio.to_thread.run_sync(self._watch, limiter=self._threads)
        self._running = False

    # --- in the thread ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        watched: list[Pending] = []
        ask_failures_at = time.monotonic()
        while True:
            now = time.monotonic()
            over = [each for each in watched if each.due <= now and self._is_over(each, now)]
            if over:
                watched = [each for each in watched if not each.over]
                self._report(self._settle, over)
            if self._pop_failure is not None and now >= ask_failures_at:
                ask_failures_at = now + FAILURES
                if lost := self._lost():
                    self._report(self._lose, lost)
            pause = LINGER
            if watched:
                pause = max(min(each.due for each in watched) - time.monotonic(), SHORTEST)
            try:
                arrived = [self._mailbox.get(timeout=pause)]
            except queue.Empty:
                if not watched:
                    return
                continue
            while not self._mailbox.empty():
                arrived.append(self._mailbox.get())
            if None in arrived:
                return
            watched += [each for each in arrived if each is not None]

    def _lost(self) -> Sequence[Lost]:
        if self._pop_failure is None:
            return []
        try:
            return [
                Lost(failure.remote_engine_key, f"{failure.reason.name} {failure.detail}".strip())
                for failure in iter(self._pop_failure, None)
            ]
        except (*RAISES, AttributeError) as error:
            # Without this news each write still ends with its own status; without this thread none would.
            logger.warning("Mori cannot be asked for lost peers, and is not asked again: %s", error)
            self._pop_failure = None
            return []

    def _is_over(self, pending: Pending, now: float) -> bool:
        try:
            pending.over = pending.status.WaitFor(0) != self._in_progress
        except Exception as error:  # noqa: BLE001 - it is carried over to whoever waits for this transfer
            pending.error = error
            pending.over = True
        pending.due = now + min(max((now - pending.began) / 8, SHORTEST), LONGEST)
        return pending.over

    def _report(self, settle: Callable[[Sequence[T]], None], found: Sequence[T]) -> None:
        try:
            self._token.run_sync_soon(settle, found)
        except trio.RunFinishedError:
            logger.debug("transfers ended after their trio run")

    # --- in the trio run ----------------------------------------------------------------------------------

    def _settle(self, over: Sequence[Pending]) -> None:
        for pending in over:
            self.open.discard(pending)
            pending.outlet.open -= 1
            pending.done.set()
        self._progress.unpark_all()

    def _lose(self, lost: Sequence[Lost]) -> None:
        for each in lost:
            logger.warning("Mori lost %s: %s", each.peer, each.why)
            for pending in self.open:
                if pending.peer == each.peer and not pending.done.is_set():
                    pending.lost = each.why
                    pending.done.set()
