"""A small world for the two books: pools with bytes in them, a network that misbehaves, an engine that copies in steps.

It does for the books what the shell does, and nothing that the shell does not: a process that stopped handles nothing,
one that ended writes nothing once its fence is known, and each write is ended once. What it adds is sight: it knows
which bytes every put had, which write may still move, and why a payload left.
"""

from __future__ import annotations

import attrs
from world_link import Connection
from world_pool import ROUTES, STOCK_POOL, Put
from world_receiver import Receiver
from world_sender import Encoding, Sender

from trio_mori._errors import NoRoom
from trio_mori._protocol import stock_wire
from trio_mori._protocol.entries import StockCaller
from trio_mori._protocol.extents import OUTBOUND


@attrs.define(eq=False)
class StockPull:
    """What a stock receiver waits for."""

    put: Put
    destination: int
    length: int


class World:
    """All processes, and what lies between them.

    Attributes:
        sender: Who has the address that receivers dial.
        receivers: Who gets, at two places.
        buried: Epochs of senders that are proven dead.
        held: The places and directions whose messages wait until they are delivered one by one.
        engine_waits: Whether writes take their time.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self._last = 0
        self.puts: dict[int, Put] = {}
        self.connections: list[Connection] = []
        self.engine_waits = False
        self.stock_memory = {route: bytearray(STOCK_POOL) for route in ROUTES}
        self.stock_pulls: dict[bytes, StockPull] = {}
        self.sender = Sender(self)
        self.senders = [self.sender]
        self.receivers = [Receiver(self, 0), Receiver(self, 1)]
        self.former: list[Receiver] = []
        self.buried: set[bytes] = set()
        self.held: set[tuple[int, str]] = set()
        for receiver in self.receivers:
            receiver.connect()
        self.pump()

    def number(self) -> int:
        self._last += 1
        return self._last

    def token(self) -> bytes:
        return self.number().to_bytes(16, "big")

    def all_receivers(self) -> list[Receiver]:
        return self.receivers + self.former

    def excuse_deliveries(self, receiver: Receiver) -> None:
        """It gets a new name, and what it takes from now on under the old one is not understood."""
        for sender in self.senders:
            for session in sender.sessions_of(receiver):
                for fetch in session.fetches.values():
                    sender.excuse(fetch)

    # --- the network --------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Let everything happen that is not held up."""
        for _ in range(300):
            moved = False
            for sender in self.senders:
                if sender.running:
                    moved |= sender.flush()
            for receiver in self.all_receivers():
                if receiver.running:
                    moved |= receiver.flush()
            for receiver in self.all_receivers():
                connection, place = receiver.connection, receiver.place
                if connection is None:
                    continue
                if connection.up and connection.sender.running and (place, "up") not in self.held:
                    letters, connection.up = connection.up, []
                    for one in letters:
                        connection.deliver("up", one)
                    moved = True
                if connection.down and receiver.running and (place, "down") not in self.held:
                    letters, connection.down = connection.down, []
                    for one in letters:
                        connection.deliver("down", one)
                    moved = True
            if not moved:
                self.watch_alarms()
                return
        raise AssertionError("the two never stop talking")

    def watch_alarms(self) -> None:
        """Whoever sleeps until a deadline was woken for each earlier one that came up since."""
        for sender in self.senders:
            if sender.running:
                asleep_until = min(sender.asleep_until, sender.book.alarm)
                assert asleep_until <= sender.book.next_deadline(), "a deadline would be slept through"
                sender.asleep_until = asleep_until

    def queues(self) -> list[tuple[Connection, str]]:
        """Where messages wait."""
        return [(c, way) for c in self.connections for way in ("up", "down") if (c.up if way == "up" else c.down)]

    def forget_closed(self) -> None:
        """Of the closed connections only the last few may still surprise somebody."""
        closed = [c for c in self.connections if not c.open]
        for connection in closed[:-4]:
            self.connections.remove(connection)

    # --- time ---------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """All receivers say that they live."""
        for receiver in self.all_receivers():
            if receiver.running:
                receiver.beat()

    def pass_time(self, seconds: float, *, beats: bool) -> None:
        """Time passes, with all receivers silent or not."""
        if beats:
            self.beat()
            self.pump()
        self.now += seconds
        if beats:
            self.beat()
            self.pump()
        for sender in self.senders:
            if sender.running:
                sender.tick()

    # --- processes ----------------------------------------------------------------------------------------

    def replace_receiver(self, place: int, how: str) -> None:
        """Another process takes its place; itself it is stopped, or dead without anybody knowing."""
        old = self.receivers[place]
        if how == "leaves" and old.running:
            old.leave()
            self.pump()
        self.former.append(old)
        old.running = False
        if how != "stopped for another":
            old.die()
        self.receivers[place] = Receiver(self, place)
        self.receivers[place].connect()

    def bury_receiver(self, former: Receiver) -> None:
        """It is dead, and everybody knows."""
        self.former.remove(former)
        former.die()
        for sender in self.senders:
            if sender.alive:
                sender.hear_of_death(former)

    def replace_sender(self, how: str, *, noticed: bool, seamless: bool) -> None:
        """Another process has the address."""
        old = self.sender
        if how == "killed":
            old.die()
        elif how == "stopped for another":
            old.running = False
        elif how == "leaves" and old.running:
            old.leave()
            self.pump()
        self.senders.append(Sender(self))
        self.give_address(self.senders[-1], noticed=noticed, seamless=seamless)

    def give_address(self, sender: Sender, *, noticed: bool, seamless: bool) -> None:
        """Whoever dials from now on reaches that process, and if it is seamless also what was sent already."""
        self.sender = sender
        for receiver in self.receivers:
            broken = receiver.connection
            if not receiver.running or broken is None:
                continue
            if not seamless:
                receiver.disconnect()
            if noticed and broken.sender.running:
                broken.sender.notice_disconnect(broken)
            if seamless:
                broken.sender = sender
            else:
                receiver.connect()
        self.forget_closed()

    def bury_sender(self, sender: Sender) -> None:
        """It is dead, and everybody knows."""
        sender.die()
        self.buried.add(sender.epoch)
        self.senders.remove(sender)
        for receiver in self.all_receivers():
            if receiver.alive:
                receiver.hear_of_death(sender)

    # --- stock receivers ----------------------------------------------------------------------------------

    def stock_request(self, route: bytes, key: str, how: str) -> None:
        """A stock receiver asks, or asks again."""
        sender = self.sender
        if route in self.stock_pulls:
            return  # it waits for its answer
        caller, entry = sender.book.pulls.begin(route, key)
        if entry is None:
            return
        put = next(p for p in sender.puts if p.entry is entry)
        if not entry.is_raw and entry.encoding is None:
            try:
                extent = sender.pool.allocate(len(put.encoded), OUTBOUND)
            except NoRoom:
                return
            sender.book.pulls.begin_encoding(entry, extent, len(put.encoded))
            sender.encodings.append(Encoding(put, extent))
            if not self.engine_waits:
                sender.end_encoding(sender.encodings[-1])
        if any(e.put is put for e in sender.encodings):
            return  # it asks again when that has ended
        length = (put.size if entry.is_raw else len(put.encoded)) + (how == "long")
        destination = 0 if how != "far" else max(0, STOCK_POOL - length + 1)
        put.excused = True
        if how != "query" and length:
            self.stock_pulls[route] = StockPull(put, destination, length)
            sender.book.pull(caller, entry, destination=destination, length=length, region_size=STOCK_POOL)

    def stock_answered(self, sender: Sender, caller: StockCaller, answer: bytes) -> None:
        pull = self.stock_pulls.pop(caller.route, None)
        if answer != stock_wire.TRANSFER_DONE:
            return
        assert pull is not None, "an answer to nobody"
        put = pull.put
        put.reasons.add("stock")
        if not any(c.receiver is None for c in sender.copies):  # else a late one may have spoiled it: it owns no pool
            expected = put.data if put.entry.is_raw else put.encoded
            start = pull.destination
            memory = self.stock_memory[caller.route]
            assert memory[start : start + pull.length] == expected, "a stock receiver has other bytes"
