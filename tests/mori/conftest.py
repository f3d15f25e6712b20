"""The emulated GPUs, where they are there: torch takes `cuda:N` for their memory."""

from typing import Any

import mori_lane
import torch


def install() -> None:
    """Let torch allocate on them. Of no elements there is nothing to emulate, and the emulation cannot."""
    mori_lane.moriemu.install()
    on_emulated_gpus = torch.empty

    def empty(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
        nothing = size in ((0,), ((0,),), ([0],))
        return on_emulated_gpus(*size, device="cpu" if nothing else device, **more)

    torch.empty = empty  # type: ignore[assignment]


if mori_lane.moriemu is not None:
    install()
