"""A raw payload as vllm-omni knows it: `tensor`, `as_tensor`, `to_bytes`, and a `release` that never fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import torch

from trio_mori import LeaseError, ManagedBuffer


class ReceivedBuffer:
    """Bytes that came, as a 1-D uint8 tensor. Dtype and shape are the reader's knowledge.

    vllm-omni releases a buffer while tensors taken from it are alive, and goes on to use them. So a release only lets
    go: the memory is free when the last tensor is gone, too.
    """

    def __init__(self, source: ManagedBuffer | torch.Tensor) -> None:
        self._source: ManagedBuffer | torch.Tensor | None = source
        self.size = source.size if isinstance(source, ManagedBuffer) else source.numel()

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes.

        Raises:
            LeaseError: it was released.
        """
        source = self._source
        if source is None:
            raise LeaseError("this buffer was released; take its tensor before, or copy it")
        return source.tensor if isinstance(source, ManagedBuffer) else source

    def as_tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The bytes as a tensor of that dtype and shape.

        Raises:
            ValueError: dtype and shape need another number of bytes.
            LeaseError: it was released.
        """
        if any(length < 0 for length in shape):
            raise ValueError(f"as_tensor needs every length of the shape, but {tuple(shape)} has a negative one")
        needed = math.prod(shape) * dtype.itemsize
        if needed != self.size:
            raise ValueError(f"shape {tuple(shape)} of {dtype} has {needed} bytes, but this buffer has {self.size}")
        return self.tensor.view(dtype).reshape(tuple(shape))

    def to_bytes(self) -> bytes:
        """A copy, in host memory."""
        data: bytes = self.tensor.cpu().numpy().tobytes()
        return data

    def release(self) -> None:
        """Let go. Idempotent."""
        source, self._source = self._source, None
        if isinstance(source, ManagedBuffer):
            with suppress(LeaseError):  # then the last of its tensors gives it back
                source.release()

    def __enter__(self) -> ReceivedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
