"""Engines over Mori that can be held, failed and killed on command, as memory engines can."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio
from mori_lane import open_xgmi

from trio_mori._engines._cuda_ipc import CudaIpcEngine
from trio_mori._engines._mori import MoriEngine
from trio_mori.abc import Descriptor, Engine, EnginePeer, Write
from trio_mori.testing import MemoryEngine, MemoryFabric
from trio_mori.testing._engine import MemoryPeer, _State


class MoriFabric(MemoryFabric):
    """Where these engines find each other. Each has its pool on a GPU, two by two on different ones."""

    def __init__(self) -> None:
        super().__init__()
        self._devices = itertools.cycle(("cuda:0", "cuda:1"))

    def open_real(self, size: int) -> AbstractAsyncContextManager[Engine]:
        """What moves the bytes."""
        return open_xgmi(size, next(self._devices))

    def enter(self, engine: MemoryEngine) -> bytes:
        return b""  # it has no name yet

    @asynccontextmanager
    async def open(self, *, pool_size: int = 1 << 20, inline: bool = True) -> AsyncIterator[MemoryEngine]:
        async with self.open_real(pool_size) as real:
            engine = self._engines[real.descriptor.engine] = CommandedEngine(self, real)
            try:
                yield engine
            finally:
                engine.close()
                del self._engines[real.descriptor.engine]  # and with it the pool, of which GPUs have less than hosts


class CommandedEngine(MemoryEngine):
    """Writes by Mori, unless the test says otherwise: of what is held or fails, torch moves as much as it wants."""

    def __init__(self, fabric: MoriFabric, real: Engine) -> None:
        super().__init__(fabric, pool_size=1)
        self.real = real
        self._region = real.region
        self._descriptor = real.descriptor

    @property
    def identity(self) -> str:
        return self.real.key

    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        peer = super().add_peer(descriptor)
        self.real.add_peer(descriptor)
        return peer

    def drop_peer(self, peer: EnginePeer) -> None:
        if isinstance(peer, MemoryPeer) and self._knows(peer):
            self.real.drop_peer(self.real.add_peer(peer.target.descriptor))
        super().drop_peer(peer)
        assert isinstance(self.real, CudaIpcEngine | MoriEngine)
        assert len(self.real._peers) == len(self._peers), "the real one has others than a memory engine would"

    def write_nowait(self, peer: EnginePeer, write: Write) -> bool:
        self._record("write_nowait", peer, write)
        self._admit(peer, write)
        return False

    async def write(self, peer: EnginePeer, write: Write) -> None:
        await trio.lowlevel.checkpoint()
        self._record("write", peer, write)
        ours = self._admit(peer, write)
        self._fail_if_told(ours, write)
        arrived = self._gate(ours)
        if arrived is None:
            await self.real.write(self.real.add_peer(ours.target.descriptor), write)
        else:
            await self._post(ours, write, arrived).wait_told()

    def abandon(self) -> None:
        killed = self._state is _State.KILLED
        super().abandon()
        if not killed:  # what a process had is gone with it
            self.real.abandon()

    def _move(self, peer: MemoryPeer, write: Write) -> None:
        if self.identity not in peer.target._revoked:
            source = self.region.tensor[write.source : write.source + write.size]
            peer.target.region.tensor[write.destination : write.destination + write.size].copy_(source)
