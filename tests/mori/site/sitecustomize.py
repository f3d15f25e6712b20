"""For stage processes of the lane, which find this on $PYTHONPATH: emulated GPUs, of which stage N has number N."""

import sys
from typing import Any

import moriemu
import torch

moriemu.install()
on_emulated_gpus = torch.empty


def empty(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
    """What `torch.empty` does after `torch.cuda.set_device`."""
    if device == "cuda" and sys.argv[-1].isdigit():
        device = f"cuda:{sys.argv[-1]}"
    return on_emulated_gpus(*size, device=device, **more)


torch.empty = empty  # type: ignore[assignment]
