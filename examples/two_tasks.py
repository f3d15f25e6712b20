"""Two tasks of one process hand tensors to each other: the shortest whole program.

python examples/two_tasks.py
"""

from __future__ import annotations

import torch
import trio

import trio_mori
from trio_mori import Connector, ConnectorConfig

POOL = 16 * 1024 * 1024  # bytes; all payloads of a connector live in this one block


async def produce(conn: Connector) -> None:
    """Put three tensors on the edge from stage 0 to stage 1, each under a key of its own."""
    for step in range(3):
        hidden = torch.full((2, 4), step, dtype=torch.bfloat16)
        receipt = await conn.put("0", "1", f"step-{step}", hidden)
        hidden.zero_()  # allowed: put has returned
        print(f"put step-{step}, {receipt.size} bytes")


async def consume(conn: Connector) -> None:
    """Get them; a `get` waits until its payload is there, so it may well run before the `put`."""
    for step in range(3):
        with trio.fail_after(10):
            hidden = await conn.get("0", "1", f"step-{step}")
        assert isinstance(hidden, torch.Tensor)
        print(f"got step-{step}, {hidden.dtype}, {tuple(hidden.shape)}, all {hidden[0, 0].item():g}")


async def main() -> None:
    sender_config = ConnectorConfig(role="sender", host="127.0.0.1", zmq_port=0, memory_pool_size=POOL)
    async with trio_mori.open_connector(sender_config) as sender:
        port = sender.get_connection_info()["zmq_port"]
        receiver_config = ConnectorConfig(
            role="receiver", sender_host="127.0.0.1", sender_zmq_port=port, memory_pool_size=POOL
        )
        async with trio_mori.open_connector(receiver_config) as receiver, trio.open_nursery() as nursery:
            nursery.start_soon(consume, receiver)
            nursery.start_soon(produce, sender)


if __name__ == "__main__":
    trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
