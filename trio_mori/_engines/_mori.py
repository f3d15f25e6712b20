"""The engines on AMD's Mori: xgmi writes from GPU to GPU within a host, rdma through NICs."""

from __future__ import annotations

import enum
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf

import trio

from .._errors import ConfigError, ConnectorClosed, DescriptorRefused, EngineUnavailable, TransferFailed
from .._scope import open_service
from ..abc import Descriptor, Engine, EnginePeer, Region, Write
from ._bounds import check_bounds
from ._fence import Fence
from ._immortal import keep_for_ever
from ._mori_backend import Backend, RdmaBackend, XgmiBackend, open_outlet
from ._mori_identity import fence_neighbour, new_key
from ._mori_library import RAISES, EngineDesc, Library, load
from ._mori_options import RdmaOptions, XgmiOptions, read_options
from ._mori_outlet import Outlet
from ._mori_peer import MoriPeer, decode
from ._mori_pool import allocate
from ._mori_transfers import Transfers
from ._process import Process, this_process

logger = logging.getLogger("trio_mori.engine")

# The port of an rdma engine that has fallen back to xgmi, because $MORI_DISABLE_AUTO_XGMI is 0.
_FALLBACK_PORT = 1

# The engines of this process by key, for peers in the same process.
_live: dict[str, MoriEngine] = {}


class _State(enum.Enum):
    OPEN = "open"
    CLOSED = "closed"
    ABANDONED = "abandoned"


# Python 3.10 finds a member of an Enum in 0.2 us, which counts before every write.
_OPEN = _State.OPEN

# A peer that was seen to be there so many seconds ago is taken to be there: to look costs 1.4 us, a tenth of what Mori
# takes for 64 KiB. Its bytes harm nobody if it has just gone; only its sender would like to know.
SEEN = 10e-3


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_mori(
    backend: str, *, pool_size: int, device: str, options: Mapping[str, object], region: Region | None = None
) -> AsyncIterator[Engine]:
    """Open a pool that Mori reaches: on a GPU of this host for ``xgmi``, on a GPU or in host memory for ``rdma``.

    Opening imports Mori and allocates in threads, and is not cancelled while it does. Leaving waits for the writes
    under way. Where one failed in a way that leaves it open whether it still moves, or was abandoned, pool and Mori
    engine stay for the rest of the process.

    With `region`, the pool is one that another engine has opened, and keeps open for longer.

    Options: the fields of `XgmiOptions` or `RdmaOptions`; for rdma also ``host``, the address at which Mori listens
    for peers' Mori. Where NICs are named, $MORI_RDMA_DEVICES says so while the backend is made, and only then.

    Fences: xgmi has pidfds, for peers of this pid namespace, because a process that has exited copies nothing. For
    rdma, and for stock peers, `wait_fenced` never returns.
    """
    if pool_size <= 0:
        raise ConfigError(
            f"memory_pool_size must be a positive number of bytes, not {pool_size}",
            key="memory_pool_size",
            value=pool_size,
        )
    if backend == "xgmi" and device == "cpu":
        raise ConfigError(
            "xgmi has pools on GPUs only: memory_pool_device must be cuda or cuda:N, not 'cpu'",
            key="memory_pool_device",
            value=device,
        )
    settings = read_options(backend, options)
    async with AsyncExitStack() as stack:
        library = await trio.to_thread.run_sync(load)
        process = this_process()
        key = new_key(process)
        if region is None:
            region = await trio.to_thread.run_sync(allocate, pool_size, device)
        home = await trio.to_thread.run_sync(open_outlet, library, settings, key, region.tensor)
        stack.callback(home.close)
        kind = XgmiEngine if backend == "xgmi" else RdmaEngine
        fence, unfenced = os.pipe()
        engine = kind(library, settings, process, region, home, fence, unfenced)
        stack.callback(engine._end)
        engine._check_own_memory()
        async with open_service(drain=engine._drain, drain_timeout=inf) as service:
            engine._serve(service)
            _live[key] = engine
            logger.info("%s pool of %d bytes on %s open as %s", backend, pool_size, device, key)
            yield engine
        logger.info("%s pool of %s closed", backend, key)


class MoriEngine(Engine):
    """See `open_mori`.

    Mori trusts its caller. Bounds, descriptors and identity are checked here before it hears of them; what it may
    touch is kept until its statuses say that it has ended (see `Transfers` and `Outlet`). A write to a peer that was
    not written to before goes through a thread, since Mori connects, or maps, in it.

    It keeps every peer that was added until that is dropped, and sets no bound to them: a connector does, `max_peers`.
    """

    def __init__(
        self,
        library: Library,
        settings: XgmiOptions | RdmaOptions,
        process: Process,
        region: Region,
        home: Outlet,
        fence: int,
        unfenced: int,
    ) -> None:
        self._library = library
        self._process = process
        self._region = region
        self._size = region.size
        self._home = home
        assert home.engine is not None
        self._desc: EngineDesc = home.engine.get_engine_desc()
        self._descriptor = Descriptor(self._desc.pack(), home.memory.pack())
        # Whether bytes go over XGMI: then peers are of this host, and have their pools on GPUs.
        self._over_xgmi = self.name == "xgmi" or self._desc.port == _FALLBACK_PORT
        self._backend: Backend = RdmaBackend(home)
        if self._over_xgmi:
            self._backend = XgmiBackend(library, settings, process, region.tensor)
        self._fence = fence
        self._unfenced: int | None = unfenced  # closing it makes `fence` readable
        self._state = _OPEN
        self._peers: dict[Descriptor, MoriPeer] = {}
        self._uids = itertools.count()
        self._transfers: Transfers

    @property
    def region(self) -> Region:
        return self._region

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor

    # --- peers --------------------------------------------------------------------------------------------

    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        if self._state is not _OPEN:
            raise ConnectorClosed(f"the engine {self._desc.key} is {self._state.value} and takes no peer")
        if descriptor in self._peers:
            return self._peers[descriptor]
        peer = decode(self._library, descriptor, gpu=self._over_xgmi)
        live = _live.get(peer.engine.key)
        if live is not None:
            if live.descriptor != descriptor:
                raise DescriptorRefused(f"{peer.identity}: no engine of this process has this descriptor")
            peer.pool = live.region.tensor
            peer.fence = Fence(os.dup(live._fence))
        elif self._over_xgmi:
            peer.fence = fence_neighbour(peer.identity, peer.engine, self._desc, self._process)
        peer.owner = self
        self._peers[descriptor] = peer
        return peer

    @trio.lowlevel.enable_ki_protection
    def drop_peer(self, peer: EnginePeer) -> None:
        if isinstance(peer, MoriPeer) and peer.owner is self:
            del self._peers[peer.descriptor]
            peer.owner = None
            if peer.fence is not None:
                peer.fence.close()
                peer.fence = None
            self._transfers.let_go(peer)

    async def wait_fenced(self, peer: EnginePeer) -> None:
        if isinstance(peer, MoriPeer) and peer.fence is not None:
            await peer.fence.wait()
            peer.seen = -inf
        else:
            await trio.sleep_forever()  # nothing can be proven about it

    # --- writes -------------------------------------------------------------------------------------------

    # Ctrl-C would otherwise come between a write that was posted and the wait for it, and the engine end over it.
    @trio.lowlevel.enable_ki_protection
    async def write(self, peer: EnginePeer, write: Write) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._state is not _OPEN:
            raise TransferFailed(f"write to {peer.identity} refused: our engine is {self._state.value}")
        if not isinstance(peer, MoriPeer) or peer.owner is not self:
            raise TransferFailed(f"write to {peer.identity} refused: it is not a peer of this engine, or was dropped")
        check_bounds(write, self._size, peer)
        if time.monotonic() - peer.seen > SEEN:
            peer.check_present()
        status = None
        if peer.session is not None and write.size:
            try:
                status = peer.session.write(write.source, write.destination, write.size, next(self._uids))
            except RAISES as error:
                raise self._transfers.doubt(peer, peer.outlet, write, error) from error
        # Asked for the first time it keeps the GIL, for 0.2 us, and nobody else asks.
        if (status is not None and status.Succeeded()) or not write.size:
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._transfers.carry_out(peer, write, status)

    @trio.lowlevel.enable_ki_protection
    def abandon(self) -> None:
        self._state = _State.ABANDONED
        # Peers that were not heard of again may still write here, whatever is under way from here.
        keep_for_ever(self._region)
        if self._transfers.abandon():
            self._home.doubtful = True  # a first write may still be in its thread
            self._unfenced = None  # stays open for ever: nobody will know when these writes have ended

    # --- life ---------------------------------------------------------------------------------------------

    def _serve(self, service: trio.Nursery) -> None:
        self._transfers = Transfers(service, self._backend, in_progress=self._library.StatusCode.IN_PROGRESS)

    def _check_own_memory(self) -> None:
        try:
            decode(self._library, self._descriptor, gpu=self._over_xgmi)
        except DescriptorRefused as error:
            raise EngineUnavailable(f"{self.name}: our own pool cannot be reached by others: {error}") from error

    @trio.lowlevel.enable_ki_protection
    async def _drain(self) -> None:
        if self._state is _OPEN:
            self._state = _State.CLOSED
        _live.pop(self._desc.key, None)
        await self._transfers.wait_quiet()

    def _end(self) -> None:
        _live.pop(self._desc.key, None)
        for peer in tuple(self._peers.values()):
            self.drop_peer(peer)
        os.close(self._fence)
        if self._unfenced is not None:
            os.close(self._unfenced)


class XgmiEngine(MoriEngine):
    """Copies from GPU to GPU within a host; see `XgmiBackend`."""

    name = "xgmi"


class RdmaEngine(MoriEngine):
    """Writes through NICs, from host memory or GPUs; see `RdmaBackend`."""

    name = "rdma"
