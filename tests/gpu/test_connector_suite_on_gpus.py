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

# What they are about is not so here: copies out of a pool on a GPU that one tensor fills are made in no thread.
OTHERS = {
    "test_a_get_that_copies_in_a_thread_ends_well_or_is_told_and_harms_nothing",
    "test_a_get_that_copies_in_a_thread_is_waited_for",
    # And this one looks for the pool in host memory.
    "test_health_has_the_stock_keys_and_the_pool_by_state",
}
assert connector_suite.TESTS.keys() >= OTHERS, "one that is left out is not there"

globals().update({name: test for name, test in connector_suite.TESTS.items() if name not in OTHERS})

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
