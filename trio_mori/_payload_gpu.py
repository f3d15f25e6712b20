"""Copies of a payload that a GPU makes: queued here, and waited for by whoever asked.

A copy begins when the work is done that the caller had queued before it handed the payload over. It goes on a stream
beside the caller's, so that nobody's later work delays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import attrs
import torch

from ._gpu import Mark, SideStream, current_stream, is_over_soon, mark, side_stream, take_side_stream, working_on
from ._payload_copy import Leaf, allocate, check_memory, copy_to_host, is_plain, same_bits
from ._payload_glance import Part, Recipe


class Streams:
    """The streams on which the tensors of one payload become complete: those that are current as it is planned.

    Attributes:
        ready: When they are, of those on which there was work.
    """

    def __init__(self) -> None:
        self.ready: list[torch.cuda.Event] = []
        self._noted: set[torch.device] = set()

    def note(self, device: torch.device) -> None:
        """There is a tensor on this device."""
        if device not in self._noted:
            self._noted.add(device)
            stream = current_stream(device)
            if not stream.query():
                self.ready.append(mark(stream))


def queue_copies(leaves: Sequence[Leaf], address: int, device: torch.device) -> Mark | None:
    """Queue the copy of every leaf to its place from an address on, in memory of a GPU on which all of them are.

    Returns:
        When it is over, until which neither side may be let go of. None, and nothing was queued: it takes more than
        copies of runs of bytes, or the leaves lie elsewhere.

    Raises:
        UnsupportedPayload: a source lost its memory, or changed its length, after it was planned.
    """
    for leaf in leaves:
        if not (leaf.on_gpu and leaf.source.device == device and is_plain(leaf.source)):
            return None
    starts = [check_memory(leaf) for leaf in leaves]  # all of them before anything moves
    side = take_side_stream(device)
    for leaf, start in zip(leaves, starts, strict=True):
        if not side.copy(address + leaf.offset, start, leaf.nbytes):
            return None
    return side.mark()


def make_on_gpu(recipe: Recipe, address: int, device: torch.device) -> object | None:
    """A payload of its own memory, on the GPU where its bytes lie at an address; complete. In any thread.

    Tensors are the current stream's, as those that torch makes there. None: it has to be made in another way.
    """
    parts: list[tuple[Part, int]] = []

    def make(part: Part) -> torch.Tensor:
        result = allocate(part.dtype, part.shape, device)
        if part.nbytes:
            parts.append((part, result.data_ptr()))
        return result

    value = recipe.made_by(make)
    side, stream = take_side_stream(device), current_stream(device)
    if not stream.query():
        side.stream.wait_stream(stream)  # which may use that memory until then for what had it before
    for part, place in parts:
        if not side.copy(place, address + part.offset, part.nbytes):
            return None
    done = side.mark()
    if not is_over_soon(done):
        done.synchronize()
    return value


def begin_copies(leaves: Sequence[Leaf], target: torch.Tensor, ready: Sequence[torch.cuda.Event]) -> list[Mark]:
    """Queue the copy of every leaf to its place in `target`, a 1-D uint8 tensor; one of the two sides is on a GPU.

    Args:
        ready: When the leaves are complete.

    Returns:
        The moments when all bytes are there. Until then neither side may be let go of.

    Raises:
        UnsupportedPayload: a source lost its memory, or changed its length, after it was planned.
    """
    groups: dict[torch.device, list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.source.device if leaf.on_gpu else target.device, []).append(leaf)
    begun: list[SideStream] = []
    try:
        for device, group in groups.items():
            if device.type == "cpu":
                for leaf in group:
                    copy_to_host(leaf, target.data_ptr(), target)
            else:
                begun.append(take_side_stream(device))
                _begin_group(group, target, ready, begun[-1])
    except BaseException:
        for side in begun:  # whoever is told gives the memory back at once
            side.stream.synchronize()
        raise
    return [side.mark() for side in begun]


def _begin_group(group: list[Leaf], target: torch.Tensor, ready: Sequence[torch.cuda.Event], side: SideStream) -> None:
    """Queue what one GPU copies."""
    for moment in ready:
        side.stream.wait_event(moment)
    group = [leaf for leaf in group if not _queue_bytes(leaf, target, side)]
    if group:
        with ExitStack() as stack:
            if side.stream.device != target.device and not target.is_cpu:
                # Between two GPUs torch makes the current stream of either wait for the other's.
                stack.enter_context(working_on(side_stream(target.device)))
            stack.enter_context(working_on(side.stream))
            for leaf in group:
                _queue(leaf, target)


def _queue_bytes(leaf: Leaf, target: torch.Tensor, side: SideStream) -> bool:
    """Queue a copy that is one run of bytes, within a GPU. False: it is more than that."""
    source = leaf.source
    if not leaf.on_gpu or source.device != target.device or not is_plain(source):
        return False
    return side.copy(target.data_ptr() + leaf.offset, check_memory(leaf), leaf.nbytes)


def _queue(leaf: Leaf, target: torch.Tensor) -> None:
    if leaf.on_gpu:
        check_memory(leaf)
        source, place = same_bits(leaf, target)
        place.copy_(source, non_blocking=True)
        return
    # By pinned memory: from there alone it goes without the host. torch keeps it until then.
    staged = torch.empty(leaf.nbytes, dtype=torch.uint8, pin_memory=True)
    copy_to_host(attrs.evolve(leaf, offset=0), staged.data_ptr(), staged)
    target[leaf.offset : leaf.offset + leaf.nbytes].copy_(staged, non_blocking=True)
