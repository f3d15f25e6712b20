"""A stage process of the tests of this folder, with its connector's pool on a GPU. It does what it is told by lines.

sender PORT DELAY       listens there, tells its port; "put KEY VALUE": puts bytes of that value, says "put", and
                        "writing" as soon as they are under way
receiver PORT           says "ready"; "get KEY": says "asked", and then which value came

DELAY is what the sender's copies take, in seconds.
"""

from __future__ import annotations

import sys

import mori_lane
import torch
import trio
from mori_processes import SIZE

from trio_mori import Connector, ConnectorConfig, open_connector

if mori_lane.moriemu is not None:
    mori_lane.moriemu.install()


def say(word: object) -> None:
    print(word, flush=True)


async def commands() -> list[str]:
    return (await trio.to_thread.run_sync(sys.stdin.readline)).split()


async def send(connector: Connector, key: str, value: int) -> None:
    await connector.put("0", "1", key, torch.full((SIZE,), value, dtype=torch.uint8))
    say("put")
    while not connector.statistics().held.get("pinned"):  # noqa: ASYNC110 - no event tells
        await trio.sleep(0.001)
    say("writing")


async def receive(connector: Connector, key: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_asked, connector)
        value = await connector.get("0", "1", key)
    assert isinstance(value, torch.Tensor)
    assert len(value) == SIZE
    (only,) = set(value.tolist())
    say(only)


async def tell_asked(connector: Connector) -> None:
    while not connector.statistics().held["posted"]:  # noqa: ASYNC110 - no event tells
        await trio.sleep(0.001)
    say("asked")


async def main(role: str, port: str, delay: str = "0") -> None:
    keys = {"zmq_port": int(port)} if role == "sender" else {"sender_host": "127.0.0.1", "sender_zmq_port": int(port)}
    device = "cuda:0" if role == "sender" else "cuda:1"
    config = {"role": role, "host": "127.0.0.1", "backend_type": "xgmi", "memory_pool_device": device, **keys}
    async with open_connector(ConnectorConfig.from_dict({**config, "memory_pool_size": 16 * SIZE})) as connector:
        if role == "sender":
            say(connector.get_connection_info()["zmq_port"])
            if mori_lane.moriemu is not None:
                mori_lane.control("copy_delay_us", int(1e6 * float(delay)))
        else:
            say("ready")
        while words := await commands():
            if words[0] == "put":
                await send(connector, words[1], int(words[2]))
            else:
                await receive(connector, words[1])


def run(*arguments: str) -> None:
    trio.run(main, *arguments)
