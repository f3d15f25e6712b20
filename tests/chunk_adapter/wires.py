"""A wire in memory, and a courier over it whose commands are carried out when a test flushes them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio_mori_vllm_omni.chunks._courier import Courier
from trio_mori_vllm_omni.chunks._flows import Event, Outgoing

from trio_mori import Gone


class MemoryWire:
    """What is put under a name and a number can be taken under it, once.

    Attributes:
        failures: Raised by the next puts or takes, one by each.
        refusals: Raised by the next put under a number.
        told: That chunks are gone, to takes that were cancelled just then: raised by the next one, as a connector does.
        room: Puts that may still be made; None: any number.
    """

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, int], Any] = {}
        self.lost: set[tuple[str, int]] = set()
        self.cleaned: list[str] = []
        self.told: dict[tuple[str, int], Exception] = {}
        self.failures: list[Exception] = []
        self.refusals: dict[int, Exception] = {}
        self.room: int | None = None
        self.waiting = 0
        self.refused: set[tuple[str, int]] = set()
        self._news = trio.Event()
        self._changed = trio.Event()

    def change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def planned(self, payload: object) -> object:
        return payload

    async def prepare(self) -> None:
        await trio.lowlevel.checkpoint()

    async def put(self, external_id: str, number: int, planned: Any) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.failures:
            raise self.failures.pop(0)
        if number in self.refusals:
            raise self.refusals.pop(number)
        while self.room == 0:
            self.refused.add((external_id, number))
            self._news.set()
            await self._changed.wait()
        if self.room is not None:
            self.room -= 1
        self.chunks[external_id, number] = planned
        self.change()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def put_at_once(self, external_id: str, number: int, planned: Any) -> bool:
        if self.failures or number in self.refusals or self.room == 0:
            return False
        if self.room is not None:
            self.room -= 1
        self.chunks[external_id, number] = planned
        self.change()
        return True

    async def take(self, external_id: str, number: int, source: dict[str, Any] | None) -> object:
        if self.failures:
            raise self.failures.pop(0)
        key = external_id, number
        if key in self.told:
            raise self.told.pop(key)
        self.waiting += 1
        try:
            while key not in self.chunks and key not in self.lost:
                await self._changed.wait()
        finally:
            self.waiting -= 1
        if key in self.lost:
            self.lost.remove(key)
            raise Gone("nothing comes", key=external_id)
        return self.chunks.pop(key)

    def forget(self, external_id: str) -> None:
        for key in [key for key in self.told if key[0] == external_id]:
            del self.told[key]

    def clean(self, external_id: str) -> None:
        self.cleaned.append(external_id)
        for key in [key for key in self.chunks if key[0] == external_id]:
            del self.chunks[key]

    def lose(self, external_id: str, number: int) -> None:
        self.lost.add((external_id, number))
        self.change()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something is so that changes with the chunks."""
        while not condition():
            await self._changed.wait()

    async def wait_refused(self, count: int = 1) -> None:
        """Until so many puts wait for room."""
        with trio.fail_after(30):
            while len(self.refused) < count:
                self._news = trio.Event()
                await self._news.wait()

    def sent(self, external_id: str) -> list[Any]:
        """What was put for a request and not taken, in order."""
        numbers = sorted(number for name, number in self.chunks if name == external_id)
        assert numbers == list(range(len(numbers)))
        return [self.chunks[external_id, number] for number in numbers]


class Signals(deque[Event]):
    """Events for the scheduler's half, and for a task that waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.news = trio.Event()

    def append(self, event: Event) -> None:
        super().append(event)
        self.news.set()


class Names(list[str]):
    """Names that come from the worker, and that a task may wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = trio.Event()

    def note(self, name: str) -> None:
        """In the worker."""
        self.append(name)
        trio.from_thread.run_sync(self._news.set)

    async def wait(self, count: int) -> None:
        with trio.fail_after(30):
            while len(self) < count:
                self._news = trio.Event()
                await self._news.wait()


@asynccontextmanager
async def open_courier(wire: MemoryWire, forgotten: Names | None = None) -> AsyncIterator[Courier]:
    """A courier; what it is told to receive is carried out as soon as it is flushed."""
    names = Names() if forgotten is None else forgotten
    token, loop = trio.lowlevel.current_trio_token(), threading.get_ident()

    def post(command: Callable[[], None]) -> None:
        if threading.get_ident() == loop:
            command()
        else:
            token.run_sync_soon(command)

    courier = Courier(post, wire, names.note, time.monotonic)
    courier._events = Signals()
    async with courier.open():
        yield courier


async def next_events(courier: Courier, count: int) -> list[Event]:
    """Wait for so many events."""
    events: list[Event] = []
    signals = courier._events
    assert isinstance(signals, Signals)
    with trio.fail_after(30):
        while True:
            events += courier.events()
            if len(events) >= count:
                return events
            signals.news = trio.Event()
            await signals.news.wait()


def chunk(payload: Any, *, terminal: bool = False) -> Outgoing:
    """One that is built of nothing."""
    return Outgoing(lambda number: payload, terminal)
