"""A payload in a caller's hands, still where it arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _stock_payload
from ._buffer import ManagedBuffer
from ._payload_types import PayloadTypes


class Lease:
    """What arrived, where it arrived, for the length of an ``async with conn.lease(...)`` block.

    Tensors taken from it alias the pool. They must be gone when the block ends: delete them or copy what is to stay.
    """

    def __init__(self, buffer: ManagedBuffer, header: bytes | None, payload_types: PayloadTypes) -> None:
        self.buffer = buffer
        self._header = header
        self._payload_types = payload_types

    @property
    def size(self) -> int:
        """Bytes of the payload in the pool."""
        return self.buffer.size

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a 1-D uint8 tensor."""
        return self.buffer.tensor

    def as_tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The bytes as a tensor of that dtype and shape.

        Raises:
            ValueError: dtype and shape need another number of bytes.
        """
        return self.buffer.as_tensor(dtype, shape)

    def value(self) -> Any:
        """The payload as `get` would return it, with its tensors as views of the pool; anything else is a copy.

        What a stock sender encoded is copied all.
        """
        if self._header is None:
            return _stock_payload.stock_decode(self.buffer.to_bytes())
        return self._payload_types.restore(self._header, self.buffer.tensor, copy=False).value
