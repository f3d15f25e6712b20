"""No shared memory is left, for one process: the calls by which the engine makes a pool fail as they do then.

A limit that only this process is under would need a control group of its own, and so leave to make one; and a pool is
anonymous memory, which no mount limits. What the kernel itself says is tried by `tests/test_full_memory.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from trio_mori import EngineUnavailable, open_connector
from trio_mori._engines import _syscalls

# Where a pool is made: its file, its size, its pages.
SEAMS: tuple[tuple[Any, str], ...] = ((_syscalls, "memfd_create"), (os, "ftruncate"), (os, "posix_fallocate"))


def _refuse(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def no_shared_memory(seam: int) -> Iterator[None]:
    """Have one of the calls fail meanwhile, in all threads."""
    owner, name = SEAMS[seam]
    call = getattr(owner, name)
    setattr(owner, name, _refuse)
    try:
        yield
    finally:
        setattr(owner, name, call)


async def try_to_open(config: Mapping[str, object]) -> str:
    """Open a connector, and close it; returns what was said if there is no engine for it, or nothing."""
    try:
        async with open_connector(config):
            return ""
    except EngineUnavailable as error:
        return str(error)
