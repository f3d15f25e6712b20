"""A put in two halves: claim room here, copy wherever the caller likes, then publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from . import _payload
from ._buffer import ManagedBuffer
from ._errors import InternalError
from ._payload import Plan

if TYPE_CHECKING:
    from ._pool import Pool
    from ._protocol.entries import Entry
    from ._statistics import Receipt


def plan_payload(data: object) -> Plan:
    """How a payload will lie in the pool. Reads its structure, not yet its contents; in any thread.

    Raises:
        UnsupportedPayload: something in it cannot arrive bit for bit, or it is empty; names it by its path.
    """
    return _payload.plan(data.tensor if isinstance(data, ManagedBuffer) else data)


class _Publisher(Protocol):
    """What a reservation needs of its sender."""

    def publish(self, entry: Entry, plan: Plan) -> Receipt: ...

    def unstage(self, entry: Entry) -> None: ...


class Reservation:
    """Room for one payload, claimed under its key. Made by `Connector.reserve_nowait`.

    Copy with `fill`, in any thread, and end it with `publish` or `release` in the connector's own. Until then it pins
    its memory as a write does: a close waits for it, and if that takes longer than `close_grace`, the memory is kept
    for the rest of the process rather than pulled away under the copy.

    Attributes:
        size: Bytes that the payload takes in the pool.
    """

    def __init__(self, publisher: _Publisher, entry: Entry, plan: Plan, pool: Pool) -> None:
        self.size = plan.size
        self._publisher = publisher
        self._entry = entry
        self._plan = plan
        self._pool = pool
        self._open = True

    def fill(self) -> None:
        """Copy the payload in. Afterwards its source may be overwritten. Once, in any thread.

        Raises:
            UnsupportedPayload: a source changed its length since it was planned.
        """
        if not self._open:
            raise InternalError(f"the reservation of {self._entry.key!r} was filled or ended before")
        self._open = False
        plan, extent = self._plan, self._entry.extent
        address = self._pool.address(extent, plan.size)
        if not address or not plan.copy_to(address):
            plan.copy_into(self._pool.tensor(extent, plan.size))

    def publish(self) -> Receipt:
        """Let receivers have it.

        Raises:
            KeyBusy: the payload under this key began to be transferred meanwhile; this one is gone without a trace.
            ConnectorClosed: the connector was closed meanwhile.
        """
        self._open = False
        return self._publisher.publish(self._entry, self._plan)

    def release(self) -> None:
        """Give the room back unused."""
        self._open = False
        self._publisher.unstage(self._entry)
