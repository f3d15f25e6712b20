"""A process of the tests of this folder that closes over a copy: two connectors, and a write that takes SECONDS.

mori_closing.py SECONDS GRACE       prints how long closing both of them took, and ends
"""

from __future__ import annotations

import sys

import mori_lane
import trio

from trio_mori import ConnectorConfig, open_connector

if mori_lane.moriemu is not None:
    mori_lane.moriemu.install()


async def main(seconds: float, grace: float) -> None:
    base = {"host": "127.0.0.1", "backend_type": "xgmi", "memory_pool_size": 1 << 20, "close_grace": grace}
    sending = ConnectorConfig.from_dict({**base, "zmq_port": 0, "memory_pool_device": "cuda:0"})
    async with open_connector(sending) as sender:
        port = sender.get_connection_info()["zmq_port"]
        receiving = {**base, "role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port}
        async with open_connector({**receiving, "memory_pool_device": "cuda:1"}) as receiver:
            mori_lane.control("copy_delay_us", int(1e6 * seconds))
            await sender.put("0", "1", "k", b"y" * 1000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receiver.get, "0", "1", "k")
                while not sender.statistics().held.get("pinned"):  # noqa: ASYNC110 - no event tells
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
            began = trio.current_time()
    print(trio.current_time() - began)


if __name__ == "__main__":
    trio.run(main, *map(float, sys.argv[1:]))
