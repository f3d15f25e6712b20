"""What a user holds of a connector: its calls, and its end."""

from __future__ import annotations

import logging
from _thread import get_ident
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio

from ._arrival import Arrival, StockArrival
from ._chunks import ChunkReceiver, ChunkSender, open_chunk_receiver, open_chunk_sender
from ._config import ConnectorConfig, Endpoint
from ._errors import ConfigError, ConnectorClosed, Misuse, TrioMoriError, WrongRole
from ._figures import Figures
from ._lease import Lease
from ._payload import Plan
from ._pool import Pool
from ._port import Port
from ._protocol.keys import edge_name, full_key
from ._receiver import Ask, Receiver
from ._sender import Sender
from ._source import Source
from ._staging import Reservation
from ._statistics import ConnectorStatistics, Receipt
from .abc import Engine

logger = logging.getLogger("trio_mori.connector")


class Connector:
    """Moves payloads between stages. Made by `open_connector`; used from the trio thread that opened it."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        engine: Engine,
        pool: Pool,
        sender: Sender | None,
        receiver: Receiver,
        port: Port | None,
        endpoint: Endpoint,
    ) -> None:
        self.config = config
        self._engine = engine
        self._pool = pool
        self._sender = sender
        self._receiver = receiver
        self._port = port
        self._endpoint = endpoint
        self._figures = Figures(endpoint, engine=engine, pool=pool, sender=sender, receiver=receiver, port=port)
        self._source = Source(config)
        self._closed = False
        self._thread = get_ident()
        self._wound_up = False
        self._is_broken_off = False  # its block was left by an error or a cancellation
        self._ended_at = trio.current_time()  # moves on when it is closed
        self._errors = 0

    # --- put ----------------------------------------------------------------------------------------------

    async def put(self, from_stage: str, to_stage: str, key: str, data: object) -> Receipt:
        """Hand a payload to whoever gets this key on this edge. When it returns, the source may be overwritten.

        Waits for room in the pool. A second put under a key replaces what nobody has fetched yet.

        Cancellation: before it returns, and then nothing was put.

        Args:
            data: A tensor, bytes, a `ManagedBuffer` (taken over without a copy if it is this connector's), or a
                structure of them; see docs/payloads.md. Or the `Plan` of one, from `plan_payload`.

        Raises:
            Misuse: called in another thread than the connector's; so are all calls but `has_place`, and those that
                only tell.
            WrongRole: a receiver cannot put.
            UnsupportedPayload: something in it cannot arrive bit for bit.
            TooBig: it can never fit into the pool.
            KeyBusy: the payload under this key is being transferred right now.
            PortHeld: another process has this stage's address, and has put payloads there.
            BindFailed: a program that is no instance of this stage has it now.
            NoDescriptors: too few file descriptors are left to listen there; nothing else ends.
            ConnectorClosed: the connector was closed.
        """
        return await self._require_port(key).put(full_key(key, from_stage, to_stage), data)

    def put_nowait(self, from_stage: str, to_stage: str, key: str, data: object) -> Receipt:
        """As `put`, but never waits; the copy is made here and now, whatever its size.

        Raises:
            NoRoom: the pool has no room now.
            NotReady: another process has this stage's address, and is being asked for it.
            WrongRole, UnsupportedPayload, TooBig, KeyBusy, PortHeld, BindFailed, ConnectorClosed: as `put`.
        """
        return self._require_port(key).put_nowait(full_key(key, from_stage, to_stage), data)

    def reserve_nowait(self, from_stage: str, to_stage: str, key: str, plan: Plan) -> Reservation:
        """As `put_nowait`, but the copy is the caller's: for code of other threads, which copies in its own.

        Args:
            plan: Of the payload, from `plan_payload`, which may be called in any thread.

        Raises:
            NoRoom, NotReady, WrongRole, TooBig, KeyBusy, PortHeld, BindFailed, ConnectorClosed: as `put_nowait`.
        """
        return self._require_port(key).reserve_nowait(full_key(key, from_stage, to_stage), plan)

    async def drain(self) -> int:
        """Wait until nothing that was put is held any more: it was fetched and acknowledged, expired or was cleaned up.

        Before the block is left, for that drops what nobody has fetched. What is put meanwhile is waited for, too; what
        several instances of a stage put at one address, together. A stock receiver does not acknowledge: what it
        fetched counts as held until its next request, or for a few seconds.

        Cancellation: at any time.

        Returns:
            How many payloads expired or were cleaned up meanwhile, instead of being fetched.

        Raises:
            ConnectorClosed: the connector was closed, and has dropped what was held.
        """
        if self._closed or get_ident() != self._thread:
            raise self._unusable("drain")
        if self._port is None:  # a receiver holds nothing for others
            await trio.lowlevel.checkpoint()
            return 0
        return await self._port.wait_empty()

    def has_place(self, from_stage: str, to_stage: str, key: str, size: int) -> bool:
        """Whether nothing lies under a key and so many bytes are free. In any thread; true of this moment only.

        Raises:
            KeyRefused: a peer would not accept the key.
        """
        full = full_key(key, from_stage, to_stage)
        return not self._closed and self._port is not None and self._port.has_place(full, size)

    async def wait_listening(self) -> None:
        """Have the address of this stage, as the first `put` does, so that `put_nowait` and `reserve_nowait` can put.

        Returns at once where there is one instance only: it listens from the start.

        Cancellation: at any time.

        Raises:
            WrongRole, PortHeld, BindFailed, ConnectorClosed: as `put`.
        """
        if self._closed or get_ident() != self._thread:
            raise self._unusable("wait_listening")
        if self._port is None:
            raise WrongRole(
                "wait_listening on a connector of role receiver, which never listens; leave it out, or set role both"
            )
        await self._port.wait_listening()

    def _unusable(self, what: str) -> TrioMoriError:
        """Why a call cannot be made: the connector is closed, or this is not its thread."""
        if self._closed:
            return ConnectorClosed(f"{what} after the connector was closed")
        return Misuse(
            f"{what} was called in another thread than the one whose trio run opened the connector; threads use "
            "trio_mori.blocking.open_connector, asyncio code trio_mori.aio.open_connector"
        )

    def _require_port(self, key: str) -> Port:
        # Looked at here, for elsewhere trio would notice it, if at all, when the books are changed; it takes 70 ns.
        if self._closed or get_ident() != self._thread:
            raise self._unusable(f"put of {key!r}")
        if self._port is None:
            raise WrongRole(
                f"put of {key!r} on a connector of role receiver; a stage that sends has role sender or both"
            )
        return self._port

    # --- get ----------------------------------------------------------------------------------------------

    async def get(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> Any:
        """The payload that was put under this key on this edge, in memory of its own. Each is delivered once.

        Waits until the sender has it, also for a sender that is not up yet; bound it by a cancel scope.

        Cancellation: at any time, and then the payload stays with the sender.

        Args:
            metadata: Where the sender is, if not at the configured endpoint: the `Receipt` of the put, its
                `Receipt.metadata`, or only ``source_host`` and ``source_port`` of that.

        Returns:
            What was put. From a stock sender: a 1-D uint8 `ManagedBuffer` if it is raw, for dtype and shape do not
            travel there.

        Raises:
            NoEndpoint: it is not known where the sender is.
            WrongRole: a sender cannot get.
            Expired, Gone: the sender has dropped it.
            TransferFailed: the bytes could not be moved; the payload stays with the sender.
            PeerLost: the sender was there, and has been away for `peer_timeout`.
            AuthenticationFailed: the sender and this side do not accept each other's keys.
            EngineMismatch: the sender has no way to write into this pool.
            TooBig: it can never fit into this pool.
            NoRoom: too much of this pool is in quarantine.
            ConnectorClosed: the connector was closed.
        """
        source, known = self._find_source(key, metadata)
        try:
            return await self._receiver.get(source, full_key(key, from_stage, to_stage), known)
        except Exception:
            self._errors += 1
            raise

    def get_nowait(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> Any:
        """As `get`, if the payload has arrived. Otherwise it is asked for, and stays asked for until `cleanup`.

        Raises:
            NotReady: it has not arrived.
            NoRoom: it waits at the sender for room in this pool.
            others: as `get`.
        """
        source, known = self._find_source(key, metadata)
        return self._receiver.get_nowait(source, full_key(key, from_stage, to_stage), known)

    async def take(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> Arrival | StockArrival:
        """As `get`, but the copy is the caller's: for code of other threads, which copies in its own.

        Cancellation, Raises: as `get`.
        """
        source, known = self._find_source(key, metadata)
        try:
            return await self._receiver.take(source, full_key(key, from_stage, to_stage), known)
        except Exception:
            self._errors += 1
            raise

    def take_nowait(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> Arrival | StockArrival:
        """As `get_nowait`, but the copy is the caller's.

        Raises:
            NotReady, NoRoom, others: as `get_nowait`.
        """
        source, known = self._find_source(key, metadata)
        return self._receiver.take_nowait(source, full_key(key, from_stage, to_stage), known)

    @asynccontextmanager
    async def lease(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> AsyncIterator[Lease]:
        """The payload where it arrived, without a copy, for the length of an ``async with`` block.

        The sender forgets it when the block is entered. Tensors taken from the lease must be gone when it ends.

        Cancellation: before the block is entered, and then the payload stays with the sender.

        Raises:
            LeaseError: at the end of the block, if tensors outlive it; the memory comes back with the last of them.
            others: as `get`.
        """
        source, known = self._find_source(key, metadata)
        async with self._receiver.lease(source, full_key(key, from_stage, to_stage), known) as lease:
            yield lease

    def _find_source(
        self, key: str, metadata: Mapping[str, object] | Receipt | None
    ) -> tuple[Endpoint, Mapping[str, object]]:
        if self._closed or get_ident() != self._thread:
            raise self._unusable(f"get of {key!r}")
        return self._source.find(key, metadata)

    # --- chunk streams ------------------------------------------------------------------------------------

    def open_chunk_sender(
        self, request_id: str, to_stage: str, *, from_stage: str | None = None
    ) -> AbstractAsyncContextManager[ChunkSender]:
        """The sending end of a request's chunk stream, as an ``async with`` block.

        Leaving the block sends the terminal chunk. If it is left by an exception, the receiver is told that the stream
        failed, and why.

        Args:
            from_stage: By default the configured `stage_id`.

        Raises:
            WrongRole: a receiver cannot send.
        """
        self._require_port(request_id)
        return open_chunk_sender(self, request_id, self._own_stage(from_stage, "from_stage"), to_stage)

    def open_chunk_receiver(
        self, request_id: str, from_stage: str, *, to_stage: str | None = None
    ) -> AbstractAsyncContextManager[ChunkReceiver]:
        """The receiving end of a request's chunk stream: an ``async with`` block around an ``async for``.

        The next chunk is always asked for in advance. Leaving the block early gives back what has not been handed out.
        The sender is not told: what it sends on waits in its pool until it expires, or until a `cleanup` there.

        Args:
            to_stage: By default the configured `stage_id`.

        Raises:
            NoEndpoint: it is not known where the sender is.
        """
        self._find_source(request_id, None)
        return open_chunk_receiver(self, request_id, from_stage, self._own_stage(to_stage, "to_stage"))

    def _own_stage(self, named: str | None, parameter: str) -> str:
        if named is not None:
            return named
        if self.config.stage_id < 0:
            raise ConfigError(
                f"the stage of this connector is not known; set stage_id, or give {parameter}", key="stage_id", value=-1
            )
        return str(self.config.stage_id)

    def _ask(self, from_stage: str, to_stage: str, key: str, epoch: bytes | None) -> Ask:
        source, _ = self._find_source(key, None)
        return self._receiver.ask(source, full_key(key, from_stage, to_stage), epoch)

    def lose(self, from_stage: str, to_stage: str, key: str) -> None:
        """Let whoever waits for this key, or gets it next, know that nothing comes under it: it is told `Gone`, once.

        Takes no room. What was put under the key before is delivered first.
        """
        if self._port is not None and not self._closed:  # a close tells everybody
            self._port.lose(full_key(key, from_stage, to_stage))

    # --- the rest -----------------------------------------------------------------------------------------

    async def cleanup(self, key: str, from_stage: str | None = None, to_stage: str | None = None) -> int:
        """Drop what nobody has fetched of a request: the payload under this key and all chunks of it.

        A payload that is being transferred goes when that has ended. Whoever gets one of them next is told `Gone`.
        What `get_nowait` asked for under these keys is not asked for any more.

        Args:
            from_stage, to_stage: Only on this edge; both or neither.

        Returns:
            How many payloads and interests were dropped.

        Raises:
            ValueError: only one stage is given.
            KeyRefused: an edge of stages that are named so cannot be.
        """
        await trio.lowlevel.checkpoint()
        return self.cleanup_nowait(key, from_stage, to_stage)

    def cleanup_nowait(
        self, key: str, from_stage: str | None = None, to_stage: str | None = None, *, tell: bool = True
    ) -> int:
        """As `cleanup`, at once.

        Args:
            tell: Let whoever gets one of the payloads next know. Without, a get waits as for one that was never put,
                also where it was still to be told of an earlier one: for keys that will be used again, so that the new
                life of a request is not told of the old one.
        """
        if (from_stage is None) != (to_stage is None):
            raise ValueError(
                f"cleanup of {key!r} names from_stage={from_stage!r} and to_stage={to_stage!r}; give both or neither"
            )
        if get_ident() != self._thread and not self._closed:
            raise self._unusable(f"cleanup of {key!r}")
        edge = None if from_stage is None or to_stage is None else edge_name(from_stage, to_stage)
        dropped = self._receiver.cancel(key, edge)
        if self._port is not None:
            dropped += self._port.cleanup(key, edge, tell=tell)
        return dropped

    def update_sender_info(self, host: str, port: int) -> None:
        """Where `get` finds the sender from now on, unless its metadata says otherwise.

        Raises:
            ConfigError: not an address and a port from 1 to 65535.
        """
        self._source.update(host, port)

    def get_connection_info(self) -> dict[str, Any]:
        """What peers need: ``host``, ``zmq_port``, ``engine_key``, ``can_put``."""
        return {
            "host": self._endpoint.host,
            "zmq_port": self._endpoint.port,
            "engine_key": self.engine_key,
            "can_put": self._port is not None,
        }

    @property
    def engine_key(self) -> str:
        """Names this connector's engine, unlike any other's."""
        return self._engine.key

    def statistics(self) -> ConnectorStatistics:
        """Counts and sizes, at this moment."""
        self._tidy()
        return self._figures.statistics(self._time, self._source.endpoint)

    def _tidy(self) -> None:
        if get_ident() == self._thread:  # another one is told what is a tick old
            self._receiver.tidy()

    @property
    def _time(self) -> float:
        """Now; of a closed connector, which is asked outside of its trio run, too, when it was closed."""
        here = not self._closed and trio.lowlevel.in_trio_run()
        return trio.current_time() if here else self._ended_at

    def health(self) -> dict[str, Any]:
        """The stock keys (status, host, pool_device, pool_size, engine_key, puts, gets, bytes_transferred, errors,
        timeouts) and the pool by state, what is in flight, quarantined, parked, the puts that wait, and the peers.

        ``status`` is ``healthy``, ``degraded`` (memory is in quarantine or a write is stuck) or ``unhealthy`` (closed).
        ``quarantine`` says which memory, for how long, for whose sake and why: the oldest pieces, see `Quarantined`.
        ``port`` says who listens on this stage's address: ``held`` (this connector), ``shared`` (another one of this
        process), ``passive`` (another process); on the way ``opening``, ``yielding``, ``closing``. None for a receiver.
        ``senders`` says where it gets from: each address, and whether that is ``connected``, ``dialling`` (nobody has
        answered, for so many seconds), ``refused`` or ``idle`` (nothing was asked of it yet). See `KnownSender`.
        """
        self._tidy()
        return self._figures.health(self._time, self._source.endpoint, is_closed=self._closed, errors=self._errors)

    # --- life ---------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Refuse new calls, and tell each that waits. Idempotent."""
        if not self._closed:
            self._ended_at = trio.current_time()
        self._closed = True
        if self._port is not None:
            self._port.stop()
        self._pool.close()
        self._receiver.stop()
        if self._sender is not None:
            self._sender.stop()

    async def _wind_up(self) -> None:
        """End everything in order: waiting calls, destinations, writes. Called once, while the service still runs."""
        self._stop()
        deadline = trio.current_time() + self.config.close_grace
        quiet = await self._receiver.drain(deadline)
        if self._sender is not None:
            told_at = logging.INFO if self._is_broken_off else logging.WARNING
            await self._sender.drain(deadline, told_at=told_at)
        if not quiet:
            # A sender that went silent may still write into the pool: it must never be anything else.
            self._engine.abandon()
        self._wound_up = True

    async def _guard(self) -> None:
        """End everything at once if the service ends without a wind-up, since it failed, or that took too long."""
        try:
            await trio.sleep_forever()
        finally:
            if not self._wound_up:
                self._stop()
                self._engine.abandon()
