"""Engines for the tests of this folder: on AMD GPUs, or on the emulated ones of the lane (docs/mori.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any

import pytest

from trio_mori._engines import open_engine
from trio_mori._engines._mori import MoriEngine
from trio_mori._engines._mori_backend import Backend
from trio_mori._engines._mori_peer import MoriPeer
from trio_mori.abc import Engine, EnginePeer
from trio_mori.testing._engine_bench import EngineBench

try:
    import moriemu
except ModuleNotFoundError:
    moriemu = None

# Long enough for a check to do what it does beside held writes, on a busy machine.
HELD = 1.5

emulated = pytest.mark.skipif(moriemu is None, reason="needs the emulation, which can delay and break copies")


def control(key: str, value: object) -> None:
    """A knob of the emulation."""
    moriemu.ctl(key, value)


def open_xgmi(size: int, device: str = "cuda:0") -> AbstractAsyncContextManager[Engine]:
    """An engine with a pool on a GPU."""
    return open_engine("xgmi", pool_size=size, device=device)


class WithoutSessions:
    """A backend all of whose writes go the long way."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def session_to(self, peer: EnginePeer) -> None:
        """There is none."""


class Holding:
    """Makes the copies to some peers take `HELD` seconds, and all others `delay`.

    The emulation has one delay for what is posted from now on; so posting goes one by one.
    """

    def __init__(self, delay: float = 0.0, held: float = HELD) -> None:
        self.delay = delay
        self.held = held
        self._peers: set[EnginePeer] = set()
        self._posting = threading.RLock()

    def hold(self, engine: Engine, peer: EnginePeer) -> None:
        """From now on copies of this engine to this peer are slow."""
        assert isinstance(engine, MoriEngine)
        assert isinstance(peer, MoriPeer)
        if not self._peers:
            transfers: Any = engine._transfers
            transfers._open_and_post = self._slowed(transfers._open_and_post)
            transfers._post = self._slowed(transfers._post)
            transfers._backend = WithoutSessions(transfers._backend)
        peer.session = None
        self._peers.add(peer)

    def release(self, engine: Engine) -> None:
        """They end by themselves."""
        self._peers.clear()

    def _slowed(self, post: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(peer: EnginePeer, *arguments: object) -> Any:
            with self._posting:
                control("copy_delay_us", int(1e6 * (self.held if peer in self._peers else self.delay)))
                try:
                    return post(peer, *arguments)
                finally:
                    control("copy_delay_us", int(1e6 * self.delay))

        return slowed


@contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """Copies take so long. On a GPU they take what they take."""
    if moriemu is None:
        yield
        return
    control("copy_delay_us", int(1e6 * seconds))
    try:
        yield
    finally:
        control("copy_delay_us", 0)


def bench(delay: float = 0.0, backend: str = "xgmi") -> EngineBench:
    """What the conformance suite is run with."""
    opened = partial(_open_on_gpu, backend)
    if moriemu is None:
        return EngineBench(opened, closing_fences=True)
    holding = Holding(delay)
    return EngineBench(opened, holding.hold, holding.release, closing_fences=True)


def _open_on_gpu(backend: str, size: int) -> AbstractAsyncContextManager[Engine]:
    return open_engine(backend, pool_size=size, device="cuda:0")


class Answers:
    """How long answers took, until forty in a row came within 50 ms, or too many did not.

    What this machine does besides delays one now and then; what is late by itself is so in any forty. None may come as
    late as if it had waited for a held copy.
    """

    LIMIT = 0.05

    def __init__(self) -> None:
        self._in_a_row = 0
        self._late: list[float] = []

    def add(self, seconds: float) -> None:
        """One more."""
        assert seconds < HELD, "it waited for a held copy"
        if seconds < self.LIMIT:
            self._in_a_row += 1
        elif not self.over:
            self._in_a_row = 0
            self._late.append(seconds)

    @property
    def over(self) -> bool:
        """Whether there are enough."""
        return self._in_a_row >= 40 or len(self._late) >= 10

    def assert_prompt(self) -> None:
        """Forty in a row were."""
        assert self._in_a_row >= 40, self._late
