"""Descriptors of this process: that there are no more of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


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
