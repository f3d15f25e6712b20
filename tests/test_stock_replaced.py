"""A stock sender and a native one that take each other's place, and a stock one that is gone."""

from __future__ import annotations

import pytest
import torch
import trio
from ports import free_port
from rig import LIMIT, POOL, assert_free, begin, filled, pass_time, port_of, receiver_config, sender_config, wait_until
from stock_edges import open_descriptors
from stock_peers import open_stock_server
from trio.testing import MockClock

from trio_mori import Connector, ManagedBuffer, NotReady, PeerLost, PeerRestarted, open_connector
from trio_mori.testing import MemoryEngine, MemoryFabric

deterministic = pytest.mark.deterministic


@deterministic
async def test_a_stock_sender_is_replaced_by_a_native_one_on_its_address_and_back() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, AsyncNursery() as nursery:
            async with open_stock_server(fabric, free_port()) as server:
                port = server.port
                server.put("k@0_1", filled(10, 0))
                receiver = await nursery.start_connector(receiver_config(port), engine)
                value = await receiver.get("0", "1", "k")
                assert isinstance(value, ManagedBuffer)
                value.release()
                waiting = begin(nursery.tasks, receiver.get, "0", "1", "native")
                await wait_until(lambda: "native@0_1" in server.queries)
            before = open_descriptors()
            for number in range(1, 6):
                async with fabric.open(pool_size=POOL) as native_engine:
                    async with open_connector(sender_config(zmq_port=port), engine=native_engine) as native:
                        await native.put("0", "1", "native", filled(10, number))
                        assert torch.equal(await waiting.wait(), filled(10, number))
                        waiting = begin(nursery.tasks, receiver.get, "0", "1", "stock")
                        await wait_until(lambda: receiver.statistics().parked == 1)
                async with open_stock_server(fabric, port) as server:
                    server.put("stock@0_1", filled(10, number))
                    value = await waiting.wait()
                    assert isinstance(value, ManagedBuffer)
                    with value:
                        assert value.to_bytes() == bytes([number] * 10)
                    waiting = begin(nursery.tasks, receiver.get, "0", "1", "native")
                    await wait_until(lambda server=server: "native@0_1" in server.queries)
            await wait_until(lambda: open_descriptors() <= before)
            waiting.scope.cancel()
            await assert_free(receiver)
            nursery.tasks.cancel_scope.cancel()


class AsyncNursery:
    """A nursery that can hold a connector open."""

    def __init__(self) -> None:
        self._manager = trio.open_nursery()

    async def __aenter__(self) -> AsyncNursery:
        self.tasks = await self._manager.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> object:
        return await self._manager.__aexit__(*error)  # type: ignore[arg-type]

    async def start_connector(self, config: dict[str, object], engine: MemoryEngine) -> Connector:
        async def run(*, task_status: trio.TaskStatus[Connector]) -> None:
            async with open_connector(config, engine=engine) as connector:
                task_status.started(connector)
                await trio.sleep_forever()

        connector: Connector = await self.tasks.start(run)
        return connector


@deterministic
async def test_what_had_arrived_from_a_native_sender_is_not_lost_when_a_stock_one_takes_its_place() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, fabric.open(pool_size=POOL) as native_engine:
            async with AsyncNursery() as nursery:
                async with open_connector(sender_config(zmq_port=free_port()), engine=native_engine) as native:
                    port = port_of(native)
                    receiver = await nursery.start_connector(receiver_config(port), engine)
                    with pytest.raises(NotReady):
                        receiver.get_nowait("0", "1", "k")
                    await native.put("0", "1", "k", b"arrived")
                    await wait_until(lambda: receiver.statistics().held["arrived"])
                async with open_stock_server(fabric, port) as server:
                    server.put("other@0_1", filled(10))
                    value = await receiver.get("0", "1", "other")
                    assert isinstance(value, ManagedBuffer)
                    value.release()
                    assert receiver.get_nowait("0", "1", "k") == b"arrived"
                    await assert_free(receiver)
                nursery.tasks.cancel_scope.cancel()


@deterministic
async def test_a_stream_does_not_go_on_with_a_stock_sender_in_the_place_of_its_own() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, fabric.open(pool_size=POOL) as native_engine:
            async with AsyncNursery() as nursery:
                async with open_connector(sender_config(zmq_port=free_port()), engine=native_engine) as native:
                    port = port_of(native)
                    receiver = await nursery.start_connector(receiver_config(port), engine)
                    await native.put("0", "1", "r_0_0", (0, 5, "first"))  # as a chunk sender wraps it, which goes on
                    chunks = receiver.open_chunk_receiver("r", "0", to_stage="1")
                    stream = await chunks.__aenter__()
                    assert await stream.__anext__() == "first"
                async with open_stock_server(fabric, port):
                    with pytest.raises((PeerRestarted, PeerLost)):
                        await stream.__anext__()
                    with pytest.raises((PeerRestarted, PeerLost)):
                        await stream.__anext__()
                    await chunks.__aexit__(None, None, None)
                    await assert_free(receiver)
                nursery.tasks.cancel_scope.cancel()


@deterministic
async def test_a_stock_sender_that_is_gone_for_peer_timeout_is_lost(clock: MockClock) -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open(pool_size=POOL) as engine, AsyncNursery() as nursery:
            async with open_stock_server(fabric, free_port()) as server:
                port = server.port
                receiver = await nursery.start_connector(
                    receiver_config(port, heartbeat_interval=1, peer_timeout=10), engine
                )
                outcome = begin(nursery.tasks, receiver.get, "0", "1", "k")
                await wait_until(lambda: server.queries)
                clock.rate = 0.1  # a machine that stops for a second has not waited for the rest of peer_timeout
            await wait_until(lambda: receiver.health()["peers"] == 0)
            await pass_time(clock, 9)
            assert not outcome.over.is_set()
            await pass_time(clock, 2)
            clock.rate = 1.0
            with pytest.raises(PeerLost):
                await outcome.wait()
            again = begin(nursery.tasks, receiver.get, "0", "1", "k")
            async with open_stock_server(fabric, port) as server:
                server.put("k@0_1", filled(10))
                value = await again.wait()
                assert isinstance(value, ManagedBuffer)
                value.release()
                await assert_free(receiver)
            nursery.tasks.cancel_scope.cancel()
