"""The memory of a Mori engine's pool."""

from __future__ import annotations

import ctypes

import torch

from .._errors import EngineUnavailable
from ..abc import Region


def allocate(size: int, device: str) -> Region:
    """All pages of it exist when this returns; takes seconds for a large one, so in a thread.

    Raises:
        EngineUnavailable: there is no such device, or no room on it.
    """
    try:
        if device == "cpu":
            # Pinned for the GPU's copies; Mori registers it with the NIC itself. Zeroed to have all pages now.
            tensor = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).zero_()
        else:
            tensor = torch.empty(size, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineUnavailable(
            f"a pool of {size} bytes cannot be allocated on {device}: {error}. Check memory_pool_device, "
            "memory_pool_size, and that torch is a ROCm build that sees the GPU"
        ) from error
    return Region(tensor, _host_bytes(tensor), device)


def _host_bytes(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's bytes, where they are host memory; the view keeps the tensor."""
    if not tensor.is_cpu:
        return None
    array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
