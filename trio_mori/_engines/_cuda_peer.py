"""A peer of the cuda_ipc engine: what is known of its process, and what of it is open here."""

from __future__ import annotations

import attrs
import torch
import trio

from ..abc import Descriptor, Engine, EnginePeer
from ._cuda_library import Lane
from ._cuda_owner import Memory, Owner
from ._fence import Fence


@attrs.define(eq=False)
class Track:
    """A lane to a peer, and how many copies are under way on it."""

    lane: Lane
    copies: int = 0


class CudaPeer(EnginePeer):
    """Another engine's pool. The first write maps it, so that a peer learned only for its fence holds nothing.

    Attributes:
        engine: The engine whose peer it is; None once it was dropped.
        fence: Tells when it is over; None where nothing can.
        pool: Its pool, once mapped.
        opening: Held while it is mapped.
        tracks: Its own lanes, so that nobody's copies wait for another peer's.
        writes: `write` calls under way.
    """

    def __init__(self, descriptor: Descriptor, owner: Owner, memory: Memory) -> None:
        self.descriptor = descriptor
        self.owner = owner
        self.memory = memory
        self.engine: Engine | None = None
        self.fence: Fence | None = None
        self.pool: torch.Tensor | None = None
        self.opening = trio.Lock()
        self.tracks: list[Track] = []
        self.writes = 0

    @property
    def identity(self) -> str:
        return self.owner.identity

    @property
    def size(self) -> int:
        return self.memory.size

    def is_fenced(self) -> bool:
        """Whether the peer is known to be over."""
        return self.fence is not None and self.fence.is_over()
