"""What is put, how one chunk is told from another, and whether what arrived is what was put."""

from __future__ import annotations

from typing import Any

import torch

from .turn import Turn


class Payload:
    """A chunk of a turn, the same memory for all of them; put copies it.

    Structured is what vllm-omni's stages send: a dict with a tensor of codec frames, and a flag.
    """

    def __init__(self, turn: Turn) -> None:
        self._words = torch.arange(turn.size // 8, dtype=torch.int64)
        self.value: Any = self._words.view(torch.uint8)
        if turn.structured:
            self.value = {"codes": {"audio": self._words.view(-1, 64)}, "meta": {"finished": False}}

    def mark(self, number: int) -> None:
        """Make it that chunk."""
        self._words[0] = number
        self._words[-1] = number


def check(value: Any, turn: Turn, number: int) -> None:
    """Raise unless this is the chunk of that number, whatever the peer wraps it in."""
    if isinstance(value, dict):
        value = value["codes"]["audio"]
    elif not isinstance(value, torch.Tensor):
        value = value.tensor
    words = value.reshape(-1).view(torch.int64)
    if len(words) != turn.size // 8 or words[0] != number or words[-1] != number:
        raise ValueError(f"chunk {number} arrived as {len(words) * 8} bytes, {int(words[0])} ... {int(words[-1])}")
