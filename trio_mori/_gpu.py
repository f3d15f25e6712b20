"""Streams of a GPU, and waiting for what was queued on them without holding up the trio run."""

from __future__ import annotations

import ctypes
import os
import time
from functools import lru_cache
from typing import Any, Protocol

import torch
import trio

from ._errors import EngineUnavailable

# A copy of up to 1 MB is over so soon after it was queued (5 us between two H200 by NVLink, and 20 us for the calls).
# More than this would be felt by other tasks.
SPIN = 30e-6

# From then on others run between two questions, and for so long that is all: one costs 2 us, a round of the run 10 to
# 20, and 256 MB between two H200 take 0.7 ms. A timer of trio has a resolution of 1 ms, which would be noticed.
EAGER = 2e-3

# What takes longer is asked after when it has become an eighth older, as it is noticed that much late at most; and at
# least so often, so that 64 that are stuck take 1% of a core.
LONGEST = 20e-3


class Moment(Protocol):
    """A point in a stream of work, for example a `torch.cuda.Event` that was recorded."""

    def query(self) -> bool:
        """Whether all work before it is done. Never waits."""


async def wait_over(moment: Moment) -> None:
    """Return when a moment has come. A checkpoint; cancellable, which stops no work.

    A GPU tells nobody: its driver's own wait holds a thread until it ends, which nothing could interrupt.

    Raises:
        RuntimeError: the GPU has failed; whether the work goes on is not known.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    began = time.perf_counter()
    age = 0.0
    while age < SPIN:
        if moment.query():
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        age = time.perf_counter() - began
    while not moment.query():
        if age < EAGER:
            await trio.lowlevel.checkpoint()
        else:
            await trio.sleep(min(age / 8, LONGEST))
        age = time.perf_counter() - began


def check_device(name: str) -> None:
    """See that what is to be brought to a device can be: ``pool``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        EngineUnavailable: there is no such GPU in this process.
    """
    if name.startswith("cuda"):
        seen = torch.cuda.device_count()
        if (torch.device(name).index or 0) >= seen:
            raise EngineUnavailable(
                f"payload_device: {name} is not there: torch {torch.__version__} sees {seen} GPUs in this process; "
                "give pool or cpu, or see that `nvidia-smi` or `rocm-smi` lists it and no CUDA_VISIBLE_DEVICES hides it"
            )


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside what the process does on a device. torch has 32 of high priority, and gives them out in turn."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class working_on:
    """Around what torch is to do on a stream of whatever device; then device and streams are as before.

    `torch.cuda.stream` does the same in 10 us, a third of what a copy of 1 MB between two H200 takes with all calls.
    """

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The moment when all that was queued on a stream until now is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def mark_current(device: torch.device) -> torch.cuda.Event:
    """As `mark`, of the stream that the caller works on there."""
    return mark(torch.cuda.current_stream(device))


# As of cudaMemcpyKind: the driver finds out from the addresses where they are.
_DEFAULT = 4


@lru_cache(maxsize=1)
def _copy_call() -> Any:
    """The runtime's copy on a stream; None where it is not to be had.

    Only of the library that torch has loaded: another copy of it, which a system may have as well, knows nothing of
    torch's streams. That of ROCm has no name that would tell the two apart.
    """
    if torch.version.cuda is None:
        return None
    name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).cudaMemcpyAsync
    except (OSError, AttributeError):
        return None


def copy_bytes(target: int, source: int, size: int, stream: torch.cuda.Stream) -> bool:
    """Queue a copy between addresses on a stream, whatever device and stream are current.

    In a process that has slept for 3 ms it takes 20 us; the calls of torch that do the same, with tensors to be made
    and a stream to be entered, take 60 to 110.

    Returns:
        Whether it was; else it has to be done by tensors.

    Raises:
        RuntimeError: the GPU has failed.
    """
    call, handle = _copy_call(), stream.cuda_stream
    if call is None or not handle:  # the default stream is that of the current device
        return False
    status = call(
        ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), _DEFAULT, ctypes.c_void_p(handle)
    )
    if status:
        raise RuntimeError(f"the copy of {size} bytes was refused: error {status} of the driver")
    return True
