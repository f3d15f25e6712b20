"""The connector's own tests, among themselves and with stock peers, for engines that are not made of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import rig
import stock_edges
import stock_peers
import test_chunks
import test_connector
import test_connector_buffers
import test_connector_close
import test_connector_gone
import test_connector_health
import test_connector_memory
import test_connector_roles
import test_connector_room
import test_stock_late
import test_stock_receivers
import test_stock_replaced
import test_stock_senders

from trio_mori.testing import MemoryFabric

SUITE = (
    test_chunks,
    test_connector,
    test_connector_buffers,
    test_connector_close,
    test_connector_gone,
    test_connector_health,
    test_connector_memory,
    test_connector_roles,
    test_connector_room,
    test_stock_late,
    test_stock_receivers,
    test_stock_replaced,
    test_stock_senders,
)

OTHERS = {
    # They start processes, whose pools are in host memory.
    "test_a_sender_process_that_is_killed_is_lost_after_peer_timeout_or_replaced_by_the_next",
    "test_a_sender_process_that_is_stopped_is_lost_for_each_get_and_may_go_on",
    # It gives two hundred queries four milliseconds each, and all of them twenty seconds. The engine has no part in it.
    "test_a_late_answer_to_a_query_is_never_taken_for_that_to_a_newer_one",
}

ALL = [(name, test) for module in SUITE for name, test in vars(module).items() if name.startswith("test_")]
assert len(ALL) == len(dict(ALL)), "two tests with one name"
assert dict(ALL).keys() >= OTHERS, "one that is left out is not there"

TESTS = {name: test for name, test in ALL if name not in OTHERS}

# With pools in a GPU's own memory these are not what they are about.
HOST_ONLY = {
    # Copies into such a pool, and out of it what one tensor fills, are made in no thread.
    "test_a_put_that_is_cancelled_while_a_thread_copies_publishes_nothing",
    "test_a_get_that_copies_in_a_thread_ends_well_or_is_told_and_harms_nothing",
    "test_a_get_that_copies_in_a_thread_is_waited_for",
    # It looks for the pool in host memory.
    "test_health_has_the_stock_keys_and_the_pool_by_state",
}
assert TESTS.keys() >= HOST_ONLY, "one that is left out is not there"

TESTS_ON_GPUS = {name: test for name, test in TESTS.items() if name not in HOST_ONLY}

count_descriptors = test_connector_close.open_descriptors


def open_descriptors() -> int:
    """An emulated pool is a descriptor, until its tensor is gone."""
    gc.collect()
    return count_descriptors()


def over(fabric: Callable[[], MemoryFabric], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on these tests take such a fabric."""
    for module in (rig, stock_edges, stock_peers, *SUITE):
        monkeypatch.setattr(module, "MemoryFabric", fabric, raising=False)
    monkeypatch.setattr(test_connector_close, "open_descriptors", open_descriptors)
