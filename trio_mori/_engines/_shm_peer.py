"""A peer of the shm engine: what is known of its process, and what of it is open here."""

from __future__ import annotations

import os
import select

import trio

from ..abc import Descriptor, EnginePeer
from . import _memfd
from ._shm_owner import Memory, Owner, Way


class ShmPeer(EnginePeer):
    """Another engine's pool. The first write maps it, so that a peer learned only for its fence holds no memory.

    Attributes:
        buffer: The peer's pool, once mapped.
        fence: Readable as soon as no byte of the peer can arrive: a pidfd, or the end of a pipe. None while unknown.
        fence_known: Set together with `fence`.
        learning: Around the task that learns the fence, where that takes one.
    """

    def __init__(self, descriptor: Descriptor, owner: Owner, memory: Memory, way: Way) -> None:
        self.descriptor = descriptor
        self.owner = owner
        self.memory = memory
        self.way = way
        self.buffer: memoryview | None = None
        self.fence: int | None = None
        self.fence_known = trio.Event()
        self.learning = trio.CancelScope()
        self._poll = select.poll()

    @property
    def identity(self) -> str:
        return self.owner.identity

    @property
    def size(self) -> int:
        return self.memory.size

    def adopt_fence(self, fd: int | None) -> None:
        """Take over a descriptor that becomes readable when the peer is fenced; closes one that is not needed."""
        if fd is None:
            return
        if self.fence is not None:
            os.close(fd)
            return
        self.fence = fd
        self._poll.register(fd, select.POLLIN)
        self.fence_known.set()

    def map(self, memory: int) -> memoryview:
        """Take over the peer's memfd, which was checked, and map it."""
        try:
            self.buffer = pool = _memfd.map_pool(memory, self.size)
            return pool
        finally:
            os.close(memory)

    def is_fenced(self) -> bool:
        """Whether the peer is over by now: 0.4 us, little enough to be asked before every write."""
        return self.fence is not None and bool(self._poll.poll(0))

    def drop(self) -> None:
        """Let go of memory and fence. Writes and waiters under way have references of their own."""
        self.learning.cancel()
        self.buffer = None
        if self.fence is not None:
            self._poll.unregister(self.fence)
            os.close(self.fence)
            self.fence = None
