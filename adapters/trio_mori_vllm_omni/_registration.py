"""How vllm-omni finds the connector: by its own name, and on demand by the name of the stock one.

vllm runs `register` in every process, also in those that never load vllm-omni, and more than once in some. So nothing
is imported here; the names are entered when vllm-omni's factory is imported, or now if it is there already.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from . import _adapter_choice, _adapter_hook

logger = logging.getLogger("trio_mori.vllm_omni")

NAME = "TrioMoriConnector"
STOCK_NAME = "MoriTransferEngineConnector"
FACTORY = "vllm_omni.distributed.omni_connectors.factory"

# The switch for a whole deployment, and the key for one connector of a deploy YAML.
SWITCH = "TRIO_MORI_REPLACE_STOCK"
KEY = "replace_stock"

_Constructor = Callable[[dict[str, Any]], Any]


class SeamMoved(RuntimeError):
    """This vllm-omni keeps its connectors in another way than the one that was built for."""


def register() -> None:
    """Let vllm-omni know the connector. Idempotent; imports nothing of vllm-omni."""
    _log_beside_vllm()
    factory = sys.modules.get(FACTORY)
    if factory is not None:
        enter_names(factory)
    else:
        _watch(FACTORY, enter_names)
    if _adapter_choice.MODULE in sys.modules:
        _adapter_choice.install(is_ours)
    else:
        _watch(_adapter_choice.MODULE, lambda _: _adapter_choice.install(is_ours))


def _log_beside_vllm() -> None:
    """Let trio_mori log where vllm does and what vllm does, unless somebody has said where and what."""
    ours, theirs = logging.getLogger("trio_mori"), logging.getLogger("vllm")
    if theirs.handlers and not (ours.handlers or ours.level or logging.getLogger().handlers):
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)


def _watch(name: str, then: Callable[[ModuleType], None]) -> None:
    if not any(isinstance(finder, _Watch) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, then))


def unregister() -> None:
    """Restore what vllm-omni had before `register`. Idempotent; connectors that exist go on."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
    _adapter_hook.remove()
    _adapter_choice.remove()
    factory = sys.modules.get(FACTORY)
    if factory is None:
        return
    registry = _registry(factory)
    if registry.get(NAME) is construct:
        del registry[NAME]
    stock = registry.get(STOCK_NAME)
    if isinstance(stock, _StockOrOurs):
        registry[STOCK_NAME] = stock.stock


def enter_names(factory: ModuleType) -> None:
    """Enter both names into the registry of vllm-omni's factory module."""
    try:
        registry = _registry(factory)
    except SeamMoved:
        if _adapter_choice.is_switched_on(SWITCH):
            raise
        logger.exception("%s is not available in this vllm-omni", NAME)
        return
    registry.setdefault(NAME, construct)
    stock = registry.get(STOCK_NAME)
    if not isinstance(stock, _StockOrOurs):
        registry[STOCK_NAME] = _StockOrOurs(stock)


def construct(extra: dict[str, Any]) -> Any:
    """What the factory calls for our own name."""
    from ._connector import TrioMoriConnector

    return TrioMoriConnector(extra)


def is_replaced(extra: dict[str, Any]) -> bool:
    """Whether the stock name means ours for a connector with this `extra`."""
    said = _adapter_choice.said_in(extra, KEY)
    return _adapter_choice.is_switched_on(SWITCH) if said is None else said


def is_ours(name: str, extra: dict[str, Any]) -> bool:
    """Whether a connector of that name, with this `extra`, is ours."""
    return name == NAME or (name == STOCK_NAME and is_replaced(extra))


class _StockOrOurs:
    """What the factory calls for the stock name."""

    def __init__(self, stock: _Constructor | None) -> None:
        self.stock = stock

    def __call__(self, extra: dict[str, Any]) -> Any:
        if is_replaced(extra):
            from ._connector import TrioMoriConnector

            # vllm-omni knows the stock name, and has put the ports of stage, rank and replica into its configuration.
            return TrioMoriConnector(extra, resolved=True)
        if self.stock is None:
            raise ValueError(f"this vllm-omni has no {STOCK_NAME}; give its connector {KEY}: true, or set {SWITCH}=1")
        return self.stock({key: value for key, value in extra.items() if key != KEY})


def _registry(factory: ModuleType) -> dict[str, Any]:
    registry = getattr(getattr(factory, "OmniConnectorFactory", None), "_registry", None)
    if not isinstance(registry, dict):
        raise SeamMoved(
            f"{FACTORY} has no OmniConnectorFactory with a dict named _registry: this version of trio-mori does not "
            "fit this version of vllm-omni, install one that does (see docs/vllm-omni.md)"
        )
    return registry


class _Watch(importlib.abc.MetaPathFinder):
    """Does something right after a module of vllm-omni has been imported, and is gone then."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Following(spec.loader, self._then)
        return spec


class _Following(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # whoever asks the module for its source asks this one
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
