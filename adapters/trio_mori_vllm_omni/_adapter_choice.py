"""Which chunk adapter a stage's scheduler gets: vllm-omni's, or the one of `chunks`.

vllm-omni's scheduler makes its adapter by a class's name, which it imports from one module. There the name is bound
anew, to what decides for each stage; also in the scheduler's module, if that has imported it already.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

logger = logging.getLogger("trio_mori.vllm_omni")

MODULE = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
SCHEDULER = "vllm_omni.core.sched.omni_scheduler_mixin"
NAME = "OmniChunkTransferAdapter"

# The switch for a whole deployment, and the key for one connector of a deploy YAML, which wins.
SWITCH = "TRIO_MORI_CHUNK_ADAPTER"
KEY = "chunk_adapter"

IsOurs = Callable[[str, dict[str, Any]], bool]

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class Choice:
    """What a scheduler calls for an adapter. Everything else about the class is that of the stock one."""

    def __init__(self, stock: Any, is_ours: IsOurs) -> None:
        self.stock = stock
        self._is_ours = is_ours

    def __call__(self, vllm_config: Any, *args: Any, **keywords: Any) -> Any:
        name, extra = _connector_of(vllm_config.model_config)
        if not is_wanted(extra):
            return self.stock(vllm_config, *args, **keywords)
        if not self._is_ours(name, extra):
            logger.warning(
                "the chunk adapter of trio_mori is asked for, but this stage's connector is %s: vllm-omni's own is "
                "used. Name TrioMoriConnector in the deploy YAML to have it",
                name,
            )
            return self.stock(vllm_config, *args, **keywords)
        from .chunks._adapter import TrioChunkTransferAdapter

        return TrioChunkTransferAdapter(vllm_config, *args, **keywords)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.stock)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[Any, ...]:
        return (self.stock,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


def is_wanted(extra: dict[str, Any]) -> bool:
    """Whether a stage is to have ours: its YAML says so, or else the environment.

    Raises:
        ConfigError: whichever is asked says neither yes nor no.
    """
    said = said_in(extra, KEY)
    return is_switched_on(SWITCH) if said is None else said


def is_switched_on(switch: str) -> bool:
    """Whether the environment says yes to a question for the whole deployment.

    Raises:
        ConfigError: it says neither yes nor no.
    """
    value = os.environ.get(switch, "")
    return value != "" and _meaning(switch, value, "set it to 1 or 0")


def said_in(extra: Mapping[str, Any], key: str) -> bool | None:
    """What a connector's `extra` says to a question; None if it says nothing.

    Raises:
        ConfigError: it is neither yes nor no.
    """
    value = extra.get(key)
    return None if value is None else _meaning(key, value, "give true or false")


def _meaning(key: str, value: object, remedy: str) -> bool:
    word = str(value).lower()
    if word not in (*_TRUE, *_FALSE):
        from trio_mori import ConfigError

        raise ConfigError(f"{key}: {value!r} is not allowed; {remedy}", key=key, value=value)
    return word in _TRUE


def install(is_ours: IsOurs) -> None:
    """Bind the name anew, where it is bound already. Idempotent.

    Args:
        is_ours: Whether a connector of that name and `extra` is one of trio_mori.
    """
    module = sys.modules.get(MODULE)
    if module is None:
        return
    stock = getattr(module, NAME, None)
    if stock is None:
        logger.warning("%s has no %s: %s=1 has no effect in this vllm-omni", MODULE, NAME, SWITCH)
        return
    choice = stock if isinstance(stock, Choice) else Choice(stock, is_ours)
    _bind(module, choice)


def remove() -> None:
    """Bind it as it was."""
    choice = getattr(sys.modules.get(MODULE), NAME, None)
    if isinstance(choice, Choice):
        _bind(sys.modules[MODULE], choice.stock)


def _bind(module: ModuleType, value: Any) -> None:
    setattr(module, NAME, value)
    scheduler = sys.modules.get(SCHEDULER)
    if scheduler is not None and hasattr(scheduler, NAME):
        setattr(scheduler, NAME, value)


def _connector_of(model_config: Any) -> tuple[str, dict[str, Any]]:
    config = getattr(model_config, "stage_connector_config", None)
    if isinstance(config, dict):
        return config.get("name") or "SharedMemoryConnector", config.get("extra") or {}
    return getattr(config, "name", None) or "SharedMemoryConnector", getattr(config, "extra", None) or {}
