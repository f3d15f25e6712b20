"""Message links inside one process, with everything that can go wrong on a wire at the test's command."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import trio

from .._errors import ConnectorClosed
from .._link import Message
from ..abc import Arrived, Connected, Disconnected, Link, LinkEvent


def memory_link_pair(*, connected: bool = True) -> tuple[MemoryDialler, MemoryListener]:
    """A dialling link and the listening one that it dials. See `MemoryNetwork` for more than two."""
    network = MemoryNetwork()
    return network.dial(connected=connected), network.listener


class MemoryNetwork:
    """A listening link and those that dial it. Needs no ``async with``, but takes one, and closes the listener then.

    Nothing happens by itself or at random: a message that leaves has arrived, unless a test says otherwise
    with the `MemoryCable` of a direction, `MemoryDialler.cut`, or `replace_listener`.

    Attributes:
        listener: The listening link of today.
    """

    def __init__(self) -> None:
        self.listener = MemoryListener()
        self._diallers: list[MemoryDialler] = []

    def dial(self, *, connected: bool = True) -> MemoryDialler:
        """A new dialling link. Not connected, it becomes so by `MemoryDialler.restore`."""
        dialler = MemoryDialler(self)
        self._diallers.append(dialler)
        if connected:
            dialler.restore()
        return dialler

    def replace_listener(self) -> MemoryListener:
        """The listening process dies, and another one listens in its place: every dialler reconnects."""
        connected = [dialler for dialler in self._diallers if dialler.route]
        self.listener.close()
        self.listener = MemoryListener()
        for dialler in connected:
            dialler.restore()
        return self.listener

    async def __aenter__(self) -> MemoryNetwork:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.listener.close()
        await trio.lowlevel.cancel_shielded_checkpoint()


class MemoryCable:
    """One direction of a connection: what happens to messages on their way.

    Attributes:
        in_flight: Messages that have left and not arrived. They are lost when the connection is cut.
    """

    def __init__(self, arrive: Callable[[list[bytes]], None]) -> None:
        self.in_flight: deque[list[bytes]] = deque()
        self._arrive = arrive
        self._held = False
        self._drops = 0
        self._duplicates = 0
        self._to_reverse = 0
        self._reversed: deque[list[bytes]] = deque()

    def hold(self) -> None:
        """From now on messages stay in flight, as if the peer were stopped."""
        self._held = True

    def release(self, count: int | None = None) -> None:
        """Let the first `count` messages in flight arrive and hold the rest; None: all, and hold no more."""
        if count is None:
            self._held = False
            count = len(self.in_flight)
        for _ in range(count):
            self._arrive(self.in_flight.popleft())

    def drop(self, count: int = 1) -> None:
        """The next `count` messages are lost, though the connection stays."""
        self._drops += count

    def duplicate(self, count: int = 1) -> None:
        """Each of the next `count` messages arrives twice."""
        self._duplicates += count

    def reverse(self, count: int = 2) -> None:
        """The next `count` messages arrive in reverse order, as soon as all of them have left."""
        self._to_reverse = count

    def carry(self, frames: Sequence[bytes]) -> None:
        """Take a message that leaves."""
        if self._drops:
            self._drops -= 1
            return
        copies = 1
        if self._duplicates:
            self._duplicates -= 1
            copies = 2
        for _ in range(copies):
            self._put_in_order([bytes(frame) for frame in frames])
        if not self._held:
            self.release()

    def lose(self) -> None:
        """The connection is gone, with all that is in flight."""
        self.in_flight.clear()
        self._reversed.clear()
        self._to_reverse = 0

    def _put_in_order(self, frames: list[bytes]) -> None:
        if not self._to_reverse:
            self.in_flight.append(frames)
            return
        self._reversed.appendleft(frames)
        self._to_reverse -= 1
        if not self._to_reverse:
            self.in_flight += self._reversed
            self._reversed.clear()


class _MemoryLink(Link):
    def __init__(self, address: str) -> None:
        self._address = address
        self._outbox: deque[tuple[Message, bytes]] = deque()
        self._inbox: list[LinkEvent] = []
        self._receiver = trio.lowlevel.ParkingLot()
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    def send(self, frames: Message, route: bytes = b"", *, urgent: bool = True) -> None:
        self._check_open()
        if not self._outbox:
            trio.lowlevel.current_trio_token().run_sync_soon(self._flush)
        self._outbox.append((frames, route))

    async def receive(self) -> list[LinkEvent]:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        if self._inbox:
            batch, self._inbox = self._inbox, []
            await trio.lowlevel.cancel_shielded_checkpoint()
            return batch
        while not self._inbox:
            await self._receiver.park()
            self._check_open()
        batch, self._inbox = self._inbox, []
        return batch

    def recheck(self) -> None:
        # Nobody can fail to be woken here.
        return

    def close(self) -> None:
        """Let what is queued leave, and end `receive`. Idempotent."""
        self._flush()
        self._closed = True
        self._receiver.unpark_all()

    def happen(self, event: LinkEvent) -> None:
        """Have `receive` return an event."""
        self._inbox.append(event)
        self._receiver.unpark_all()

    @abstractmethod
    def _deliver(self, frames: Sequence[bytes], route: bytes) -> None:
        """Send one message on its way."""

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosed(f"the link {self.address} is closed")

    def _flush(self) -> None:
        while self._outbox:
            message, route = self._outbox.popleft()
            frames = message() if callable(message) else message
            if frames is not None:
                self._deliver(frames, route)


class MemoryListener(_MemoryLink):
    """The listening link of a `MemoryNetwork`."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        super().__init__(f"memory://listener-{next(self._numbers)}")
        self._connections: dict[bytes, MemoryDialler] = {}
        self._routes = (b"route-%d" % number for number in itertools.count(1))

    def close(self) -> None:
        super().close()
        for dialler in list(self._connections.values()):
            dialler.cut()

    def accept(self, dialler: MemoryDialler) -> bytes:
        """Take in a connection; returns its route."""
        self._check_open()
        route = next(self._routes)
        self._connections[route] = dialler
        return route

    def forget(self, route: bytes) -> None:
        """A connection is gone. Said only when somebody sends to it."""
        self._connections.pop(route, None)

    def _deliver(self, frames: Sequence[bytes], route: bytes) -> None:
        dialler = self._connections.get(route)
        if dialler is not None:
            dialler.incoming.carry(frames)
        elif Disconnected(route) not in self._inbox:
            self.happen(Disconnected(route))


class MemoryDialler(_MemoryLink):
    """A dialling link of a `MemoryNetwork`. Needs no ``async with``, but takes one.

    Attributes:
        outgoing: The way to the listener.
        incoming: The way from the listener.
        route: How the listener knows this connection; empty while there is none.
    """

    _numbers = itertools.count(1)

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(f"memory://dialler-{next(self._numbers)}")
        self._network = network
        self._listener = network.listener
        self.route = b""
        self.outgoing = MemoryCable(lambda frames: self._listener.happen(Arrived(frames, self.route)))
        self.incoming = MemoryCable(lambda frames: self.happen(Arrived(frames)))

    def cut(self) -> None:
        """The connection breaks. Messages in flight are lost; the listener notices when it next sends."""
        if self.route:
            self._hang_up()
            self.happen(Disconnected())

    def restore(self) -> None:
        """Connect, by a new route, to whoever listens now."""
        if not self.route:
            self._listener = self._network.listener
            self.route = self._listener.accept(self)
            self.happen(Connected())

    def close(self) -> None:
        super().close()
        self._hang_up()

    async def __aenter__(self) -> MemoryDialler:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _hang_up(self) -> None:
        self._listener.forget(self.route)
        self.route = b""
        for cable in (self.outgoing, self.incoming):
            cable.lose()

    def _deliver(self, frames: Sequence[bytes], route: bytes) -> None:
        if self.route:
            self.outgoing.carry(frames)
