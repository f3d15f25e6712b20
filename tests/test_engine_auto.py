"""Several engines over one pool: which of them reaches a peer, and how bytes go by host memory where none does."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import trio
from rig import EVERY_ENGINE_CHECK, assert_free, port_of, receiver_config, sender_config

from trio_mori import Connector, EngineUnavailable, TransferFailed, open_connector, open_engine
from trio_mori._engines import _cuda_library
from trio_mori._engines._cuda_ipc import CudaIpcEngine
from trio_mori._engines._cuda_peer import CudaPeer
from trio_mori._engines._staged import StagedEngine, open_staged
from trio_mori.abc import Engine
from trio_mori.testing import EngineBench, FakeGpus
from trio_mori.testing._engine_bench import Check

deterministic = pytest.mark.deterministic

POOL = 8 << 20
LARGE = 3 << 20

PAYLOAD = {"large": torch.arange(LARGE // 8), "small": torch.ones(7), "rest": [b"x" * 500, None, "text"]}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    fakes = FakeGpus()
    monkeypatch.setattr(_cuda_library, "load", lambda: fakes)
    return fakes


@pytest.fixture
def no_access(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to the own process's pools."""

    async def refuse(engine: CudaIpcEngine, peer: CudaPeer) -> torch.Tensor:
        await trio.lowlevel.checkpoint()
        raise TransferFailed(f"write to {peer.identity} refused: Fake GPU cuda:0 has no access to {peer.memory.device}")

    monkeypatch.setattr(CudaIpcEngine, "_map", refuse)


@pytest.mark.parametrize("check", EVERY_ENGINE_CHECK)
async def test_several_engines_keep_the_contract_of_one(check: Check, gpus: FakeGpus) -> None:
    with trio.fail_after(60):
        await check(EngineBench(lambda size: open_engine("auto", pool_size=size, device="cuda:0"), closing_fences=True))


@asynccontextmanager
async def open_by_host(size: int) -> AsyncIterator[Engine]:
    """A pool on a GPU that is written from and to by host memory; peers' writes are brought there by the check."""
    async with (
        open_engine("cuda_ipc", pool_size=size, device="cuda:0") as gpu,
        open_staged(gpu.region, {}) as staged,
    ):
        yield LookedInto(staged)


class LookedInto(StagedEngine):
    """One whose peers see its mirror as its region, so that what arrives can be looked for there."""

    def __init__(self, staged: StagedEngine) -> None:
        self.__dict__ = staged.__dict__
        # What is in the pool has to be in the mirror for a check that fills one and looks at the other.
        self._region = self._mirror.region


@pytest.mark.parametrize("check", EVERY_ENGINE_CHECK)
async def test_the_way_by_host_memory_keeps_the_contract(check: Check, gpus: FakeGpus) -> None:
    with trio.fail_after(60):
        await check(EngineBench(open_by_host, closing_fences=True))


@asynccontextmanager
async def open_two(
    sender: dict[str, object], receiver: dict[str, object]
) -> AsyncIterator[tuple[Connector, Connector]]:
    common = {"memory_pool_size": POOL}
    async with open_connector(sender_config(**common, **sender)) as source:
        async with open_connector(receiver_config(source, **common, **receiver)) as target:
            with trio.fail_after(30):
                yield source, target
                await assert_free(source, target)


async def check_payloads(source: Connector, target: Connector) -> None:
    for data in (PAYLOAD, PAYLOAD["large"], b"y" * LARGE, {"none": None}):
        await source.put("0", "1", "k", data)
        assert_same(await target.get("0", "1", "k"), data)
        await source.put("0", "1", "k", data)
        async with target.lease("0", "1", "k") as lease:
            value = lease.value()
            assert_same(value, data)
            del value


def assert_same(got: object, put: object) -> None:
    if isinstance(put, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, put)
    elif isinstance(put, dict):
        assert isinstance(got, dict)
        for key, value in put.items():
            assert_same(got[key], value)
    else:
        assert got == put


GPU: dict[str, object] = {"backend_type": "auto", "memory_pool_device": "cuda:0"}


async def test_gpus_that_have_access_to_each_other_write_directly(gpus: FakeGpus) -> None:
    async with open_two(GPU, GPU | {"memory_pool_device": "cuda:1"}) as (source, target):
        await check_payloads(source, target)
        assert source.statistics().engine == "cuda_ipc, shm"
        assert list(source.statistics().ways.values()) == ["cuda_ipc"]
        assert target.statistics().ways == {f"from tcp://127.0.0.1:{port_of(source)}": "cuda_ipc"}


@pytest.mark.usefixtures("no_access")
@pytest.mark.parametrize("backend", ["auto", "cuda_ipc"])
async def test_gpus_without_access_go_by_host_memory_and_say_so_once(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = GPU | {"backend_type": backend, "fallback": "host"}
    async with open_two(config, config) as (source, target):
        await check_payloads(source, target)
        (way,) = source.statistics().ways.values()
        assert way.startswith("shm (cuda_ipc: write to ")
        assert "has no access to Fake GPU cuda:0" in way
        assert list(target.statistics().ways.values()) == ["shm"]
    said = [each for each in caplog.records if each.levelno >= logging.WARNING and "no access" in each.getMessage()]
    assert len(said) == 1


@pytest.mark.usefixtures("no_access")
async def test_without_a_fallback_a_get_is_told_which_gpus_and_what_to_do() -> None:
    config = GPU | {"backend_type": "cuda_ipc"}
    async with open_two(config, config) as (source, target):
        await source.put("0", "1", "k", PAYLOAD)
        with pytest.raises(TransferFailed, match="no access"):
            await target.get("0", "1", "k")
        await source.cleanup("k")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("turned", [False, True])
async def test_a_pool_on_a_gpu_and_one_in_host_memory_reach_each_other(turned: bool) -> None:
    ends: list[dict[str, object]] = [GPU, {"backend_type": "shm"}]
    async with open_two(*(ends[::-1] if turned else ends)) as (source, target):
        await check_payloads(source, target)
        reason = "" if turned else " (cuda_ipc is not offered)"
        assert list(source.statistics().ways.values()) == [f"shm{reason}"]
        assert list(target.statistics().ways.values()) == ["shm"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
async def test_where_there_is_no_gpu_the_pool_is_in_host_memory_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_two(GPU, {"backend_type": "auto"}) as (source, target):
        await check_payloads(source, target)
        assert source.statistics().engine == target.statistics().engine == "shm"
        assert source.health()["pool_device"] == "cpu"
    assert "no engine reaches a pool on cuda:0 here" in caplog.text
    assert "cuda_ipc needs a GPU" in caplog.text
    with pytest.raises(EngineUnavailable, match="cuda_ipc needs a GPU"):
        async with open_connector(sender_config(**GPU | {"backend_type": "cuda_ipc", "fallback": "host"})):
            pass
