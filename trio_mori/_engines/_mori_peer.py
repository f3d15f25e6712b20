"""A peer of a Mori engine: what its descriptor says, whether that can be true, and what of it is open here."""

from __future__ import annotations

import time
from math import inf
from typing import Annotated

import msgspec
import torch
import trio

from .._errors import DescriptorRefused, TransferFailed
from ..abc import Descriptor, Engine, EnginePeer
from ._fence import Fence
from ._mori_library import RAISES, EngineDesc, Library, MemoryDesc, Session
from ._mori_outlet import Outlet

# MemoryLocationType in packed form.
_GPU = 2

_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Word = Annotated[int, msgspec.Meta(ge=0)]  # of 64 bits, which msgspec cannot bound; Mori checks it


class _PackedEngine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    node_id: _Name
    hostname: _Name
    host: _Name
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    pid: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class _PackedMemory(msgspec.Struct, frozen=True, array_like=True):
    engine_key: _Name
    id: _Word
    device_id: int
    device_bus_id: _Name
    data: _Word
    size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]
    loc: int
    ipc_handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


_engine = msgspec.msgpack.Decoder(_PackedEngine)
_memory = msgspec.msgpack.Decoder(_PackedMemory)


class MoriPeer(EnginePeer):
    """Another engine's pool. Mori hears of it, and maps it, at the first write.

    Attributes:
        owner: The engine whose peer it is; None once it was dropped.
        engine: Mori's own form of the descriptor's halves.
        memory: As `engine`.
        pool: Its memory, if it is of this process.
        fence: Tells when it is over; None where nothing can.
        seen: When it was last seen to be there, by `time.monotonic`.
        outlet: What writes to it; None until the first write.
        opening: Held by the first write.
        unreachable: What the last first write that could not leave raised.
        session: The short way, once a write has succeeded.
        writes: `write` calls under way.
    """

    def __init__(self, descriptor: Descriptor, engine: EngineDesc, memory: MemoryDesc, size: int) -> None:
        self.descriptor = descriptor
        self.owner: Engine | None = None
        self.engine = engine
        self.memory = memory
        self.pool: torch.Tensor | None = None
        self.fence: Fence | None = None
        self.seen = -inf
        self.outlet: Outlet | None = None
        self.opening = trio.Lock()
        self.unreachable: TransferFailed | None = None
        self.session: Session | None = None
        self.writes = 0
        self._size = size

    @property
    def identity(self) -> str:
        return f"mori:{self.engine.key}"

    @property
    def size(self) -> int:
        return self._size

    def check_present(self) -> None:
        """Refuse a write to a peer that was dropped, or is proven to be over.

        Raises:
            TransferFailed: settled.
        """
        if self.owner is None:
            raise TransferFailed(f"write to {self.identity} refused: it was dropped")
        if self.fence is not None and self.fence.is_over():
            raise TransferFailed(f"write to {self.identity} refused: its process has exited, or its engine was closed")
        self.seen = time.monotonic()


def decode(library: Library, descriptor: Descriptor, *, gpu: bool) -> MoriPeer:
    """A peer from its descriptor. The bytes are checked here first: Mori's unpack believes what it reads.

    Args:
        gpu: Only memory of a GPU that other processes can map will do, as xgmi needs it.

    Raises:
        DescriptorRefused: malformed, or no such memory.
    """
    try:
        engine, memory = _engine.decode(descriptor.engine), _memory.decode(descriptor.memory)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DescriptorRefused(f"mori: not a descriptor of Mori: {error}") from error
    who = f"mori:{engine.key}"
    if memory.engine_key != engine.key:
        raise DescriptorRefused(f"{who}: its memory is said to be of another engine, {memory.engine_key!r}")
    if gpu and memory.loc != _GPU:
        raise DescriptorRefused(
            f"{who}: its pool is in host memory, which xgmi does not reach: set its memory_pool_device to cuda:N"
        )
    if gpu and not any(memory.ipc_handle):
        raise DescriptorRefused(
            f"{who}: its pool cannot be mapped by other processes (no ipc handle): allocate it with "
            "PYTORCH_HIP_ALLOC_CONF free of expandable_segments, and open its engine before it is registered"
        )
    try:
        ours, theirs = library.EngineDesc.unpack(descriptor.engine), library.MemoryDesc.unpack(descriptor.memory)
    except (*RAISES, ValueError) as error:
        raise DescriptorRefused(f"{who}: refused by Mori: {error}") from error
    peer = MoriPeer(descriptor, ours, theirs, memory.size)  # type: ignore[arg-type]
    if peer.engine.pack() != descriptor.engine or peer.memory.pack() != descriptor.memory:
        raise DescriptorRefused(
            f"{who}: packed by another release of Mori, or altered: install the same amd-mori on both sides"
        )
    return peer
