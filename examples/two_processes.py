"""Two processes: this one puts, a child that it starts reads the data where it lies, without a copy.

python examples/two_processes.py
"""

from __future__ import annotations

import sys

import torch
import trio

import trio_mori
from trio_mori import ConnectorConfig

POOL = 64 * 1024 * 1024
ROWS, WIDTH = 512, 4096  # 8 MiB of float32


async def parent() -> None:
    """Put, start the child, and stay open until it has fetched: what is put lives in this process."""
    config = ConnectorConfig(role="sender", host="127.0.0.1", zmq_port=0, memory_pool_size=POOL)
    async with trio_mori.open_connector(config) as conn:
        table = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
        await conn.put("0", "1", "table", table)
        await conn.put("0", "1", "about", {"rows": ROWS, "checksum": table.double().sum()})
        port = conn.get_connection_info()["zmq_port"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.run_process, [sys.executable, __file__, str(port)])
            await conn.drain()
            edge = conn.statistics().put["0_1"]
            print(f"parent: put {edge.payloads} payloads, {edge.bytes} bytes, and all were fetched")


async def child(port: int) -> None:
    """Structures keep their shape; a lease is the receive slot itself, and the tensor a view of it."""
    config = ConnectorConfig(role="receiver", sender_host="127.0.0.1", sender_zmq_port=port, memory_pool_size=POOL)
    async with trio_mori.open_connector(config) as conn:
        with trio.fail_after(30):
            about = await conn.get("0", "1", "about")
            assert isinstance(about, dict)
            async with conn.lease("0", "1", "table") as region:
                table = region.as_tensor(torch.float32, (about["rows"], WIDTH))
                intact = torch.equal(table.double().sum(), about["checksum"])
                del table  # no view may outlive the lease
        print(f"child: the table arrived {'intact' if intact else 'damaged'}")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        trio.run(child, int(sys.argv[1]), restrict_keyboard_interrupt_to_checkpoints=True)
    else:
        trio.run(parent, restrict_keyboard_interrupt_to_checkpoints=True)
