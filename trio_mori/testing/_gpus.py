"""GPUs made of host memory, for the cuda_ipc engine where there are none."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from .._engines._cuda_library import Gpu, Lane, Share
from .._engines._syscalls import memfd_create
from .._errors import EngineUnavailable
from .._gpu import Moment
from ..abc import Write

# As torch's handles begin: their version, and that they name an allocation.
_PREFIX = b"\2c"


class FakeGpus:
    """What `trio_mori._engines._cuda_library.Library` is, over shared memory: other processes can map it, too.

    Copies are made at once, unless their target is held.

    Attributes:
        mapped: How often memory was mapped.
        access: Whether GPUs have access to each other's memory.
        broken: Whether copies fail as those of a GPU that has failed.
    """

    def __init__(self, count: int = 2) -> None:
        self.mapped = 0
        self.access = True
        self.broken = False
        self._count = count
        self._held: set[int] = set()
        self._waiting: list[_Copy] = []
        self._files: dict[int, int] = {}
        self._where: dict[int, str] = {}

    # --- what a test does to them

    def hold(self, tensor: torch.Tensor) -> None:
        """From now on copies into the memory of this tensor do not end."""
        self._held.add(tensor.untyped_storage().data_ptr())

    def release(self) -> None:
        """Let all of them end, and hold none any more."""
        self._held.clear()
        while self._waiting:
            self._waiting.pop(0).carry_out()

    # --- what torch is to the engine

    def allocate(self, size: int, device: str) -> torch.Tensor:
        number = int(device.partition(":")[2] or 0)
        if number >= self._count:
            raise EngineUnavailable(f"a pool of {size} bytes cannot be allocated on {device}: invalid device ordinal")
        file = memfd_create("trio-mori-fake-gpu")
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        weakref.finalize(memory, os.close, file).atexit = False
        tensor = torch.frombuffer(memoryview(memory), dtype=torch.uint8)
        place = tensor.data_ptr()
        self._files[place], self._where[place] = file, f"cuda:{number}"
        return tensor

    def gpu(self, tensor: torch.Tensor) -> Gpu:
        where = self._where.get(tensor.untyped_storage().data_ptr(), "cuda:0")
        return Gpu(f"Fake GPU {where}", f"fake-{where}")

    def share(self, tensor: torch.Tensor) -> Share:
        file = self._files[tensor.data_ptr()]
        name = os.getpid().to_bytes(4, "big") + file.to_bytes(4, "big")
        return Share(_PREFIX + name.ljust(64, b"\0"), 0, tensor.numel())

    def map(self, share: Share, device: torch.device) -> torch.Tensor:
        self.mapped += 1
        if not self.access:
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        name = share.handle[len(_PREFIX) :]
        pid, number = int.from_bytes(name[:4], "big"), int.from_bytes(name[4:8], "big")
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"CUDA error: invalid resource handle ({error})") from error
        try:
            if os.fstat(file).st_size < share.offset + share.span:
                raise RuntimeError("CUDA error: invalid argument")
            memory = mmap.mmap(file, share.offset + share.span)
            return torch.frombuffer(memoryview(memory), dtype=torch.uint8)[share.offset :]
        finally:
            os.close(file)

    def host_bytes(self, tensor: torch.Tensor) -> memoryview | None:
        array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
        array.tensor = tensor  # type: ignore[attr-defined]
        return memoryview(array).cast("B")

    def open_lane(self, device: torch.device) -> Lane:
        return _FakeLane(self)

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Moment:
        """A copy; as a lane does."""
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        copy = _Copy(target, source)
        if target.untyped_storage().data_ptr() in self._held:
            self._waiting.append(copy)
        else:
            copy.carry_out()
        return copy


class _Copy:
    """A copy that was queued."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target = target
        self._source = source
        self._over = False

    def carry_out(self) -> None:
        self._target.copy_(self._source)
        self._over = True

    def query(self) -> bool:
        return self._over


class _FakeLane:
    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus = gpus

    def copy(self, target: torch.Tensor, source: torch.Tensor, write: Write) -> Moment:
        ends = write.destination + write.size, write.source + write.size
        return self._gpus.begin(target[write.destination : ends[0]], source[write.source : ends[1]])
