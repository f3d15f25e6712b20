"""vllm-omni's own SharedMemoryConnector, of its installed files, without all that else comes with that package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = (
    "vllm_omni",
    "vllm_omni.config",
    "vllm_omni.entrypoints",
    "vllm_omni.distributed",
    "vllm_omni.distributed.omni_connectors",
    "vllm_omni.distributed.omni_connectors.connectors",
    "vllm_omni.distributed.omni_connectors.utils",
)

# What its files import and a transfer of tensors does not use.
_UNUSED = {
    "vllm": (),
    "vllm.outputs": ("CompletionOutput", "RequestOutput"),
    "vllm_omni.config.yaml_util": ("to_dict",),
    "vllm_omni.platforms": ("current_omni_platform",),
}


def stock_connector(site: Path) -> Any:
    """A connector, of the folder that holds `vllm_omni`."""
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(site.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name, members in _UNUSED.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (), {}))
        sys.modules[name] = module
    found: Any = importlib.import_module("vllm_omni.distributed.omni_connectors.connectors.shm_connector")
    return found.SharedMemoryConnector({})
