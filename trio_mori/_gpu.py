"""Streams of a GPU, and waiting for what was queued on them without holding up the trio run."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from functools import cache, lru_cache
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


def is_over_soon(moment: Moment) -> bool:
    """Whether a moment has come, or comes while this looks for it, which it does for `SPIN` at most.

    Raises:
        RuntimeError: the GPU has failed; whether the work goes on is not known.
    """
    began = time.perf_counter()
    while not moment.query():
        if time.perf_counter() - began >= SPIN:
            return False
    return True


async def wait_over(moment: Moment) -> None:
    """Return when a moment has come. A checkpoint; cancellable, which stops no work.

    A GPU tells nobody: its driver's own wait holds a thread until it ends, which nothing could interrupt.

    Raises:
        RuntimeError: as `is_over_soon`.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    if is_over_soon(moment):
        await trio.lowlevel.cancel_shielded_checkpoint()
    else:
        await wait_long(moment)


async def wait_long(moment: Moment) -> None:
    """As `wait_over`, of a moment that did not come soon: others run before it is looked for again."""
    began = time.perf_counter()
    age = 0.0
    while True:
        if age < EAGER:
            await trio.lowlevel.checkpoint()
        else:
            await trio.sleep(min(age / 8, LONGEST))
        if moment.query():
            return
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
        self._before = current_stream(self._stream.device)
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


# Without torch's objects around it: 0.4 us for 5.5, and after a pause 6 for 36. Not of torch's public interface.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which the caller works on a device."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device)
    return _named_stream(device.index, _raw_stream(device.index))


@lru_cache(maxsize=64)
def _named_stream(index: int, handle: int) -> torch.cuda.Stream:
    """The stream of a handle, which is the current one."""
    return torch.cuda.current_stream(index)


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
        call = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return call


class Mark:
    """A moment of a `SideStream`. Its event serves for another when this one has come."""

    __slots__ = ("_event", "_spare")

    def __init__(self, event: torch.cuda.Event, spare: list[torch.cuda.Event]) -> None:
        self._event: torch.cuda.Event | None = event
        self._spare = spare

    def query(self) -> bool:
        """Whether it has come."""
        event = self._event
        if event is None:
            return True
        if not event.query():  # type: ignore[no-untyped-call]
            return False
        self._event = None
        self._spare.append(event)
        return True

    def synchronize(self) -> None:
        """Hold the thread until it has come."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """A stream for copies, with events that are used again: to make one takes 30 us after a pause, as the copy does.

    Attributes:
        stream: What torch calls it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = side_stream(device)
        self._handle = self.stream.cuda_stream
        self._spare: list[torch.cuda.Event] = []
        self._last: Mark | None = None

    def copy(self, target: int, source: int, size: int) -> bool:
        """Queue a copy between addresses, whatever device and stream are current.

        In a process that has slept for 3 ms it takes 20 us; the calls of torch that do the same, with tensors to be
        made and a stream to be entered, take 60 to 110.

        Returns:
            Whether it was; else it has to be done by tensors.

        Raises:
            RuntimeError: the GPU has failed.
        """
        call = _copy_call()
        if call is None:
            return False
        status = call(target, source, size, _DEFAULT, self._handle)
        if status:
            raise RuntimeError(f"the copy of {size} bytes was refused: error {status} of the driver")
        return True

    def mark(self) -> Mark:
        """The moment when all that was queued here until now is done."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self._last = Mark(event, self._spare)
        return self._last

    @property
    def is_idle(self) -> bool:
        """Whether all that was marked here is known to be done, or is found to be."""
        return self._last is None or self._last.query()


# As many as torch has of high priority for each device.
_SIDE_STREAMS = 32
_turns = itertools.count()


@cache
def _side_streams(device: torch.device) -> list[SideStream]:
    """Those that there are; more may be added, in any thread."""
    return []


def take_side_stream(device: torch.device) -> SideStream:
    """A stream for copies of a device that has none to do; where all have, of so many, one of them in turn."""
    streams = _side_streams(device)
    for stream in streams:
        if stream.is_idle:
            return stream
    if len(streams) >= _SIDE_STREAMS:
        return streams[next(_turns) % _SIDE_STREAMS]
    streams.append(SideStream(device))
    return streams[-1]
