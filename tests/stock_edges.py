"""One edge with a stock peer at one end, and ours at the other."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import torch
import trio
from rig import LIMIT, POOL, port_of, receiver_config, sender_config
from stock_peers import StockClient, StockServer, open_stock_client, open_stock_server

from trio_mori import Connector, ManagedBuffer, open_connector
from trio_mori.testing import MemoryEngine, MemoryFabric

STRUCTURE = {"hidden": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "ids": [1, 2], "name": "x", "none": None}


def assert_structure(value: object) -> None:
    assert isinstance(value, dict)
    assert torch.equal(value["hidden"], STRUCTURE["hidden"])  # type: ignore[arg-type]
    assert value["hidden"].dtype == torch.bfloat16
    assert [value["ids"], value["name"], value["none"]] == [[1, 2], "x", None]


@attrs.frozen
class Sending:
    """Our sender, a stock receiver, and both engines."""

    fabric: MemoryFabric
    sender: Connector
    engine: MemoryEngine
    client: StockClient

    async def put(self, key: str, data: object) -> dict[str, object]:
        return (await self.sender.put("0", "1", key, data)).metadata


@asynccontextmanager
async def open_sending(*, pool: int = POOL, **config: object) -> AsyncIterator[Sending]:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=pool) as ours, fabric.open(pool_size=POOL) as theirs:
            async with open_connector(sender_config(**config), engine=ours) as sender:
                with open_stock_client(port_of(sender), theirs) as client:
                    yield Sending(fabric, sender, ours, client)
            assert ours.violations == []


@attrs.frozen
class Receiving:
    """A stock sender, our receiver, and its engine."""

    fabric: MemoryFabric
    server: StockServer
    receiver: Connector
    engine: MemoryEngine

    async def get(self, key: str, metadata: dict[str, object] | None = None) -> object:
        return await self.receiver.get("0", "1", key, metadata)

    async def get_bytes(self, key: str, metadata: dict[str, object] | None = None) -> bytes:
        value = await self.get(key, metadata)
        assert isinstance(value, ManagedBuffer)
        with value:
            return value.to_bytes()


@asynccontextmanager
async def open_receiving(*, within: float = LIMIT, **config: object) -> AsyncIterator[Receiving]:
    fabric = MemoryFabric()
    with trio.fail_after(within):
        async with open_stock_server(fabric) as server, fabric.open(pool_size=POOL) as engine:
            async with open_connector(receiver_config(server.port, **config), engine=engine) as receiver:
                yield Receiving(fabric, server, receiver, engine)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
