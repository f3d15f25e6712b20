"""What the loop's half needs of a stage's connector, and how ours gives it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import trio

from trio_mori import Connector, Plan, TrioMoriError, UnsupportedPayload

from .._sync import SyncConnector

# A smaller payload is copied in the loop: to change threads takes as long as to copy so much.
COPIED_IN_LOOP = 1 << 18


class Wire(Protocol):
    """Chunks of one edge in and one edge out, by the request's external id and a number. In the loop."""

    def planned(self, payload: object) -> object:
        """A payload as `put` takes it. In any thread."""

    async def prepare(self) -> None:
        """Make ready what the first chunk would have to wait for. What is wrong with it, that one says."""

    async def put(self, external_id: str, number: int, planned: Any) -> None:
        """Hand a chunk on; waits for room. If it is cancelled, nothing was put."""

    def put_at_once(self, external_id: str, number: int, planned: Any) -> bool:
        """As `put`, without waiting. False: nothing was put, and `put` waits, or says why it cannot be."""

    async def take(self, external_id: str, number: int, source: dict[str, Any] | None) -> object:
        """Wait for a chunk, and have it. If it is cancelled, its sender has it still."""

    def forget(self, external_id: str) -> None:
        """Drop what came for takes of a request that were cancelled: that a chunk is gone is told to the next one."""

    def clean(self, external_id: str) -> None:
        """Drop the chunks of a request that were put and that nobody has fetched; tell nobody."""

    def lose(self, external_id: str, number: int) -> None:
        """Let whoever waits for a chunk know that it does not come."""


class ConnectorWire:
    """A wire on the core connectors of a stage."""

    def __init__(self, connector: SyncConnector, *, sends: bool) -> None:
        self._connector = connector
        self._sends = sends
        self._stage = connector.stage_id
        self._edge_in = (str(self._stage - 1), str(self._stage))
        self._edge_out = (str(self._stage), str(self._stage + 1))

    def planned(self, payload: object) -> Plan:
        """See `Wire`.

        Raises:
            UnsupportedPayload: something in it cannot be sent.
        """
        return self._connector.payloads.plan(payload)[0]

    async def prepare(self) -> None:
        """See `Wire`: a stage in the middle opens its sender, whose memory takes its time."""
        if self._sends:
            with suppress(TrioMoriError):
                await self._connector.open_core("sender")

    async def put(self, external_id: str, number: int, planned: Plan) -> None:
        """See `Wire`. Raises as `Connector.put`."""
        core = await self._connector.open_core("sender")
        await core.put(*self._edge_out, f"{external_id}_{self._stage}_{number}", planned)

    def put_at_once(self, external_id: str, number: int, planned: Plan) -> bool:
        """See `Wire`."""
        if planned.size > COPIED_IN_LOOP:
            return False
        try:
            core = self._sender()
            if core is None:
                return False
            key = f"{external_id}_{self._stage}_{number}"
            reservation = core.reserve_nowait(*self._edge_out, key, planned)
        except TrioMoriError:
            return False
        if reservation.by_gpu:
            reservation.release()
            return False
        is_filled = False
        try:
            reservation.fill()
            is_filled = True
        except UnsupportedPayload:
            return False
        finally:
            if not is_filled:
                reservation.release()
        reservation.publish()
        return True

    async def take(self, external_id: str, number: int, source: dict[str, Any] | None) -> object:
        """See `Wire`. Raises as `Connector.get`; also whatever reading a payload of a foreign form raises."""
        core = await self._connector.open_core("receiver")
        key = f"{external_id}_{self._stage - 1}_{number}"
        arrival = await core.take(*self._edge_in, key, self._connector.source(key, source))
        try:
            if arrival.size <= COPIED_IN_LOOP:
                return self._connector.payloads.received(arrival)
            # Nothing is gained by a cancellation here, and what came from a stock sender would be lost.
            with trio.CancelScope(shield=True):
                payload: object = await trio.to_thread.run_sync(self._connector.payloads.received, arrival)
            return payload
        finally:
            # Also of what cannot be read: it would come again, and could be read no better.
            arrival.finish()

    def forget(self, external_id: str) -> None:
        """See `Wire`."""
        core = self._connector.core_now("receiver")
        if core is not None:
            core.cleanup_nowait(external_id, *self._edge_in, tell=False)

    def clean(self, external_id: str) -> None:
        """See `Wire`."""
        core = self._sender()
        if core is not None:
            core.cleanup_nowait(external_id, *self._edge_out, tell=False)

    def lose(self, external_id: str, number: int) -> None:
        """See `Wire`."""
        core = self._sender()
        if core is not None:
            core.lose(*self._edge_out, f"{external_id}_{self._stage}_{number}")

    def _sender(self) -> Connector | None:
        return self._connector.core_now("sender")
