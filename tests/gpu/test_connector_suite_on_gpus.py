"""The connector's own tests with pools on GPUs, over the cuda_ipc engine."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import connector_suite
import pytest
import torch
from gpu_lane import COUNT, needs_gpu
from mori_fabric import MoriFabric

from trio_mori import open_engine
from trio_mori.abc import Engine

pytestmark = [pytest.mark.gpu, needs_gpu]

globals().update(connector_suite.TESTS_ON_GPUS)

equal = torch.equal


class GpuFabric(MoriFabric):
    """Its engines are on GPUs, in turn where there are two."""

    def open_real(self, size: int) -> AbstractAsyncContextManager[Engine]:
        device = next(self._devices)
        return open_engine("cuda_ipc", pool_size=size, device=device if COUNT > 1 else "cuda:0")


@pytest.fixture(autouse=True)
def _on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda one, other: equal(one.cpu(), other.cpu()))
    connector_suite.over(GpuFabric, monkeypatch)
