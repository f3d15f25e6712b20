"""An engine inside one process, with everything that can go wrong with a real one at the test's command."""

from __future__ import annotations

import enum
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import torch
import trio

from .._engines._bounds import check_bounds
from .._errors import ConnectorClosed, DescriptorRefused, TransferFailed
from ..abc import Descriptor, Engine, EnginePeer, Region, Write


class MemoryFabric:
    """Where memory engines find each other: those of one fabric are peers, others do not exist for them."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._engines: dict[bytes, MemoryEngine] = {}

    @asynccontextmanager
    async def open(self, *, pool_size: int = 1 << 20, inline: bool = True) -> AsyncIterator[MemoryEngine]:
        """A new engine, closed at the end of the ``async with``. Arguments as `MemoryEngine`."""
        engine = MemoryEngine(self, pool_size=pool_size, inline=inline)
        try:
            yield engine
        finally:
            engine.close()

    def enter(self, engine: MemoryEngine) -> bytes:
        """Make an engine known; returns its unique name."""
        name = b"memory-%d" % next(self._numbers)
        self._engines[name] = engine
        return name

    def find(self, descriptor: Descriptor) -> MemoryEngine:
        """The engine that has this descriptor.

        Raises:
            DescriptorRefused: none has.
        """
        engine = self._engines.get(descriptor.engine)
        if engine is None or engine.descriptor != descriptor:
            raise DescriptorRefused(f"memory: no engine of this fabric has the descriptor {descriptor}")
        return engine


class _State(enum.Enum):
    OPEN = "open"
    CLOSED = "closed"
    ABANDONED = "abandoned"
    KILLED = "killed"


@attrs.frozen
class EngineCall:
    """One call that an engine got: the method's name, the peer's identity, and the write if it has one."""

    method: str
    peer: str = ""
    write: Write | None = None


@attrs.frozen
class _Failure:
    settled: bool
    arrived: float


class MemoryPeer(EnginePeer):
    """Another memory engine, as one of them sees it."""

    def __init__(self, target: MemoryEngine) -> None:
        self.target = target
        self.fenced = trio.Event()

    @property
    def identity(self) -> str:
        return self.target.identity

    @property
    def size(self) -> int:
        return self.target.region.size


class HeldWrite:
    """A posted write whose bytes have not all arrived, or whose end has not been told.

    Bytes are read from the source when they arrive, as a network card would: a source that is reused too early shows.

    Attributes:
        peer: Where it goes.
        write: What was asked for.
    """

    def __init__(self, engine: MemoryEngine, peer: MemoryPeer, write: Write) -> None:
        self.peer = peer
        self.write = write
        self._engine = engine
        self._arrived = 0
        self._told = trio.Event()
        self._error: TransferFailed | None = None

    @property
    def told(self) -> bool:
        """Whether the writer goes on already: it was told that this failed, unsettled."""
        return self._told.is_set()

    def arrive(self, upto: int) -> None:
        """Let the bytes up to this position arrive, counted within the write; not those again that came before."""
        if upto > self._arrived:
            write, start = self.write, self._arrived
            self._engine._move(self.peer, Write(write.source + start, write.destination + start, upto - start))
            self._arrived = upto

    def finish(self) -> None:
        """Let all bytes arrive, and the writer go on; with an error if the peer is over or has fenced us."""
        self.arrive(self.write.size)
        self.end(self._engine._refusal(self.peer))

    def end(self, error: TransferFailed | None) -> None:
        """Let the writer go on; bytes that have not arrived never will."""
        self.tell(error)
        self._engine._forget(self)

    def tell(self, error: TransferFailed | None) -> None:
        """Let the writer go on, though bytes may still be under way. The first word counts."""
        if not self._told.is_set():
            self._error = error
            self._told.set()

    async def wait_told(self) -> None:
        """As the writer waits: not cancellable."""
        with trio.CancelScope(shield=True):
            await self._told.wait()
        if self._error is not None:
            raise self._error


class MemoryEngine(Engine):
    """An engine whose peers are objects in the same process. Passes `check_engine`, and misbehaves on request.

    Without a request every write is done at once. It needs no running trio until something waits, so that a
    synchronous test may use it too.

    Attributes:
        inline: Whether `write_nowait` does anything.
        calls: Every call so far, in order.
        violations: What its user did that the contract forbids, in words; a test ends with ``assert not violations``.
    """

    name = "memory"

    def __init__(self, fabric: MemoryFabric, *, pool_size: int = 1 << 20, inline: bool = True) -> None:
        self.inline = inline
        self.calls: list[EngineCall] = []
        self.violations: list[str] = []
        self._buffer = memoryview(bytearray(pool_size))
        self._region = Region(torch.frombuffer(self._buffer, dtype=torch.uint8), self._buffer, "cpu")
        self._fabric = fabric
        self._descriptor = Descriptor(fabric.enter(self), pool_size.to_bytes(8, "big"))
        self._state = _State.OPEN
        self._peers: dict[Descriptor, MemoryPeer] = {}
        self._seen_by: list[MemoryPeer] = []
        self._revoked: set[str] = set()
        self._gates: dict[str, float] = {}
        self._failures: list[_Failure] = []
        self._held: list[HeldWrite] = []

    # --- the contract

    @property
    def region(self) -> Region:
        return self._region

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor

    @property
    def identity(self) -> str:
        """What peers see as `EnginePeer.identity`."""
        return self._descriptor.engine.decode()

    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        self._record("add_peer")
        if self._state is not _State.OPEN:
            raise ConnectorClosed(f"the engine {self.identity} is {self._state.value} and takes no peer")
        if descriptor in self._peers:
            return self._peers[descriptor]
        target = self._fabric.find(descriptor)
        if target._state is not _State.OPEN:
            raise DescriptorRefused(f"{target.identity} is {target._state.value}")
        peer = MemoryPeer(target)
        target._seen_by.append(peer)
        self._peers[descriptor] = peer
        return peer

    def drop_peer(self, peer: EnginePeer) -> None:
        self._record("drop_peer", peer)
        if isinstance(peer, MemoryPeer) and self._knows(peer):
            del self._peers[peer.target.descriptor]

    def write_nowait(self, peer: EnginePeer, write: Write) -> bool:
        self._record("write_nowait", peer, write)
        ours = self._admit(peer, write)
        if not self.inline or self._gate(ours) is not None:
            return False
        self._fail_if_told(ours, write)
        self._move(ours, write)
        return True

    async def write(self, peer: EnginePeer, write: Write) -> None:
        await trio.lowlevel.checkpoint()
        self._record("write", peer, write)
        ours = self._admit(peer, write)
        self._fail_if_told(ours, write)
        arrived = self._gate(ours)
        if arrived is None:
            self._move(ours, write)
        else:
            await self._post(ours, write, arrived).wait_told()

    async def wait_fenced(self, peer: EnginePeer) -> None:
        self._record("wait_fenced", peer)
        if not isinstance(peer, MemoryPeer) or not self._knows(peer):
            await trio.sleep_forever()
        else:
            await peer.fenced.wait()

    def abandon(self) -> None:
        self._record("abandon")
        self._state = _State.ABANDONED
        for held in self._held:
            held.tell(TransferFailed(f"write to {held.peer.identity} was abandoned", settled=False))

    # --- what a test does to it

    @property
    def held(self) -> tuple[HeldWrite, ...]:
        """The writes that have not ended, oldest first; `HeldWrite.finish` ends one out of order."""
        return tuple(self._held)

    def hold(self, peer: EnginePeer | None = None, *, arrived: float = 0.0) -> None:
        """From now on writes (to this peer) stay under way until `release`.

        Args:
            arrived: How much of each arrives at once: 0 nothing, 0.5 half, 1 all of it while its end stays unknown.
        """
        self._gates[peer.identity if peer else ""] = arrived

    def release(self, count: int | None = None) -> None:
        """Finish the oldest held writes, or all of them and hold none any more."""
        if count is None:
            self._gates.clear()
        for held in self._held[:count]:
            held.finish()

    def fail(self, count: int = 1, *, settled: bool = True, arrived: float = 0.0) -> None:
        """Let the next writes raise `TransferFailed` after a part of their bytes arrived.

        Args:
            settled: False: the rest is still under way when it raises, and arrives at `release`.
            arrived: How much of each arrives before it raises.
        """
        self._failures += [_Failure(settled, arrived)] * count

    def fence(self, peer: EnginePeer) -> None:
        """Revoke a peer's access to our region: none of its bytes arrives from now on, and `wait_fenced` returns."""
        if isinstance(peer, MemoryPeer):
            self._revoked.add(peer.identity)
            peer.fenced.set()

    def kill(self, *, land: bool = False) -> None:
        """End as a process does that is killed: fenced for its peers from now on, held writes never arrive.

        Args:
            land: Let held writes arrive first.
        """
        self._state = _State.KILLED
        for held in self.held:
            if land:
                held.arrive(held.write.size)
            held.end(TransferFailed(f"{self.identity} was killed"))
        self._tell_fenced()

    def close(self) -> None:
        """End in good order, as leaving `open_engine` does; with writes under way that is a violation. Idempotent."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSED
            if self._held:
                self.violations.append(f"closed with {len(self._held)} writes under way and not abandoned")
            self.release()
        self._tell_fenced()

    # --- inside

    def _record(self, method: str, peer: EnginePeer | None = None, write: Write | None = None) -> None:
        self.calls.append(EngineCall(method, peer.identity if peer else "", write))

    def _knows(self, peer: MemoryPeer) -> bool:
        return self._peers.get(peer.target.descriptor) is peer

    def _admit(self, peer: EnginePeer, write: Write) -> MemoryPeer:
        if self._state is not _State.OPEN:
            raise self._violation(f"write to {peer.identity} when the engine was {self._state.value}")
        if not isinstance(peer, MemoryPeer) or not self._knows(peer):
            raise self._violation(f"write to {peer.identity}, which was dropped or is not a peer")
        try:
            check_bounds(write, self._region.size, peer)
        except TransferFailed as error:
            raise self._violation(str(error)) from error
        refusal = self._refusal(peer)
        if refusal is not None:
            raise refusal
        return peer

    def _refusal(self, peer: MemoryPeer) -> TransferFailed | None:
        if peer.target._state is not _State.OPEN:
            return TransferFailed(f"write to {peer.identity} refused: it is {peer.target._state.value}")
        if self.identity in peer.target._revoked:
            return TransferFailed(f"write to {peer.identity} refused: it has revoked our access")
        return None

    def _violation(self, what: str) -> TransferFailed:
        self.violations.append(what)
        return TransferFailed(what)

    def _gate(self, peer: MemoryPeer) -> float | None:
        return self._gates.get(peer.identity, self._gates.get(""))

    def _fail_if_told(self, peer: MemoryPeer, write: Write) -> None:
        if not self._failures:
            return
        failure = self._failures.pop(0)
        error = TransferFailed(f"write to {peer.identity} failed on request", settled=failure.settled)
        held = self._post(peer, write, failure.arrived)
        if failure.settled:
            held.end(error)
        else:
            held.tell(error)
        raise error

    def _post(self, peer: MemoryPeer, write: Write, arrived: float) -> HeldWrite:
        held = HeldWrite(self, peer, write)
        self._held.append(held)
        held.arrive(int(write.size * arrived))
        return held

    def _move(self, peer: MemoryPeer, write: Write) -> None:
        if self.identity not in peer.target._revoked:
            target, source = peer.target._buffer, self._buffer
            target[write.destination : write.destination + write.size] = source[
                write.source : write.source + write.size
            ]

    def _forget(self, held: HeldWrite) -> None:
        self._held.remove(held)
        if self._state is not _State.OPEN:
            self._tell_fenced()

    def _tell_fenced(self) -> None:
        """An engine that is over and moves nothing any more is fenced for everybody who has met it."""
        if not self._held:
            for peer in self._seen_by:
                peer.fenced.set()
