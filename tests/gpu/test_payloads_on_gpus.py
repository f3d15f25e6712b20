"""Payloads between connectors whose pools are on GPUs: where they go, beside which streams, and by no other memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import trio
from gpu_lane import PLACES, needs_gpu
from rig import assert_free, port_of, wait_until

from trio_mori import Connector, LeaseError, NotReady, UnsupportedPayload, open_connector
from trio_mori._staging import plan_payload

pytestmark = [pytest.mark.gpu, needs_gpu]

POOL = 256 << 20
MB = 1 << 20

# What keeps an H200 busy for a tenth of a second.
BUSY = 200_000_000


@asynccontextmanager
async def open_two(devices: tuple[str, str], **more: object) -> AsyncIterator[tuple[Connector, Connector]]:
    """A sender on one GPU, a receiver on the other."""
    common = {"backend_type": "cuda_ipc", "memory_pool_size": POOL, "host": "127.0.0.1"}
    sender = {"role": "sender", "zmq_port": 0, "memory_pool_device": devices[0], **common}
    async with open_connector(sender) as one:
        receiver = {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port_of(one)}
        async with open_connector(receiver | {"memory_pool_device": devices[1], **common, **more}) as other:
            with trio.fail_after(60):
                yield one, other
                await assert_free(one, other)


@pytest.mark.parametrize("devices", PLACES)
async def test_structures_of_gpu_and_host_parts_arrive_bit_for_bit(devices: tuple[str, str]) -> None:
    ours, theirs = devices
    payload = {
        "hidden": torch.randn(3, 100, 64, device=ours).to(torch.bfloat16),
        "transposed": torch.arange(35 * 21, device=ours).view(35, 21).t(),
        "on the other": torch.randn(1000, device=theirs, dtype=torch.complex64).conj(),
        "bytes of their own": torch.randint(0, 255, (MB + 3,), device=ours, dtype=torch.uint8)[1:],
        "host": torch.arange(300_000),
        "nothing": torch.empty(0, 4, device=ours),
        "rest": [b"x" * 1000, 7, "text", None, {"deep": torch.ones((), device=ours)}],
        "small": torch.tensor([True, False], device=ours),
    }
    async with open_two(devices) as (sender, receiver):
        await sender.put("0", "1", "k", payload)
        got = await receiver.get("0", "1", "k")
        assert isinstance(got, dict)
        for key, value in payload.items():
            if isinstance(value, torch.Tensor):
                assert got[key].device == torch.device(theirs)
                assert got[key].dtype == value.dtype
                assert torch.equal(got[key].cpu(), value.cpu()), key
        assert got["rest"][:4] == payload["rest"][:4]  # type: ignore[index]
        assert got["rest"][4]["deep"].item() == 1


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("devices", PLACES)
async def test_a_structure_of_gpu_tensors_never_comes_by_the_host(devices: tuple[str, str]) -> None:
    ours, theirs = devices
    payload = {"a": torch.randn(4 * MB, device=ours), "b": [torch.randn(1000, device=ours)], "n": 3}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    async with open_two(devices) as (sender, receiver):
        await sender.put("0", "1", "first", payload)  # maps the peer, once
        await receiver.get("0", "1", "first")
        with torch.profiler.profile(activities=activities) as profile:
            await sender.put("0", "1", "k", payload)
            got = await receiver.get("0", "1", "k")
            await sender.put("0", "1", "leased", payload)
            async with receiver.lease("0", "1", "leased") as lease:
                value = lease.value()
                torch.cuda.synchronize(theirs)
                del value
        assert isinstance(got, dict)
        assert torch.equal(got["a"].cpu(), payload["a"].cpu())  # type: ignore[attr-defined]
    copies = {event.key: event.count for event in profile.key_averages() if "memcpy" in event.key.lower()}
    assert any("DtoD" in name or "PtoP" in name for name in copies), copies
    assert not any("DtoH" in name or "HtoD" in name for name in copies), copies


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("size", [64 << 10, 4 * MB])
async def test_the_source_may_be_overwritten_and_the_result_read_on_any_stream(
    devices: tuple[str, str], size: int
) -> None:
    ours, theirs = devices
    source = torch.empty(size // 4, dtype=torch.int32, device=ours)
    wrong = torch.zeros((), dtype=torch.int64, device=theirs)
    writing, spoiling = torch.cuda.Stream(ours), torch.cuda.Stream(ours)
    reading = torch.cuda.Stream(theirs)
    async with open_two(devices) as (sender, receiver):
        for number in range(500):
            with torch.cuda.stream(writing):
                torch.cuda._sleep(20_000)
                source.fill_(number)
                receipt = await sender.put("0", "1", str(number), {"x": source} if number % 2 else source)
            assert receipt.size == size
            with torch.cuda.stream(spoiling):
                source.fill_(-1)
            got = await receiver.get("0", "1", str(number))
            with torch.cuda.stream(reading):
                result = got["x"] if isinstance(got, dict) else got
                assert isinstance(result, torch.Tensor)
                wrong += (result != number).sum()
                result.record_stream(reading)
            spoiling.synchronize()
        torch.cuda.synchronize(theirs)
        assert wrong.item() == 0


@pytest.mark.parametrize("devices", PLACES)
async def test_memory_that_is_still_read_is_not_what_a_get_returns_too_early(devices: tuple[str, str]) -> None:
    theirs = devices[1]
    result = torch.empty(MB, dtype=torch.uint8, device=theirs)
    stream = torch.cuda.Stream(theirs)
    async with open_two(devices) as (sender, receiver):
        for number in range(5):
            await sender.put("0", "1", str(number), torch.full((MB,), 255, dtype=torch.uint8, device=devices[0]))
            with pytest.raises(NotReady):
                receiver.get_nowait("0", "1", str(number))
            await wait_until(lambda: receiver.statistics().held.get("arrived"))
            with torch.cuda.stream(stream):
                before = torch.full((MB,), number, dtype=torch.uint8, device=theirs)
                torch.cuda._sleep(BUSY // 20)
                result.copy_(before)
                del before  # the next tensor of its size on this stream has its memory
                got = receiver.get_nowait("0", "1", str(number))
            assert isinstance(got, torch.Tensor)
            stream.synchronize()
            assert result.unique().tolist() == [number]
            assert got.unique().tolist() == [255]
            del got


@pytest.mark.parametrize("devices", PLACES)
async def test_a_source_that_lost_its_memory_is_named_and_nothing_of_it_goes_on(devices: tuple[str, str]) -> None:
    ours = devices[0]
    for other in (torch.ones(3, device=ours), torch.ones(3)):
        async with open_two(devices) as (sender, receiver):
            payload = {"large": torch.ones(64 * MB, dtype=torch.uint8, device=ours), "lost": other}
            plan = plan_payload(payload)
            other.untyped_storage().resize_(0)
            with pytest.raises(UnsupportedPayload):
                await sender.put("0", "1", "k", plan)
            await sender.put("0", "1", "k", torch.full((64 * MB,), 3, dtype=torch.uint8, device=ours))
            got = await receiver.get("0", "1", "k")
            assert isinstance(got, torch.Tensor)
            assert got.unique().tolist() == [3]


@pytest.mark.parametrize("devices", PLACES)
async def test_other_tasks_run_while_a_source_is_still_computed_and_a_put_can_be_cancelled(
    devices: tuple[str, str],
) -> None:
    source = torch.zeros(MB, dtype=torch.uint8, device=devices[0])
    async with open_two(devices) as (sender, receiver):
        with torch.cuda.device(devices[0]):
            torch.cuda._sleep(5 * BUSY)
        with trio.move_on_after(0.05) as scope:
            await sender.put("0", "1", "k", source)
        assert scope.cancelled_caught
        with torch.cuda.device(devices[0]):
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY)
        source.fill_(5)
        turns = 0
        async with trio.open_nursery() as nursery:

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await trio.sleep(0.005)

            nursery.start_soon(count)
            await sender.put("0", "1", "k", source)
            nursery.cancel_scope.cancel()
        assert turns > 5
        got = await receiver.get("0", "1", "k")
        assert isinstance(got, torch.Tensor)
        assert got.min().item() == 5


@pytest.mark.parametrize("devices", PLACES)
async def test_a_lease_is_given_back_when_what_its_block_queued_has_read_it(devices: tuple[str, str]) -> None:
    theirs = devices[1]
    result = torch.empty(MB, dtype=torch.uint8, device=theirs)
    async with open_two(devices, memory_pool_size=2 * MB) as (sender, receiver):
        torch.cuda.set_device(theirs)
        for number in range(20):
            await sender.put("0", "1", str(number), torch.full((MB,), number, dtype=torch.uint8, device=devices[0]))
            async with receiver.lease("0", "1", str(number)) as lease:
                torch.cuda._sleep(BUSY // 20)
                result.copy_(lease.tensor)
            await sender.put("0", "1", f"next {number}", torch.full((MB,), 255, dtype=torch.uint8, device=devices[0]))
            await receiver.get("0", "1", f"next {number}")
            assert result.unique().tolist() == [number]
        torch.cuda.set_device(0)
        await sender.put("0", "1", "kept", torch.zeros(MB, dtype=torch.uint8, device=devices[0]))
        with pytest.raises(LeaseError):
            async with receiver.lease("0", "1", "kept") as lease:
                kept = lease.tensor
        del kept


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("place", ["cpu", "cuda:0", "cuda"])
async def test_tensors_go_where_payload_device_says(devices: tuple[str, str], place: str) -> None:
    payload = {"a": torch.arange(MB, device=devices[0]), "b": torch.arange(5)}
    async with open_two(devices, payload_device=place) as (sender, receiver):
        for data in (payload, payload["a"]):
            await sender.put("0", "1", "k", data)
            got = await receiver.get("0", "1", "k")
            result = got["a"] if isinstance(got, dict) else got
            assert isinstance(result, torch.Tensor)
            assert result.device.type == torch.device(place).type
            await sender.put("0", "1", "over", torch.full((8 * MB,), 255, dtype=torch.uint8))
            await receiver.get("0", "1", "over")  # where the first one lay
            assert torch.equal(result.cpu(), torch.arange(MB))


@pytest.mark.parametrize("devices", PLACES)
async def test_a_pool_in_host_memory_takes_from_gpus_and_gives_to_them(devices: tuple[str, str]) -> None:
    shm = {"host": "127.0.0.1", "memory_pool_size": POOL}
    payload = {"a": torch.randn(2 * MB, device=devices[0]), "b": torch.arange(5)}
    async with open_connector({"role": "sender", "zmq_port": 0, **shm}) as sender:
        to = {"sender_host": "127.0.0.1", "sender_zmq_port": port_of(sender), "payload_device": devices[1]}
        async with open_connector({"role": "receiver", **to, **shm}) as receiver:
            for data in (payload, payload["a"]):
                await sender.put("0", "1", "k", data)
                got = await receiver.get("0", "1", "k")
                result = got["a"] if isinstance(got, dict) else got
                assert isinstance(result, torch.Tensor)
                assert result.device == torch.device(devices[1])
                assert torch.equal(result.cpu(), payload["a"].cpu())
