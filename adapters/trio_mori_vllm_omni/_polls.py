"""What this process has polled for, and what came: asked for in the loop, looked for in any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from math import inf

import trio

from trio_mori import Arrival, ConnectorClosed, PayloadLost, StockArrival
from trio_mori import Connector as Core

from ._interests import PAUSE, Interest, Interests, State, left_of
from ._reasons import Reasons

AnyArrival = Arrival | StockArrival

# The loop is told of a chunk that was read at once, and of those that are read within so many seconds after it in one
# piece, by the next look after that. The adapter of vllm-omni looks for all requests in a row; woken for each, the loop
# takes the interpreter from the thread that looks, and keeps the rest of a burst waiting.
HELD = 0.001


class Polls:
    """In the loop but where it says so."""

    def __init__(
        self,
        core: Callable[[str], Awaitable[Core]],
        check_alive: Callable[[], None],
        nursery: trio.Nursery,
        reasons: Reasons,
    ) -> None:
        """Store, and begin to give up what nobody polls for.

        Args:
            core: Opens the connector of a role, if it is not open.
            check_alive: Raises if one of them has failed. In any thread.
        """
        self._core = core
        self._check_alive = check_alive
        self._nursery = nursery
        self._reasons = reasons
        # Guards the interests, which are polled in foreign threads.
        self._lock = threading.Lock()
        self._interests: Interests[AnyArrival] = Interests()
        self._read: deque[Callable[[], None]] = deque()  # what is to be done for what was read; see `tell_soon`
        self._told_at = -inf
        self._tell_at: float | None = None  # when what was read since then is due
        self._news = trio.Event()
        self._sweeping = trio.CancelScope()
        self._is_over = False
        nursery.start_soon(self._sweep)

    def stop(self) -> None:
        """Ask for nothing more, and give up what was polled for."""
        self._is_over = True
        self._sweeping.cancel()
        self.give_up(lambda _: True)

    def poll(
        self, post: Callable[[Callable[[], object]], None], edge: tuple[str, str], key: str, source: tuple[str, int]
    ) -> AnyArrival | None:
        """Look for a payload, and have it asked for if it was not. In any thread; waits for nobody.

        With a request's first chunk, what came or is to come for an earlier request of its name is not wanted any more.

        Raises:
            ConnectorClosed: the connector has failed, or the loop.
        """
        self._check_alive()
        now = time.monotonic()
        name = (f"{key}@{edge[0]}_{edge[1]}", *source)
        with self._lock:
            interest, is_new = self._interests.poll(name, now)
            arrival = interest.arrival
            is_left = left_of(key, edge) if is_new else None
            left = [] if is_left is None else self._interests.drop(is_left)
        if left:
            post(lambda: self._return(left))
        if is_new:
            post(lambda: self._ask(interest, edge, key))
        elif arrival is None and self._tell_at is not None and self._tell_at <= now:
            self._have_told(post, now)
        return arrival

    def tell_soon(
        self,
        post: Callable[[Callable[[], object]], None],
        arrival: AnyArrival,
        edge: tuple[str, str],
        source: tuple[str, int],
        ahead: str,
    ) -> None:
        """As `finish`, and have asked for what will be polled for next. In any thread; in a burst a later poll wakes
        the loop.

        *Why that does no harm.* The next key counts as polled for from now on. If nobody does poll for it, it is given
        up within `PATIENCE`, and whoever comes to do that tells what is left here; so does the end of the connector.
        """
        now = time.monotonic()
        with self._lock:
            interest, is_new = self._interests.poll((f"{ahead}@{edge[0]}_{edge[1]}", *source), now)

        def tell() -> None:
            self.finish(arrival)
            if is_new:
                self._ask(interest, edge, ahead)

        self._read.append(tell)
        due = self._told_at + HELD
        if now >= due:
            self._have_told(post, now)
        else:
            self._tell_at = due

    def _have_told(self, post: Callable[[Callable[[], object]], None], now: float) -> None:
        self._told_at, self._tell_at = now, None
        with suppress(ConnectorClosed):  # the close has told
            post(self.tell)

    def tell(self) -> None:
        """Do what was left to be done for what was read."""
        self._tell_at = None  # first: what is put in from now on is told by somebody else, or here
        with suppress(IndexError):
            while True:
                self._read.popleft()()

    def finish(self, arrival: AnyArrival) -> None:
        """Let the sender forget what was copied."""
        with suppress(ConnectorClosed):  # during the copy: it has been copied all the same
            arrival.finish()

    def _ask(self, interest: Interest[AnyArrival], edge: tuple[str, str], key: str) -> None:
        self._news.set()
        if not self._is_over:
            self._nursery.start_soon(self._fetch, interest, edge, key)

    async def _fetch(self, interest: Interest[AnyArrival], edge: tuple[str, str], key: str) -> None:
        if interest.state is not State.WAITING:  # it was given up before this task had its first turn
            return
        arrival: AnyArrival | None = None
        _, host, port = interest.name
        with trio.CancelScope() as scope:
            interest.stop = scope.cancel
            try:
                core = await self._core("receiver")
                arrival = await core.take(*edge, key, {"source_host": host, "source_port": port})
            except Exception as error:  # noqa: BLE001 - told at the next poll, which is in another thread
                # What was dropped may be put again at any time; anything else takes a while to heal.
                pause = 0.0 if isinstance(error, PayloadLost) else PAUSE
                with self._lock:
                    self._interests.fail(interest, time.monotonic() + pause)
                if not isinstance(error, ConnectorClosed):
                    self._reasons.note("get", error)
        if arrival is not None:
            with self._lock:
                is_wanted = self._interests.arrive(interest, arrival)
            if not is_wanted:
                arrival.give_back()

    async def take(self, edge: tuple[str, str], key: str, metadata: Mapping[str, object]) -> AnyArrival:
        """Wait for a payload. What was polled for under its key is not any more; see `poll` for a first chunk."""
        self.tell()
        full, is_left = f"{key}@{edge[0]}_{edge[1]}", left_of(key, edge)
        self.give_up(lambda other: other == full or (is_left is not None and is_left(other)))
        core = await self._core("receiver")
        return await core.take(*edge, key, metadata)

    def abandon(self, key: str) -> None:
        """What was polled for under a key, on any edge, is not wanted."""
        self.give_up(lambda full: full.rpartition("@")[0] == key)

    def give_up(self, is_meant: Callable[[str], bool]) -> None:
        """What was polled for under these full keys is not wanted."""
        with self._lock:
            dropped = self._interests.drop(is_meant)
        self._return(dropped)

    def _return(self, dropped: list[Interest[AnyArrival]]) -> None:
        for interest in dropped:
            if interest.arrival is not None:
                interest.arrival.give_back()
            elif interest.stop is not None:
                interest.stop()

    async def _sweep(self) -> None:
        """Give up what nobody polls for; wakes only when something may be due."""
        with self._sweeping:
            while True:
                self._news = trio.Event()
                with self._lock:
                    due = self._interests.next_deadline()
                if due is None:
                    await self._news.wait()
                    continue
                await trio.sleep(max(due - time.monotonic(), 0))
                self.tell()
                with self._lock:
                    dropped = self._interests.drop_unpolled(time.monotonic())
                self._return(dropped)

    def polled(self) -> int:
        """How many payloads are polled for."""
        with self._lock:
            return len(self._interests)
