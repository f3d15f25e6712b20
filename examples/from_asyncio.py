"""asyncio code: any number of coroutines that wait at the same time, and not a thread for any of them.

python examples/from_asyncio.py
"""

from __future__ import annotations

import asyncio

import torch

from trio_mori import ConnectorConfig, aio

POOL = 16 * 1024 * 1024
REQUESTS = 64  # more than the threads of asyncio's pool


async def answer(conn: aio.AsyncioConnector, request: str) -> int:
    """One of many coroutines that wait for their payload."""
    tensor = await asyncio.wait_for(conn.get("0", "1", request), timeout=10)
    assert isinstance(tensor, torch.Tensor)
    return int(tensor.sum())


async def serve(sender: aio.AsyncioConnector, receiver: aio.AsyncioConnector) -> None:
    waiting = [asyncio.create_task(answer(receiver, f"request-{number}")) for number in range(REQUESTS)]
    await asyncio.sleep(0)  # now all of them wait
    for number in range(REQUESTS):
        await sender.put("0", "1", f"request-{number}", torch.full((10,), number))
    answers = await asyncio.gather(*waiting)
    print(f"{len(answers)} answers: {answers[:3]}, ...")

    try:  # a get that was cancelled has taken nothing
        await asyncio.wait_for(receiver.get("0", "1", "late"), timeout=0.1)
    except asyncio.TimeoutError:
        await sender.put("0", "1", "late", b"still to be had")
        print(f"gave up, and later got {await receiver.get('0', '1', 'late')!r}")


async def main() -> None:
    sender_config = ConnectorConfig(role="sender", host="127.0.0.1", zmq_port=0, memory_pool_size=POOL)
    async with aio.open_connector(sender_config) as sender:
        port = sender.get_connection_info()["zmq_port"]
        receiver_config = ConnectorConfig(
            role="receiver", sender_host="127.0.0.1", sender_zmq_port=port, memory_pool_size=POOL
        )
        async with aio.open_connector(receiver_config) as receiver:
            await serve(sender, receiver)


if __name__ == "__main__":
    asyncio.run(main())
