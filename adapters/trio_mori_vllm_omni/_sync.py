"""A connector with blocking calls, for any thread, of which vllm-omni's is made. It knows nothing of vllm-omni."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from trio_mori import (
    AuthenticationFailed,
    ConfigError,
    ConnectorClosed,
    KeyBusy,
    Misuse,
    NoEndpoint,
    NoRoom,
    NotReady,
    PayloadLost,
    PeerLost,
    Receipt,
    TooBig,
    TransferFailed,
    UnsupportedPayload,
    WrongRole,
)
from trio_mori import Connector as Core

from ._home import CLOSE_LIMIT, Client, Home, home_of_this_process
from ._interests import first_of, next_of
from ._payloads import Codec, Payloads, goes_on
from ._place import Place
from ._posted_puts import COPIED_IN_LOOP, Put
from ._shared import Shared

logger = logging.getLogger("trio_mori.vllm_omni")

# A put waits for the loop, which answers within a millisecond, and the first one for memory and a port.
CALL_LIMIT = 30.0

# As long as a loop that is alive takes to answer, with much to spare.
HEALTH_LIMIT = 1.0


T = TypeVar("T")


class SyncConnector:
    """A stage's connector, as vllm-omni calls it.

    One instance receives and sends. `put` claims memory in one call to the loop, copies in the calling thread, and
    posts the rest; a small payload under a new key, while there is much room, is only posted. It never waits for a peer
    or for room. `get` looks into memory: what is not there is asked for once, and the next call after its arrival has
    it.

    Attributes:
        config: The whole `extra` that it was made of.
        stage_id: The stage, or -1.
        host, zmq_port: Where it listens, or would.
        sender_host, sender_zmq_port: Whom `get` asks without metadata.
        can_put: Whether it may send.
        payloads: How values travel between it and the core connectors.
    """

    # For `__del__` after a failed constructor.
    _client: Client | None = None

    def __init__(self, config: Mapping[str, Any], place: Place, codec: Codec) -> None:
        """Claim memory and, for a sender, the port, or share what another connector of this process has.

        Raises:
            BindFailed: the port cannot be listened on, and nobody of this stage does.
            EngineUnavailable: the engine's library is missing; says how to install it.
            ConfigError: the host has no address.
        """
        self.config = config
        self.stage_id = place.config.stage_id
        self.host = place.config.host
        self.zmq_port = place.config.zmq_port
        self.sender_host = place.sender_host
        self.sender_zmq_port = place.sender_zmq_port
        self.can_put = place.can_put
        self._pid = os.getpid()
        self._core_config = place.config
        self.payloads = Payloads(codec, place.config)
        self._home: Home = home_of_this_process()
        self._client = self._home.portal.call(self._home.join, place.config, timeout=CALL_LIMIT)
        logger.info(
            "stage %d: connector ready, %s, puts at %s:%s, gets from %s:%s",
            self.stage_id,
            place.config.backend_type,
            self.host,
            self.zmq_port if self.can_put else None,
            self.sender_host,
            self.sender_zmq_port,
        )

    # --- put ----------------------------------------------------------------------------------------------

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Hand a payload to whoever gets this key on this edge; when it returns, the source may be overwritten.

        Returns:
            Success, the length of its stock form, and what `get` may be given as metadata. `(False, 0, None)` if it
            cannot be sent as things are: `health()["refusals"]` and the log say why.

        Raises:
            ConnectorClosed: closed before or during the call, or its loop has died.
            PortHeld, BindFailed: the port cannot be had; `PortHeld` if another instance of the stage puts there.
        """
        client = self._require_client()
        try:
            if not self.can_put:
                raise WrongRole(f"put of {put_key!r} on a connector that only receives")
            plan, is_on_host = self.payloads.plan(data)
            put = Put(from_stage, to_stage, put_key, plan, first_of(put_key, from_stage))
            if is_on_host and plan.size <= COPIED_IN_LOOP:
                host, port = client.shared.post_put(self._home.post, put) or self._in_loop(
                    client.shared, partial(client.shared.put_nowait, put)
                )
            else:
                reservation, host, port = self._in_loop(client.shared, partial(client.shared.reserve_nowait, put))
                try:
                    reservation.fill()
                except BaseException:
                    self._post_last(reservation.release)
                    raise
                client.shared.post_publish(self._home.post, reservation)
        except (WrongRole, UnsupportedPayload, NoRoom, TooBig, KeyBusy) as error:
            client.shared.reasons.note("put", error)
            return False, 0, None
        address: Any = _Address(host, port)
        metadata = Receipt(plan.size, plan.is_raw, plan.whole_header, address).metadata
        return True, metadata["data_size"], metadata

    def _in_loop(self, shared: Shared, function: Callable[[], T]) -> T:
        """Have something done that needs the port of this stage, which may still be to be had."""
        try:
            return self._home.portal.call_sync(function)  # type: ignore[no-any-return]
        except NotReady:
            self._home.portal.call(shared.wait_listening, timeout=CALL_LIMIT)
            return self._home.portal.call_sync(function)  # type: ignore[no-any-return]

    # --- get ----------------------------------------------------------------------------------------------

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """The payload and its bytes if it is here, else None at once; each is delivered once.

        With all of the metadata that put returned it waits for the transfer, as long as the configuration allows.

        Raises:
            NoEndpoint: it is not known where the sender is.
            ConnectorClosed: closed before or during the call, or its loop has died.
        """
        client = self._require_client()
        size = metadata.get("data_size") if metadata else None
        if isinstance(size, int) and size > 0:
            limit = self._core_config.transfer_timeout(size)
            return self._wait_for(from_stage, to_stage, get_key, metadata, limit)
        source, edge = self._find_source(get_key, metadata), (from_stage, to_stage)
        arrival = client.shared.polls.poll(self._home.post, edge, get_key, source)
        if arrival is None:
            return None
        ahead = None
        try:
            value = self.payloads.received(arrival)
            following = next_of(get_key, from_stage)
            ahead = following if following is not None and goes_on(value) else None
        finally:
            # Also of what cannot be read: it would come again, and could be read no better.
            if ahead is None:
                self._post_last(partial(client.shared.polls.finish, arrival))
            else:
                client.shared.polls.tell_soon(self._home.post, arrival, edge, source, ahead)
        return value, arrival.size

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As `get`, but waits until `time.monotonic()` is `deadline`. None: it did not come, and was not consumed."""
        return self._wait_for(from_stage, to_stage, get_key, metadata, max(deadline - time.monotonic(), 0.0))

    def _wait_for(
        self, from_stage: str, to_stage: str, key: str, metadata: dict[str, Any] | None, limit: float
    ) -> tuple[Any, int] | None:
        client = self._require_client()
        source, edge = self._find_source(key, metadata), (from_stage, to_stage)
        known = {**(metadata or {}), "source_host": source[0], "source_port": source[1]}
        take = partial(client.shared.polls.take, edge, key, known)
        try:
            arrival = self._home.portal.call(client.run, take, timeout=limit)
        except TimeoutError:
            return None
        except (AuthenticationFailed, PayloadLost, TransferFailed, PeerLost, NoRoom, TooBig) as error:
            client.shared.reasons.note("get", error)
            return None
        try:
            return self.payloads.received(arrival), arrival.size
        finally:
            self._post_last(partial(client.shared.polls.finish, arrival))

    def _find_source(self, key: str, metadata: dict[str, Any] | None) -> tuple[str, int]:
        host, port = (metadata.get("source_host"), metadata.get("source_port")) if metadata else (None, None)
        if host is None and port is None:
            host, port = self.sender_host, self.sender_zmq_port
        if not host or not port:
            raise NoEndpoint(
                f"get of {key!r}: it is not known where the sender listens; call update_sender_info(host, port), or "
                "give sender_host and sender_zmq_port"
            )
        return str(host), int(port)

    def abandon_get(self, get_key: str) -> None:
        """Nobody waits for this key any more: what was asked for goes back to its sender."""
        client = self._require_client()
        self._home.post(lambda: client.shared.polls.abandon(get_key))

    # --- the rest -----------------------------------------------------------------------------------------

    def update_sender_info(self, sender_host: str, sender_zmq_port: int) -> None:
        """Whom `get` asks from now on, unless its metadata says otherwise.

        Raises:
            ConfigError: no address, or no port.
        """
        port = int(sender_zmq_port)
        if not sender_host or not 0 < port <= 65535:
            raise ConfigError(
                f"the sender at {sender_host!r}:{sender_zmq_port!r}; give an address and a port from 1 to 65535",
                key="sender_zmq_port",
                value=sender_zmq_port,
            )
        self.sender_host, self.sender_zmq_port = sender_host, port

    def get_connection_info(self) -> dict[str, Any]:
        """``host``, ``zmq_port``, ``engine_key`` and ``can_put``. A connector that may put listens from now on."""
        client = self._require_client()
        role = "sender" if self.can_put else "receiver"
        core = self._home.portal.call(client.shared.core, role, timeout=CALL_LIMIT)
        return {**core.get_connection_info(), "can_put": self.can_put}

    def cleanup(self, request_id: str, from_stage: str | None = None, to_stage: str | None = None) -> None:
        """Drop what nobody has fetched under a key, or of a request: on one edge if both stages are given, else on all.

        Raises:
            ValueError: only one stage is given.
        """
        if (from_stage is None) != (to_stage is None):
            raise ValueError(f"cleanup of {request_id!r} needs both from_stage and to_stage, or neither")
        client = self._require_client()
        edge = None if from_stage is None or to_stage is None else (from_stage, to_stage)
        client.shared.post_cleanup(self._home.post, request_id, edge, tell=True)

    def forget_request(self, external_req_id: str) -> None:
        """Its request was aborted: drop its chunks that nobody has fetched from this stage. Called by the adapter."""
        client = self._client
        if client is None or client.closed or self._pid != os.getpid():
            return
        edge = (str(self.stage_id), str(self.stage_id + 1))
        with suppress(ConnectorClosed):
            # Nobody is told: its keys may be a new request's in a moment.
            client.shared.post_cleanup(self._home.post, external_req_id, edge, tell=False)

    def health(self) -> dict[str, Any]:
        """What the stock connector tells, the pool by state, and ``refusals``: why puts and gets were refused."""
        client = self._client
        if client is None or client.closed:
            return {"status": "unhealthy", "error": "the connector is closed"}
        self._refuse_fork()
        if get_ident() == self._home.thread:
            raise _own_thread()

        async def ask() -> dict[str, Any]:
            return client.shared.health()

        config = self._core_config
        unopened = {
            "status": "healthy",
            "host": self.host,
            "pool_device": config.memory_pool_device,
            "pool_size": config.memory_pool_size,
            "engine_key": "",
            **dict.fromkeys(
                ("puts", "gets", "bytes_transferred", "errors", "timeouts", "parked", "waiting_puts", "peers"), 0
            ),
            "pool": {},
        }
        answered = threading.Event()
        try:
            asked = self._home.portal.submit(ask, on_answer=answered.set, what="health")
            if not answered.wait(HEALTH_LIMIT):
                asked.abandon()
                error = f"the event loop of the connector has not answered for {HEALTH_LIMIT:g} s: something keeps it"
                return {**unopened, "status": "unhealthy", "error": error}
            health = asked.result()
        except ConnectorClosed as closed:
            return {**unopened, "status": "unhealthy", "error": str(closed)}
        return {
            **unopened,
            **health,
            "polled": client.shared.polls.polled(),
            "refusals": client.shared.reasons.as_dict(),
        }

    def close(self) -> None:
        """Close it, and what it shares if it was the last. Idempotent; within two seconds, from any thread.

        Calls that other threads have in progress end with ConnectorClosed. In the loop's own thread, as when the
        garbage collector calls it there, it only sets the end in motion.
        """
        client = self._client
        if client is None or self._pid != os.getpid():
            return
        home = self._home
        with suppress(ConnectorClosed):
            if home.portal.in_portal:
                home.leave_soon(client)
                return
            ended = threading.Event()
            leaving = home.portal.submit(partial(home.leave, client), on_answer=ended.set, what="close")
            # The time is taken here: the loop may be kept by something else.
            if ended.wait(CLOSE_LIMIT):
                leaving.result()
            else:
                logger.warning("stage %d: closing goes on: a peer or a write has not ended yet", self.stage_id)

    def __del__(self) -> None:
        # Perhaps in the loop's thread, in the middle of anything: nothing is waited for here.
        client = self._client
        if client is None or client.closed or self._pid != os.getpid() or sys.is_finalizing():
            return
        home = self._home
        with suppress(ConnectorClosed):
            home.post(lambda: home.leave_soon(client))

    # --- for the chunk adapter, which is in the loop itself -----------------------------------------------

    @property
    def home(self) -> Home:
        """The loop that it is in."""
        return self._home

    async def open_core(self, role: str) -> Core:
        """The core connector that sends or receives, opened if it was not. In the loop.

        Raises:
            ConnectorClosed: closed.
            others: as `open_connector`.
        """
        return await self._require_client_in_loop().shared.core(role)

    def core_now(self, role: str) -> Core | None:
        """The core connector that sends or receives, if it is open. In the loop."""
        return self._require_client_in_loop().shared.core_now(role)

    def source(self, key: str, metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Where the sender of a payload is, as metadata of a `Connector.take`.

        Raises:
            NoEndpoint: it is not known.
        """
        host, port = self._find_source(key, metadata)
        return {"source_host": host, "source_port": port}

    def _require_client_in_loop(self) -> Client:
        client = self._client
        if client is None or client.closed:
            raise ConnectorClosed(f"the connector of stage {self.stage_id} was closed")
        return client

    # --- ends ---------------------------------------------------------------------------------------------

    def _require_client(self) -> Client:
        # The adapter polls for each request every millisecond: this asks the system for nothing.
        client, home = self._client, self._home
        if client is None or client.closed or home.is_over:
            self._refuse_fork()
            if client is None or client.closed:
                raise ConnectorClosed(f"the connector of stage {self.stage_id} was closed")
            home.portal.post(int)  # raises, and says why
        if get_ident() == home.thread:
            raise _own_thread()
        return client

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise Misuse(
                f"the connector of stage {self.stage_id} was made in process {self._pid}, and this is {os.getpid()}: "
                "make one after the fork, or start processes by spawn"
            )

    def _post_last(self, callback: Callable[[], object]) -> None:
        """Post what a closed loop does not need any more."""
        with suppress(ConnectorClosed):
            self._home.post(callback)


def _own_thread() -> Misuse:
    return Misuse(
        "a connector was called in the loop's own thread, where it would wait for itself; call it from another"
    )


class _Address:
    """Where the sender listens, as a receipt names it."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
