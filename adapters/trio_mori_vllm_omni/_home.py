"""The trio side: one thread for all connectors of a process, and the core connectors that they share.

Two connectors that vllm-omni makes with one configuration in one process are two `Client`s of one `Shared`, which has
the memory, the port and what was polled for. What is said of "the loop" below runs in that one thread; everything else
runs in whatever thread vllm-omni calls from.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any, TypeVar

import attrs
import trio

from trio_mori import (
    Arrival,
    ConnectorClosed,
    ConnectorConfig,
    NotReady,
    PayloadLost,
    Reservation,
    StockArrival,
    TrioMoriError,
    open_connector,
)
from trio_mori import Connector as Core
from trio_mori.blocking import Portal

from ._interests import PAUSE, Interest, Interests, State, is_of
from ._posted_puts import PostedPuts, Put
from ._reasons import Reasons

logger = logging.getLogger("trio_mori.vllm_omni")

T = TypeVar("T")
AnyArrival = Arrival | StockArrival

# The loop is told of a chunk that was read at once, and of those that are read within so many seconds after it in one
# piece, by the next look after that. The adapter of vllm-omni looks for all requests in a row; woken for each, the loop
# takes the interpreter from the thread that looks, and keeps the rest of a burst waiting.
HELD = 0.001

# How long closing is waited for, in every state. What has not ended by then goes on ending in the loop.
CLOSE_LIMIT = 1.8


class Shared:
    """The core connectors behind the connectors of one configuration. Made and used in the loop but where it says so.

    A sender is opened with its first client. A stage in the middle or at the end, which vllm-omni does not tell apart,
    gets a receiver then, and a sender with memory and a port of its own at its first put.
    """

    def __init__(self, config: ConnectorConfig, nursery: trio.Nursery) -> None:
        self.config = config
        self.reasons = Reasons(config.stage_id)
        self.users = 0
        self.closed = trio.Event()
        self._failure: Exception | None = None  # of a core connector that was open
        self._nursery = nursery
        self._opening = trio.Lock()
        self._cores: dict[str, Core] = {}
        self._hosts = 0
        self._ending = trio.Event()
        # Guards the interests, which are polled in foreign threads.
        self._lock = threading.Lock()
        self._interests: Interests[AnyArrival] = Interests()
        self._read: deque[Callable[[], None]] = deque()  # what is to be done for what was read; see `tell_soon`
        self._told_at = -inf
        self._tell_at: float | None = None  # when what was read since then is due
        self._address: tuple[str, int] | None = None  # where the sender listens; known from the first put
        self._posted = PostedPuts(self._put, nursery, self.reasons)
        self._news = trio.Event()
        self._sweeping = trio.CancelScope()
        nursery.start_soon(self._sweep)

    # --- the core connectors ------------------------------------------------------------------------------

    async def core(self, role: str) -> Core:
        """The sender or the receiver, opened if it was not.

        Raises:
            BindFailed, EngineUnavailable, ConfigError: as `open_connector`.
            ConnectorClosed: closed meanwhile.
        """
        self.check_alive()
        core = self._cores.get(role)
        if core is not None:
            return core
        async with self._opening:
            if self._ending.is_set():
                raise ConnectorClosed("the connector was closed")
            if role not in self._cores:
                self._cores[role] = await self._nursery.start(self._host, role)
            return self._cores[role]

    def core_now(self, role: str) -> Core | None:
        """The sender or the receiver, if it is open."""
        return self._cores.get(role)

    async def _host(self, role: str, *, task_status: trio.TaskStatus[Core]) -> None:
        self._hosts += 1
        opened = False
        try:
            async with open_connector(attrs.evolve(self.config, role=role)) as core:
                opened = True
                task_status.started(core)
                try:
                    await self._ending.wait()
                finally:
                    self._tell()
        except Exception as error:
            # Before it is open it is the caller's. Afterwards there is nobody to raise it to, and the loop must go on.
            if not opened:
                raise
            self._failure = error
            logger.exception("a connector of stage %d failed", self.config.stage_id)
        finally:
            self._hosts -= 1
            if self._ending.is_set() and not self._hosts:
                self.closed.set()

    def check_alive(self) -> None:
        """See that no core connector has failed. In any thread.

        Raises:
            ConnectorClosed: one has.
        """
        if self._failure is not None:
            raise ConnectorClosed(
                f"the connector of stage {self.config.stage_id} has failed: {self._failure!r}"
            ) from self._failure

    async def close(self) -> None:
        """End everything, as a task."""
        self._ending.set()
        self._sweeping.cancel()
        self._give_up(lambda _: True)
        if not self._hosts:
            self.closed.set()
        await self.closed.wait()

    # --- puts ---------------------------------------------------------------------------------------------

    def reserve_nowait(self, put: Put) -> tuple[Reservation, str, int]:
        """Claim room and key, or refuse. Returns also where the sender listens.

        Raises:
            NotReady: `wait_listening` comes first.
            NoRoom, TooBig, KeyBusy, ConnectorClosed: as `Connector.reserve_nowait`.
        """
        self._posted.catch_up()
        core = self._make_way(put)
        return core.reserve_nowait(*put.edge, put.key, put.plan), *self._address_of(core)

    def _make_way(self, put: Put) -> Core:
        """The sender, with nothing in the way that is of an earlier life."""
        self.check_alive()
        core = self._cores.get("sender")
        if core is None:
            raise NotReady("the sender of this stage is not open yet")
        self._posted.check_free(put)
        if put.replaces is not None:
            core.cleanup_nowait(put.replaces, *put.edge)
            self._posted.drop(put.replaces, put.edge)
        return core

    def _address_of(self, core: Core) -> tuple[str, int]:
        if self._address is None:
            info = core.get_connection_info()
            self._address = info["host"], info["zmq_port"]
        return self._address

    def put_nowait(self, put: Put) -> tuple[str, int]:
        """As `reserve_nowait`, with the copy and the rest made here and now. Returns where the sender listens.

        Raises:
            KeyBusy, others: as `reserve_nowait`.
        """
        self._posted.catch_up()
        return self._put(put)

    def _put(self, put: Put) -> tuple[str, int]:
        core = self._make_way(put)
        core.put_nowait(*put.edge, put.key, put.plan)
        return self._address_of(core)

    def post_put(self, post: Callable[[Callable[[], object]], None], put: Put) -> tuple[str, int] | None:
        """Put a small payload without waiting for the loop, if nothing can be said against it. In any thread.

        Returns:
            Where the sender listens; None: the loop has to be asked.

        Raises:
            UnsupportedPayload, KeyRefused: as `put_nowait`.
            ConnectorClosed: the loop has ended.
        """
        core, address = self._cores.get("sender"), self._address
        if core is None or address is None or self._failure is not None:
            return None
        return address if self._posted.post(post, core, put) else None

    def publish(self, reservation: Reservation) -> None:
        """Let receivers have what was filled."""
        try:
            reservation.publish()
        except TrioMoriError as error:  # closed meanwhile, or its key is being transferred: put has returned already
            self.reasons.note("put", error)

    async def wait_listening(self) -> None:
        """Open the sender, and have the port: an idle instance of another process gives it up when it is asked.

        Raises:
            PortHeld, BindFailed, EngineUnavailable, ConfigError: it cannot be had.
        """
        await (await self.core("sender")).wait_listening()

    # --- gets ---------------------------------------------------------------------------------------------

    def poll(
        self, post: Callable[[Callable[[], object]], None], edge: tuple[str, str], key: str, source: tuple[str, int]
    ) -> AnyArrival | None:
        """Look for a payload, and have it asked for if it was not. In any thread; waits for nobody.

        Raises:
            ConnectorClosed: the connector has failed, or the loop.
        """
        if self._failure is not None:
            self.check_alive()
        now = time.monotonic()
        name = (f"{key}@{edge[0]}_{edge[1]}", *source)
        with self._lock:
            interest, is_new = self._interests.poll(name, now)
            arrival = interest.arrival
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
            post(self._tell)

    def _tell(self) -> None:
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
        if not self._ending.is_set():
            self._nursery.start_soon(self._fetch, interest, edge, key)

    async def _fetch(self, interest: Interest[AnyArrival], edge: tuple[str, str], key: str) -> None:
        if interest.state is not State.WAITING:  # it was given up before this task had its first turn
            return
        arrival: AnyArrival | None = None
        _, host, port = interest.name
        with trio.CancelScope() as scope:
            interest.stop = scope.cancel
            try:
                core = await self.core("receiver")
                arrival = await core.take(*edge, key, {"source_host": host, "source_port": port})
            except Exception as error:  # noqa: BLE001 - told at the next poll, which is in another thread
                # What was dropped may be put again at any time; anything else takes a while to heal.
                pause = 0.0 if isinstance(error, PayloadLost) else PAUSE
                with self._lock:
                    self._interests.fail(interest, time.monotonic() + pause)
                if not isinstance(error, ConnectorClosed):
                    self.reasons.note("get", error)
        if arrival is not None:
            with self._lock:
                is_wanted = self._interests.arrive(interest, arrival)
            if not is_wanted:
                arrival.give_back()

    async def take(self, edge: tuple[str, str], key: str, metadata: Mapping[str, object]) -> AnyArrival:
        """Wait for a payload. What was polled for under its key is not any more."""
        self._tell()
        full = f"{key}@{edge[0]}_{edge[1]}"
        self._give_up(lambda other: other == full)
        core = await self.core("receiver")
        return await core.take(*edge, key, metadata)

    def abandon(self, key: str) -> None:
        """What was polled for under a key, on any edge, is not wanted."""
        self._give_up(lambda full: full.rpartition("@")[0] == key)

    def _give_up(self, is_meant: Callable[[str], bool]) -> None:
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
                self._tell()
                with self._lock:
                    dropped = self._interests.drop_unpolled(time.monotonic())
                self._return(dropped)

    # --- the rest -----------------------------------------------------------------------------------------

    def cleanup(self, name: str, edge: tuple[str, str] | None) -> None:
        """Drop what nobody has fetched of a request, and what was polled for."""
        self._tell()
        self._posted.catch_up()
        for core in self._cores.values():
            core.cleanup_nowait(name, *(edge or (None, None)))
        self._posted.drop(name, edge)
        self._give_up(lambda full: is_of(full, name, edge))

    def health(self) -> dict[str, Any]:
        """The core connectors' health, added up."""
        self._tell()
        self._posted.catch_up()
        total: dict[str, Any] = {}
        for role in ("sender", "receiver"):
            core = self._cores.get(role)
            if core is None:
                continue
            for key, value in core.health().items():
                if key == "status":
                    total[key] = max(value, total.get(key, ""), key=_SEVERITY.index)
                elif isinstance(value, dict):
                    merged = total.setdefault(key, {})
                    for name, number in value.items():
                        merged[name] = merged.get(name, 0) + number
                elif isinstance(value, list):
                    total[key] = total.get(key, []) + value
                elif isinstance(value, int):
                    total[key] = total.get(key, 0) + value
                else:
                    total.setdefault(key, value)
        return total

    def polled(self) -> int:
        """How many payloads are polled for."""
        with self._lock:
            return len(self._interests)


_SEVERITY = ("", "healthy", "degraded", "unhealthy")


class Client:
    """One connector's hold on what it shares. In the loop."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.closed = False
        self._waiting: dict[trio.CancelScope, None] = {}

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Carry out what may wait for long, until the connector is closed.

        Raises:
            ConnectorClosed: it was.
        """
        if self.closed:
            raise ConnectorClosed("the connector was closed")
        with trio.CancelScope() as scope:
            self._waiting[scope] = None
            try:
                return await function(*args)
            finally:
                del self._waiting[scope]
        raise ConnectorClosed("the connector was closed during the call")

    def stop(self) -> None:
        """End its waiting calls."""
        self.closed = True
        for scope in self._waiting:
            scope.cancel()


class Home:
    """What lives in the loop of this process."""

    def __init__(self, portal: Any) -> None:
        self.portal = portal
        self.pid = os.getpid()
        self.is_over = False  # also in a forked child, for which it never was
        self.thread = 0  # the loop's
        self._nursery: trio.Nursery | None = None
        self._shared: dict[ConnectorConfig, Shared] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Its nursery, for as long as the process lives."""
        self.thread = threading.get_ident()
        try:
            async with trio.open_nursery() as self._nursery:
                yield
                self._nursery.cancel_scope.cancel()
        except Exception as error:
            causes: Sequence[Exception] = getattr(error, "exceptions", ())
            if len(causes) == 1:
                raise causes[0] from None  # what callers are told is the error itself, not its group
            raise
        finally:
            self.is_over = True

    async def join(self, config: ConnectorConfig) -> Client:
        """A hold on what the connectors of a configuration share.

        Raises:
            BindFailed, EngineUnavailable, ConfigError: as `open_connector`.
        """
        assert self._nursery is not None
        shared = self._shared.get(config)
        if shared is None:
            shared = self._shared[config] = Shared(config, self._nursery)
        shared.users += 1
        client = Client(shared)
        try:
            await shared.core("sender" if config.role == "sender" else "receiver")
        except BaseException:
            self.leave_soon(client)
            raise
        return client

    async def leave(self, client: Client) -> None:
        """Let go. Whoever is last closes what was shared, and waits for it."""
        shared = client.shared
        if not client.closed:
            client.stop()
            shared.users -= 1
            if not shared.users:
                self._shared.pop(shared.config, None)
                assert self._nursery is not None
                self._nursery.start_soon(shared.close)
        if not shared.users:
            await shared.closed.wait()

    def leave_soon(self, client: Client) -> None:
        """As `leave`, without waiting."""
        assert self._nursery is not None
        self._nursery.start_soon(self.leave, client)

    def post(self, callback: Callable[[], object]) -> None:
        """Have something done in the loop that may fail: then it is logged, and the loop goes on. From any thread."""

        def run() -> None:
            try:
                callback()
            except Exception:  # it would end the loop of everybody
                logger.exception("a call into the loop failed")

        self.portal.post(run)


_lock = threading.Lock()
_home: Home | None = None


def home_of_this_process() -> Home:
    """The one of this process, started if there is none or its loop has died."""
    global _home
    with _lock:
        if _home is not None and _home.pid == os.getpid():
            with suppress(ConnectorClosed):
                _home.portal.post(lambda: None)
                return _home
        home = Home(Portal("trio_mori_vllm_omni"))
        home.portal.enter(home.open)
        _home = home
        return home


def _forget_home() -> None:
    """A forked child has none of the threads, and perhaps a lock that nobody will release."""
    global _lock
    _lock = threading.Lock()
    if _home is not None:
        _home.is_over = True


os.register_at_fork(after_in_child=_forget_home)
