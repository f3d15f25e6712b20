"""From GPU to GPU by host memory, where no GPU has access to the other's."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
import trio

from .._errors import TransferFailed
from .._gpu import side_stream, working_on
from ..abc import Descriptor, Engine, EnginePeer, Landing, Region, Write
from ._bounds import check_bounds
from ._shm import open_shm


@asynccontextmanager
async def open_staged(region: Region, options: dict[str, object]) -> AsyncIterator[StagedEngine]:
    """Open an shm engine whose pool mirrors one on a GPU, byte for byte by offset, for the length of the block.

    Options: those of shm.
    """
    async with open_shm(pool_size=region.size, device="cpu", options=options) as mirror:
        engine = StagedEngine(region, mirror)
        try:
            yield engine
        finally:
            with trio.CancelScope(shield=True):  # bounded, since a copy always ends
                await engine.wait_quiet()


class StagedEngine(Engine, Landing):
    """Writes what is in the pool on the GPU into peers' mirrors, or pools in host memory, by our own mirror.

    To peers it is an shm engine like any other. What they write arrives in our mirror, and is taken from there.
    """

    name = "shm"

    def __init__(self, region: Region, mirror: Engine) -> None:
        self._region = region
        self._mirror = mirror
        self._stream = side_stream(region.tensor.device) if region.tensor.is_cuda else None
        self._threads = trio.CapacityLimiter(4)  # as many as shm copies with
        self._writes: Counter[EnginePeer] = Counter()
        self._dropped: set[EnginePeer] = set()  # by our caller, while a write to them was under way
        self._abandoned = False
        self._progress = trio.lowlevel.ParkingLot()

    @property
    def landing(self) -> Landing:
        return self

    @property
    def mirror(self) -> torch.Tensor:
        """Where peers' writes arrive, by their offsets in the pool."""
        return self._mirror.region.tensor

    @property
    def region(self) -> Region:
        return self._region

    @property
    def descriptor(self) -> Descriptor:
        return self._mirror.descriptor

    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        peer = self._mirror.add_peer(descriptor)
        self._dropped.discard(peer)
        return peer

    def drop_peer(self, peer: EnginePeer) -> None:
        if self._writes[peer]:
            self._dropped.add(peer)
        else:
            self._mirror.drop_peer(peer)

    async def write(self, peer: EnginePeer, write: Write) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if peer in self._dropped:
            raise TransferFailed(f"write to {peer.identity} refused: it was dropped")
        check_bounds(write, self._region.size, peer)
        await self._mirror.write(peer, Write(0, 0, 0))  # whether it is a peer, and there
        self._writes[peer] += 1
        try:
            await self._fetch(peer, write)
            await self._mirror.write(peer, write)
        finally:
            self._writes[peer] -= 1
            if not self._writes[peer]:
                del self._writes[peer]
                if peer in self._dropped:
                    self._dropped.discard(peer)
                    self._mirror.drop_peer(peer)
                self._progress.unpark_all()

    async def _fetch(self, peer: EnginePeer, write: Write) -> None:
        """Bring what is to be written from the GPU. Not cancellable; it ends by itself."""
        what = f"write of {write.size} bytes to {peer.identity}"
        try:
            with trio.CancelScope(shield=True):
                ends = self._mirror.region.tensor, self._region.tensor, write.source, write.size
                await trio.to_thread.run_sync(self._copy, *ends, limiter=self._threads)
        except RuntimeError as error:
            raise TransferFailed(f"{what} failed: {error}") from error
        if self._abandoned:
            raise TransferFailed(f"{what} was abandoned while it was under way", settled=False)

    async def wait_fenced(self, peer: EnginePeer) -> None:
        await self._mirror.wait_fenced(peer)

    def abandon(self) -> None:
        self._abandoned = True
        self._mirror.abandon()

    async def wait_quiet(self) -> None:
        """Return when no write is under way."""
        while self._writes:
            await self._progress.park()

    def land(self, offset: int, size: int) -> None:
        """Bring what a peer wrote to where it belongs, on the GPU. In any thread; done when it returns."""
        self._copy(self._region.tensor, self.mirror, offset, size)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, offset: int, size: int) -> None:
        if self._stream is None:
            target[offset : offset + size].copy_(source[offset : offset + size])
            return
        with working_on(self._stream):
            target[offset : offset + size].copy_(source[offset : offset + size])
            self._stream.synchronize()
