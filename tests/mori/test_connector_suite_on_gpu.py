"""The connector's own tests with pools on a GPU of whatever make, into which the host cannot look.

The emulated GPUs of the lane have host memory. Here the memory is a GPU's, and a stand-in for Mori moves it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import connector_suite
import pytest
import torch
from mori_fabric import MoriFabric
from mori_standin import Fabric

from trio_mori._engines import _mori, open_engine
from trio_mori.abc import Engine

if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch sees", allow_module_level=True)

globals().update(connector_suite.TESTS_ON_GPUS)

equal = torch.equal


class GpuFabric(MoriFabric):
    """Its engines are on a GPU."""

    def open_real(self, size: int) -> AbstractAsyncContextManager[Engine]:
        return open_engine("rdma", pool_size=size, device="cuda")


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric()
    monkeypatch.setattr(_mori, "load", lambda: fabric)
    monkeypatch.setattr(torch, "equal", lambda one, other: equal(one.cpu(), other.cpu()))
    connector_suite.over(GpuFabric, monkeypatch)
