"""What the cuda_ipc engine asks of torch, for GPUs of NVIDIA and, by the same names, of AMD."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from .._errors import EngineUnavailable
from .._gpu import Moment, SideStream, side_stream, working_on
from ..abc import Write


@attrs.frozen
class Gpu:
    """A GPU, as it is named to peers and in errors.

    Attributes:
        name: Its model, and how this process numbers it.
        uuid: Which one it is; empty where torch does not say.
    """

    name: str
    uuid: str

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid or 'of unknown uuid'})"


@attrs.frozen
class Share:
    """How other processes come by a tensor.

    Attributes:
        handle: The driver's name of the allocation that holds it.
        offset: Where in that it begins.
        span: Its bytes.
    """

    handle: bytes
    offset: int
    span: int


class Lane(Protocol):
    """A stream of copies, one after the other, beside all other work of the process."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, write: Write) -> Moment:
        """Queue a copy of bytes from one pool to another, which has ended when the moment has come.

        Raises:
            RuntimeError: the GPU has failed.
        """


class Library(Protocol):
    """The calls. Each may be made in any thread, and leaves that thread's device and stream as they are."""

    def allocate(self, size: int, device: str) -> torch.Tensor:
        """So many bytes on a device.

        Raises:
            EngineUnavailable: there is no such device, or no room on it.
        """

    def gpu(self, tensor: torch.Tensor) -> Gpu:
        """Where a tensor is."""

    def share(self, tensor: torch.Tensor) -> Share:
        """Let other processes come by a tensor, which begins its storage.

        Raises:
            EngineUnavailable: it lies in memory that cannot be shared.
        """

    def map(self, share: Share, device: torch.device) -> torch.Tensor:
        """Another process's tensor, for copies that a device of ours makes; it goes when the last tensor over it does.

        Raises:
            RuntimeError: the device has no access, or there is no such memory.
        """

    def host_bytes(self, tensor: torch.Tensor) -> memoryview | None:
        """The bytes of a tensor where the host can reach them; None where it cannot."""

    def open_lane(self, device: torch.device) -> Lane:
        """A stream of copies that a device makes."""


def load() -> Library:
    """torch, if it sees a GPU.

    Raises:
        EngineUnavailable: it does not.
    """
    if not torch.cuda.is_available():
        raise EngineUnavailable(
            f"cuda_ipc needs a GPU, and torch {torch.__version__} sees none: install a CUDA or ROCm build of torch, "
            "see that `nvidia-smi` or `rocm-smi` lists the GPU here (containers: --gpus, or /dev/kfd), or use shm"
        )
    return TorchLibrary()


# The kinds of handle that torch makes: a bare one (64 bytes; torch up to 2.4), or with its version and kind before it.
# Of kind "e" (expandable segments) it names descriptors of a process, which would have to be taken from there.
_HANDLE = 64
_KIND = b"c"


def is_plain(handle: bytes) -> bool:
    """Whether a handle names one allocation of the driver, and nothing else."""
    return len(handle) == _HANDLE or (len(handle) == _HANDLE + 2 and handle[1:2] == _KIND)


class TorchLibrary:
    """See `Library`."""

    def allocate(self, size: int, device: str) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except (RuntimeError, AssertionError) as error:
            raise EngineUnavailable(
                f"a pool of {size} bytes cannot be allocated on {device}: {error}. Check memory_pool_device and "
                f"memory_pool_size; torch sees {torch.cuda.device_count()} GPUs"
            ) from error

    def gpu(self, tensor: torch.Tensor) -> Gpu:
        properties = torch.cuda.get_device_properties(tensor.device)
        uuid = getattr(properties, "uuid", "")  # torch from 2.5 on, and not in each build
        return Gpu(f"{properties.name} {tensor.device}", str(uuid))

    def share(self, tensor: torch.Tensor) -> Share:
        storage = tensor.untyped_storage()
        try:
            shared = storage._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise EngineUnavailable(
                f"the pool on {tensor.device} cannot be shared with other processes: {error}"
            ) from error
        _, handle, span, offset, counter, place, _, _ = shared
        # torch would keep the memory until a receiver has counted this down. Who may write here, and until when, is
        # settled between the peers, and no peer opens the counter: it is a file that a descriptor could name.
        torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
        if not is_plain(handle):
            raise EngineUnavailable(
                f"the pool on {tensor.device} cannot be shared with other processes: torch allocated it in expandable "
                "segments; take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF (PYTORCH_HIP_ALLOC_CONF)"
            )
        return Share(handle, offset, span)

    def map(self, share: Share, device: torch.device) -> torch.Tensor:
        # The first item says by which device it is mapped. By the writer's own, NVLink between two H200 carries 394
        # GB/s; by the owner's, which is what torch does when a tensor is passed on, 37.
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, share.handle, share.span, share.offset, b"/trio-mori-none", 0, b"", False
        )
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def host_bytes(self, tensor: torch.Tensor) -> memoryview | None:
        return None

    def open_lane(self, device: torch.device) -> Lane:
        return _TorchLane(device)


class _TorchLane:
    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)
        self._there: torch.cuda.Stream | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, write: Write) -> Moment:
        side, size = self._side, write.size
        if side.copy(target.data_ptr() + write.destination, source.data_ptr() + write.source, size):
            return side.mark()
        target = target[write.destination : write.destination + size]
        source = source[write.source : write.source + size]
        with working_on(side.stream):
            if target.device == source.device:
                target.copy_(source, non_blocking=True)
            else:  # of one process: torch makes the current stream of the other side wait, too
                self._there = self._there or side_stream(target.device)
                with working_on(self._there), torch.cuda.device(source.device):
                    target.copy_(source, non_blocking=True)
            return side.mark()
