"""Connectors whose pools are on GPUs, over the real Mori."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import trio
from mori_lane import Answers, Holding, control, delayed, emulated, moriemu
from rig import UNIT, begin, wait_until
from stock_peers import open_stock_client

from trio_mori import Connector, ConnectorConfig, TransferFailed, open_connector
from trio_mori._engines import _mori_pool

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

SIZE = 64 << 20

# Seconds that a copy takes over which connectors close, and for which they wait; a process with torch takes four more.
COPY = 30.0
GRACE = 0.3

PAYLOADS: list[object] = [
    torch.arange(100_000, dtype=torch.float32).reshape(1000, 100),
    torch.randn(4096, 512).to(torch.bfloat16),
    b"bytes" * 1000,
    {"hidden": torch.randn(16, 4096), "codes": torch.arange(64), "text": "a", "finished": False},
]


@asynccontextmanager
async def edge(**keys: object) -> AsyncIterator[tuple[Connector, Connector]]:
    """A sender on one GPU and a receiver on another."""
    base = {"backend_type": "xgmi", "memory_pool_size": SIZE, "host": "127.0.0.1", **keys}
    sending = ConnectorConfig.from_dict({**base, "zmq_port": 0, "memory_pool_device": "cuda:0"})
    receiving = ConnectorConfig.from_dict({**base, "role": "receiver", "memory_pool_device": "cuda:1"})
    async with open_connector(sending) as sender, open_connector(receiving) as receiver:
        info = sender.get_connection_info()
        receiver.update_sender_info(info["host"], info["zmq_port"])
        yield sender, receiver


@pytest.mark.parametrize("delay", [0, 0.002, 0.2] if moriemu else [0])
async def test_payloads_of_every_kind_pass_from_gpu_to_gpu(delay: float) -> None:
    with trio.fail_after(60):
        async with edge() as (sender, receiver), trio.open_nursery() as nursery:
            with delayed(delay):
                for number, payload in enumerate(PAYLOADS):
                    key = f"k{number}"
                    if number % 2:
                        await sender.put("0", "1", key, payload)
                    outcome = begin(nursery, receiver.get, "0", "1", key)
                    if not number % 2:
                        await wait_until(lambda: receiver.statistics().held["posted"])
                        await sender.put("0", "1", key, payload)
                    assert _equal(await outcome.wait(), payload), key


async def test_a_lease_is_the_pool_of_the_receivers_gpu() -> None:
    with trio.fail_after(60):
        async with edge() as (sender, receiver):
            sent = torch.randn(16, 1024)
            await sender.put("0", "1", "k", sent)
            async with receiver.lease("0", "1", "k") as lease:
                x = lease.as_tensor(torch.float32, (16, 1024))
                assert torch.equal(x.cpu(), sent)
                if moriemu:
                    assert moriemu.device_of(x.data_ptr()) == 1
                else:
                    assert x.device == torch.device("cuda:1")
                del x


@emulated
@pytest.mark.parametrize("mode", ["enqueue", "event"])
async def test_a_copy_that_fails_costs_an_error_and_the_payload_comes_at_the_next_get(mode: str) -> None:
    with trio.fail_after(60):
        async with edge(close_grace=0.3) as (sender, receiver):
            await sender.put("0", "1", "before", b"x" * 1000)
            assert await receiver.get("0", "1", "before") == b"x" * 1000
            control("fail_copy", f"1:719:{mode}")
            await sender.put("0", "1", "k", b"y" * 1000)
            with pytest.raises(TransferFailed):
                await receiver.get("0", "1", "k")
            assert await receiver.get("0", "1", "k") == b"y" * 1000
            assert receiver.health()["status"] == "degraded"


@emulated
async def test_closing_over_a_copy_ends_within_the_grace_and_the_process_before_the_copy_does() -> None:
    with trio.fail_after(60):
        command = [sys.executable, str(Path(__file__).with_name("mori_closing.py")), str(COPY), str(GRACE)]
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        began = trio.current_time()
        ended = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, env=environment)
        took = trio.current_time() - began
    assert ended.returncode == 0, ended.stderr.decode()
    assert GRACE <= float(ended.stdout.split()[-1]) < 2
    assert took < COPY


@emulated
async def test_beside_64_stuck_writes_a_fresh_payload_comes_and_stock_peers_get_answers() -> None:
    answers = Answers()

    async def ask(port: int) -> None:
        with open_stock_client(port, engine=None) as client:
            while not answers.over:
                asked = trio.current_time()
                answer = await client.query("k0")
                answers.add(trio.current_time() - asked)
                assert answer is None or answer["data_size"]

    with trio.fail_after(60):
        async with edge() as (sender, stuck):
            info = sender.get_connection_info()
            config = {"role": "receiver", "backend_type": "xgmi", "memory_pool_size": SIZE, "host": "127.0.0.1"}
            config |= {"sender_host": info["host"], "sender_zmq_port": info["zmq_port"]}
            async with open_connector({**config, "memory_pool_device": "cuda:1"}) as other:
                for number, receiver in enumerate((stuck, other)):  # and have both connected
                    await sender.put("0", "1", f"first{number}", b"x")
                    assert await receiver.get("0", "1", f"first{number}") == b"x"
                engine, descriptor = sender._engine, stuck._engine.descriptor
                Holding(held=4.0).hold(engine, engine.add_peer(descriptor))
                async with trio.open_nursery() as nursery:
                    for number in range(64):
                        nursery.start_soon(stuck.get, "0", "1", f"k{number}")
                        await sender.put("0", "1", f"k{number}", b"x")
                    await wait_until(lambda: sender.statistics().held.get("pinned") == 64 * UNIT)
                    async with trio.open_nursery() as asking:
                        asking.start_soon(ask, info["zmq_port"])
                        await sender.put("0", "1", "fresh", b"y" * 65536)
                        with trio.fail_after(2):
                            assert await other.get("0", "1", "fresh") == b"y" * 65536
                    assert sender.statistics().held.get("pinned") == 64 * UNIT
                    answers.assert_prompt()


async def test_no_connector_needs_to_look_into_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # An emulated GPU's memory is host memory; a GPU's is not, and then there is no buffer.
    monkeypatch.setattr(_mori_pool, "_host_bytes", lambda tensor: None)
    with trio.fail_after(60):
        async with edge() as (sender, receiver):
            for connector in (sender, receiver):
                assert connector._engine.region.buffer is None
            for payload in PAYLOADS:
                await sender.put("0", "1", "k", payload)
                assert _equal(await receiver.get("0", "1", "k"), payload)


def _equal(one: object, other: object) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other)
    if isinstance(other, dict):
        return isinstance(one, dict) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in other)
    return one == other
