"""The connector for code without an event loop. For asyncio code there is `trio_mori.aio`.

```python
from trio_mori import blocking

with blocking.open_connector({"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": 50051}) as conn:
    value = conn.get("0", "1", "key", timeout=5)
```

Everything but copies runs in one trio thread behind it; copies run in the threads that call. All methods may be called
from any number of threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

from . import _opening
from ._arrival import Arrival, StockArrival
from ._blocks import Block, BlockingChunkReceiver, BlockingChunkSender
from ._buffer import ManagedBuffer
from ._config import ConnectorConfig
from ._connector import Connector
from ._entered import Entered
from ._errors import ConnectorClosed, NoRoom, NotReady
from ._held import Held, finish, publish
from ._lease import Lease
from ._payload import Plan
from ._portal import Portal
from ._staging import Reservation, plan_payload
from ._statistics import ConnectorStatistics, Receipt

__all__ = ["BlockingChunkReceiver", "BlockingChunkSender", "BlockingConnector", "Portal", "open_connector"]

# A smaller payload is copied in the loop, on the one way there that a put takes anyhow. A larger one is copied in the
# thread that calls, which then has to say that it is there: 35 us, in which 256 KB are copied.
COPY_IN_LOOP = 1 << 18


def _itself(lease: Lease) -> Lease:
    return lease


def _check(timeout: float | None) -> None:
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout}; give a number of seconds above zero, or use the _nowait method")


class BlockingConnector:
    """A `trio_mori.Connector` whose methods block. Made by `open_connector`; a context manager.

    `timeout` is in seconds, None for no limit. A call that timed out had no effect.
    A call that is interrupted (KeyboardInterrupt) is cancelled and not waited for.

    Raises, beside what the methods of `Connector` raise:
        ConnectorClosed: closed before or during the call; or what runs behind it has failed, and that is the cause.
        Misuse: called in the connector's own event loop, or in a process that was forked off since it was opened.
        ValueError: a timeout that is not a number above zero.
    """

    def __init__(self, portal: Portal, connector: Connector, entered: Entered[Connector] | None = None) -> None:
        """Takes the portal over, and the block of the connector there, unless others hold that open."""
        self._portal = portal
        self._connector = connector
        self._entered = entered

    # --- put ----------------------------------------------------------------------------------------------

    def put(self, from_stage: str, to_stage: str, key: str, data: object, *, timeout: float | None = None) -> Receipt:
        """See `Connector.put`. Raises TimeoutError when there is no room in time."""
        _check(timeout)
        try:
            return self.put_nowait(from_stage, to_stage, key, data)
        except (NoRoom, NotReady):
            return self._portal.call(
                self._connector.put, from_stage, to_stage, key, data, timeout=timeout, what=f"put of {key!r}"
            )

    def put_nowait(self, from_stage: str, to_stage: str, key: str, data: object) -> Receipt:
        """See `Connector.put_nowait`."""
        what = f"put of {key!r}"
        if isinstance(data, ManagedBuffer):  # nothing is copied if it is ours
            return self._portal.call_sync(self._connector.put_nowait, from_stage, to_stage, key, data, what=what)
        plan = plan_payload(data)
        if plan.size <= COPY_IN_LOOP:
            return self._portal.call_sync(self._put_at_once, from_stage, to_stage, key, plan, what=what)
        held = self._portal.call_sync(self._reserve, from_stage, to_stage, key, plan, what=what)
        with held as reservation:
            reservation.fill()
            return self._portal.call_sync(publish, held, what=what)

    def _put_at_once(self, from_stage: str, to_stage: str, key: str, plan: Plan) -> Receipt:
        reservation = self._connector.reserve_nowait(from_stage, to_stage, key, plan)
        try:
            reservation.fill()
        except BaseException:
            reservation.release()
            raise
        return reservation.publish()

    def _reserve(self, from_stage: str, to_stage: str, key: str, plan: Plan) -> Held[Reservation]:
        reservation = self._connector.reserve_nowait(from_stage, to_stage, key, plan)
        return Held(self._portal, reservation, reservation.release)

    def wait_listening(self, *, timeout: float | None = None) -> None:
        """See `Connector.wait_listening`. Raises TimeoutError when nothing has decided it in time."""
        _check(timeout)
        self._portal.call(self._connector.wait_listening, timeout=timeout, what="wait_listening")

    def drain(self, *, timeout: float | None = None) -> int:
        """See `Connector.drain`. Raises TimeoutError when something is still held then."""
        _check(timeout)
        return self._portal.call(self._connector.drain, timeout=timeout, what="drain")

    # --- get ----------------------------------------------------------------------------------------------

    def get(
        self,
        from_stage: str,
        to_stage: str,
        key: str,
        metadata: Mapping[str, object] | Receipt | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """See `Connector.get`. Raises TimeoutError when it does not come in time; it stays with the sender."""
        _check(timeout)
        what = f"get of {key!r}"
        return self._copy(
            self._portal.call(self._take, from_stage, to_stage, key, metadata, timeout=timeout, what=what)
        )

    def get_nowait(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> Any:
        """See `Connector.get_nowait`."""
        what = f"get of {key!r}"
        return self._copy(self._portal.call_sync(self._take_nowait, from_stage, to_stage, key, metadata, what=what))

    async def _take(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None
    ) -> Held[Arrival | StockArrival]:
        arrival = await self._connector.take(from_stage, to_stage, key, metadata)
        return Held(self._portal, arrival, arrival.give_back)

    def _take_nowait(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None
    ) -> Held[Arrival | StockArrival]:
        arrival = self._connector.take_nowait(from_stage, to_stage, key, metadata)
        return Held(self._portal, arrival, arrival.give_back)

    def _copy(self, held: Held[Arrival | StockArrival]) -> object:
        with held as arrival:
            value = arrival.restore()
            self._portal.post(partial(finish, held))
        return value

    def lease(
        self,
        from_stage: str,
        to_stage: str,
        key: str,
        metadata: Mapping[str, object] | Receipt | None = None,
        *,
        timeout: float | None = None,
    ) -> AbstractContextManager[Lease]:
        """See `Connector.lease`. Raises TimeoutError when it does not come in time; it stays with the sender."""
        _check(timeout)
        return Block(
            self,
            partial(self._connector.lease, from_stage, to_stage, key, metadata),
            _itself,
            what=f"lease of {key!r}",
            timeout=timeout,
        )

    # --- chunk streams ------------------------------------------------------------------------------------

    def open_chunk_sender(
        self, request_id: str, to_stage: str, *, from_stage: str | None = None, timeout: float | None = None
    ) -> AbstractContextManager[BlockingChunkSender]:
        """See `Connector.open_chunk_sender`.

        Args:
            timeout: Seconds that each chunk may wait for room, and the end when the block is left.
        """
        _check(timeout)
        return Block(
            self,
            partial(self._connector.open_chunk_sender, request_id, to_stage, from_stage=from_stage),
            lambda sender: BlockingChunkSender(self, sender, request_id, timeout),
            what=f"the chunk stream of {request_id!r}",
            timeout=timeout,
        )

    def open_chunk_receiver(
        self, request_id: str, from_stage: str, *, to_stage: str | None = None, timeout: float | None = None
    ) -> AbstractContextManager[BlockingChunkReceiver]:
        """See `Connector.open_chunk_receiver`.

        Args:
            timeout: Seconds that each chunk may take to come.
        """
        _check(timeout)
        return Block(
            self,
            partial(self._connector.open_chunk_receiver, request_id, from_stage, to_stage=to_stage),
            lambda receiver: BlockingChunkReceiver(self, receiver, request_id, timeout),
            what=f"the chunk stream of {request_id!r}",
            timeout=timeout,
        )

    # --- the rest -----------------------------------------------------------------------------------------

    def cleanup(self, key: str, from_stage: str | None = None, to_stage: str | None = None) -> int:
        """See `Connector.cleanup`."""
        return self._portal.call_sync(
            self._connector.cleanup_nowait, key, from_stage, to_stage, what=f"cleanup of {key!r}"
        )

    def update_sender_info(self, host: str, port: int) -> None:
        """See `Connector.update_sender_info`."""
        self._portal.call_sync(self._connector.update_sender_info, host, port, what="update_sender_info")

    def get_connection_info(self) -> dict[str, Any]:
        """See `Connector.get_connection_info`."""
        return self._connector.get_connection_info()

    def statistics(self) -> ConnectorStatistics:
        """See `Connector.statistics`. Of a closed connector: its last ones."""
        try:
            return self._portal.call_sync(self._connector.statistics, what="statistics")
        except ConnectorClosed:  # then nothing changes them any more
            return self._connector.statistics()

    def health(self) -> dict[str, Any]:
        """See `Connector.health`."""
        try:
            return self._portal.call_sync(self._connector.health, what="health")
        except ConnectorClosed as error:
            return {**self._connector.health(), "status": "unhealthy", "error": str(error)}

    # --- life ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close it in order; see `trio_mori.open_connector`. Idempotent, from any thread.

        What nobody has fetched is dropped; `drain` before waits until nothing of it is left.

        Calls that other threads have in progress end with `ConnectorClosed`, and streams as failed.

        Raises:
            ConnectorClosed: from what failed behind it, if no call has said so yet.
        """
        self._portal.close()

    def break_off(self) -> None:
        """It will be closed for an error's sake: what that drops is nothing to be warned of."""
        if self._entered is not None:
            self._entered.is_whole = False

    def __enter__(self) -> BlockingConnector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.break_off()
        if self._portal.in_portal:  # a generator that is collected there: nothing may be waited for
            self._portal.stop()
            return
        try:
            self.close()
        except ConnectorClosed:
            if error is None:
                raise

    def __del__(self) -> None:
        # Perhaps in the loop's own thread, in the middle of anything.
        self._portal.stop()


def open_connector(
    config: ConnectorConfig | Mapping[str, object], *, payload_types: Iterable[type] = ()
) -> BlockingConnector:
    """Open a connector. See `trio_mori.open_connector` for arguments and errors.

    Leave it as a ``with`` block, or `close` it. One that is dropped is closed soon, without being waited for; one that
    is open at the end of the program is closed then.
    """
    if not isinstance(config, ConnectorConfig):
        config = ConnectorConfig.from_dict(config)
    portal = Portal(grace=config.close_grace)
    try:
        entered = portal.enter(
            partial(_opening.open_connector, config, payload_types=payload_types),
            what="open_connector",
            is_whole=True,
        )
        return BlockingConnector(portal, entered.value, entered)
    except BaseException:
        portal.close()
        raise
