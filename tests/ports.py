"""Ports for tests that have to name one before anybody listens on it."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# Below those that the system gives to connections. Each process has a range of its own, so that tests of two that run
# at the same time do not take each other's ports while nobody listens on them.
FIRST, RANGE, RANGES = 20000, 500, 24

# Not that of `random`, whose numbers are the same in every process that runs these tests.
_any = random.SystemRandom()


def _own_range() -> int:
    """The first port of this process's range, which a name holds until it ends: its descriptor is never closed."""
    for number in _any.sample(range(RANGES), RANGES):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0trio-mori-tests-{number}")
        except OSError:
            holder.close()
        else:
            holder.detach()
            return FIRST + number * RANGE
    return FIRST + _any.randrange(RANGES) * RANGE  # more processes than ranges: two may meet


# Now, before any test counts descriptors.
_first = _own_range()


def free_port(count: int = 1) -> int:
    """A port where nobody listens, and that no connection gets as its own; the first of so many of them in a row."""
    while True:
        first = _any.randrange(_first, _first + RANGE - count + 1)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
