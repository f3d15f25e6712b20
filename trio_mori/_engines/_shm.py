"""The shm engine: a pool in anonymous shared memory, into which the peers of one machine copy directly."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import torch
import trio

from .._errors import ConfigError, ConnectorClosed, DescriptorRefused, TransferFailed
from ..abc import Descriptor, Engine, EnginePeer, Region, Write
from . import _memfd
from ._bounds import check_bounds
from ._copies import Copies
from ._immortal import keep_for_ever
from ._process import open_process
from ._share_directory import Sharing, open_sharing
from ._shm_owner import Memory, Owner, Way, choose_way, decode, describe_self, encode, open_memory
from ._shm_peer import ShmPeer
from ._siblings import Siblings

logger = logging.getLogger("trio_mori.engine")

# Up to here a copy stays on the trio thread: 1 MiB takes 0.16 ms, and handing it to a thread alone 0.18 ms.
INLINE = 1 << 20

# One thread copies 6 GB/s on the slowest machine we measured; a few of them use up what a socket's memory gives
# (not measured there: it has two cores).
COPY_THREADS = 4

# The engines of this process by nonce, for peers in the same process.
_siblings: Siblings[ShmEngine] = Siblings()


class _State(enum.Enum):
    OPEN = "open"
    CLOSED = "closed"
    ABANDONED = "abandoned"


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_shm(*, pool_size: int, device: str, options: Mapping[str, object]) -> AsyncIterator[Engine]:
    """Open a shared-memory pool that every process of this user on this machine can write into.

    It leaves nothing behind, however the process ends; only in a share directory a socket may stay until another
    engine opens there. Opening takes up to 3 s per GiB, where the machine has to find every page; it is done in
    threads and may be cancelled. Leaving waits for the copies under way, which take milliseconds.

    Options:
        share_directory: Absolute path of a directory of mode 700 that is mounted wherever the peers run, for
            processes that do not share a pid namespace. Where both sides have one it is used.

    Fences are pidfds; a share directory passes them on as well. Where the system has none (Linux before 5.3, some
    sandboxes) `wait_fenced` never returns.
    """
    _check_arguments(pool_size, device, options)
    async with AsyncExitStack() as stack:
        owner = describe_self(shared="share_directory" in options)
        fd = _memfd.create(pool_size)
        stack.callback(os.close, fd)
        pool = _memfd.map_pool(fd, pool_size)
        await _memfd.allocate(fd, pool)
        descriptor = encode(owner, Memory(fd, pool_size))
        _memfd.publish(fd, descriptor, pool_size)
        sharing = None
        if owner.shared:
            sharing = await stack.enter_async_context(
                open_sharing(options["share_directory"], name=owner.socket_name, memory=fd)
            )
        engine = ShmEngine(pool, descriptor, owner, sharing, *os.pipe())
        _siblings.add(owner.nonce, engine)
        logger.info("shm pool of %d bytes open as %s", pool_size, owner.identity)
        try:
            yield engine
        finally:
            await engine._close()
            logger.info("shm pool of %s closed", owner.identity)


def _check_arguments(pool_size: int, device: str, options: Mapping[str, object]) -> None:
    if pool_size <= 0:
        raise ConfigError(
            f"memory_pool_size must be a positive number of bytes, not {pool_size}",
            key="memory_pool_size",
            value=pool_size,
        )
    if device != "cpu":
        raise ConfigError(
            f"shm has pools in host memory only: memory_pool_device must be 'cpu', not {device!r}",
            key="memory_pool_device",
            value=device,
        )
    for key in options:
        if key != "share_directory":
            raise ConfigError(f"shm has no option {key!r}; allowed: share_directory", key=key, value=options[key])


class ShmEngine(Engine):
    """See `open_shm`.

    The writer copies, in one go, and a copy always ends. So a posted write is a thread that copies, and closing
    waits for these threads. A peer is fenced when its process has exited, which its pidfd tells. An engine of the
    own process is fenced when it was closed, which a byte in a pipe tells: its last copy had ended before.
    """

    name = "shm"

    def __init__(
        self, pool: memoryview, descriptor: Descriptor, owner: Owner, sharing: Sharing | None, fence: int, unfenced: int
    ) -> None:
        self._pool = pool
        self._region = Region(torch.frombuffer(pool, dtype=torch.uint8), pool, "cpu")
        self._descriptor = descriptor
        self._owner = owner
        self._sharing = sharing
        self._fence = fence
        self._unfenced: int | None = unfenced
        self._state = _State.OPEN
        self._peers: dict[Descriptor, ShmPeer] = {}
        self._slots = trio.CapacityLimiter(COPY_THREADS)
        self._copies = Copies()

    @property
    def region(self) -> Region:
        return self._region

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor

    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        if self._state is not _State.OPEN:
            raise ConnectorClosed(f"the engine {self._owner.identity} is {self._state.value} and takes no peer")
        if descriptor in self._peers:
            return self._peers[descriptor]
        owner, memory = decode(descriptor)
        peer = ShmPeer(descriptor, owner, memory, choose_way(self._owner, owner))
        if peer.way is Way.OWN_PROCESS:
            sibling = _siblings.find(owner.nonce, descriptor, peer.identity)
            peer.adopt_fence(_siblings.dup_fence(owner.nonce, sibling._fence, sibling._owner.identity))
        elif peer.way is Way.PROC:
            process = open_process(owner.process, owner.identity)
            try:
                # To find out now what would be wrong at the first write; mapped only then.
                os.close(open_memory(owner, memory, descriptor))
            except BaseException:
                _close(process)
                raise
            peer.adopt_fence(process)
        elif self._sharing is not None:
            self._sharing.tasks.start_soon(self._learn_fence, self._sharing, peer)
        self._peers[descriptor] = peer
        return peer

    def drop_peer(self, peer: EnginePeer) -> None:
        if isinstance(peer, ShmPeer) and self._knows(peer):
            del self._peers[peer.descriptor]
            peer.drop()

    def write_nowait(self, peer: EnginePeer, write: Write) -> bool:
        ours = self._admit(peer, write)
        if write.size > INLINE or (ours.way is Way.SHARED and ours.buffer is None):
            return False
        # Assigning a slice keeps the GIL. ctypes.memmove takes as long (64 KiB 10 us, 1 MiB 0.15 ms) but gives it
        # away, and beside a busy thread the worst of 200 copies of 64 KiB then took 8.6 ms instead of 0.13 ms.
        target, source = self._ends(ours, write)
        target[:] = source
        return True

    async def write(self, peer: EnginePeer, write: Write) -> None:
        await trio.lowlevel.checkpoint()
        ours = self._admit(peer, write)
        if self._sharing is not None and ours.way is Way.SHARED and ours.buffer is None:
            await self._map_shared(self._sharing, ours)
        if self.write_nowait(ours, write):
            return
        async with self._slots:
            self._admit(ours, write)
            target, source = self._ends(ours, write)
            await self._copies.copy(target, source, ours.pages, write.destination)

    async def wait_fenced(self, peer: EnginePeer) -> None:
        if isinstance(peer, ShmPeer) and self._knows(peer):
            await peer.fence_known.wait()
            if peer.fence is not None:
                await peer.fence.wait()
                return
        await trio.sleep_forever()  # it was dropped: nothing can be proven about it any more

    def abandon(self) -> None:
        self._state = _State.ABANDONED
        if self._copies.abandon():
            keep_for_ever(self._region, tuple(peer.buffer for peer in self._peers.values()))
            self._unfenced = None  # stays open and empty: nobody will know when these copies have ended

    async def _close(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.CLOSED
        _siblings.remove(self._owner.nonce)
        try:
            with trio.CancelScope(shield=True):  # bounded, since a copy always ends
                await self._copies.wait_none_running()
        except KeyboardInterrupt:  # ends any wait of the main task, also a shielded one
            self.abandon()
            raise
        finally:
            for peer in tuple(self._peers.values()):
                self.drop_peer(peer)
            if self._unfenced is not None:
                os.write(self._unfenced, b"\0")  # a forked child may have the pipe too: that it is closed says nothing
                os.close(self._unfenced)
            os.close(self._fence)
        if self._state is _State.CLOSED:
            # Whoever still has the engine does not hold the memory by it: an engine that its connector opened is a
            # part of cycles, which may be collected late.
            self._pool = memoryview(bytearray())
            self._region = Region(torch.empty(0, dtype=torch.uint8), self._pool, "cpu")

    def _knows(self, peer: ShmPeer) -> bool:
        return self._peers.get(peer.descriptor) is peer

    def _admit(self, peer: EnginePeer, write: Write) -> ShmPeer:
        if self._state is not _State.OPEN:
            raise TransferFailed(f"write to {peer.identity} refused: our engine is {self._state.value}")
        if not isinstance(peer, ShmPeer) or not self._knows(peer):
            raise TransferFailed(f"write to {peer.identity} refused: it is not a peer of this engine, or was dropped")
        check_bounds(write, len(self._pool), peer)
        if peer.is_fenced():
            raise TransferFailed(f"write to {peer.identity} refused: its process has exited, or its engine was closed")
        return peer

    def _ends(self, peer: ShmPeer, write: Write) -> tuple[memoryview, memoryview]:
        """Target and source of a write, as views that keep both mappings alive."""
        try:
            pool = self._map(peer)
        except (DescriptorRefused, OSError) as error:
            raise TransferFailed(f"write to {peer.identity} refused: {error}") from error
        return (
            pool[write.destination : write.destination + write.size],
            self._pool[write.source : write.source + write.size],
        )

    def _map(self, peer: ShmPeer) -> memoryview:
        if peer.buffer is not None:
            return peer.buffer
        if peer.way is Way.OWN_PROCESS:
            peer.buffer = pool = _siblings.find(peer.owner.nonce, peer.descriptor, peer.identity)._pool
            return pool
        return peer.map(open_memory(peer.owner, peer.memory, peer.descriptor))

    async def _map_shared(self, sharing: Sharing, peer: ShmPeer) -> None:
        try:
            peer.map(await self._fetch(sharing, peer))
        except (DescriptorRefused, OSError) as error:
            raise TransferFailed(f"write to {peer.identity} refused: {error}") from error

    async def _learn_fence(self, sharing: Sharing, peer: ShmPeer) -> None:
        with peer.learning:
            try:
                memory = await self._fetch(sharing, peer)
            except DescriptorRefused as error:
                logger.warning("%s can never be fenced: %s", peer.identity, error)
            else:
                os.close(memory)

    async def _fetch(self, sharing: Sharing, peer: ShmPeer) -> int:
        """The peer's memfd, checked, which the caller owns; its pidfd is adopted on the way."""
        passed = await sharing.directory.fetch(peer.owner.socket_name)
        try:
            _memfd.check_pool(passed.memory, peer.descriptor, peer.size)
        except BaseException:
            os.close(passed.memory)
            _close(passed.process)
            raise
        if self._knows(peer):
            peer.adopt_fence(passed.process)
        else:
            _close(passed.process)
        return passed.memory


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
