"""A peer of the shm engine: what is known of its process, and what of it is open here."""

from __future__ import annotations

import os

import trio

from .._pages import PageFinder
from ..abc import Descriptor, EnginePeer
from . import _memfd
from ._fence import Fence
from ._shm_owner import Memory, Owner, Way


class ShmPeer(EnginePeer):
    """Another engine's pool. The first write maps it, so that a peer learned only for its fence holds no memory.

    Attributes:
        buffer: The peer's pool, once mapped.
        pages: Finds the pages of that mapping. None if it is another engine's of this process, who has them.
        fence: Over as soon as no byte of the peer can arrive. None while unknown.
        fence_known: Set together with `fence`.
        learning: Around the task that learns the fence, where that takes one.
    """

    def __init__(self, descriptor: Descriptor, owner: Owner, memory: Memory, way: Way) -> None:
        self.descriptor = descriptor
        self.owner = owner
        self.memory = memory
        self.way = way
        self.buffer: memoryview | None = None
        self.pages: PageFinder | None = None
        self.fence: Fence | None = None
        self.fence_known = trio.Event()
        self.learning = trio.CancelScope()

    @property
    def identity(self) -> str:
        return self.owner.identity

    @property
    def size(self) -> int:
        return self.memory.size

    def adopt_fence(self, fd: int | None) -> None:
        """Take over a descriptor that becomes readable when the peer is over; closes one that is not needed."""
        if fd is not None and self.fence is None:
            self.fence = Fence(fd)
            self.fence_known.set()
        elif fd is not None:
            os.close(fd)

    def map(self, memory: int) -> memoryview:
        """Take over the peer's memfd, which was checked, and map it."""
        try:
            self.buffer = pool = _memfd.map_pool(memory, self.size)
            self.pages = PageFinder(_memfd.address(pool), self.size)
            return pool
        finally:
            os.close(memory)

    def is_fenced(self) -> bool:
        """Whether the peer is known to be over."""
        return self.fence is not None and self.fence.is_over()

    def drop(self) -> None:
        """Let go of memory and fence. Writes and waiters under way have references of their own."""
        self.learning.cancel()
        self.buffer = None
        if self.fence is not None:
            self.fence.close()
            self.fence = None
