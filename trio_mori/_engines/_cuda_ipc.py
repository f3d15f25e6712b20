"""The cuda_ipc engine: a pool on a GPU, into which the GPUs of other processes of the host copy directly."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf

import torch
import trio

from .._errors import ConfigError, ConnectorClosed, DescriptorRefused, TransferFailed
from .._scope import open_service
from ..abc import Descriptor, Engine, EnginePeer, Posted, Region, Write
from . import _cuda_library, _memfd
from ._bounds import check_bounds
from ._cuda_copy import Copy
from ._cuda_library import Library
from ._cuda_owner import PAGE, Owner, check_author, decode, describe
from ._cuda_peer import CudaPeer, Track
from ._fence import Fence
from ._immortal import keep_for_ever
from ._process import open_process, this_process
from ._siblings import Siblings

logger = logging.getLogger("trio_mori.engine")

# Lanes to one peer, so that small writes overtake large ones. One alone carries 98% of what NVLink can.
TRACKS = 4

# Up to here a copy is looked for in place: 1 MB between two H200 takes 12 us by NVLink.
INLINE = 1 << 20

# The engines of this process by nonce, for peers in the same process: it cannot map its own memory.
_siblings: Siblings[CudaIpcEngine] = Siblings()


class _State(enum.Enum):
    OPEN = "open"
    CLOSED = "closed"
    ABANDONED = "abandoned"


@asynccontextmanager
async def open_cuda_ipc(*, pool_size: int, device: str, options: Mapping[str, object]) -> AsyncIterator[Engine]:
    """Open a pool on a GPU that every process of this host can write into whose GPU has access to that one.

    Opening allocates in a thread. Leaving waits for the copies under way, which take milliseconds; where one failed in
    a way that leaves it open whether it still moves, or was abandoned, the pool stays for the rest of the process.

    Peers are processes of this user in this pid namespace, which a file of theirs in /proc proves. Fences are pidfds,
    because the driver ends the copies of a process before that is gone. Where the system has none (Linux before 5.3)
    `wait_fenced` never returns.
    """
    _check_arguments(pool_size, device, options)
    async with AsyncExitStack() as stack:
        library = await trio.to_thread.run_sync(_cuda_library.load)
        engine = await trio.to_thread.run_sync(_make, library, pool_size, device)
        stack.callback(engine._end)
        async with open_service(drain=engine._drain, drain_timeout=inf) as service:
            engine._service = service
            _siblings.add(engine._owner.nonce, engine)
            logger.info("cuda_ipc pool of %d bytes on %s open as %s", pool_size, engine.region.device, engine.identity)
            yield engine
        logger.info("cuda_ipc pool of %s closed", engine.identity)


def _check_arguments(pool_size: int, device: str, options: Mapping[str, object]) -> None:
    if pool_size <= 0:
        raise ConfigError(
            f"memory_pool_size must be a positive number of bytes, not {pool_size}",
            key="memory_pool_size",
            value=pool_size,
        )
    if device == "cpu":
        raise ConfigError(
            "cuda_ipc has pools on GPUs only: memory_pool_device must be cuda or cuda:N, not 'cpu'",
            key="memory_pool_device",
            value=device,
        )
    for key in options:
        raise ConfigError(f"cuda_ipc has no option {key!r}, and no other", key=key, value=options[key])


def _make(library: Library, size: int, device: str) -> CudaIpcEngine:
    """In a thread: the first use of a GPU takes a second."""
    process = this_process()
    pool = library.allocate(size, device)
    memfd = _memfd.create(PAGE)
    try:
        owner, descriptor = describe(process, library.gpu(pool), library.share(pool), memfd)
        _memfd.publish(memfd, descriptor, PAGE)
    except BaseException:
        os.close(memfd)
        raise
    region = Region(pool, library.host_bytes(pool), str(pool.device))
    return CudaIpcEngine(library, owner, descriptor, region, memfd)


class CudaIpcEngine(Engine):
    """See `open_cuda_ipc`.

    The writer's GPU copies, on streams of the engine's own. What lies in our pool is complete before a write is
    posted, so that these streams wait for no other. A copy that was queued always ends, or the GPU has failed.
    """

    name = "cuda_ipc"

    def __init__(self, library: Library, owner: Owner, descriptor: Descriptor, region: Region, memfd: int) -> None:
        self._library = library
        self._owner = owner
        self._descriptor = descriptor
        self._region = region
        self._memfd = memfd
        self._fence, unfenced = os.pipe()
        self._unfenced: int | None = unfenced
        self._state = _State.OPEN
        self._peers: dict[Descriptor, CudaPeer] = {}
        self._service: trio.Nursery
        self._threads = trio.CapacityLimiter(inf)
        self._copies: set[Copy] = set()  # those under way
        self._busy = 0  # writes, and mappings that are being let go of
        self._progress = trio.lowlevel.ParkingLot()

    @property
    def region(self) -> Region:
        return self._region

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor

    @property
    def identity(self) -> str:
        """What peers see as `EnginePeer.identity`."""
        return self._owner.identity

    # --- peers --------------------------------------------------------------------------------------------

    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        if self._state is not _State.OPEN:
            raise ConnectorClosed(f"the engine {self.identity} is {self._state.value} and takes no peer")
        if descriptor in self._peers:
            return self._peers[descriptor]
        peer = CudaPeer(descriptor, *decode(descriptor))
        peer.fence = self._fence_of(peer)
        peer.engine = self
        self._peers[descriptor] = peer
        return peer

    def _fence_of(self, peer: CudaPeer) -> Fence | None:
        ours, theirs = self._owner, peer.owner
        if theirs.boot != ours.boot:
            raise DescriptorRefused(
                f"{peer.identity} runs on another machine: cuda_ipc moves bytes within one; use rdma between machines"
            )
        if theirs.process == ours.process:
            sibling = _siblings.find(theirs.nonce, peer.descriptor, peer.identity)
            return Fence(_siblings.dup_fence(theirs.nonce, sibling._fence, sibling.identity))
        if theirs.namespace != ours.namespace:
            raise DescriptorRefused(
                f"{peer.identity} runs in another pid namespace, where it cannot be known by anything but its word: "
                "start the containers with one (--pid=host, or --pid=container:NAME), or use shm with a share_directory"
            )
        pidfd = open_process(theirs.process, peer.identity)
        try:
            check_author(theirs, peer.memory, peer.descriptor)
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise
        return None if pidfd is None else Fence(pidfd)

    def drop_peer(self, peer: EnginePeer) -> None:
        if isinstance(peer, CudaPeer) and peer.engine is self:
            del self._peers[peer.descriptor]
            peer.engine = None
            if peer.fence is not None:
                peer.fence.close()
                peer.fence = None
            self._let_go(peer)

    async def wait_fenced(self, peer: EnginePeer) -> None:
        if isinstance(peer, CudaPeer) and peer.fence is not None:
            await peer.fence.wait()
        else:
            await trio.sleep_forever()  # nothing can be proven about it

    # --- writes -------------------------------------------------------------------------------------------

    def write_nowait(self, peer: EnginePeer, write: Write) -> bool | Posted:
        ours = self._admit(peer, write)
        if ours.pool is None or not write.size:
            return False  # it has to be mapped, or there is nothing that could tell whether it can be
        copy = self._post(ours, ours.pool, write)
        # One behind others would be looked for in vain, and all else be held up once for each.
        is_looked_for = write.size <= INLINE and copy.track.copies == 1
        return (is_looked_for and copy.is_over_soon()) or copy

    async def write(self, peer: EnginePeer, write: Write) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        ours = self._admit(peer, write)
        pool = ours.pool
        if pool is None:
            self._begin(ours)
            try:
                pool = await self._map(ours)
                if self._state is _State.ABANDONED:
                    raise TransferFailed(f"write to {peer.identity} was abandoned before it was posted", settled=False)
                self._admit(ours, write)
            finally:
                self._ended(ours)
        if write.size:
            await self._post(ours, pool, write).wait()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def abandon(self) -> None:
        self._state = _State.ABANDONED
        # Peers that were not heard of again may still write here, whatever is under way from here.
        keep_for_ever(self._region)
        if self._copies:
            self._unfenced = None  # stays open for ever: nobody will know when these copies have ended
        for copy in self._copies:
            copy.abandon()
        self._progress.unpark_all()

    def _admit(self, peer: EnginePeer, write: Write) -> CudaPeer:
        if self._state is not _State.OPEN:
            raise TransferFailed(f"write to {peer.identity} refused: our engine is {self._state.value}")
        if not isinstance(peer, CudaPeer) or peer.engine is not self:
            raise TransferFailed(f"write to {peer.identity} refused: it is not a peer of this engine, or was dropped")
        check_bounds(write, self._region.size, peer)
        if peer.is_fenced():
            raise TransferFailed(f"write to {peer.identity} refused: its process has exited, or its engine was closed")
        return peer

    def _take_track(self, peer: CudaPeer) -> Track:
        """An idle lane; a new one if there is none and may be another; else the one with the fewest copies."""
        track = min(peer.tracks, key=lambda each: each.copies, default=None)
        if track is None or (track.copies and len(peer.tracks) < TRACKS):
            track = Track(self._library.open_lane(self._region.tensor.device))
            peer.tracks.append(track)
        track.copies += 1
        return track

    def _post(self, peer: CudaPeer, pool: torch.Tensor, write: Write) -> Copy:
        copy = Copy(peer, self._take_track(peer), write, pool=pool, region=self._region, on_end=self._copied)
        self._copies.add(copy)
        self._begin(peer)
        copy.begin()
        return copy

    def _copied(self, copy: Copy) -> None:
        self._copies.discard(copy)
        copy.track.copies -= 1
        self._ended(copy.peer)

    def _begin(self, peer: CudaPeer) -> None:
        peer.writes += 1
        self._busy += 1

    def _ended(self, peer: CudaPeer) -> None:
        peer.writes -= 1
        self._busy -= 1
        if peer.engine is None:
            self._let_go(peer)
        self._progress.unpark_all()

    # --- mappings -----------------------------------------------------------------------------------------

    async def _map(self, peer: CudaPeer) -> torch.Tensor:
        async with peer.opening:
            if peer.pool is None and peer.owner.process == self._owner.process:
                try:
                    peer.pool = _siblings.find(peer.owner.nonce, peer.descriptor, peer.identity)._region.tensor
                except DescriptorRefused as error:
                    raise TransferFailed(f"write to {peer.identity} refused: {error}") from error
            elif peer.pool is None:
                peer.pool = await trio.to_thread.run_sync(self._open, peer, limiter=self._threads)
            return peer.pool

    def _open(self, peer: CudaPeer) -> torch.Tensor:
        """In a thread: 10 ms between two H200."""
        library, memory, ours = self._library, peer.memory, self._region.tensor
        try:
            return library.map(memory.share, ours.device)
        except RuntimeError as error:
            raise TransferFailed(
                f"write to {peer.identity} refused: {library.gpu(ours)} has no access to its pool on {memory.device}: "
                f"{error}. The GPUs need peer access (`nvidia-smi topo -p2p r`), the processes one IPC namespace "
                "(containers: --ipc=host); where that cannot be, set fallback: host, or use shm"
            ) from error

    def _let_go(self, peer: CudaPeer) -> None:
        """Unmap the pool of a peer that was dropped, unless a write to it is under way."""
        if peer.writes or peer.pool is None:
            return
        pool, peer.pool = [peer.pool], None
        peer.tracks.clear()
        if self._state is _State.ABANDONED:
            keep_for_ever(*pool)
        elif peer.owner.process != self._owner.process:
            self._busy += 1
            self._service.start_soon(self._unmap, pool)

    async def _unmap(self, pool: list[torch.Tensor]) -> None:
        """torch waits for the work on the current stream of the thread in which the last tensor over it goes."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(pool.clear, limiter=self._threads)
        self._busy -= 1
        self._progress.unpark_all()

    # --- life ---------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.CLOSED
        _siblings.remove(self._owner.nonce)
        await self._wait_quiet()
        for peer in tuple(self._peers.values()):
            self.drop_peer(peer)
        await self._wait_quiet()

    async def _wait_quiet(self) -> None:
        while self._busy and self._state is not _State.ABANDONED:
            await self._progress.park()

    def _end(self) -> None:
        _siblings.remove(self._owner.nonce)
        if self._state is _State.OPEN:
            self.abandon()  # the service has failed, and with it whoever unmaps
        for peer in tuple(self._peers.values()):
            self.drop_peer(peer)
        if self._unfenced is not None:
            os.write(self._unfenced, b"\0")  # a forked child may have the pipe too, so that closing it says nothing
            os.close(self._unfenced)
        os.close(self._fence)
        os.close(self._memfd)
