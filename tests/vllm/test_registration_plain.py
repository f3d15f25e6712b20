"""Entering and leaving vllm-omni's registry, with a factory of the test's own in its place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest
import trio_mori_vllm_omni
from trio_mori_vllm_omni import _adapter_hook, _registration, register, unregister
from trio_mori_vllm_omni._registration import FACTORY, NAME, STOCK_NAME, SWITCH, SeamMoved

from trio_mori import ConfigError

pytestmark = pytest.mark.deterministic


def stock(extra: dict[str, object]) -> tuple[str, dict[str, object]]:
    return "stock", extra


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The registry of a factory that this process seems to have imported."""
    module = ModuleType(FACTORY)
    names: dict[str, object] = {STOCK_NAME: stock}
    module.OmniConnectorFactory = SimpleNamespace(_registry=names)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FACTORY, module)
    monkeypatch.delenv(SWITCH, raising=False)
    # The connector's module needs vllm-omni; what is made here is only told from stock.
    ours = ModuleType("trio_mori_vllm_omni._connector")
    ours.TrioMoriConnector = lambda extra, *, resolved=False: ("ours", extra, resolved)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trio_mori_vllm_omni._connector", ours)
    yield names
    unregister()


def test_registering_twice_is_registering_once_and_unregistering_restores_stock(registry: dict[str, object]) -> None:
    register()
    first = dict(registry)
    register()
    assert registry == first
    assert set(registry) == {NAME, STOCK_NAME}
    unregister()
    assert registry == {STOCK_NAME: stock}
    unregister()
    assert registry == {STOCK_NAME: stock}


def make(registry: dict[str, object], name: str, extra: dict[str, object]) -> object:
    constructor = registry[name]
    assert callable(constructor)
    return constructor(extra)


def test_the_stock_name_means_stock_unless_it_is_replaced(
    registry: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    assert make(registry, NAME, {"a": 1}) == ("ours", {"a": 1}, False)
    assert make(registry, STOCK_NAME, {"a": 1}) == ("stock", {"a": 1})
    assert make(registry, STOCK_NAME, {"replace_stock": True}) == ("ours", {"replace_stock": True}, True)
    monkeypatch.setenv(SWITCH, "1")
    assert make(registry, STOCK_NAME, {"a": 1}) == ("ours", {"a": 1}, True)
    assert make(registry, STOCK_NAME, {"a": 1, "replace_stock": False}) == ("stock", {"a": 1})
    monkeypatch.setenv(SWITCH, "0")
    assert make(registry, STOCK_NAME, {"a": 1}) == ("stock", {"a": 1})


@pytest.mark.parametrize(("said", "made"), [("yes", "ours"), ("false", "stock"), (0, "stock"), (None, "stock")])
def test_replace_stock_is_a_yes_or_a_no_in_quotes_too(registry: dict[str, object], said: object, made: str) -> None:
    register()
    assert make(registry, STOCK_NAME, {"replace_stock": said})[0] == made  # type: ignore[index]


def test_replace_stock_that_is_neither_yes_nor_no_is_refused(registry: dict[str, object]) -> None:
    register()
    with pytest.raises(ConfigError, match="replace_stock: 'maybe' is not allowed; give true or false"):
        make(registry, STOCK_NAME, {"replace_stock": "maybe"})


def test_a_registry_that_has_moved_is_reported_and_fails_only_who_depends_on_it(
    registry: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules[FACTORY], "OmniConnectorFactory", SimpleNamespace(connectors={}))
    with caplog.at_level(logging.ERROR, "trio_mori.vllm_omni"):
        register()
    assert "not available in this vllm-omni" in caplog.text
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(SeamMoved, match="does not fit this version of vllm-omni"):
        register()
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(sys.modules[FACTORY], "OmniConnectorFactory", SimpleNamespace(_registry={}))


def test_the_entry_point_names_the_function() -> None:
    points = [p for p in entry_points(group="vllm.general_plugins") if p.name == "trio_mori"]
    assert points
    assert all(p.load() is register for p in points)


# --- aborts ---------------------------------------------------------------------------------------------------


class Adapter:
    """As much of vllm-omni's as the hook touches."""

    def __init__(self, connector: object) -> None:
        self.connector = connector
        self.queued: list[str] = []

    def _queue_shm_cleanup_locked(self, external_req_id: str, sender_token: object) -> None:
        self.queued.append(external_req_id)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Adapter]]:
    module = ModuleType(_adapter_hook.ADAPTER)
    fresh = type(
        "OmniChunkTransferAdapter", (Adapter,), {"_queue_shm_cleanup_locked": Adapter._queue_shm_cleanup_locked}
    )
    module.OmniChunkTransferAdapter = fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, _adapter_hook.ADAPTER, module)
    yield fresh
    _adapter_hook.remove()


@pytest.mark.parametrize(("puts", "terminal", "forgotten"), [(3, False, ["r"]), (0, False, []), (3, True, [])])
def test_only_what_was_put_without_its_end_is_forgotten(
    adapter: type[Adapter], puts: int, terminal: bool, forgotten: list[str]
) -> None:
    assert _adapter_hook.install()
    assert _adapter_hook.install()
    told: list[str] = []
    instance = adapter(SimpleNamespace(forget_request=told.append))
    instance._queue_shm_cleanup_locked("r", SimpleNamespace(num_puts=puts, terminal_sent=terminal))
    assert (told, instance.queued) == (forgotten, ["r"])


def test_another_connector_is_left_alone_and_removing_restores_the_adapter(adapter: type[Adapter]) -> None:
    original = adapter.__dict__["_queue_shm_cleanup_locked"]
    _adapter_hook.install()
    adapter(SimpleNamespace())._queue_shm_cleanup_locked("r", SimpleNamespace(num_puts=1, terminal_sent=False))
    assert adapter.__dict__["_queue_shm_cleanup_locked"] is not original
    _adapter_hook.remove()
    assert adapter.__dict__["_queue_shm_cleanup_locked"] is original


def test_an_adapter_that_has_moved_is_said_once(
    adapter: type[Adapter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_adapter_hook, "_warned", False)
    monkeypatch.setattr(sys.modules[_adapter_hook.ADAPTER], "OmniChunkTransferAdapter", SimpleNamespace())
    with caplog.at_level(logging.WARNING, "trio_mori.vllm_omni"):
        assert not _adapter_hook.install()
        assert not _adapter_hook.install()
    assert caplog.text.count("stay until they expire") == 1


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    assert _registration.NAME in trio_mori_vllm_omni.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        trio_mori_vllm_omni.Nothing  # noqa: B018
