"""Writes of a Mori engine that are posted, until they have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import trio

from .._errors import TransferFailed
from ..abc import Write
from ._immortal import keep_for_ever, let_go
from ._mori_backend import Backend
from ._mori_library import RAISES, Code, Status
from ._mori_outlet import Outlet
from ._mori_peer import MoriPeer
from ._mori_sweep import Pending, Sweep

P = ParamSpec("P")
T = TypeVar("T")

# A fresh write of up to so many bytes is polled on the spot for so many seconds: 1 MiB takes an XGMI link 20 us, and
# handing it to the sweep would alone take 70. More than this would hold up the trio thread.
INLINE = 1 << 20
SPIN = 50e-6

# First writes at one time; each is to another peer. rdma connects in them, which takes up to 5 s for a dead address.
OPENERS = 64


class Transfers:
    """Posts the writes of one engine, and waits for their ends.

    Mori reports nothing by itself: somebody has to ask each status. A small write is asked after at once, on the trio
    thread, for as long as a message would take; whatever is not over by then goes to the sweep, one thread for all.
    Whoever posted it asks no more from then on. What a write touches is kept until its status says that it has ended.
    """

    def __init__(self, service: trio.Nursery, backend: Backend, *, in_progress: Code) -> None:
        self._backend = backend
        self._in_progress = in_progress
        self._threads = trio.CapacityLimiter(OPENERS)
        self._waits: set[trio.CancelScope] = set()
        self._writes = 0
        self._progress = trio.lowlevel.ParkingLot()
        self._abandoned = False
        self._left_behind = False
        self._sweep = Sweep(service, in_progress=in_progress, progress=self._progress, pop_failure=backend.pop_failure)

    async def carry_out(self, peer: MoriPeer, write: Write, status: Status | None) -> None:
        """Post a write, unless that was done, and wait for its end. Not cancellable.

        Args:
            status: Of a write that was posted; None: post it.

        Raises:
            TransferFailed: as `Engine.write`.
        """
        peer.writes += 1
        self._writes += 1
        try:
            if status is None and peer.outlet is not None:
                status = self._post(peer, peer.outlet, write)
            elif status is None:
                status = await self._post_in_turn(peer, write)
            outlet = peer.outlet
            assert outlet is not None
            # Others run while it is under way, as they do at every checkpoint.
            await trio.lowlevel.cancel_shielded_checkpoint()
            if status is not None and not self._ends_soon(status, write.size):
                await self._wait(status, peer, outlet, write)
            if status is None or not status.Succeeded():
                raise self._failure(peer, outlet, write, status)
            if peer.session is None:
                peer.session = self._backend.session_to(peer)
        finally:
            peer.writes -= 1
            self._writes -= 1
            if not peer.writes and peer.owner is None:
                self.let_go(peer)
            self._progress.unpark_all()

    def doubt(self, peer: MoriPeer, outlet: Outlet | None, write: Write, error: Exception) -> TransferFailed:
        """What to raise when Mori has raised something: nobody knows then what it has posted, and it is kept."""
        if outlet is not None:
            outlet.doubtful = True
        return TransferFailed(f"write of {write.size} bytes to {peer.identity} failed: {error}", settled=False)

    def let_go(self, peer: MoriPeer) -> None:
        """Forget what was opened for a peer that was dropped; when its last write ends, if there are some."""
        if peer.writes:
            return
        peer.session = None
        outlet, peer.outlet = peer.outlet, None
        if not self._left_behind:
            self._backend.forget(peer, outlet)

    async def wait_quiet(self) -> None:
        """Return when every transfer has ended, or they were abandoned."""
        while not self._abandoned and (self._writes or self._sweep.open):
            await self._progress.park()

    def abandon(self) -> bool:
        """Wait for nothing any more.

        Returns:
            Whether something was under way; its statuses stay for ever.
        """
        self._abandoned = True
        self._left_behind = bool(self._writes or self._sweep.open)
        keep_for_ever(*self._sweep.open)
        self._sweep.stop()
        for scope in self._waits:
            scope.cancel()
        self._progress.unpark_all()
        return self._left_behind

    # --- posting ------------------------------------------------------------------------------------------

    async def _post_in_turn(self, peer: MoriPeer, write: Write) -> Status | None:
        """Post a write to a peer that none has reached; in a thread, unless one before it did meanwhile.

        Whoever waited while one before it could not connect fails with it: rdma takes 5 s to find that a peer is dead,
        and a hundred writes in turn would take minutes.
        """
        known = peer.unreachable
        async with peer.opening:
            if self._abandoned:
                raise TransferFailed(f"write to {peer.identity} was abandoned before it was posted", settled=False)
            peer.check_present()
            if peer.outlet is not None:
                return self._post(peer, peer.outlet, write)
            if peer.unreachable is not known and peer.unreachable is not None:
                raise TransferFailed(f"{peer.unreachable}; a write before this one found so") from peer.unreachable
            try:
                outlet, status = await self._in_thread(self._open_and_post, peer, write)
            except TransferFailed as error:
                peer.unreachable = TransferFailed(str(error))  # without the frames that this one holds
                raise
            let_go(status)
            if status is not None and not status.Succeeded() and status.Code().name in self._backend.refusals:
                self._backend.close(outlet)
                raise self._failure(peer, outlet, write, status)
            peer.outlet = outlet
            return status

    def _open_and_post(self, peer: MoriPeer, write: Write) -> tuple[Outlet, Status | None]:
        """In a thread."""
        outlet = self._backend.outlet_for(peer)
        outlet.introduce(peer.engine, peer.pool)
        try:
            status = outlet.post(peer.memory, write)
        except RAISES as error:
            self._backend.close(outlet)
            raise TransferFailed(f"write to {peer.identity} refused: Mori cannot reach it: {error}") from error
        keep_for_ever(status)  # nobody takes it if this was abandoned meanwhile
        return outlet, status

    def _post(self, peer: MoriPeer, outlet: Outlet, write: Write) -> Status | None:
        try:
            return outlet.post(peer.memory, write)
        except RAISES as error:
            raise self.doubt(peer, outlet, write, error) from error

    async def _in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Not cancellable, but abandoned with everything else."""
        with trio.CancelScope(shield=True) as scope:
            self._waits.add(scope)
            try:
                return await trio.to_thread.run_sync(
                    partial(call, *args, **kwargs), abandon_on_cancel=True, limiter=self._threads
                )
            except KeyboardInterrupt:  # ends any wait of the main task, also a shielded one
                self._left_behind = True
                self._backend.leave()
                raise
            finally:
                self._waits.discard(scope)
        raise TransferFailed("a first write was abandoned while it was posted", settled=False)

    # --- waiting ------------------------------------------------------------------------------------------

    def _ends_soon(self, status: Status, size: int) -> bool:
        in_progress = self._in_progress
        if status.WaitFor(0) != in_progress:
            return True
        if size > INLINE:
            return False
        until = time.perf_counter() + SPIN
        while time.perf_counter() < until:
            if status.WaitFor(0) != in_progress:
                return True
        return False

    async def _wait(self, status: Status, peer: MoriPeer, outlet: Outlet, write: Write) -> None:
        what = f"write of {write.size} bytes to {peer.identity}"
        if self._abandoned:
            keep_for_ever(status)
            raise TransferFailed(f"{what} was abandoned while it was under way", settled=False)
        pending = Pending(status, peer.engine.key, outlet, time.monotonic())
        outlet.open += 1
        self._sweep.add(pending)
        with trio.CancelScope(shield=True) as scope:
            self._waits.add(scope)
            try:
                await pending.done.wait()
            finally:
                self._waits.discard(scope)
        if not pending.done.is_set():
            raise TransferFailed(f"{what} was abandoned while it was under way", settled=False)
        if pending.lost is not None:
            peer.outlet = None  # the next write connects again, in a thread
            raise TransferFailed(f"{what} given up: Mori lost the peer: {pending.lost}", settled=False)
        if pending.error is not None:
            raise self.doubt(peer, outlet, write, pending.error) from pending.error

    def _failure(self, peer: MoriPeer, outlet: Outlet, write: Write, status: Status | None) -> TransferFailed:
        name, message = "no status", ""
        if status is not None:
            name, message = status.Code().name, status.Message()
        settled = name in self._backend.refusals
        if not settled:
            outlet.doubtful = True
        return TransferFailed(
            f"write of {write.size} bytes to {peer.identity} failed: Mori says {name} {message}".rstrip(),
            settled=settled,
        )
