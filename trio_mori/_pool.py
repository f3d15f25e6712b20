"""A pool: one region of memory, and who waits for room in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from ._errors import ConnectorClosed, InternalError, NoRoom
from ._protocol.extents import INBOUND, OUTBOUND, Extent, Extents, format_size
from ._protocol.line import Line
from .abc import Region

if TYPE_CHECKING:
    import torch

__all__ = ["INLINE_COPY", "Pool", "PoolStatistics"]

# Copies in and out of up to 1 MB take about 0.2 ms, as long as a thread takes to be reached. Larger ones leave it.
INLINE_COPY = 1 << 20


@attrs.frozen
class PoolStatistics:
    """A pool at one moment; sizes in bytes.

    Attributes:
        size: All that can be handed out.
        free: What is in no extent.
        largest_free: The largest free block.
        inbound: In extents of what is received.
        outbound: In extents of what is sent.
        waiting: Calls that wait for room.
    """

    size: int
    free: int
    largest_free: int
    inbound: int
    outbound: int
    waiting: int


@attrs.define(eq=False)
class _Waiter:
    """A task that waits for an extent."""

    task: trio.lowlevel.Task
    granted: Extent | None = None


@attrs.frozen(eq=False)
class _Move:
    """An extent that is to be booked under another share, and who waits for that."""

    extent: Extent
    share: str
    waiter: _Waiter


class Pool:
    """Ties a region to the books of its extents, and lets tasks wait for room.

    Requests that find no room wait in a `Line` for each share: the first is sure to be served, and others pass it only
    as far as they are not in its way. Room that becomes free is booked for a waiter at once, before anybody can come
    between. An extent that moves to another share has its memory already. It stands behind nobody: who is
    first in line may be waiting for this very memory.

    Lives in the trio run in which it was made. Only `post` and `call` may be used from elsewhere.

    Attributes:
        region: The memory. It belongs to an engine. Nothing is in it once the pool has let it go.
        on_gpu: Whether it is a GPU's.
        place: Which one it is, or the host.
        extents: The allocator; the pool takes its `on_free` over.
        on_room: Called when room became free and the waiters have taken theirs, for a book with a queue of its own;
            may allocate, must not free.
        on_shortage: Called when a request finds no room, before it waits or is refused: frees what could be free.
    """

    def __init__(self, region: Region, extents: Extents, *, on_room: Callable[[], None] | None = None) -> None:
        if extents.size > region.size:
            raise InternalError(f"an allocator of {extents.size} bytes over a region of {region.size}")
        self.region = region
        self.on_gpu = region.tensor.is_cuda  # ROCm's too
        self.extents = extents
        self.on_room = on_room
        self.on_shortage: Callable[[], None] | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._pid = os.getpid()
        self._lines = {share: Line[_Waiter](extents, share) for share in (INBOUND, OUTBOUND)}
        self._moves: dict[_Move, None] = {}
        self._closed = False
        self._base = 0 if region.buffer is None else region.tensor.data_ptr()
        self._gpu_base = region.tensor.data_ptr() if self.on_gpu else 0
        self.place = region.tensor.device
        extents.on_free = self._serve

    def reserve_nowait(self, size: int, share: str) -> Extent:
        """Take an extent of at least `size` bytes; it is the caller's, who ends it by `extents.free`.

        Raises:
            TooBig: it can never fit.
            NoRoom: not now, or only where somebody who waits is to be placed.
            ConnectorClosed: the pool is closed.
        """
        self._check_open()
        try:
            return self.extents.allocate(size, share)
        except NoRoom:
            if self.on_shortage is None:
                raise
        self.on_shortage()
        return self.extents.allocate(size, share)

    async def reserve(self, size: int, share: str) -> Extent:
        """As `reserve_nowait`, but waits for room. A cancelled call took nothing.

        Raises:
            TooBig: at once.
            ConnectorClosed: the pool is closed, or was while this waited.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with suppress(NoRoom):
            extent = self.reserve_nowait(size, share)
            await trio.lowlevel.cancel_shielded_checkpoint()
            return extent
        line, waiter = self._lines[share], _Waiter(trio.lowlevel.current_task())
        line.join(waiter, size)
        await self._wait(lambda: line.leave(waiter))
        if waiter.granted is None:
            raise ConnectorClosed(f"the connector was closed while {format_size(size)} {share} waited for room")
        return waiter.granted

    def transfer_nowait(self, extent: Extent, share: str) -> Extent:
        """Book an extent under another share. The caller uses the extent that is returned from now on.

        Raises:
            NoRoom: a guarantee could not be kept now. Nothing was changed.
            ConnectorClosed: the pool is closed.
        """
        self._check_open()
        if self.on_shortage is not None:
            self.on_shortage()
        moved = self.extents.transfer(extent, share)
        self._serve()  # what it took of one guarantee may be what a waiter of the other share waits for
        return moved

    async def transfer(self, extent: Extent, share: str) -> Extent:
        """As `transfer_nowait`, but waits until something was freed. Cancelled, nothing changed.

        Raises:
            ConnectorClosed: the pool is closed, or was while this waited.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with suppress(NoRoom):
            moved = self.transfer_nowait(extent, share)
            await trio.lowlevel.cancel_shielded_checkpoint()
            return moved
        move = _Move(extent, share, _Waiter(trio.lowlevel.current_task()))
        self._moves[move] = None
        await self._wait(lambda: self._moves.pop(move))
        if move.waiter.granted is None:
            raise ConnectorClosed(f"the connector was closed while {format_size(extent.size)} waited to be {share}")
        return move.waiter.granted

    def tensor(self, extent: Extent, size: int) -> torch.Tensor:
        """The first `size` bytes of an extent as a 1-D uint8 tensor (1 us).

        It aliases the pool and owns nothing: it must be gone when the extent is freed.
        """
        _check_inside(extent, size)
        return self.region.tensor[extent.offset : extent.offset + size]

    def address(self, extent: Extent, size: int) -> int:
        """Where they lie in host memory (0.3 us); 0 if they do not."""
        _check_inside(extent, size)
        return self._base and self._base + extent.offset

    def gpu_address(self, extent: Extent, size: int) -> int:
        """Where they lie in a GPU's memory, for a pool that is `on_gpu`."""
        _check_inside(extent, size)
        return self._gpu_base + extent.offset

    def buffer(self, extent: Extent, size: int) -> memoryview:
        """The same bytes as a writable memoryview (0.1 us). For regions in host memory only."""
        _check_inside(extent, size)
        if self.region.buffer is None:
            raise InternalError(f"a memoryview was asked for of memory on {self.region.device}")
        return self.region.buffer[extent.offset : extent.offset + size]

    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        extents = self.extents
        return PoolStatistics(
            size=extents.size,
            free=extents.free_bytes,
            largest_free=extents.largest_free,
            inbound=extents.used(INBOUND),
            outbound=extents.used(OUTBOUND),
            waiting=sum(map(len, self._lines.values())) + len(self._moves),
        )

    def close(self) -> None:
        """End all waiting with `ConnectorClosed`, and refuse new calls. Idempotent.

        Extents that are out stay valid and can be freed: the memory belongs to the engine, not to the pool.
        """
        self._closed = True
        waiters = [move.waiter for move in self._moves]
        self._moves.clear()
        for line in self._lines.values():
            waiters += line.clear()
        for waiter in waiters:
            trio.lowlevel.reschedule(waiter.task)

    def let_go(self) -> None:
        """Hold the memory no longer. To be called last: the pool is a part of cycles, which may be collected late."""
        self.region = Region(self.region.tensor.new_empty(0), memoryview(b""), self.region.device)

    def post(self, callback: Callable[[], None]) -> None:
        """Have something done in the pool's trio run, soon. From any thread, signal handler or finaliser.

        When that run is over, so is the pool, and nothing is done. Nor is anything in a forked child, which has a copy
        of the books, and perhaps of a lock that a thread of its parent held.
        """
        if self._pid == os.getpid():
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(callback)

    def call(self, callback: Callable[[], None]) -> None:
        """Do something in the pool's trio run: now, when called from inside it; else as `post`."""
        inside = trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._token
        if inside and self._pid == os.getpid():
            callback()
        else:
            self.post(callback)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosed("the pool was closed, because its connector was")

    async def _wait(self, leave: Callable[[], object]) -> None:
        """Until the task is rescheduled, by a grant or by a close; or leave at a cancellation."""

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            leave()
            self._serve()  # others may fit where it did not
            return trio.lowlevel.Abort.SUCCEEDED

        # A waiter that was granted its extent is no longer cancelled here: it returns, and the extent is its own.
        await trio.lowlevel.wait_task_rescheduled(abort)

    def _serve(self) -> None:
        while (self._moves and self._move_one()) or self._serve_one():
            pass
        if self.on_room is not None:
            self.on_room()

    def _move_one(self) -> bool:
        for move in self._moves:
            with suppress(NoRoom):
                move.waiter.granted = self.extents.transfer(move.extent, move.share)
                del self._moves[move]
                trio.lowlevel.reschedule(move.waiter.task)
                return True
        return False

    def _serve_one(self) -> bool:
        for line in self._lines.values():
            if line.waiting and (served := line.serve()):
                waiter, extent = served
                waiter.granted = extent
                trio.lowlevel.reschedule(waiter.task)
                return True
        return False


def _check_inside(extent: Extent, size: int) -> None:
    if not 0 <= size <= extent.size:
        raise InternalError(f"{size} bytes were asked for of an extent of {extent.size}")
