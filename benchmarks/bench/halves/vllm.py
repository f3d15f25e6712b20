"""Connectors of vllm-omni, stock and ours, bare: put and get, without the chunk adapter that drives them there."""

from __future__ import annotations

import time
from typing import Any

import torch
import trio_mori_vllm_omni
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from vllm_omni.distributed.omni_connectors.utils.initialization import resolve_connector_spec

from ..half import GIVE_UP
from .blocking_calls import BlockingHalf

OURS = "TrioMoriConnector"
EDGE = ("0", "1")


class Bare(BlockingHalf):
    """`connector`: its name in vllm-omni's registry."""

    def __init__(self, role: str, connector: str) -> None:
        super().__init__(role)
        self._name = connector

    def open(self, pool: int, other: Any) -> Any:
        torch.set_num_threads(1)
        trio_mori_vllm_omni.register()
        stage, role = (0, "sender") if self.role == "send" else (1, "receiver")
        extra = {"host": "127.0.0.1", "zmq_port": other, "memory_pool_size": pool, "role": role, "from_stage": 0}
        spec = resolve_connector_spec(ConnectorSpec(self._name, extra), stage_id=stage, role=role)
        spec.extra["stage_id"] = stage
        self._connector = OmniConnectorFactory.create_connector(spec)
        return other

    def close(self) -> None:
        self._connector.close()

    def put(self, key: str, value: Any) -> None:
        accepted, _, _ = self._connector.put(*EDGE, key, value)
        if not accepted:
            raise RuntimeError(f"put of {key} was refused by {self._name}: {self._connector.health()}")

    def poll(self, key: str) -> Any:
        got = self._connector.get(*EDGE, key)
        return None if got is None else got[0]

    def wait(self, key: str) -> Any:
        if self._name != OURS:
            return super().wait(key)
        got = self._connector.get_with_deadline(*EDGE, key, deadline=time.monotonic() + GIVE_UP)
        if got is None:
            raise TimeoutError(f"{key} did not come within {GIVE_UP} s: {self._connector.health()}")
        return got[0]

    def release(self, value: Any) -> None:
        if hasattr(value, "release"):
            value.release()
