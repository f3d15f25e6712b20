"""The bounds of a write, checked before anything is touched."""

from __future__ import annotations

from .._errors import TransferFailed
from ..abc import EnginePeer, Write


def check_bounds(write: Write, size: int, peer: EnginePeer) -> None:
    """Refuse a write that leaves a source region of `size` bytes or the peer's region. Empty writes may pass.

    Raises:
        TransferFailed: with ``settled=True``; names the offset, the bytes and the region that they leave.
    """
    if write.size < 0:
        raise TransferFailed(f"write of {write.size} bytes to {peer.identity} refused: the size is negative")
    if not 0 <= write.source <= size - write.size:
        raise TransferFailed(
            f"write to {peer.identity} refused: {write.size} bytes at {write.source} leave our region of {size} bytes"
        )
    if not 0 <= write.destination <= peer.size - write.size:
        raise TransferFailed(
            f"write to {peer.identity} refused: {write.size} bytes at {write.destination} leave its region of "
            f"{peer.size} bytes"
        )
