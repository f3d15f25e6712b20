"""Copies of a payload that a GPU makes: queued here, on streams beside the caller's, and waited for by whoever asked.

A copy begins when the work that the caller had queued before it handed the payload over is done, which an event tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ._gpu import mark, side_stream
from ._payload_copy import Leaf, check_memory, copy_to_host, same_bits


def begin_copies(leaves: Sequence[Leaf], target: torch.Tensor) -> list[torch.cuda.Event]:
    """Queue the copy of every leaf to its place in `target`, a 1-D uint8 tensor; one of the two sides is on a GPU.

    Returns:
        The moments when all bytes are there. Until then neither side may be let go of.

    Raises:
        UnsupportedPayload: a source lost its memory, or changed its length, after it was planned.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    hosted = [leaf for leaf in leaves if leaf.ready is None]
    for leaf in leaves:
        if leaf.ready is not None:
            check_memory(leaf)
            stream = _stream(streams, leaf.source.device)
            stream.wait_event(leaf.ready)
            # Between two GPUs torch makes the current stream of either wait for the other's.
            there = None if target.is_cpu else _stream(streams, target.device)
            with torch.cuda.stream(there), torch.cuda.stream(stream):
                source, place = same_bits(leaf, target)
                place.copy_(source, non_blocking=True)
    if hosted and target.is_cpu:
        for leaf in hosted:
            copy_to_host(leaf, target.data_ptr(), target)
    elif hosted:
        with torch.cuda.stream(_stream(streams, target.device)):
            _stage(hosted, target)
    return [mark(stream) for stream in streams.values()]


def _stream(streams: dict[torch.device, torch.cuda.Stream], device: torch.device) -> torch.cuda.Stream:
    if device not in streams:
        streams[device] = side_stream(device)
    return streams[device]


def _stage(leaves: Sequence[Leaf], target: torch.Tensor) -> None:
    """From host memory, by pinned memory: from there alone it goes without the host. torch keeps it until then."""
    for leaf in leaves:
        staged = torch.empty(leaf.nbytes, dtype=torch.uint8, pin_memory=True)
        copy_to_host(attrs.evolve(leaf, offset=0), staged.data_ptr(), staged)
        target[leaf.offset : leaf.offset + leaf.nbytes].copy_(staged, non_blocking=True)
