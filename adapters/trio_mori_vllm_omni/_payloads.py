"""Values of vllm-omni as payloads of the core connectors, and back."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from trio_mori import ConnectorConfig, ManagedBuffer, Plan, StockArrival, UnsupportedPayload, plan_payload

from ._polls import AnyArrival
from ._received import ReceivedBuffer


class Codec(Protocol):
    """What is done to payloads that are not raw, before they are sent and after they came. In any thread."""

    def plain(self, value: Any) -> tuple[object, bool]:
        """What to send, and whether all of it is in host memory.

        Raises:
            TypeError, ValueError, OverflowError: it cannot be sent.
        """

    def revived(self, tree: object) -> object:
        """What to deliver."""


class Payloads:
    """What is sent for a value, and what is delivered for a payload that came."""

    def __init__(self, codec: Codec, config: ConnectorConfig) -> None:
        self._codec = codec
        self._goes_to_host = config.memory_pool_device != "cpu" and config.payload_device == "pool"

    def plan(self, data: Any) -> tuple[Plan, bool]:
        """How it will lie in the pool, and whether all of it is in host memory now. In any thread.

        Raises:
            UnsupportedPayload: it cannot be sent.
        """
        is_on_host = True
        if isinstance(data, ReceivedBuffer):
            data = data.tensor
        if isinstance(data, ManagedBuffer):
            is_on_host = data.device == "cpu"
        elif isinstance(data, torch.Tensor):
            is_on_host = data.device.type == "cpu"
        elif not isinstance(data, bytes):
            try:
                data, is_on_host = self._codec.plain(data)
            except (TypeError, ValueError, OverflowError) as error:
                raise UnsupportedPayload(str(error), path="payload") from error
            if isinstance(data, bytes):
                data = bytearray(data)  # alone, bytes would be a raw payload; those that were not are told by this
        return plan_payload(data), is_on_host

    def received(self, arrival: AnyArrival) -> object:
        """A payload that came, as vllm-omni knows it, in memory of its own. In any thread."""
        value = arrival.restore()
        if isinstance(arrival, StockArrival) and arrival.is_raw:
            assert isinstance(value, ManagedBuffer)
            return ReceivedBuffer(value)
        if isinstance(value, torch.Tensor):
            return ReceivedBuffer(value.contiguous().view(-1).view(torch.uint8))
        if isinstance(value, bytes):
            return ReceivedBuffer(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        if self._goes_to_host:
            value = _on_host(value)  # as from the stock connectors; stages that want it elsewhere say where
        return bytes(value) if isinstance(value, bytearray) else self._codec.revived(value)


def goes_on(chunk: object) -> bool:
    """Whether this is a chunk after which another one of its request comes."""
    if not isinstance(chunk, dict):
        return False
    meta = chunk.get("meta")
    finished = meta.get("finished") if isinstance(meta, dict) else None
    if isinstance(finished, torch.Tensor):
        # `any` and `item` give the interpreter away, and may wait for it for longer than all of the get has taken.
        return not (finished.tolist() if not finished.dim() else finished.any())
    return not finished


def _on_host(tree: object) -> object:
    """A tree with its tensors in host memory, where the stock serializer delivers them whatever the pool is on."""
    if isinstance(tree, torch.Tensor):
        return tree.cpu()
    if isinstance(tree, list):
        return [_on_host(each) for each in tree]
    return {key: _on_host(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
