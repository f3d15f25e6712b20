"""Descriptors of this process: which it has, and that there are no more of them."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_files() -> set[tuple[str, str]]:
    """Their numbers and what each is open on, so that one of an earlier test that is closed makes up for no new one."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory itself, or one that libzmq's threads have just closed
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@contextmanager
def no_descriptors_left() -> Iterator[int]:
    """This process gets no descriptor, whatever is closed meanwhile, as libzmq's threads may do for an earlier test.

    Yields:
        The limit: only numbers below it would be given, and all of these stay taken.
    """
    limit = 3
    assert all(os.path.exists(f"/proc/self/fd/{number}") for number in range(limit))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
