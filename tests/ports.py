"""Ports for tests that have to name one before anybody listens on it."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# Not that of `random`, whose numbers are the same in every process that runs these tests.
_any = random.SystemRandom()


def free_port(count: int = 1) -> int:
    """A port where nobody listens, and that no connection gets as its own; the first of so many of them in a row."""
    while True:
        first = _any.randrange(20000, 32000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
