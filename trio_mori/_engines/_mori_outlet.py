"""A Mori engine through which writes leave."""

from __future__ import annotations

import torch

from ..abc import Write
from ._immortal import keep_for_ever, let_go
from ._mori_library import EngineDesc, IOEngine, MemoryDesc, Session, Status


class Outlet:
    """Mori's engine with our pool registered. It posts; who waits for a status is not its concern.

    Mori's destructor with a copy in flight is a segmentation fault, and Python calls destructors when it likes. So an
    outlet lives for ever from the moment it is made, unless `close` is called, which is done when every status of it
    has ended well. That also keeps `deregister_memory`, which deadlocks or frees what a transfer uses, away from
    all transfers.

    Attributes:
        open: Statuses that have not ended.
        doubtful: A transfer failed and may be copying still; it is never closed.
    """

    def __init__(self, engine: IOEngine, tensor: torch.Tensor) -> None:
        self.engine: IOEngine | None = engine
        self.memory: MemoryDesc = engine.register_torch_tensor(tensor)
        self.open = 0
        self.doubtful = False
        self._tensor = tensor
        self._targets: dict[str, torch.Tensor] = {}
        keep_for_ever(self)

    def introduce(self, peer: EngineDesc, pool: torch.Tensor | None) -> None:
        """Let Mori know an engine, before anything is written to it.

        Args:
            pool: Its memory, if it is of this process: what is written to has to live as long as what is read.
        """
        self._engine.register_remote_engine(peer)
        if pool is not None:
            self._targets[peer.key] = pool

    def forget(self, peer: EngineDesc) -> None:
        """The reverse of `introduce`, when no write to it is under way."""
        self._engine.deregister_remote_engine(peer)
        if not self.doubtful:
            self._targets.pop(peer.key, None)

    def post(self, remote: MemoryDesc, write: Write) -> Status | None:
        """Post a write. None: Mori gave back no status, or several.

        Raises:
            RuntimeError: Mori could not reach the peer.
        """
        engine = self._engine
        statuses = engine.batch_write(
            [self.memory],
            [[write.source]],
            [remote],
            [[write.destination]],
            [[write.size]],
            [engine.allocate_transfer_uid()],
        )
        return statuses[0] if len(statuses) == 1 else None

    def open_session(self, remote: MemoryDesc) -> Session | None:
        """The short way to a memory that was written to before, if this Mori has one."""
        engine = self._engine
        return engine.create_session(self.memory, remote) if hasattr(engine, "create_session") else None

    def close(self) -> bool:
        """End Mori's engine, if nothing of it can still move. Sessions must be gone. Idempotent.

        Returns:
            Whether it has ended; otherwise it lives on, and the pool with it.
        """
        if self.open or self.doubtful:
            return False
        if self.engine is not None:
            self.engine.deregister_memory(self.memory)
            self.engine = None
            let_go(self)
        return True

    @property
    def _engine(self) -> IOEngine:
        assert self.engine is not None, "an outlet was used after its close"
        return self.engine
