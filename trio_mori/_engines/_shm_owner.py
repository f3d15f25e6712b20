"""Who owns a shared-memory pool, as its descriptor says it; and which way, if any, leads there from this process."""

from __future__ import annotations

import enum
import os
import secrets
from typing import Annotated

import msgspec

from .._errors import DescriptorRefused
from ..abc import Descriptor
from . import _memfd
from ._process import Process, this_process

_Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Int = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Pid = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]  # PID_MAX_LIMIT of 64-bit Linux
_Fd = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]  # the kernel's ceiling of fs.nr_open is just below


class Owner(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="trio-mori shm 1"):
    """The process and engine that own a pool; the engine half of a descriptor.

    Attributes:
        boot: The kernel's boot id: which machine, since which boot.
        namespace: Inode of the pid namespace in which `pid` counts.
        pid: Process id.
        started: When the process started, in clock ticks since boot; with the pid it never comes again.
        uid: Effective user id.
        nonce: Random; names this one engine.
        shared: Whether it hands its memory out in a share directory.
    """

    boot: _Id
    namespace: _Int
    pid: _Pid
    started: _Int
    uid: _Int
    nonce: _Id
    shared: bool

    @property
    def process(self) -> Process:
        """The process that it names."""
        return Process(self.boot.hex(), self.namespace, self.pid, self.started)

    @property
    def identity(self) -> str:
        """Unique name for messages."""
        return f"shm:{self.pid}:{self.nonce.hex()}"

    @property
    def socket_name(self) -> str:
        """File name of its socket in the share directory."""
        return f"{self.nonce.hex()}.shm"


class Memory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pool itself; the memory half of a descriptor."""

    fd: _Fd
    size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]


class Way(enum.Enum):
    """How a pool's memory is reached from here."""

    OWN_PROCESS = enum.auto()
    PROC = enum.auto()  # /proc/PID/fd/FD of a process that we can see
    SHARED = enum.auto()  # a socket in the share directory


_encoder = msgspec.msgpack.Encoder()
_owner = msgspec.msgpack.Decoder(Owner)
_memory = msgspec.msgpack.Decoder(Memory)


def encode(owner: Owner, memory: Memory) -> Descriptor:
    """The descriptor that peers are given."""
    return Descriptor(_encoder.encode(owner), _encoder.encode(memory))


def decode(descriptor: Descriptor) -> tuple[Owner, Memory]:
    """Both halves of a descriptor.

    Raises:
        DescriptorRefused: not a descriptor of this engine and release.
    """
    try:
        return _owner.decode(descriptor.engine), _memory.decode(descriptor.memory)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DescriptorRefused(f"shm: not a descriptor of this engine and release: {error}") from error


def describe_self(*, shared: bool) -> Owner:
    """This process, with a new nonce.

    Raises:
        EngineUnavailable: not on Linux, or /proc is not there.
    """
    process = this_process()
    boot = bytes.fromhex(process.boot)
    nonce = secrets.token_bytes(16)
    return Owner(boot, process.namespace, process.pid, process.started, os.geteuid(), nonce, shared)


def choose_way(ours: Owner, theirs: Owner) -> Way:
    """The way from our process to a pool of that owner; a share directory that both sides name comes first.

    Raises:
        DescriptorRefused: there is none; says why, and what to do.
    """
    if theirs.boot != ours.boot:
        raise DescriptorRefused(
            f"{theirs.identity} runs on another machine: shm moves bytes within one; use an engine that crosses hosts"
        )
    if theirs.uid != ours.uid:
        raise DescriptorRefused(
            f"{theirs.identity} runs as uid {theirs.uid}, this process as uid {ours.uid}: run both as the same user"
        )
    if theirs.process == ours.process:
        return Way.OWN_PROCESS
    if ours.shared and theirs.shared:
        return Way.SHARED
    if theirs.namespace == ours.namespace:
        return Way.PROC
    who = "neither side has" if not (ours.shared or theirs.shared) else "only one side has"
    raise DescriptorRefused(
        f"{theirs.identity} runs in another pid namespace and {who} a share_directory: start the containers with one "
        "pid namespace (--pid=host, or --pid=container:NAME), or mount one directory into both and set the shm option "
        "share_directory to it on both sides"
    )


def open_memory(owner: Owner, memory: Memory, descriptor: Descriptor) -> int:
    """The owner's memfd, by /proc, checked against the descriptor. The caller owns it.

    Raises:
        DescriptorRefused: it may not be opened, or is not that pool.
    """
    return _memfd.open_by_proc(owner.pid, memory.fd, descriptor, memory.size, who=owner.identity)
