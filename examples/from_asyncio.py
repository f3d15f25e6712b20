"""asyncio code: the blocking facade behind `asyncio.to_thread`, so that its event loop never waits.

python examples/from_asyncio.py
"""

from __future__ import annotations

import asyncio

import torch

from trio_mori import ConnectorConfig, blocking

POOL = 16 * 1024 * 1024


async def answer(conn: blocking.BlockingConnector, request: str) -> int:
    """One of many coroutines that wait for their payload at the same time."""
    tensor = await asyncio.to_thread(conn.get, "0", "1", request, timeout=10)
    assert isinstance(tensor, torch.Tensor)
    return int(tensor.sum())


async def serve(sender: blocking.BlockingConnector, receiver: blocking.BlockingConnector) -> None:
    waiting = [asyncio.create_task(answer(receiver, f"request-{number}")) for number in range(3)]
    for number in range(3):
        await asyncio.to_thread(sender.put, "0", "1", f"request-{number}", torch.full((10,), number), timeout=10)
    print(f"answers: {await asyncio.gather(*waiting)}")


def main() -> None:
    sender_config = ConnectorConfig(role="sender", host="127.0.0.1", zmq_port=0, memory_pool_size=POOL)
    with blocking.open_connector(sender_config) as sender:
        receiver_config = ConnectorConfig(
            role="receiver",
            sender_host="127.0.0.1",
            sender_zmq_port=sender.get_connection_info()["zmq_port"],
            memory_pool_size=POOL,
        )
        with blocking.open_connector(receiver_config) as receiver:
            asyncio.run(serve(sender, receiver))


if __name__ == "__main__":
    main()
