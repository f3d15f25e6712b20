"""Copies between the memory of leaves and the pool; what touches a GPU is in `_payload_gpu`.

Host to host it is memmove, in one thread: on an idle machine torch's copy, with two threads, takes 0.6 of the time (1.3
against 0.74 ms for 16 MB), and on a busy one it stalls for 8 ms.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import attrs
import torch

from . import _pages, _spare
from ._errors import UnsupportedPayload
from ._payload_foreign import array_address, required
from ._payload_format import ARRAY, BYTEARRAY, BYTES, IMAGE, TENSOR, VIEW

# A copy up to this size keeps the GIL: 30 us of memory. Whoever gives it away beside a thread that computes has it
# back after the switch interval, 5 ms.
KEEPS_GIL = 256 << 10

# ctypes calls this one as a part of Python, with the GIL, and its own memmove as a foreign function, without it.
_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_with_gil.restype = None

# From here on the C library takes new memory from the kernel, more often than not: 0.16 ms of faults for 256 KiB, 0.04
# with its pages found before. Memory that was used before costs 2 us more so.
_NEW_MEMORY = 256 << 10

# torch copies fewer elements than this (at::internal::GRAIN_SIZE) in the calling thread.
_ONE_THREAD = 32768

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Most calls of torch give the interpreter away, however short they are. Where another thread waits for it that wakes
# this thread for nothing at best, and is 5 ms until it comes back at worst. So the two things that are done for every
# small tensor, to look whether its bits mean what they are and to make one, are done by calls that keep it.
# The first is not of torch's public interface, so that a release may come without it.


def _lazy_bits() -> int | None:
    """Bits of a tensor's keys that say that its values are others than its bytes; None if torch does not tell."""
    try:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
        bits = (keys | torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)).raw_repr()
        plain = torch.zeros(1, dtype=torch.complex64, device="cpu")
        shown = [torch._C._dispatch_keys(each).raw_repr() & bits for each in (plain, plain.conj(), plain.conj().imag)]
    except (AttributeError, TypeError):
        return None
    return bits if not shown[0] and all(shown[1:]) else None


_LAZY_BITS = _lazy_bits()

# How numpy calls the dtypes that it has, too, and the dimensions that every release of it knows.
_IN_NUMPY = {
    getattr(torch, name): name
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
}
_NUMPY_DIMS = 32


@attrs.define(eq=False)
class Leaf:
    """Bytes that a payload has in the pool, and what they are copied from.

    Attributes:
        tag: What `source` is: a tensor, bytes, bytearray, memoryview, array or image.
        offset: Where they go, from the start of the extent.
        nbytes: How many.
        source: What they are read from.
        on_gpu: It is a tensor on a GPU.
    """

    tag: int
    offset: int
    nbytes: int
    source: Any
    on_gpu: bool = False


def memmove(target: int, source: int | bytes, nbytes: int) -> None:
    """Copy host memory, given its addresses; the source may be bytes."""
    if nbytes <= KEEPS_GIL:
        _memmove_with_gil(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)


def copy_leaves(leaves: Sequence[Leaf], target: torch.Tensor) -> None:
    """Copy every leaf, from host memory, to its place in `target`, a 1-D uint8 tensor there.

    Raises:
        UnsupportedPayload: a source lost its memory, or changed its length, after it was planned.
    """
    base = target.data_ptr()
    for leaf in leaves:
        copy_to_host(leaf, base, target)


def copy_plain_leaves(leaves: Sequence[Leaf], address: int) -> bool:
    """Copy every leaf to host memory. False, and nothing is copied, if one is more than a run of bytes there."""
    for leaf in leaves:
        if leaf.tag == TENSOR and (leaf.on_gpu or not is_plain(leaf.source)):
            return False
    for leaf in leaves:
        if leaf.tag == TENSOR:
            memmove(address + leaf.offset, check_memory(leaf), leaf.nbytes)
        else:
            _TO_HOST[leaf.tag](leaf, address + leaf.offset)
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one run of bytes that mean what they are, with none to be negated when they are read."""
    if _LAZY_BITS is None:
        return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.is_contiguous() and not torch._C._dispatch_keys(tensor).raw_repr() & _LAZY_BITS


def same_bits(leaf: Leaf, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and place as integers of the element's width: those are copied bit for bit, for every dtype."""
    source = leaf.source.resolve_conj().resolve_neg()
    if source.dtype.itemsize not in _SAME_WIDTH:
        source = torch.view_as_real(source)
    source = source.view(_SAME_WIDTH[source.dtype.itemsize])
    place = target[leaf.offset : leaf.offset + leaf.nbytes].view(source.dtype).view(source.shape)
    return source, place


def copy_to_host(leaf: Leaf, base: int, target: torch.Tensor) -> None:
    """Copy a leaf from host memory to its place in `target`, which begins at `base` there."""
    if leaf.tag != TENSOR:
        _TO_HOST[leaf.tag](leaf, base + leaf.offset)
        return
    start = check_memory(leaf)
    if is_plain(leaf.source):
        memmove(base + leaf.offset, start, leaf.nbytes)
    else:
        _copy_strided(*same_bits(leaf, target))


def _copy_strided(source: torch.Tensor, place: torch.Tensor) -> None:
    """In pieces that torch copies in this thread, halving the longest side, so that both sides stay in cache.

    Three transposed bfloat16 matrices of 32 MB take 117 ms so, and 218 ms in one call with two threads; one of 16 MB
    takes 15 ms against 12.
    """
    if source.numel() < _ONE_THREAD:
        place.copy_(source)
        return
    dim = max(range(source.dim()), key=source.size)
    half = source.size(dim) // 2
    rest = source.size(dim) - half
    _copy_strided(source.narrow(dim, 0, half), place.narrow(dim, 0, half))
    _copy_strided(source.narrow(dim, half, rest), place.narrow(dim, half, rest))


def check_memory(leaf: Leaf) -> int:
    """Where a tensor begins. Storage can be freed under it (`untyped_storage().resize_`), which no copy survives."""
    source: torch.Tensor = leaf.source
    end = source.storage_offset() * source.itemsize
    if source.is_contiguous():
        end += leaf.nbytes
    else:
        last = sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        end += (1 + last) * source.itemsize
    start = source.data_ptr()
    if start == 0 or source.untyped_storage().nbytes() < end:
        raise UnsupportedPayload(
            f"a {source.dtype} tensor of shape {tuple(source.shape)} lost its memory before it was copied: keep its "
            "storage until `put` has returned",
            path="payload",
        )
    return start


def _copy_bytes(leaf: Leaf, address: int) -> None:
    memmove(address, leaf.source, leaf.nbytes)


def _copy_bytearray(leaf: Leaf, address: int) -> None:
    if len(leaf.source) != leaf.nbytes:
        raise UnsupportedPayload(
            f"a bytearray of {leaf.nbytes} bytes had {len(leaf.source)} when it was copied: leave its length alone "
            "until `put` has returned",
            path="payload",
        )
    memmove(address, ctypes.addressof(ctypes.c_char.from_buffer(leaf.source)), leaf.nbytes)


def _copy_view(leaf: Leaf, address: int) -> None:
    # A memoryview may be read-only, and ctypes takes no address of those: this copy holds the GIL.
    source = leaf.source if leaf.source.c_contiguous else leaf.source.tobytes()
    host_view(address, leaf.nbytes)[:] = memoryview(source).cast("B")


def _copy_array(leaf: Leaf, address: int) -> None:
    packed = required("numpy", "a numpy array").ascontiguousarray(leaf.source)
    if packed.nbytes != leaf.nbytes:
        raise UnsupportedPayload(
            f"a numpy array of {leaf.nbytes} bytes had {packed.nbytes} when it was copied: leave its shape alone "
            "until `put` has returned",
            path="payload",
        )
    memmove(address, array_address(packed), leaf.nbytes)


def _copy_image(leaf: Leaf, address: int) -> None:
    pixels = leaf.source.tobytes()
    if len(pixels) != leaf.nbytes:
        raise UnsupportedPayload(
            f"an image of {leaf.nbytes} bytes had {len(pixels)} when it was copied: leave its size alone until `put` "
            "has returned",
            path="payload",
        )
    memmove(address, pixels, leaf.nbytes)


_TO_HOST: dict[int, Callable[[Leaf, int], None]] = {
    BYTES: _copy_bytes,
    BYTEARRAY: _copy_bytearray,
    VIEW: _copy_view,
    ARRAY: _copy_array,
    IMAGE: _copy_image,
}


def new_tensor(dtype: torch.dtype, shape: Sequence[int], nbytes: int) -> torch.Tensor:
    """A tensor of its own host memory, not initialised, that has so many bytes."""
    if nbytes >= _spare.LARGE:
        return torch.frombuffer(_spare.take(nbytes), dtype=torch.uint8).view(dtype).view(shape)
    name, numpy = _IN_NUMPY.get(dtype), sys.modules.get("numpy")
    if numpy is not None and name is not None and nbytes and len(shape) <= _NUMPY_DIMS and _suits_torch(numpy):
        return torch.from_numpy(numpy.empty(shape, name))
    return allocate(dtype, shape, "cpu")


def allocate(dtype: torch.dtype, shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """A tensor on a device, not initialised."""
    if dtype is torch.complex32:
        # torch warns of allocating one, and a receiver may take warnings for errors.
        return torch.empty(shape, dtype=torch.int32, device=device).view(dtype)
    return torch.empty(shape, dtype=dtype, device=device)


@lru_cache
def _suits_torch(numpy: ModuleType) -> bool:
    """Whether it is of a release for which this torch was built."""
    try:
        torch.from_numpy(numpy.empty(1))
    except (AttributeError, RuntimeError, TypeError):  # half imported, none for torch, or of another kind
        return False
    return True


def fill(address: int, source: Any, nbytes: int) -> None:
    """Copy to memory that was just allocated, from an address or bytes."""
    if nbytes >= _NEW_MEMORY:
        _pages.find_pages(address, nbytes)
    memmove(address, source, nbytes)


def read_bytes(address: int, nbytes: int) -> bytes:
    """Host memory as bytes of their own."""
    # string_at takes a C int, and cuts longer lengths off without a word.
    return ctypes.string_at(address, nbytes) if nbytes < 1 << 31 else bytes(host_view(address, nbytes))


def host_view(address: int, nbytes: int) -> memoryview:
    """Host memory as bytes. It owns nothing."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
