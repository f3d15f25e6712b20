"""Two Linux calls that some Pythons leave out: the ones that uv installed until the middle of 2026 were built
against a C library older than both.
"""

from __future__ import annotations

import ctypes
import os
import platform

# From linux/memfd.h and linux/fcntl.h; the same Pythons lack the names.
MFD_CLOEXEC = 0x1
MFD_ALLOW_SEALING = 0x2
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_EXEC = 0x20

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_PIDFD_OPEN = 434  # the same on every architecture, as all calls since Linux 5.1


def memfd_create(name: str) -> int:
    """A new descriptor of anonymous memory of size 0 that may be sealed; not inherited by children.

    Raises:
        OSError: the kernel has no such call, or refuses it.
    """
    flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _call(_MEMFD_CREATE.get(platform.machine(), -1), ctypes.c_char_p(name.encode()), ctypes.c_uint(flags))


def pidfd_open(pid: int) -> int:
    """A descriptor of a process; it becomes readable when the process has exited. Not inherited by children.

    Raises:
        OSError: no such process, or the kernel has no such call (before 5.3), or a sandbox forbids it.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def _call(number: int, *arguments: ctypes.c_char_p | ctypes.c_int | ctypes.c_uint) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
