"""A pool in anonymous shared memory: allocated, labelled, sealed; and the checks before somebody else's is mapped.

The file is the pool, rounded up to whole pages, and one page more that carries the label: the very descriptor that
peers are given. A mapper compares it with the one it was given, so that a descriptor which was altered, belongs to
another process or names another file never leads to a mapping.

The seals say that the file can neither shrink nor grow again. Without them an owner that truncates its file kills
everyone who has mapped it with SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

import trio

from .._errors import DescriptorRefused, EngineUnavailable
from ..abc import Descriptor
from . import _syscalls

_SEALS = _syscalls.F_SEAL_SHRINK | _syscalls.F_SEAL_GROW | _syscalls.F_SEAL_SEAL

# How the kernel says that there is no shared memory left, whichever of the calls asks for it.
_FULL = (errno.ENOSPC, errno.ENOMEM)

# One step of touching a new pool, between two checkpoints: 0.2 to 0.8 s where every page is new to the machine.
_SLICE = 256 << 20


def create(size: int) -> int:
    """A memfd with room for a pool of `size` bytes and its label. The caller owns the descriptor.

    Raises:
        EngineUnavailable: the machine or the control group lacks the memory, or the kernel lacks memfd.
    """
    available = _available_memory()
    if size > available:
        # The kernel would not refuse: it would look for a process to kill.
        raise EngineUnavailable(
            f"shm: a pool of {size} bytes does not fit into the {available} bytes of memory that are available here; "
            "lower memory_pool_size or raise the memory limit of the container"
        )
    try:
        fd = _syscalls.memfd_create("trio-mori-pool")
    except OSError as error:
        if error.errno in _FULL:
            raise _no_memory(error, 0, size) from error
        raise EngineUnavailable(f"shm: this system refuses memfd_create: {error}") from error
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, _label_offset(size) + mmap.PAGESIZE)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _no_memory(error, 0, size) from error
        raise
    return fd


async def allocate(fd: int, pool: memoryview) -> None:
    """Give the pool all its pages, and touch them, in threads.

    Cancellable between slices of 256 MiB. Pages are touched with a plain memset because ``MAP_POPULATE`` keeps the
    GIL: 256 MiB stopped every other thread for 796 ms, against 4 ms this way.

    If it fails or is cancelled, `pool` is released: the error leads to it by its frames, and would keep what memory
    there was until the garbage collector comes.

    Raises:
        EngineUnavailable: there is not enough memory.
    """
    try:
        for start in range(0, len(pool), _SLICE):
            await trio.to_thread.run_sync(_touch, fd, pool, start, min(_SLICE, len(pool) - start))
    except BaseException:
        pool.release()
        raise


def _touch(fd: int, pool: memoryview, start: int, size: int) -> None:
    try:
        # Fails where the memset would be killed.
        os.posix_fallocate(fd, start, size)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _no_memory(error, start, len(pool)) from error
    ctypes.memset(address(pool[start : start + size]), 0, size)


def _no_memory(error: OSError, start: int, size: int) -> EngineUnavailable:
    return EngineUnavailable(
        f"shm: memory ran out at {start} of the pool's {size} bytes ({error.strerror}); lower memory_pool_size, "
        "end what holds the machine's memory, or raise the memory limit of the container"
    )


def publish(fd: int, descriptor: Descriptor, size: int) -> None:
    """Write the label and seal the size: from here on peers may map it."""
    os.pwrite(fd, _label(descriptor), _label_offset(size))
    fcntl.fcntl(fd, _syscalls.F_ADD_SEALS, _SEALS)


def map_pool(fd: int, size: int) -> memoryview:
    """The pool's bytes; unmapped when the last view of them is gone. `fd` may be closed afterwards."""
    return memoryview(mmap.mmap(fd, size))


def address(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def open_by_proc(pid: int, number: int, descriptor: Descriptor, size: int, *, who: str) -> int:
    """The memfd that a process has under a number, checked against the descriptor. The caller owns it.

    Only the two integers come from the descriptor. The file is looked at before it is opened, since opening a pipe
    or a device, which the process may have under that number as well, is not without effects.

    Args:
        who: The peer, in errors.

    Raises:
        DescriptorRefused: it may not be opened, or is not that pool.
    """
    try:
        path = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DescriptorRefused(f"{who}: its pool is closed, or its process has exited") from error
    except OSError as error:
        raise DescriptorRefused(
            f"{who}: /proc/{pid}/fd/{number} may not be opened ({error.strerror}): the process is ending, has "
            "capabilities that this one lacks, or is not dumpable; start both alike, or use shm with a share_directory "
            "on both sides"
        ) from error
    try:
        check_path(path, size)
        fd = os.open(f"/proc/self/fd/{path}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DescriptorRefused(f"{who}: its pool may not be written: {error.strerror}") from error
    finally:
        os.close(path)
    try:
        check_pool(fd, descriptor, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_path(fd: int, size: int) -> None:
    """Refuse what is not a pool's file before it is opened: `fd` is an ``O_PATH`` or any other descriptor of it.

    Raises:
        DescriptorRefused: not a regular file of ours of exactly that size.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise DescriptorRefused(
            f"shm: the descriptor names a file that is not a pool of this user (mode {stat.filemode(status.st_mode)}, "
            f"uid {status.st_uid}, ours {os.geteuid()})"
        )
    if status.st_size != _label_offset(size) + mmap.PAGESIZE:
        raise DescriptorRefused(f"shm: the descriptor says {size} bytes, the file it names has {status.st_size}")


def check_pool(fd: int, descriptor: Descriptor, size: int) -> None:
    """Refuse what is not exactly the pool that the descriptor describes.

    Raises:
        DescriptorRefused: wrong kind, owner, size, seals or label.
    """
    check_path(fd, size)
    try:
        seals = fcntl.fcntl(fd, _syscalls.F_GET_SEALS)
    except OSError as error:
        raise DescriptorRefused("shm: the descriptor names a file that is not anonymous memory") from error
    if seals & ~_syscalls.F_SEAL_EXEC != _SEALS:
        raise DescriptorRefused(f"shm: the pool's seals are {seals:#x}, not {_SEALS:#x}: it could shrink while mapped")
    label = _label(descriptor)
    if os.pread(fd, len(label), _label_offset(size)) != label:
        raise DescriptorRefused("shm: the memory that the descriptor names carries another label: forged, or altered")


def _label(descriptor: Descriptor) -> bytes:
    lengths = len(descriptor.engine).to_bytes(2, "big") + len(descriptor.memory).to_bytes(2, "big")
    return b"trio-mori pool\0" + lengths + descriptor.engine + descriptor.memory


def _label_offset(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _available_memory() -> int:
    """Bytes that this process can still have, as far as the kernel tells: the machine's, or its control group's."""
    available = _fields(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    try:
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().split("0::/", 1)[1].splitlines()[0]
        limit = int((group / "memory.max").read_text())
        cache = _fields(group / "memory.stat")
        used = int((group / "memory.current").read_text()) - cache["active_file"] - cache["inactive_file"]
    except (OSError, IndexError, ValueError):
        return available  # no control group of version 2, or no limit ("max")
    return min(available, limit - used)


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value, *_ in (line.split() for line in path.read_text().splitlines())}
