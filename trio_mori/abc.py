"""The contracts between the parts: what an engine and a link must do. Their docstrings are the specification;
`trio_mori.testing.check_engine` and `check_link` are the same text as tests.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    import torch

__all__ = [
    "Arrived",
    "Connected",
    "Descriptor",
    "Disconnected",
    "Engine",
    "EnginePeer",
    "Landing",
    "Link",
    "LinkEvent",
    "Posted",
    "Refused",
    "Region",
    "Write",
]


@attrs.frozen(eq=False)
class Region:
    """The one block of memory of a pool, registered with an engine for as long as that engine is open.

    Attributes:
        tensor: All of it, as a 1-D uint8 tensor on its device.
        buffer: The same bytes as a writable memoryview; None when they are not host memory.
        device: The torch device string, for example ``"cpu"`` or ``"cuda:0"``.
    """

    tensor: torch.Tensor
    buffer: memoryview | None
    device: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel()


@attrs.frozen
class Descriptor:
    """What a peer needs to reach a region: two opaque byte strings, as the stock dialect carries them too.

    Attributes:
        engine: Identity of the process and engine that own the region.
        memory: The region itself.
    """

    engine: bytes
    memory: bytes


@attrs.frozen
class Write:
    """One contiguous copy out of our region into a peer's.

    Attributes:
        source: Offset in our region, in bytes.
        destination: Offset in the peer's region, in bytes.
        size: Bytes to copy.
    """

    source: int
    destination: int
    size: int


class EnginePeer(ABC):
    """A peer's region as an engine sees it. Obtained from `Engine.add_peer`; meaningful to that engine only."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Names the peer's process and engine in messages, and never names two different ones."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of the peer's region; no write reaches past it."""


class Posted(ABC):
    """A write that was posted and has not ended. Obtained from `Engine.write_nowait`."""

    @abstractmethod
    async def wait(self) -> None:
        """Return, or raise, when it has ended, as `Engine.write` does once it has posted. Called once."""


class Landing(ABC):
    """Host memory that mirrors a pool on a GPU, by offset; what peers write there is taken from there."""

    @property
    @abstractmethod
    def mirror(self) -> torch.Tensor:
        """All of it, as a 1-D uint8 tensor."""

    @abstractmethod
    def land(self, offset: int, size: int) -> None:
        """Bring a part of it into the pool. In any thread; done when it returns."""


class Engine(ABC):
    """Moves bytes out of one registered region of this process into regions of peers.

    An engine is opened by `trio_mori._engines.open_engine`, which owns it: region, peers and writes end before
    that context does. All methods are called from one trio thread.
    """

    name: ClassVar[str]

    @property
    def key(self) -> str:
        """Names this engine in `health()` and logs, unlike any other's."""
        return f"{self.name}-{hashlib.sha256(self.descriptor.engine).hexdigest()[:12]}"

    @property
    def members(self) -> Sequence[Engine]:
        """The engines that share its pool, in order of preference: this one, unless it stands for several."""
        return (self,)

    @property
    def landing(self) -> Landing | None:
        """Where in host memory peers' writes arrive that are meant for its pool; None: in the pool itself."""
        return None

    @property
    @abstractmethod
    def region(self) -> Region:
        """The registered region. It lives as long as the engine, and longer if a write outlives it."""

    @property
    @abstractmethod
    def descriptor(self) -> Descriptor:
        """What peers pass to their own `add_peer` to write here. The same bytes for the engine's whole life."""

    @abstractmethod
    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        """Learn a peer from its descriptor, which came over the network and is not trusted.

        Calling it again with an equal descriptor returns the same peer. Nothing is written to or mapped from
        the peer yet, so that a peer may be learned only for `wait_fenced`.

        Raises:
            DescriptorRefused: malformed, forged, of another engine, or not reachable; says why and what to do.
        """

    def add_peer_of(self, member: Engine, descriptor: Descriptor) -> EnginePeer:
        """As `add_peer`, of one of the members."""
        return self.add_peer(descriptor)

    @abstractmethod
    def drop_peer(self, peer: EnginePeer) -> None:
        """Forget a peer and what was mapped for it, at once or when its last write ends. Idempotent."""

    def write_nowait(self, peer: EnginePeer, write: Write) -> bool | Posted:
        """Do the whole write here and now if that takes no longer than a message does (about 1 MB by memcpy), or, where
        others do it, post it.

        Returns:
            True when the bytes have arrived; False when nothing was done and `write` has to be used; if it was posted
            and has not ended, how to wait for that, which whoever called has to do.

        Raises:
            TransferFailed: as `write`.
        """
        return False

    @abstractmethod
    async def write(self, peer: EnginePeer, write: Write) -> None:
        """Copy bytes into the peer's region; when it returns they are all there.

        It is a checkpoint before anything is posted, and may be cancelled there. Once posted it cannot be
        cancelled: it returns, or raises, only when the bytes have stopped moving (or with ``settled=False``).
        One of no bytes finds out whether the peer can be written to, as far as an engine can tell beforehand.
        Writes to one peer do not wait for each other, and a stuck peer delays no other.

        Raises:
            TransferFailed: out of bounds, the peer is gone, or the engine reports an error. ``settled`` says
                whether bytes may still be moving.
        """

    @abstractmethod
    async def wait_fenced(self, peer: EnginePeer) -> None:
        """Return only when it is *proven* that no byte of this peer can arrive in our region any more, for
        example because its process has exited. Without such a proof it waits for ever. Cancellable.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Stop waiting for writes in flight: each pending `write` raises ``TransferFailed(settled=False)``.

        Region, peers and whatever a write in flight touches are kept for the rest of the process. This is what
        a close does when its grace ends before the writes do. Nothing may be written afterwards.
        """


# --- links ------------------------------------------------------------------------------------------------


@attrs.frozen
class Arrived:
    """One whole message, with the route it came by."""

    frames: Sequence[bytes]
    route: bytes = b""


@attrs.frozen
class Connected:
    """A connection was made (dialling links only). What was sent before may be lost; say hello."""

    route: bytes = b""


@attrs.frozen
class Disconnected:
    """A route is gone: the dialled connection broke, or a listener's message could not be delivered."""

    route: bytes = b""


@attrs.frozen
class Refused:
    """Whoever listens there and this side do not accept each other's keys (dialling links only). It is tried on until
    it is `Connected`, or gone and `Disconnected`.

    Attributes:
        why: In words, with what to do.
    """

    why: str


LinkEvent = Arrived | Connected | Disconnected | Refused


class Link(ABC):
    """A message port. A *dialling* link has one peer and the single route ``b""``; a *listening* link has many
    peers, told apart by the route that each message came by.

    Messages are lists of frames and arrive whole, in order per route, at most once. They may be lost when a
    connection breaks, and only then. A link belongs to one trio task tree; one task calls `receive`, any task
    calls `send`.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """Where it listens or dials, for messages: for example ``tcp://127.0.0.1:50051``."""

    @abstractmethod
    def send(
        self,
        frames: Sequence[bytes] | Callable[[], Sequence[bytes] | None],
        route: bytes = b"",
        *,
        urgent: bool = True,
    ) -> None:
        """Queue one message; it leaves at the latest when the running tasks yield. Never blocks.

        One that is not urgent may wait until then for company, where an urgent one might leave at once.

        A callable is called when the message leaves, and returns it, or None for nothing: so that whatever is
        said until then goes into one message. It is called even if the message is then dropped.

        On a dialling link that is not connected the message is dropped (after `Connected` everything is said
        again anyway). On a listening link a route that is gone is reported as `Disconnected`.

        Raises:
            ConnectorClosed: the link is closed.
        """

    def nudge(self, route: bytes = b"") -> None:  # noqa: B027 - a link may have no way
        """Something will be said soon: let the peer's process wake for it meanwhile, if a link can. Says nothing."""

    @abstractmethod
    def recheck(self) -> None:
        """Look for messages that nobody was woken for; called at each heartbeat. A link that needs it counts what
        it finds, and the count stays zero unless the link has a bug.
        """

    @abstractmethod
    async def receive(self) -> list[LinkEvent]:
        """Wait until something happened, then return all that has, in order; never an empty list.

        Always a checkpoint. Cancelling it loses nothing: what had arrived is returned by the next call.

        Raises:
            ConnectorClosed: the link was closed.
        """
