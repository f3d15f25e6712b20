"""The trio side: one thread for all connectors of a process, and the core connectors that they share.

Two connectors that vllm-omni makes with one configuration in one process are two `Client`s of one `Shared`, which has
the memory, the port and what was polled for. What is said of "the loop" below runs in that one thread; everything else
runs in whatever thread vllm-omni calls from.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import trio

from trio_mori import ConnectorClosed, ConnectorConfig
from trio_mori.blocking import Portal

from ._shared import Shared

logger = logging.getLogger("trio_mori.vllm_omni")

T = TypeVar("T")

# How long closing is waited for, in every state. What has not ended by then goes on ending in the loop.
CLOSE_LIMIT = 1.8


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
