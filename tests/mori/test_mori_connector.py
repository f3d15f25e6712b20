"""Connectors whose pools are on GPUs, over the real Mori."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import trio
from mori_lane import control, delayed, emulated, moriemu

from trio_mori import Connector, ConnectorConfig, TransferFailed, open_connector

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

SIZE = 64 << 20


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
    payloads: list[object] = [
        torch.arange(100_000, dtype=torch.float32).reshape(1000, 100),
        torch.randn(4096, 512).to(torch.bfloat16),
        b"bytes" * 1000,
        {"hidden": torch.randn(16, 4096), "codes": torch.arange(64), "text": "a", "finished": False},
    ]
    with trio.fail_after(60):
        async with edge() as (sender, receiver):
            if moriemu:
                moriemu.ctl("copy_delay_us", int(delay * 1e6))
            try:
                for number, payload in enumerate(payloads):
                    async with trio.open_nursery() as nursery:
                        got: list[object] = []
                        waits = number % 2 == 0

                        async def get(key: str, got: list[object] = got) -> None:
                            got.append(await receiver.get("0", "1", key))

                        if waits:
                            nursery.start_soon(get, f"k{number}")
                            await trio.sleep(0.01)
                        await sender.put("0", "1", f"k{number}", payload)
                        if not waits:
                            nursery.start_soon(get, f"k{number}")
                    assert _equal(got[0], payload), number
            finally:
                if moriemu:
                    moriemu.ctl("copy_delay_us", 0)


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
async def test_closing_with_a_slow_copy_ends_within_the_grace() -> None:
    with trio.fail_after(60):
        with delayed(2.0):
            async with edge(close_grace=0.3) as (sender, receiver):
                await sender.put("0", "1", "k", b"y" * 1000)
                with trio.move_on_after(0.3):
                    await receiver.get("0", "1", "k")
                began = trio.current_time()
            assert trio.current_time() - began < 3


def _equal(one: object, other: object) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other)
    if isinstance(other, dict):
        return isinstance(one, dict) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in other)
    return one == other
