"""A copy that the cuda_ipc engine has posted: how it is known that it is over, and what must live until then."""

from __future__ import annotations

from collections.abc import Callable

import torch
import trio

from .._errors import TransferFailed
from .._gpu import Moment, is_over_soon, wait_over
from ..abc import Posted, Region, Write
from ._cuda_peer import CudaPeer, Track
from ._immortal import keep_for_ever


class Copy(Posted):
    """One copy out of our pool into a peer's.

    Args:
        on_end: Called once, when nobody asks for it any more: it is over, or has failed, or was abandoned.
    """

    def __init__(
        self,
        peer: CudaPeer,
        track: Track,
        write: Write,
        *,
        pool: torch.Tensor,
        region: Region,
        on_end: Callable[[Copy], None],
    ) -> None:
        self.peer = peer
        self.track = track
        self._write = write
        self._pool = pool
        self._region = region
        self._on_end = on_end
        self._scope = trio.CancelScope(shield=True)
        self._done: Moment

    def begin(self) -> None:
        """Queue it.

        Raises:
            TransferFailed: the GPU has failed.
        """
        try:
            self._done = self.track.lane.copy(self._pool, self._region.tensor, self._write)
        except RuntimeError as error:
            raise self._failed(error) from error

    def is_over_soon(self) -> bool:
        """Whether its bytes have arrived, or do before others would have had a turn; then it has ended.

        Raises:
            TransferFailed: as `begin`.
        """
        try:
            over = is_over_soon(self._done)
        except RuntimeError as error:
            raise self._failed(error) from error
        if over:
            self._on_end(self)
        return over

    async def wait(self) -> None:
        """See `Posted`. Not cancellable, but abandoned with everything else."""
        try:
            with self._scope:
                await wait_over(self._done)
        except RuntimeError as error:
            raise self._failed(error) from error
        except BaseException:  # of the interpreter: nobody waits on
            self._keep()
            self._on_end(self)
            raise
        self._on_end(self)
        if self._scope.cancelled_caught:
            raise TransferFailed(f"{self} was abandoned while it was under way", settled=False)

    def abandon(self) -> None:
        """Wait for it no longer. What it touches stays for the rest of the process."""
        self._keep()
        self._scope.cancel()

    def _failed(self, error: RuntimeError) -> TransferFailed:
        """Nobody knows then what was queued, and what of it goes on."""
        self._keep()
        self._on_end(self)
        return TransferFailed(f"{self} failed: {error}", settled=False)

    def _keep(self) -> None:
        keep_for_ever(self._region, self._pool, self.track)

    def __str__(self) -> str:
        return f"write of {self._write.size} bytes to {self.peer.identity}"
