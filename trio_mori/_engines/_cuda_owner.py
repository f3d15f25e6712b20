"""Who owns a pool on a GPU, as its descriptor says it."""

from __future__ import annotations

import os
import secrets
from typing import Annotated

import msgspec

from .._errors import DescriptorRefused
from ..abc import Descriptor
from . import _memfd
from ._cuda_library import Gpu, Share, is_plain
from ._process import Process

_Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Int = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=(1 << 48) - 1)]  # the addresses of a process end there
_Place = Annotated[int, msgspec.Meta(ge=0, le=(1 << 48) - 1)]
_Pid = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]  # PID_MAX_LIMIT of 64-bit Linux
_Fd = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]  # the kernel's ceiling of fs.nr_open is just below
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Handle = Annotated[bytes, msgspec.Meta(min_length=64, max_length=66)]

# Bytes of the memfd that carries a pool's label, beside that.
PAGE = 4096


class Owner(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="trio-mori cuda_ipc 1"):
    """The process and engine that own a pool; the engine half of a descriptor.

    Attributes:
        boot: The kernel's boot id: which machine, since which boot.
        namespace: Inode of the pid namespace in which `pid` counts.
        pid: Process id.
        started: When the process started, in clock ticks since boot; with the pid it never comes again.
        nonce: Random; names this one engine.
    """

    boot: _Id
    namespace: _Int
    pid: _Pid
    started: _Int
    nonce: _Id

    @property
    def process(self) -> Process:
        """The process that it names."""
        return Process(self.boot.hex(), self.namespace, self.pid, self.started)

    @property
    def identity(self) -> str:
        """Unique name for messages."""
        return f"cuda_ipc:{self.pid}:{self.nonce.hex()}"


class Memory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pool itself; the memory half of a descriptor.

    Attributes:
        nonce: Of the engine that it belongs to.
        fd: Number of a memfd of the process that is labelled with this descriptor. Whoever has the descriptor from
            the network can tell by it that this process made it, for the driver believes every handle: of 64 with a
            bit altered most opened, and one was a segmentation fault.
        size: Bytes.
        handle: The driver's name of the allocation that holds it.
        offset: Where in that it begins.
        gpu: Which GPU it is on, for messages.
        uuid: As `gpu`.
    """

    nonce: _Id
    fd: _Fd
    size: _Size
    handle: _Handle
    offset: _Place
    gpu: _Name
    uuid: _Name

    @property
    def share(self) -> Share:
        """How it is reached."""
        return Share(self.handle, self.offset, self.size)

    @property
    def device(self) -> Gpu:
        """Where it is."""
        return Gpu(self.gpu, self.uuid)


_encoder = msgspec.msgpack.Encoder()
_owner = msgspec.msgpack.Decoder(Owner)
_memory = msgspec.msgpack.Decoder(Memory)


def describe(process: Process, gpu: Gpu, share: Share, fd: int) -> tuple[Owner, Descriptor]:
    """A new engine of this process, and the descriptor of its pool, with which the memfd is to be labelled."""
    nonce = secrets.token_bytes(16)
    owner = Owner(bytes.fromhex(process.boot), process.namespace, process.pid, process.started, nonce)
    memory = Memory(nonce, fd, share.span, share.handle, share.offset, gpu.name[:256], gpu.uuid[:256])
    return owner, Descriptor(_encoder.encode(owner), _encoder.encode(memory))


def decode(descriptor: Descriptor) -> tuple[Owner, Memory]:
    """Both halves of a descriptor.

    Raises:
        DescriptorRefused: not a descriptor of this engine and release.
    """
    try:
        owner, memory = _owner.decode(descriptor.engine), _memory.decode(descriptor.memory)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DescriptorRefused(f"cuda_ipc: not a descriptor of this engine and release: {error}") from error
    if memory.nonce != owner.nonce:
        raise DescriptorRefused(f"{owner.identity}: its memory is said to be of another engine")
    if not is_plain(memory.handle):
        raise DescriptorRefused(
            f"{owner.identity}: its memory is of a kind that is not mapped here (expandable segments); take "
            "expandable_segments out of its PYTORCH_CUDA_ALLOC_CONF, and run one release of torch on both sides"
        )
    return owner, memory


def check_author(owner: Owner, memory: Memory, descriptor: Descriptor) -> None:
    """Refuse a descriptor that was not made by the process that it names, which is of our pid namespace.

    Raises:
        DescriptorRefused: forged, altered, or of an engine that was closed.
    """
    os.close(_memfd.open_by_proc(owner.pid, memory.fd, descriptor, PAGE, who=owner.identity))
