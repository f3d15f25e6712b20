"""A blocking sender and receiver over memory engines in one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from rig import POOL, SOON, Pair, open_pair, wait_until

from trio_mori._portal import Portal
from trio_mori.blocking import COPY_IN_LOOP, BlockingConnector

ROOT = Path(__file__).parent.parent

# Sizes that are copied in the loop, and in the thread that calls.
SIZES = (1000, COPY_IN_LOOP + 1)

LARGE = 16 << 20


class Both:
    """The two connectors of a pair, both in one loop, from a thread."""

    def __init__(self, portal: Portal, pair: Pair) -> None:
        self.portal = portal
        self.pair = pair
        self.sender = BlockingConnector(portal, pair.sender)
        self.receiver = BlockingConnector(portal, pair.receiver)

    def put(self, key: str, data: object, timeout: float | None = SOON) -> None:
        self.sender.put("0", "1", key, data, timeout=timeout)

    def get(self, key: str, timeout: float | None = SOON) -> object:
        return self.receiver.get("0", "1", key, timeout=timeout)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Until something holds in the loop, soon."""
        self.portal.call(wait_until, condition, what="a condition")

    def assert_whole(self) -> None:
        """Both pools are wholly free, soon, and a payload still comes across."""
        self.portal.call(self.pair.assert_whole)


@contextmanager
def both(*, pool: int = POOL) -> Iterator[Both]:
    """A pair whose loop is closed in the end."""
    portal = Portal()
    pair = portal.enter(partial(open_pair, sender_pool=pool, receiver_pool=pool)).value
    try:
        yield Both(portal, pair)
    finally:
        portal.close()


@pytest.fixture(name="pair")
def open_both() -> Iterator[Both]:
    """A pair with pools that a large payload fits into."""
    with both(pool=LARGE) as pair:
        yield pair
        pair.assert_whole()
