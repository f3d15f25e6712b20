"""A process of this machine, named so that no other one ever has its name; and a descriptor that tells its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import attrs

from .._errors import DescriptorRefused, EngineUnavailable
from . import _syscalls


@attrs.frozen
class Process:
    """Which process, on which machine.

    Attributes:
        boot: The kernel's boot id, as 32 hexadecimal digits: which machine, since which boot.
        namespace: Inode of the pid namespace in which `pid` counts.
        pid: Process id.
        started: When it started, in clock ticks since boot; with the pid it never comes again.
    """

    boot: str
    namespace: int
    pid: int
    started: int


def this_process() -> Process:
    """The process that asks.

    Raises:
        EngineUnavailable: not on Linux, or /proc is not there.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        return Process(boot, os.stat("/proc/self/ns/pid").st_ino, os.getpid(), start_time("self"))
    except OSError as error:
        raise EngineUnavailable(f"engines need Linux and its /proc: {error}") from error


def open_process(process: Process, who: str) -> int | None:
    """A pidfd, the caller's, of a process of our pid namespace that is seen to run; None where the system has none.

    Args:
        who: Its name in the error.

    Raises:
        DescriptorRefused: it has exited, or its pid belongs to another one now.
    """
    try:
        pidfd = _syscalls.pidfd_open(process.pid)
    except ProcessLookupError as error:
        raise DescriptorRefused(f"{who}: process {process.pid} has exited") from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise DescriptorRefused(f"{who}: process {process.pid} cannot be watched: {error.strerror}") from error
        return None
    try:
        # Read after the pidfd was opened: if the process is the right one now, the pidfd cannot be of a later one.
        started = start_time(str(process.pid))
    except OSError as error:
        os.close(pidfd)
        raise DescriptorRefused(
            f"{who}: /proc/{process.pid} cannot be read ({error.strerror}): the process has exited, or /proc is "
            "mounted with hidepid or for another pid namespace"
        ) from error
    if started != process.started:
        os.close(pidfd)
        raise DescriptorRefused(f"{who}: process {process.pid} has exited and another one has its pid now")
    return pidfd


def start_time(pid: str) -> int:
    """When a process started, in clock ticks since boot."""
    # Field 22 of the line; the second one is the command in parentheses and may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
