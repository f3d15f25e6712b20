"""vllm-omni's own connector, from its wheel as it is, without the rest of vllm-omni and without vllm.

The lane unpacks the wheel into a folder, $TRIO_MORI_STOCK, and nothing of the two gigabytes that it requires. In their
place is here:

* `vllm_omni`, `vllm_omni.distributed` and `vllm_omni.distributed.omni_connectors`, whose `__init__.py` import models
  and other connectors: their folders, without that file;
* `vllm.outputs`: two classes, which vllm-omni's serializer tells from other values. None of these tests sends one;
  tests/vllm does;
* `vllm.distributed.parallel_state` and `vllm.logger`, which our plugin's connector imports by vllm-omni's `kv_utils`: a
  process without a tensor-parallel group, and Python's loggers. The stock connector imports neither.

So the connector, its base class, its pool and its serializer are the wheel's own, and with them all that they say to
Mori and to sockets. Where the whole of vllm-omni is installed, that is taken.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("TRIO_MORI_STOCK", "")

CONNECTOR = "vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector"

MISSING = "needs vllm-omni's connector: see docs/mori.md"


def is_there() -> bool:
    """Whether there is a vllm-omni to take it from."""
    return bool(FOLDER) or importlib.util.find_spec("vllm_omni") is not None


def install() -> None:
    """Make what the wheel has of connectors importable. Idempotent."""
    if not FOLDER or "vllm_omni" in sys.modules:
        return
    for name in ("vllm_omni", "vllm_omni.distributed", "vllm_omni.distributed.omni_connectors"):
        _enter(name).__path__ = [str(Path(FOLDER, *name.split(".")))]
    for name in ("vllm", "vllm.distributed"):
        _enter(name).__path__ = []
    outputs = {name: type(name, (), {}) for name in ("RequestOutput", "CompletionOutput")}
    _enter("vllm.outputs", **outputs)
    _enter("vllm.logger", init_logger=logging.getLogger)
    _enter(
        "vllm.distributed.parallel_state",
        get_tensor_model_parallel_rank=_no_group,
        get_tensor_model_parallel_world_size=_no_group,
    )


def import_stock() -> Any:
    """The module of their connector."""
    install()
    return importlib.import_module(CONNECTOR)


def open_stock(extra: dict[str, Any]) -> Any:
    """Their connector."""
    return import_stock().MoriTransferEngineConnector(extra)


def open_ours(extra: dict[str, Any]) -> Any:
    """The one that our plugin puts in its place."""
    install()
    from trio_mori_vllm_omni import TrioMoriConnector

    return TrioMoriConnector(extra, resolved=True)


def changed() -> list[str]:
    """Modules of vllm-omni here whose files are not as its wheel says."""
    (record,) = Path(FOLDER).glob("vllm_omni-*.dist-info")
    hashes = {str(file): file.hash for file in PathDistribution(record).files or ()}
    loaded = {name: module for name, module in sys.modules.items() if name.startswith("vllm_omni.")}
    files = {name: Path(module.__file__) for name, module in loaded.items() if vars(module).get("__file__")}
    assert CONNECTOR in files
    return [name for name, file in files.items() if hashes[str(file.relative_to(FOLDER))].value != _sha256(file)]


def _sha256(file: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")


def _enter(name: str, **contents: object) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    return module


def _no_group() -> int:
    raise AssertionError("there is no tensor-parallel group")  # as vllm's own
