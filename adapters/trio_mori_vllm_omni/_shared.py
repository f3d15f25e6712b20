"""The core connectors that the connectors of one configuration share, and what was put and polled for there.

What is said of "the loop" runs in that one thread; everything else runs in whatever thread vllm-omni calls from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import trio

from trio_mori import Connector as Core
from trio_mori import ConnectorClosed, ConnectorConfig, NotReady, Reservation, TrioMoriError, open_connector

from ._interests import is_of
from ._polls import Polls
from ._posted_puts import PostedPuts, Put
from ._reasons import Reasons

logger = logging.getLogger("trio_mori.vllm_omni")

_SEVERITY = ("", "healthy", "degraded", "unhealthy")


class Shared:
    """The core connectors behind the connectors of one configuration. Made and used in the loop but where it says so.

    A sender is opened with its first client. A stage in the middle or at the end, which vllm-omni does not tell apart,
    gets a receiver then, and a sender with memory and a port of its own at its first put.

    Attributes:
        reasons: Why puts and gets were refused.
        users: Clients that have not left.
        closed: Set when all has ended.
        polls: What is received.
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
        self._address: tuple[str, int] | None = None  # where the sender listens; known from the first put
        self._posted = PostedPuts(self._put, nursery, self.reasons)
        self.polls = Polls(self.core, self.check_alive, nursery, self.reasons)

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
                    self.polls.tell()
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
        self.polls.stop()
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
            core.cleanup_nowait(put.replaces, *put.edge, tell=False)
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

    def post_publish(self, post: Callable[[Callable[[], object]], None], reservation: Reservation) -> None:
        """Let receivers have what was filled. In any thread.

        Raises:
            ConnectorClosed: the loop has ended.
        """
        self._posted.then(post, partial(self._publish, reservation))

    def _publish(self, reservation: Reservation) -> None:
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

    # --- the rest -----------------------------------------------------------------------------------------

    def post_cleanup(
        self, post: Callable[[Callable[[], object]], None], name: str, edge: tuple[str, str] | None, *, tell: bool
    ) -> None:
        """Drop what was put under a name until now and nobody has fetched, and what was polled for. In any thread.

        Args:
            tell: As `Connector.cleanup_nowait`.

        Raises:
            ConnectorClosed: the loop has ended.
        """
        self._posted.then(post, partial(self._cleanup, name, edge, tell))

    def _cleanup(self, name: str, edge: tuple[str, str] | None, tell: bool) -> None:
        self.polls.tell()
        for core in self._cores.values():
            core.cleanup_nowait(name, *(edge or (None, None)), tell=tell)
        self._posted.drop(name, edge)
        self.polls.give_up(lambda full: is_of(full, name, edge))

    def health(self) -> dict[str, Any]:
        """The core connectors' health, added up."""
        self.polls.tell()
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
