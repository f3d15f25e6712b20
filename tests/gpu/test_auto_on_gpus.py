"""auto on real GPUs: the direct way where there is one, and host memory where there is none."""

from __future__ import annotations

import pytest
import torch
import trio
from gpu_lane import PLACES, needs_gpu
from rig import assert_free, port_of

from trio_mori import Connector, TransferFailed, open_connector
from trio_mori._engines._cuda_ipc import CudaIpcEngine
from trio_mori._engines._cuda_peer import CudaPeer

pytestmark = [pytest.mark.gpu, needs_gpu]

MB = 1 << 20


async def check_all(devices: tuple[str, str], way: str) -> None:
    common: dict[str, object] = {"backend_type": "auto", "memory_pool_size": 64 * MB, "host": "127.0.0.1"}
    async with open_connector({**common, "role": "sender", "zmq_port": 0, "memory_pool_device": devices[0]}) as sender:
        to = {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port_of(sender)}
        async with open_connector({**common, **to, "memory_pool_device": devices[1]}) as receiver:
            with trio.fail_after(60):
                await check_payloads(sender, receiver, devices)
                await assert_free(sender, receiver)
            (there,) = sender.statistics().ways.values()
            (here,) = receiver.statistics().ways.values()
            assert (there.partition(" ")[0], here) == (way, way)


async def check_payloads(sender: Connector, receiver: Connector, devices: tuple[str, str]) -> None:
    for number in range(3):
        raw = torch.randn(3 * MB, device=devices[0]) + number
        for data in (raw, {"large": raw, "small": raw[:7], "host": b"x" * 1000}):
            await sender.put("0", "1", "k", data)
            got = await receiver.get("0", "1", "k")
            result = got["large"] if isinstance(got, dict) else got
            assert isinstance(result, torch.Tensor)
            assert result.device == torch.device(devices[1])
            assert torch.equal(result.cpu(), raw.cpu())
            await sender.put("0", "1", "leased", data)
            async with receiver.lease("0", "1", "leased") as lease:
                value = lease.value()
                view = value["large"] if isinstance(value, dict) else value
                assert isinstance(view, torch.Tensor)
                assert torch.equal(view.cpu(), raw.cpu())
                del value, view


@pytest.mark.parametrize("devices", PLACES)
async def test_gpus_with_access_are_written_to_directly(devices: tuple[str, str]) -> None:
    await check_all(devices, "cuda_ipc")


@pytest.mark.parametrize("devices", PLACES)
async def test_gpus_without_access_are_reached_by_host_memory(
    devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(engine: CudaIpcEngine, peer: CudaPeer) -> torch.Tensor:
        await trio.lowlevel.checkpoint()
        raise TransferFailed(f"write to {peer.identity} refused: no access")

    monkeypatch.setattr(CudaIpcEngine, "_map", refuse)
    await check_all(devices, "shm")
