"""A put in two halves: claim room here, copy wherever the caller likes, then publish."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

from . import _payload
from ._buffer import ManagedBuffer
from ._errors import InternalError
from ._gpu import Mark, is_over_soon, wait_over
from ._payload import Plan
from ._pool import INLINE_COPY

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
        self._moments: Sequence[Mark] | None = None  # when the copy that was begun is over

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

    @property
    def by_gpu(self) -> bool:
        """Whether a GPU has a part in the copy."""
        return self._plan.on_gpu or self._pool.on_gpu

    def fill_nowait(self) -> bool:
        """As `fill`, where GPUs do all of it and it is over before others would have had a turn; once it is ready.

        Returns:
            False: call `fill_soon`, whatever of it was done here.
        """
        plan, pool = self._plan, self._pool
        if not pool.on_gpu:
            return False
        self._open = False
        if not plan.size:
            return True
        done = plan.queue_copy(pool.gpu_address(self._entry.extent, plan.size), pool.place)
        if done is None:
            return False
        self._moments = [done]
        return is_over_soon(done)

    async def wait_ready(self) -> None:
        """Wait until the payload is complete, whatever its GPU has to do before."""
        for ready in self._plan.ready:
            await wait_over(ready)

    async def fill_soon(self) -> None:
        """As `fill`, in the connector's own thread and without holding it up, where a GPU has a part in the copy.

        Cancellation: before the copy is begun. The copy itself is waited for.

        Raises:
            UnsupportedPayload: as `fill`.
            RuntimeError: the GPU has failed.
        """
        self._open = False
        plan, pool = self._plan, self._pool
        if self._moments is None:
            await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            if self._moments is None:
                target = pool.tensor(self._entry.extent, plan.size)
                # What host memory has a part in holds up the thread that asks for it.
                hosted = plan.hosted if pool.on_gpu else plan.size
                if hosted <= INLINE_COPY:
                    self._moments = plan.begin_copy(target)
                else:
                    self._moments = await trio.to_thread.run_sync(plan.begin_copy, target)
            for done in self._moments:
                await wait_over(done)

    def publish(self) -> Receipt:
        """Let receivers have it.

        Raises:
            KeyBusy: the payload under this key began to be transferred meanwhile; this one is gone without a trace.
            ConnectorClosed: the connector was closed meanwhile.
        """
        self._open = False
        return self._publisher.publish(self._entry, self._plan)

    def release(self) -> None:
        """Give the room back unused, once no GPU writes there any more."""
        self._open = False
        for begun in self._moments or ():  # whose end was not seen: the wait for it was broken off
            with suppress(RuntimeError):  # the GPU has failed, and copies nothing more
                begun.synchronize()
        self._publisher.unstage(self._entry)
