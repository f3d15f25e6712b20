"""Memory of a pool in the hands of a caller, and tensors over it that keep it theirs."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import torch
import trio

from ._errors import InternalError, LeaseError, NoRoom
from ._pool import Pool
from ._protocol.extents import Extent

__all__ = ["ManagedBuffer"]

T = TypeVar("T")


class _Claim:
    """The obligation to give one extent back, met once: by whoever redeems it, or when nobody holds it any more."""

    __slots__ = ("_pool", "_release")

    def __init__(self, pool: Pool, release: Callable[[], None]) -> None:
        self._pool = pool
        self._release: Callable[[], None] | None = release

    def redeem(self) -> None:
        """Give the extent back: now in the pool's trio run, soon from another thread."""
        if self._release is not None:
            release, self._release = self._release, None
            self._pool.call(release)

    def waive(self) -> None:
        """The extent is somebody else's now."""
        self._release = None

    def __del__(self) -> None:
        # In any thread, between any two instructions: nothing of the pool may be touched here.
        if self._release is not None:
            self._pool.post(self._release)


class _DeviceBytes:
    """Bytes of a GPU's memory that torch can make tensors over. Such a tensor holds this object until it dies."""

    def __init__(self, bytes_: torch.Tensor) -> None:
        self._bytes = bytes_
        # The protocol's third version; a stream is not named: what is in the buffer has arrived.
        self.__cuda_array_interface__ = {
            "shape": (bytes_.numel(),),
            "typestr": "|u1",
            "data": (bytes_.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class ManagedBuffer:
    """A piece of a connector's memory pool that is yours until you release it: what arrived, where it arrived.

    `tensor` and `as_tensor` alias the pool; nothing is copied. The piece stays yours until it is released *and* no
    tensor taken from it is alive, views of views and numpy arrays over them included. So what such a
    tensor shows never changes under it. While one is alive, `release` raises `LeaseError` and changes nothing: delete
    the tensors first, or take copies with ``.clone()``. A buffer that is dropped without a release is given back
    once its last tensor is gone.

    As a context manager it is released at the end of the block, which raises `LeaseError` too when tensors outlive
    the block; the buffer has ended even so, and its memory comes back with the last of them. When the block ends by
    an exception (whose traceback keeps the block's tensors alive) nothing is raised on top of it.

    A buffer may be used in any thread, by one at a time. GPU memory: work on a tensor that is queued on a stream must
    have ended before the tensor goes.

    Made by trio_mori only. `put` to the connector that it came from takes it over without a copy.
    """

    # How it works: all tensors are made over one *owner*, an object that torch keeps alive as long as any tensor shares
    # the storage. The buffer refers to the owner weakly. The owner's finaliser refers to the claim, and so does the
    # buffer; the claim posts the release when neither is left.

    __slots__ = ("__weakref__", "_claim", "_extent", "_on_detach", "_owner", "_pool", "_region", "_size")

    def __init__(
        self,
        pool: Pool,
        extent: Extent,
        size: int,
        release: Callable[[], None],
        *,
        on_detach: Callable[[], None] | None = None,
    ) -> None:
        """Take over an extent that holds `size` bytes.

        Args:
            release: Called once, in the pool's trio run, when the memory is not in use any more; frees the extent.
            on_detach: Called instead of `release` when `detach` has booked the memory as another extent.
        """
        if not 0 <= size <= extent.size:
            raise InternalError(f"a buffer of {size} bytes over an extent of {extent.size}")
        self._pool = pool
        self._region = pool.region  # which the pool lets go when its connector has ended
        self._extent = extent
        self._size = size
        self._on_detach = on_detach
        self._claim: _Claim | None = _Claim(pool, release)
        self._owner: weakref.ref[memoryview | _DeviceBytes] | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def device(self) -> str:
        """Where the memory is, as torch names it: ``"cpu"``, ``"cuda:0"``."""
        return self._region.device

    @property
    def released(self) -> bool:
        """Whether it has ended: released, given away, or left as a context manager."""
        return self._claim is None

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a 1-D uint8 tensor over the pool's own memory.

        Raises:
            LeaseError: it has ended.
        """
        claim = self._require_claim()
        if self._size == 0:
            return self._region.tensor.new_empty(0)
        owner = None if self._owner is None else self._owner()
        if owner is None:
            owner = self._make_owner(claim)
        if isinstance(owner, memoryview):
            return torch.frombuffer(owner, dtype=torch.uint8)
        return torch.as_tensor(owner, device=self.device)

    def as_tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The bytes as a tensor of that dtype and shape over the pool's own memory.

        Raises:
            LeaseError: it has ended.
            ValueError: dtype and shape need another number of bytes than there are, or another alignment.
        """
        self._require_claim()
        if any(length < 0 for length in shape):
            raise ValueError(f"as_tensor needs every length of the shape, but {tuple(shape)} has a negative one")
        needed = math.prod(shape) * dtype.itemsize
        if needed != self._size:
            raise ValueError(
                f"a tensor of shape {tuple(shape)} and {dtype} has {needed} bytes, but this buffer has {self._size}"
            )
        if self._extent.offset % dtype.itemsize:
            raise ValueError(
                f"{dtype} needs an offset that is a multiple of {dtype.itemsize} bytes, but this buffer begins at byte "
                f"{self._extent.offset} of the pool; copy it: tensor.clone().view({dtype})"
            )
        return self.tensor.view(dtype).reshape(tuple(shape))

    def to_bytes(self) -> bytes:
        """A copy of the bytes, in host memory.

        Raises:
            LeaseError: it has ended.
        """
        self._require_claim()
        first, end = self._extent.offset, self._extent.offset + self._size
        if self._region.buffer is not None:
            return bytes(self._region.buffer[first:end])
        host = self._region.tensor[first:end].cpu()
        return ctypes.string_at(host.data_ptr(), self._size)  # not by numpy, which torch does without

    def release(self) -> None:
        """Give the memory back. Idempotent; from any thread (from a foreign one it takes effect soon).

        Raises:
            LeaseError: tensors taken from it are alive. It was not released and can go on to be used.
        """
        if self._claim is not None:
            self._refuse_living_tensors("cannot be released")
            self._end().redeem()

    def belongs_to(self, pool: Pool) -> bool:
        """Whether its memory is of that pool."""
        return self._pool is pool

    def detach_nowait(self, share: str) -> Extent:
        """End the buffer, but keep its bytes: they are the caller's, as an extent of that share.

        Raises:
            LeaseError: it has ended, or tensors taken from it are alive. Nothing was changed.
            NoRoom: the share that the memory leaves has a guarantee that could not be kept now. Nothing was changed.
            ConnectorClosed: the pool is closed.
        """
        self._require_claim()
        self._refuse_living_tensors("cannot be given away")
        moved = self._pool.transfer_nowait(self._extent, share)
        self._give_away(self._end())
        return moved

    async def detach(self, share: str, take: Callable[[Extent], T]) -> T:
        """As `detach_nowait`, but waits for room. Meanwhile the buffer cannot be used; cancelled, it is as before.

        Args:
            take: Takes the memory over. If it raises instead, the buffer is as before.

        Raises:
            LeaseError: it has ended, or tensors taken from it are alive. Nothing was changed.
            ConnectorClosed: the pool is closed, or was while this waited.
        """
        self._require_claim()
        self._refuse_living_tensors("cannot be given away")
        await trio.lowlevel.checkpoint_if_cancelled()
        claim = self._end()
        try:
            try:
                moved = self._pool.transfer_nowait(self._extent, share)
            except NoRoom:
                moved = await self._pool.transfer(self._extent, share)
            try:
                taken = take(moved)
            except BaseException:
                self._pool.extents.undo_transfer(moved, self._extent)
                raise
        except BaseException:
            self._claim = claim
            raise
        self._give_away(claim)
        await trio.lowlevel.cancel_shielded_checkpoint()  # last: what was made of it may be on its way already
        return taken

    def __enter__(self) -> ManagedBuffer:
        self._require_claim()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._claim is None:
            return
        try:
            self.release()
        except LeaseError:
            self._end()
            if error is None:
                raise

    def __repr__(self) -> str:
        state = "ended" if self._claim is None else f"{self._extent.offset}..{self._extent.offset + self._size}"
        return f"<ManagedBuffer of {self._size} bytes on {self.device}, {state}>"

    def _require_claim(self) -> _Claim:
        if self._claim is None:
            raise LeaseError(
                f"this buffer of {self._size} bytes has ended (released, put again, its block was left, or its "
                "connector was closed, perhaps by another thread): its memory may hold something else now. Use it "
                "before, or copy what must outlive it: tensor.clone(), to_bytes()"
            )
        return self._claim

    def _refuse_living_tensors(self, what: str) -> None:
        if self._owner is not None and self._owner() is not None:
            raise LeaseError(
                f"this buffer of {self._size} bytes {what}: tensors or arrays taken from it are still alive, and would "
                "show whatever arrives there next. Delete them first (`del x`: a block's variables count), or keep "
                "copies (x.clone()). Until the last of them is gone this memory stays out of use"
            )

    def _end(self) -> _Claim:
        claim, self._claim = self._require_claim(), None
        return claim

    def _give_away(self, claim: _Claim) -> None:
        claim.waive()
        if self._on_detach is not None:
            self._on_detach()

    def _make_owner(self, claim: _Claim) -> memoryview | _DeviceBytes:
        owner: memoryview | _DeviceBytes
        region = self._region
        first, end = self._extent.offset, self._extent.offset + self._size
        if region.buffer is not None:
            owner = region.buffer[first:end]
        elif region.tensor.is_cuda:  # ROCm's too
            owner = _DeviceBytes(region.tensor[first:end])
        else:
            raise InternalError(f"no way is known to watch over tensors on {region.device}")
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, _let_go, claim).atexit = False
        return owner


def _let_go(claim: _Claim) -> None:
    """The last tensor is gone. Until now the finaliser held the claim; there is nothing else to do."""
