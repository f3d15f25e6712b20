"""A stage of the lane: a process that puts, passes on or takes payloads, and reports each before it is acknowledged.

A payload that was reported may be acknowledged; one that was not never is. So whoever kills this process knows what
its peers still have to have.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import attrs
import trio

from trio_mori import (
    Connector,
    KeyBusy,
    NoRoom,
    PayloadLost,
    PeerLost,
    RemoteProtocolError,
    TransferFailed,
    open_connector,
)
from trio_mori._engines import _copies, _shm
from trio_mori._reception import NativePeer

from . import payloads, plants
from .full import no_shared_memory, try_to_open

# What a get may be told although the payload is not lost: it is asked for again.
_PASSING = (PeerLost, TransferFailed, NoRoom, RemoteProtocolError)


@attrs.frozen
class Full:
    """No shared memory is left.

    Attributes:
        seam: Which call is refused it, see `full.SEAMS`.
    """

    seam: int
    seconds: float


@attrs.frozen(kw_only=True)
class Spec:
    """What a stage is to do.

    Attributes:
        place: 0 for the source; the others take from the stage before them.
        last: It passes nothing on.
        incarnation: Of the source: its payloads differ from those of another one.
        first: By stream, the number to begin with.
        largest: Bytes of the largest payload.
        pace: Seconds between two payloads of a stream, at most.
        ahead: Payloads of a stream that the source puts at its own pace; more, no faster than they are taken.
        taking: Seconds that this takes in the mean.
        impatience: How many gets are cancelled and made again.
        again: A payload that is told to be gone is asked for again; otherwise it is passed over.
        slow_copies: Copies above 16 KiB take milliseconds, in a thread.
        plant: A fault in the code itself.
        full: It is started in the middle of that, and has to wait.
        log: A file for what it has to say.
    """

    place: int
    last: bool
    incarnation: int
    config: Mapping[str, object]
    first: Mapping[int, int]
    seed: str
    largest: int
    pace: float
    ahead: int
    taking: float
    impatience: float
    again: bool
    slow_copies: bool
    plant: str
    full: Full | None
    log: str


class _Stage:
    def __init__(self, pipe: Connection, spec: Spec, connector: Connector, nursery: trio.Nursery) -> None:
        self._pipe = pipe
        self._spec = spec
        self._connector = connector
        self._nursery = nursery
        self._chance = random.Random(f"{spec.seed}.{spec.place}.{os.getpid()}")
        self._skipped: set[tuple[int, int]] = set()
        self._put_up_to: dict[int, int] = dict(spec.first)
        self._streams = trio.CancelScope()
        self._stopping = False
        self._idle = trio.Event()  # set when the work of all streams has ended
        self.closing = trio.Event()

    # --- the work -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the work of all streams."""
        self._nursery.start_soon(self._work, dict(self._spec.first))

    async def _work(self, first: dict[int, int]) -> None:
        self._idle = idle = trio.Event()
        with trio.CancelScope() as self._streams:
            async with trio.open_nursery() as nursery:
                for stream, number in first.items():
                    nursery.start_soon(self._produce if self._spec.place == 0 else self._consume, stream, number)
        idle.set()

    async def _produce(self, stream: int, number: int) -> None:
        spec = self._spec
        ahead = number + spec.ahead
        while not self._stopping:
            await self._put(stream, number, payloads.make(spec.seed, stream, number, spec.incarnation, spec.largest))
            number += 1
            await self._rest()
            if number > ahead:
                await trio.sleep(self._chance.uniform(0, 2 * spec.taking))
        await self._do_end(stream, number)

    async def _put(self, stream: int, number: int, payload: object) -> None:
        while (stream, number) not in self._skipped:
            self._put_up_to[stream] = max(number + 1, self._put_up_to[stream])
            if self._connector.statistics().pool.waiting:
                self._pipe.send(("full",))
            try:
                await self._connector.put(*self._edge(self._spec.place), _key(stream, number), payload)
            except KeyBusy:  # of what was put there before
                await trio.sleep(0.01)
                continue
            if (stream, number) in self._skipped:
                await self._connector.cleanup(_key(stream, number))
            self._pipe.send(("put", stream, number))
            return

    async def _consume(self, stream: int, number: int) -> None:
        over = False
        while not over:
            over = await self._take(stream, number)
            number += 1
            await self._rest()

    async def _take(self, stream: int, number: int) -> bool:
        """One payload: take it, report it, pass it on, and let its sender forget it. Returns whether it is the end."""
        while True:
            limit = self._chance.uniform(0, 0.05) if self._chance.random() < self._spec.impatience else 1e9
            try:
                with trio.move_on_after(limit):
                    arrival = await self._connector.take(*self._edge(self._spec.place - 1), _key(stream, number))
                    break
            except PayloadLost as lost:
                if not self._spec.again:
                    await self._pass_on(stream, number, payloads.make_lost(number, type(lost).__name__))
                    self._pipe.send(("lost", stream, number, type(lost).__name__))
                    return False
                self._pipe.send(("told", stream, number, type(lost).__name__))
                await trio.sleep(0.01)
            except _PASSING as error:
                self._pipe.send(("told", stream, number, type(error).__name__))
                await trio.sleep(0.05)
        try:
            value = arrival.restore()
            read = payloads.read(stream, value)
            if not self._spec.last:
                await self._pass_on(stream, number, value)
            self._pipe.send(("took", stream, number, read))
        except BaseException:
            arrival.give_back()
            raise
        arrival.finish()
        return read.end

    async def _pass_on(self, stream: int, number: int, value: object) -> None:
        if not self._spec.last:
            await self._put(stream, number, value)

    async def _rest(self) -> None:
        await trio.sleep(self._chance.uniform(0, self._spec.pace))

    @staticmethod
    def _edge(place: int) -> tuple[str, str]:
        return str(place), str(place + 1)

    # --- commands -----------------------------------------------------------------------------------------

    async def obey(self) -> None:
        """Do what the lane says, until it says that it is over."""
        while True:
            await trio.lowlevel.wait_readable(self._pipe.fileno())
            command, *arguments = self._pipe.recv()
            if command == "close":
                self._streams.cancel()
                self.closing.set()
                return
            await getattr(self, f"_do_{command}")(*arguments)

    async def _do_end(self, stream: int, number: int) -> None:
        """End a stream with this number; once more if that was lost."""
        await self._put(stream, number, payloads.make_end(number))
        self._pipe.send(("ended", stream, number))

    async def _do_stop(self) -> None:
        self._stopping = True

    async def _do_skip(self, stream: int, number: int) -> None:
        """It is known to have arrived, or is to be lost: it is not put, or dropped."""
        self._skipped.add((stream, number))
        await self._connector.cleanup(_key(stream, number))

    async def _do_drop(self, stream: int, number: int) -> None:
        await self._connector.cleanup(_key(stream, number))

    async def _do_rewind(self, first: dict[int, int]) -> None:
        """What was put from here on was lost behind us: put it again."""
        self._streams.cancel()
        await self._idle.wait()  # a copy in a thread cannot be cancelled, and its payload is put
        self._skipped = {(stream, number) for stream, number in self._skipped if number < first[stream]}
        for stream, number in first.items():
            for each in range(number, self._put_up_to[stream]):
                await self._connector.cleanup(_key(stream, each))
        self._nursery.start_soon(self._work, dict(first))

    async def _do_starve(self, free: int, seconds: float) -> None:
        """Have only so many descriptors left for a while."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        taken = []
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(min(free, len(taken))):
            os.close(taken.pop())
        await trio.sleep(seconds)
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async def _do_fill(self, full: Full) -> None:
        """Have no shared memory left for a while: what is open goes on, and what is opened is told."""
        config = {"role": "sender", "host": "127.0.0.1", "zmq_port": 0, "memory_pool_size": 1 << 20}
        await _outlast(self._pipe, full, config)

    async def _do_step(self, seconds: float) -> None:
        """Step the clock of the host, as this process sees it."""
        time.time = partial(_stepped, time.time, seconds)  # type: ignore[assignment]

    async def _do_look(self) -> None:
        """Tell how things are."""
        connector = self._connector
        now = connector.statistics()
        kept: list[str] = []
        if connector._sender is not None:
            kept = [entry.key for entry in connector._sender.book.shelf.everything()]
        self._pipe.send(("looked", attrs.asdict(now), kept, list(_open_matters(connector))[:40]))


async def _outlast(pipe: Connection, full: Full, config: Mapping[str, object]) -> None:
    """Try to open a connector while no shared memory is left, and after that."""
    until = trio.current_time() + full.seconds
    with no_shared_memory(full.seam):
        while True:
            pipe.send(("refused", await try_to_open(config)))
            if trio.current_time() >= until:
                break
            await trio.sleep(0.1)
    if message := await try_to_open(config):
        raise RuntimeError(f"there is shared memory again, and yet: {message}")


def _open_matters(connector: Connector) -> Iterator[str]:
    """What is not over, for whoever has to find out why."""
    for upstream in connector._receiver.upstreams.values():
        channel, links = upstream.channel, upstream._links
        yield (
            f"channel: up {channel.up}, generation {channel.generation}, sequence {channel.sequence}, "
            f"refusal {upstream.refusal!r}, local {links.local is not None}, reachable {upstream._reachable}, "
            f"last heard {trio.current_time() - upstream._presence.last_heard:.1f} s ago, said {len(channel.outgoing)}"
        )
        for link in filter(None, (links.local, links.remote)):
            yield f"{link.address}: {link.statistics()}"
        for interest in channel.interests.values():
            extent = interest.extent and interest.extent.size
            yield f"{interest.id} {interest.key}: {interest.state.name}, round {interest.round}, room {extent}"
    if connector._sender is not None:
        book = connector._sender.book
        for session in book.sessions.values():
            yield (
                f"session: connected {session.connected}, generation {session.generation}, floor {session.floor}, "
                f"sequence {session.sequence}, unsaid {len(session.outgoing)}, "
                f"heard {trio.current_time() - session.last_heard:.1f} s ago"
            )
            peer = session.handle
            if isinstance(peer, NativePeer):
                yield f"by {peer.link.address}, composing {peer.composing}: {peer.link.statistics()}"
            for fetch in session.fetches.values():
                yield f"{fetch.id} {fetch.key}: {fetch.state.name}, round {fetch.round}, {fetch.failure}, {fetch.lost}"
        yield f"told to whoever asks next: {list(book.shelf._tombstones)[-10:]}"


def _stepped(clock: object, seconds: float) -> float:
    return clock() + seconds  # type: ignore[operator, no-any-return]


def _key(stream: int, number: int) -> str:
    return f"{stream}.{number}"


def _residue() -> dict[str, int]:
    """What a process has that has to be as before: descriptors and threads."""
    gc.collect()
    threads = [t for t in threading.enumerate() if not t.name.startswith("Trio thread")]
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(threads)}


async def _settled_residue() -> dict[str, int]:
    """The least of some: libzmq closes in a thread of its own, and a little later."""
    looks = []
    for _ in range(5):
        looks.append(_residue())
        await trio.sleep(0.05)
    return {name: min(look[name] for look in looks) for name in looks[0]}


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


async def _work(pipe: Connection, spec: Spec) -> None:
    async with open_connector(spec.config) as connector, trio.open_nursery() as nursery:
        stage = _Stage(pipe, spec, connector, nursery)
        nursery.start_soon(stage.obey)
        pipe.send(("ready", connector.get_connection_info()["zmq_port"]))
        stage.start()
        await stage.closing.wait()
        nursery.cancel_scope.cancel()


async def _live(pipe: Connection, spec: Spec) -> None:
    async with open_connector({"role": "sender", "host": "127.0.0.1", "zmq_port": 0, "memory_pool_size": 4096}):
        pass  # what libzmq opens once, and keeps
    before, files = await _settled_residue(), _open_files()
    tasks = trio.lowlevel.current_statistics().tasks_living
    if spec.full is not None:
        await _outlast(pipe, spec.full, spec.config)
    await _work(pipe, spec)
    with trio.move_on_after(5):  # libzmq closes in a thread of its own, and a little later
        while any(count > before[name] for name, count in _residue().items()):  # noqa: ASYNC110 - no event tells
            await trio.sleep(0.05)
    more = {name: max(0, count - before[name]) for name, count in _residue().items()}
    more["tasks"] = trio.lowlevel.current_statistics().tasks_living - tasks
    if more["descriptors"]:
        logging.warning("open before: %s\nand after: %s", files, _open_files())
    pipe.send(("closed", more))


def main(pipe: Connection, spec: Spec) -> None:
    """Be that stage."""
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if spec.slow_copies:
        _shm.INLINE = 16 << 10
        _copies._move = partial(_move_slowly, _copies._move)
    plants.plant(spec.plant)
    gc.freeze()  # half of a gigabyte of modules, at which nobody has to look again
    trio.run(_live, pipe, spec)


def _move_slowly(
    move: Callable[..., None], target: memoryview, source: memoryview, pages: object = None, offset: int = 0
) -> None:
    middle = len(source) // 2
    move(target[:middle], source[:middle], pages, offset)
    time.sleep(0.002 + len(source) / (100 << 20))
    move(target[middle:], source[middle:], pages, offset + middle)
