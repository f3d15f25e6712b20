"""vllm-omni on trio_mori: a connector for its stages, found by its plugin entry point.

Install both into one environment, and write ``name: TrioMoriConnector`` into the deploy YAML, or set
``TRIO_MORI_REPLACE_STOCK=1`` and leave the YAML as it is. See docs/vllm-omni.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._registration import register, unregister

if TYPE_CHECKING:
    from ._connector import TrioMoriConnector as TrioMoriConnector

__all__ = ["TrioMoriConnector", "register", "unregister"]


def __getattr__(name: str) -> object:
    # Not imported above: the connector needs vllm-omni, and every process of a deployment runs the entry point.
    if name == "TrioMoriConnector":
        from ._connector import TrioMoriConnector

        return TrioMoriConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
