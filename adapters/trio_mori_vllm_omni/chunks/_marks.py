"""The marks that travel in a chunk's ``meta``: the end of a segment, of the request, and that it failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# In ``meta`` beside ``finished``, which is all that a stock adapter looks at.
FAILURE = "trio_mori_failure"

# Characters of a reason that are passed on.
MAX_REASON = 500


def is_true(value: Any) -> bool:
    """Whether a mark is set: a boolean, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return bool(value.tolist())  # `item` gives the interpreter away for its 0.2 us, and may wait 5 ms for it
        return value.numel() == 1 and bool(value.item())
    return bool(value)


def meta_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The marks of a payload; empty if it has none."""
    meta = payload.get("meta")
    return meta if isinstance(meta, dict) else {}


def is_last(payload: object) -> bool:
    """Whether no chunk follows."""
    return isinstance(payload, Mapping) and is_true(meta_of(payload).get("finished"))


def failure_of(payload: Mapping[str, Any]) -> str | None:
    """Why the stage before has given the request up, if it has."""
    reason = meta_of(payload).get(FAILURE)
    return reason if isinstance(reason, str) else None


def failed_terminal(reason: str) -> dict[str, Any]:
    """A terminal chunk that says why. For a stock adapter it is an empty terminal chunk."""
    marks = {"finished": torch.tensor(True), "is_segment_finished": torch.tensor(False)}
    return {"meta": {**marks, FAILURE: reason[:MAX_REASON]}}
