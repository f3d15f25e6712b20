"""What xgmi and rdma do differently: by which outlet a write to a peer leaves, and what Mori's words mean there."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import attrs
import torch

from .._errors import EngineUnavailable, TransferFailed
from ._mori_identity import new_key
from ._mori_library import Library, PeerFailure, Session, outdated
from ._mori_options import RdmaOptions, XgmiOptions
from ._mori_outlet import Outlet
from ._mori_peer import MoriPeer
from ._process import Process

logger = logging.getLogger("trio_mori.engine")


def open_outlet(library: Library, settings: XgmiOptions | RdmaOptions, key: str, tensor: torch.Tensor) -> Outlet:
    """Make an engine of Mori with its backend, and register the pool. Takes milliseconds, so in a thread.

    Raises:
        EngineUnavailable: the backend cannot be made here; says why and what to do.
    """
    try:
        engine = library.IOEngine(key, library.IOEngineConfig(settings.host, 0))
        try:
            settings.create_backend(library, engine)
        except RuntimeError as error:
            raise EngineUnavailable(settings.explain(error)) from error
        return Outlet(engine, tensor)
    except (AttributeError, TypeError) as error:
        raise EngineUnavailable(f"mori.io {outdated(f'says {error}')}") from error
    except RuntimeError as error:
        raise EngineUnavailable(
            f"Mori cannot register the pool of {tensor.nbytes} bytes on {tensor.device}: {error}. For rdma, "
            "`ulimit -l` must allow that much, and memory of GPUs needs the driver's peer memory; or a smaller "
            "memory_pool_size"
        ) from error


class Backend(ABC):
    """Gives each peer its outlet.

    Attributes:
        refusals: Codes with which Mori says that it has posted nothing. After any other failure the bytes may still
            be moving.
    """

    refusals: tuple[str, ...]

    @property
    def pop_failure(self) -> Callable[[], PeerFailure | None] | None:
        """Asks Mori for peers that it lost by itself; None where it does not notice."""
        return None

    @abstractmethod
    def outlet_for(self, peer: MoriPeer) -> Outlet:
        """The outlet for a first write. In a thread.

        Raises:
            TransferFailed: none can be made.
        """

    @abstractmethod
    def close(self, outlet: Outlet) -> None:
        """Let go of an outlet by which a first write could not leave."""

    @abstractmethod
    def leave(self) -> None:
        """A first write was left alone in its thread: nothing that it may use is ever closed."""

    @abstractmethod
    def forget(self, peer: MoriPeer, outlet: Outlet | None) -> None:
        """Let go of a peer to which nothing is under way, and of its outlet, if it has one."""

    @abstractmethod
    def session_to(self, peer: MoriPeer) -> Session | None:
        """The short way to a peer, after a write to it succeeded; None: there is none."""


@attrs.frozen(eq=False)
class XgmiBackend(Backend):
    """Copies from GPU to GPU within a host. Every peer has an outlet of its own.

    Mori hands the streams of an engine out in turn, so that with one for all a peer whose copies are stuck holds up
    whoever is next on their streams; and it unmaps a peer's memory only when the engine ends, so that a stage that
    restarts would cost its pool on the GPU each time.
    """

    library: Library
    settings: XgmiOptions | RdmaOptions
    process: Process
    tensor: torch.Tensor

    refusals = ("ERR_INVALID_ARGS", "ERR_NOT_FOUND", "ERR_BAD_STATE")

    def outlet_for(self, peer: MoriPeer) -> Outlet:
        try:
            return open_outlet(self.library, self.settings, new_key(self.process), self.tensor)
        except EngineUnavailable as error:
            raise TransferFailed(f"write to {peer.identity} refused: {error}") from error

    def close(self, outlet: Outlet) -> None:
        if not outlet.close():
            logger.warning("a failed copy may still be under way: its Mori engine and our pool stay in memory")

    def leave(self) -> None:
        """Nobody knows its outlet, and nobody closes it."""

    def forget(self, peer: MoriPeer, outlet: Outlet | None) -> None:
        if outlet is not None:
            outlet.forget(peer.engine)
            self.close(outlet)

    def session_to(self, peer: MoriPeer) -> Session | None:
        # Mori's sessions spare the look-ups: 64 KiB take 2.9 us instead of 5.4 (emulated, warm caches;
        # benchmarks/mori_overhead.py measures it).
        return None if peer.outlet is None else peer.outlet.open_session(peer.memory)


@attrs.frozen(eq=False)
class RdmaBackend(Backend):
    """Writes through NICs. All leave by the outlet that listens; Mori connects at the first write to a peer."""

    home: Outlet

    refusals = ("ERR_INVALID_ARGS", "ERR_NOT_FOUND")

    @property
    def pop_failure(self) -> Callable[[], PeerFailure | None] | None:
        return getattr(self.home.engine, "pop_peer_failure", None)  # since 1.2.4

    def outlet_for(self, peer: MoriPeer) -> Outlet:
        return self.home

    def close(self, outlet: Outlet) -> None:
        """It is everybody's, and ends with the engine."""

    def leave(self) -> None:
        self.home.doubtful = True

    def forget(self, peer: MoriPeer, outlet: Outlet | None) -> None:
        self.home.forget(peer.engine)  # also a peer that was lost, and has no outlet since

    def session_to(self, peer: MoriPeer) -> Session | None:
        return None
