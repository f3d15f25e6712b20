"""An address that several instances of a stage share, and those that hold it or ask for it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    asynccontextmanager,
    contextmanager,
)

import pytest
import trio
import trio.testing
from ports import free_port
from rig import (
    LIMIT,
    SOON,
    Outcome,
    Stage,
    begin,
    start_stage,
    wait_until,
)

from trio_mori import (
    BindFailed,
    ConnectorConfig,
    open_connector,
)
from trio_mori import _port as ports
from trio_mori._protocol import wire
from trio_mori._zmq_listener import open_listener
from trio_mori.abc import Arrived, Link
from trio_mori.testing import MemoryFabric


@contextmanager
def another_process() -> Iterator[None]:
    """What is opened in here knows of no port that was opened outside, as in another process."""
    token = ports.FAMILIES.set({})
    try:
        yield
    finally:
        ports.FAMILIES.reset(token)


class Site:
    """A stage's address, its instances, and a receiver of it."""

    def __init__(self, nursery: trio.Nursery, fabric: MemoryFabric) -> None:
        self.nursery = nursery
        self.fabric = fabric
        self.port = free_port()
        self.stages: list[Stage] = []

    async def open(self, **config: object) -> Stage:
        """One more instance in this process."""
        stage = await start_stage(
            self.nursery, self.fabric, **{"role": "sender", "zmq_port": self.port, "stage_id": 0, **config}
        )
        self.stages.append(stage)
        return stage

    async def open_elsewhere(self, **config: object) -> Stage:
        """One more instance in another process, as far as it knows."""
        with another_process():
            return await self.open(**config)

    async def open_receiver(self) -> Stage:
        """A receiver of this address."""
        stage = await start_stage(
            self.nursery, self.fabric, role="receiver", sender_host="127.0.0.1", sender_zmq_port=self.port
        )
        self.stages.insert(0, stage)
        return stage


@asynccontextmanager
async def open_site() -> AsyncIterator[Site]:
    """An address on loopback, for a body that takes no longer than `LIMIT`; what is still open then is closed."""
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            site = Site(nursery, MemoryFabric())
            yield site
            for stage in site.stages:
                await stage.close()
    assert ports.known_families() == {}


def standing(stage: Stage) -> object:
    """How an instance stands to the address."""
    return stage.connector.health()["port"]


async def put(stage: Stage, key: str, data: object) -> None:
    """Put on the edge from 0 to 1."""
    await stage.connector.put("0", "1", key, data)


async def get(stage: Stage, key: str) -> object:
    """Get on that edge, or fail."""
    with trio.fail_after(SOON):
        return await stage.connector.get("0", "1", key)


async def get_later(site: Site, receiver: Stage, key: str) -> Outcome:
    """A get that waits: whoever listens has heard of it."""
    before = receiver.connector.health()["peers"]
    outcome = begin(site.nursery, receiver.connector.get, "0", "1", key)
    await wait_until(lambda: receiver.connector.health()["peers"] >= max(1, before))
    await wait_until(lambda: receiver.connector.statistics().parked)
    return outcome


def sender_at(port: int) -> dict[str, object]:
    """A sender on a port of loopback."""
    return {"role": "sender", "host": "127.0.0.1", "zmq_port": port}


def holder_of(port: int, *, yields: bool, digest: str | None = None, **config: object) -> wire.Holder:
    """What another instance of `sender_at` answers."""
    own = ConnectorConfig.from_dict({**sender_at(port), **config}).digest
    return wire.Holder(1, wire.Deployment(socket.gethostname(), -1, 0, 0, digest or own), 4711, yields)


Script = Callable[[wire.Inquiry], "list[bytes] | None"]


@asynccontextmanager
async def open_holder(script: Script, port: int = 0) -> AsyncIterator[int]:
    """A ZMQ listener that answers inquiries as it is told; yields its port."""

    async def serve(link: Link) -> None:
        while True:
            for event in await link.receive():
                if isinstance(event, Arrived):
                    body = wire.decode_from_receiver(event.frames)
                    assert isinstance(body, wire.Inquiry)
                    answer = script(body)
                    if answer is not None:
                        link.send(answer, event.route)

    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], port) as link, trio.open_nursery() as nursery:
            nursery.start_soon(serve, link)
            yield link.port
            nursery.cancel_scope.cancel()


async def open_and_fail(port: int) -> BindFailed:
    """Open a sender that cannot be opened; returns why."""
    async with MemoryFabric().open() as engine:
        with pytest.raises(BindFailed) as caught, trio.fail_after(SOON):
            async with open_connector(sender_at(port), engine=engine):
                raise AssertionError
    assert f"tcp://127.0.0.1:{port}" in str(caught.value)
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
    assert caught.value.__cause__ is not None
    assert ports.known_families() == {}
    return caught.value
