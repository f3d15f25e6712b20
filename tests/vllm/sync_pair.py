"""Two stages in one process, over shared memory, with blocking calls, and words for what tests do with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trio_mori_vllm_omni._home as home_module
import trio_mori_vllm_omni._interests as interests_module
from trio_mori_vllm_omni._place import find_place
from trio_mori_vllm_omni._sync import SyncConnector

from trio_mori import ConnectorClosed

POOL = 1 << 20

# Much longer than anything here takes, and shorter than anybody's patience.
LIMIT = 20.0


class Identity:
    """A codec that changes nothing."""

    def plain(self, value: object) -> tuple[object, bool]:
        if isinstance(value, complex):
            raise TypeError("complex numbers do not travel")
        return value, True

    def revived(self, tree: object) -> object:
        return tree


def make(extra: dict[str, object]) -> SyncConnector:
    extra = {"host": "127.0.0.1", "memory_pool_size": POOL, **extra}
    return SyncConnector(extra, find_place(extra, resolved=True), Identity())


@contextmanager
def made(**extra: object) -> Iterator[SyncConnector]:
    connector = make(extra)
    try:
        yield connector
    finally:
        connector.close()


@contextmanager
def open_pair(**extra: object) -> Iterator[tuple[SyncConnector, SyncConnector]]:
    """A sender and its receiver."""
    shm = {"backend_type": "shm", **extra}
    with made(role="sender", stage_id=0, zmq_port=0, **shm) as up:
        info = up.get_connection_info()
        with made(
            role="receiver", stage_id=1, from_stage=0, sender_host=info["host"], sender_zmq_port=info["zmq_port"], **shm
        ) as down:
            yield up, down


@pytest.fixture(autouse=True)
def _leaves_nothing_in_the_loop() -> Iterator[None]:
    """All connectors of a process share one loop, and a test that begins counts on finding it at rest."""
    yield
    home = home_module._home
    if home is not None and not home.is_over:
        eventually(lambda: home._nursery is not None and not home._nursery.child_tasks, "that the loop is at rest")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is kept, though the machine may halt the test before it polls again."""
    monkeypatch.setattr(interests_module, "PATIENCE", 2 * LIMIT)


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{what} has not come true"
        time.sleep(0.001)


def poll(connector: SyncConnector, key: str, metadata: dict[str, object] | None = None) -> tuple[object, int]:
    """Poll as the adapter does, until it is there."""
    got: list[tuple[object, int]] = []

    def is_there() -> bool:
        result = connector.get("0", "1", key, metadata)
        if result is not None:
            got.append(result)
        return bool(got)

    eventually(is_there, f"the arrival of {key}")
    return got[0]


def is_told(call: Callable[[], object], what: str) -> bool:
    """Whether a call says that the connector is closed, and that this is why."""
    try:
        call()
    except ConnectorClosed as error:
        return what in str(error)
    return False


def is_whole(connector: SyncConnector) -> bool:
    health = connector.health()
    pool = health["pool"]
    return health["polled"] == 0 and sum(size for state, size in pool.items() if state != "free") == 0


def refusals(connector: SyncConnector) -> dict[str, int]:
    return {kind: entry["count"] for kind, entry in connector.health()["refusals"].items()}


@contextmanager
def held_loop(connector: SyncConnector) -> Iterator[None]:
    """The loop does nothing while the block lasts."""
    busy, go = threading.Event(), threading.Event()
    connector._home.portal.post(lambda: (busy.set(), go.wait(LIMIT)))
    assert busy.wait(LIMIT)
    try:
        yield
    finally:
        go.set()
