"""A small world for the two books: pools with bytes in them, a network that misbehaves, an engine that copies in steps.

It does for the books what the shell does, and nothing that the shell does not: a process that stopped handles nothing,
one that ended writes nothing once its fence is known, and each write is ended once. What it adds is sight: it knows
which bytes every put had, which write may still move, and why a payload left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf

import attrs

from trio_mori._errors import KeyBusy, NoRoom, TransferFailed
from trio_mori._protocol import wire
from trio_mori._protocol.entries import Entry, Fetch, Phase, Session, StockCaller, Ticket, Want
from trio_mori._protocol.extents import INBOUND, OUTBOUND, Extent, Extents
from trio_mori._protocol.inbox import Inbox
from trio_mori._protocol.interests import Interest, State
from trio_mori._protocol.keys import names_of
from trio_mori._protocol.outbox import Outbox, OutboxLimits
from trio_mori._protocol.shelf import extents_of

UNIT = 4096
SENDER_POOL = 64 * UNIT
RECEIVER_POOL = 48 * UNIT
STOCK_POOL = 8 * UNIT
GUARANTEED = 8 * UNIT
ROUTES = (b"a", b"b")  # of two stock receivers
POISON = memoryview(b"\xdd" * SENDER_POOL)
LIMITS = OutboxLimits(
    ttl=300.0,
    acknowledge_timeout=30.0,
    transfer_timeout=lambda size: 20.0,
    max_fetches=6,
    max_sessions=3,
    stock_keep=5.0,
)


class Pool(Extents):
    """An allocator with the memory that it speaks of. What is free is poisoned, so that whoever reads it is noticed."""

    def __init__(self, size: int, share: str) -> None:
        super().__init__(size, guarantees={INBOUND: GUARANTEED, OUTBOUND: GUARANTEED})
        self.memory = bytearray(POISON[:size])
        self.other = OUTBOUND if share == INBOUND else INBOUND
        self.occupied: list[Extent] = []

    def free(self, extent: Extent) -> None:
        self.memory[extent.offset : extent.end] = POISON[: extent.size]
        super().free(extent)

    def at(self, offset: int) -> Extent | None:
        """The live extent that begins there."""
        return next((e for e in self if e.offset == offset), None)

    def occupy(self, units: int) -> None:
        """The other direction of a middle stage takes some of the pool, in pieces."""
        with suppress(NoRoom):
            for _ in range(units // 4):
                self.occupied.append(self.allocate(4 * UNIT, self.other))

    def vacate(self, *, leave_every_second: bool = False) -> None:
        """It gives that back."""
        kept = self.occupied[::2] if leave_every_second else []
        gone = [extent for extent in self.occupied if extent not in kept]
        self.occupied = kept
        for extent in gone:
            self.free(extent)


@attrs.define(eq=False)
class Put:
    """What became of one payload, as somebody sees it who sees everything.

    Attributes:
        reasons: Why it may leave the sender.
        takers: How many callers took and acknowledged it.
        excused: It may be taken twice: its first receiver ended, or was silent for too long.
        told: Somebody who asked for it was told that it is gone.
    """

    number: int
    key: str
    size: int
    entry: Entry
    filed_at: float = inf
    reasons: set[str] = attrs.field(factory=set)
    takers: int = 0
    excused: bool = False
    told: bool = False

    @property
    def data(self) -> bytes:
        """Its bytes; no two puts have the same."""
        return (self.number.to_bytes(4, "big") * (self.size // 4 + 1))[: self.size]

    @property
    def encoded(self) -> bytes:
        """Its stock encoding, if it has one."""
        return b"\x93" + self.data[: 2 * UNIT] + b"stock"


@attrs.define(eq=False)
class Copy:
    """One write of an engine.

    Attributes:
        receiver: Whose memory it goes to; None for a stock receiver's.
        destination: The extent that it was started for; None when nothing is written, or nobody is there any more.
        stuck: The engine has said that it failed and cannot say whether it ended.
    """

    sender: Sender
    ticket: Ticket
    source: Extent
    receiver: Receiver | None
    destination: Extent | None = None
    copied: int = 0
    stuck: bool = False

    def advance(self, count: int) -> None:
        """Move bytes, from wherever the source is to wherever the destination is, whoever owns them now."""
        ticket, start = self.ticket, self.copied
        self.copied = end = min(ticket.size, start + count)
        if isinstance(ticket.holder, StockCaller):
            memory = self.sender.world.stock_memory[ticket.holder.route]
        elif self.receiver is not None and self.receiver.alive:
            memory = self.receiver.pool.memory
        else:
            return
        source = self.sender.pool.memory[ticket.source + start : ticket.source + end]
        memory[ticket.destination + start : ticket.destination + end] = source


@attrs.frozen(eq=False)
class Encoding:
    """The stock form of a payload that a thread is writing into the pool."""

    put: Put
    extent: Extent


@attrs.define(eq=False)
class Connection:
    """One link between two processes, for one generation. What is queued in it may still arrive after its end."""

    receiver: Receiver
    sender: Sender
    up: list[list[bytes]] = attrs.field(factory=list)
    down: list[list[bytes]] = attrs.field(factory=list)
    open: bool = True

    def deliver(self, way: str, frames: list[bytes]) -> None:
        if way == "up" and self.sender.running:
            self.sender.receive(self, frames)
        elif way == "down" and self.receiver.running:
            self.receiver.receive(frames)


class Sender:
    """A sending process: its book, its pool, and an engine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epoch = world.token()
        self.pool = Pool(SENDER_POOL, OUTBOUND)
        self.book = Outbox(self.pool, LIMITS)
        self.alive = self.running = True
        self.left = False
        self.asleep_until = inf
        self.staged: list[Put] = []
        self.puts: list[Put] = []
        self.last_puts: dict[str, Put] = {}
        self.copies: list[Copy] = []
        self.encodings: list[Encoding] = []
        self.buried: list[Receiver] = []

    # --- puts ---------------------------------------------------------------------------------------------

    def stage(self, key: str, size: int) -> None:
        try:
            extent = self.pool.allocate(size, OUTBOUND)
        except NoRoom:
            return
        put = Put(self.world.number(), key, size, self.book.stage(key, extent))
        self.world.puts[put.number] = put
        self.pool.memory[extent.offset : extent.offset + size] = put.data
        self.staged.append(put)

    def publish(self, put: Put) -> None:
        self.staged.remove(put)
        now = self.world.now
        header = put.number.to_bytes(8, "big")
        transferred = [c for c in self.copies if c.ticket.entry is self.book.shelf.find(put.key)]
        try:
            self.book.publish(put.entry, header=header, size=put.size, is_raw=bool(put.number % 2), now=now)
        except KeyBusy:
            assert transferred, f"{put.key} was refused, but nothing transfers it"
            assert put.entry.phase is Phase.FREED, "a refused put left a trace"
            return
        for other in self.puts:
            if other.key == put.key:
                other.reasons.add("replaced")
        put.filed_at = now
        self.puts.append(put)
        self.last_puts[put.key] = put

    def unstage(self, put: Put) -> None:
        self.staged.remove(put)
        self.book.unstage(put.entry)
        assert put.entry.phase is Phase.FREED

    def cleanup(self, name: str) -> None:
        for put in self.puts:
            if name in names_of(put.key):
                put.reasons.add("cleaned")
        self.book.cleanup(self.book.shelf.named(name))

    # --- the shell ----------------------------------------------------------------------------------------

    def receive(self, connection: Connection, frames: list[bytes]) -> None:
        body = wire.decode_from_receiver(frames)
        if isinstance(body, wire.Hello):
            self._on_hello(connection, body)
            return
        session = self.book.sessions.get(body.session)
        if session is None or session.generation != body.generation or body.epoch != self.epoch:
            connection.down.append(wire.encode(wire.Stale(body.session, body.generation, self.epoch)))
            return
        for message in body.messages:
            if isinstance(message, wire.Bye):
                self.book.bye(session)
            else:
                self.book.on_message(session, message, self.world.now)

    def _on_hello(self, connection: Connection, hello: wire.Hello) -> None:
        if self.left:
            return
        try:
            session = self.book.open_session(
                hello.session,
                hello.generation,
                region_size=connection.receiver.pool.size,
                handle=connection,
                now=self.world.now,
            )
        except NoRoom:
            return
        if session is None:
            connection.down.append(wire.encode(wire.Stale(hello.session, hello.generation, self.epoch)))
            return
        welcome = wire.Welcome(
            version=1,
            session=hello.session,
            generation=hello.generation,
            epoch=self.epoch,
            max_fetches=LIMITS.max_fetches,
            chosen="model",
            local="",
            offers=[],
            deployment=DEPLOYMENT,
        )
        connection.down.append(wire.encode(welcome))

    def flush(self) -> bool:
        """Carry out what the book left; whether there was anything."""
        book, did = self.book, False
        while book.starting:
            starting, book.starting, did = book.starting, [], True
            for ticket in starting:
                self._start(ticket)
        while book.talking:
            session, _ = book.talking.popitem()
            messages, session.outgoing = session.outgoing, []
            if messages:
                did = True
                body = wire.Replies(session.token, session.generation, self.epoch, messages)
                _connection_of(session).down.append(wire.encode(body))
        while book.pulls.answers:
            did = True
            caller, answer = book.pulls.answers.pop(0)
            self.world.stock_answered(self, caller, answer)
        return did

    def _start(self, ticket: Ticket) -> None:
        assert not self.left, "a write was started after the farewell"
        source = next(e for e in extents_of(ticket.entry) if e.offset <= ticket.source < e.end)
        assert ticket.source + ticket.size <= source.end
        copy = Copy(self, ticket, source, None)
        holder = ticket.holder
        if isinstance(holder, Fetch):
            copy.receiver = _connection_of(holder.session).receiver
            if copy.receiver.alive and ticket.size:
                copy.destination = copy.receiver.destination_of(self, holder.id, ticket.destination)
                assert ticket.destination + ticket.size <= copy.destination.end
        self.copies.append(copy)
        if self.world.engine_waits and ticket.size:
            self.book.watch(ticket, self.world.now)
        else:
            self.end(copy)

    def end(self, copy: Copy) -> None:
        """The engine says that a write arrived."""
        copy.advance(copy.ticket.size)
        self.copies.remove(copy)
        self.book.write_ended(copy.ticket, self.world.now)

    def end_encoding(self, encoding: Encoding) -> None:
        """A thread has written the stock form of a payload, whatever has become of that meanwhile."""
        self.encodings.remove(encoding)
        encoded, start = encoding.put.encoded, encoding.extent.offset
        self.pool.memory[start : start + len(encoded)] = encoded
        self.book.pulls.end_encoding(encoding.put.entry)

    def fail(self, copy: Copy, *, settled: bool) -> None:
        """The engine says that a write failed."""
        if settled or copy.receiver in self.buried:
            self.copies.remove(copy)
        copy.stuck = not settled
        self.book.write_ended(copy.ticket, self.world.now, TransferFailed("model", settled=settled))

    def tick(self) -> None:
        """Do what the shell's sweeper does at the present time."""
        if self.asleep_until > self.world.now:
            return
        for put in self.puts:
            if self.world.now >= put.filed_at + LIMITS.ttl:
                put.reasons.add("expired")
        self.book.expire(self.world.now)
        for fetch in self.fetches():
            if fetch.state is Want.LAPSED:
                self.excuse(fetch)
        self.asleep_until = self.book.next_deadline()
        assert self.asleep_until > self.world.now, "the sweeper would spin"

    def excuse(self, fetch: Fetch) -> None:
        """From now on this delivery does not count."""
        for put in self.puts:
            if put.entry is fetch.given:
                put.excused = True

    def fetches(self) -> Iterator[Fetch]:
        for session in self.book.sessions.values():
            yield from session.fetches.values()

    def hear_of_death(self, receiver: Receiver) -> None:
        """The end of a receiver's process is proven: what is written to it goes nowhere."""
        self.buried.append(receiver)
        for session in self.sessions_of(receiver):
            for fetch in session.fetches.values():
                self.excuse(fetch)
            self.book.fenced(session, self.world.now)
        for copy in [c for c in self.copies if c.receiver is receiver and c.stuck]:
            self.copies.remove(copy)

    def sessions_of(self, receiver: Receiver) -> list[Session]:
        return [s for s in self.book.sessions.values() if _connection_of(s).receiver is receiver]

    def notice_disconnect(self, connection: Connection) -> None:
        for session in self.book.sessions.values():
            if session.handle is connection:
                self.book.disconnected(session)

    def leave(self) -> None:
        """Close in good order; what the engine has not ended may still move."""
        self.left = True
        for put in self.staged[:]:
            self.unstage(put)
        self.book.stop()
        for put in self.puts:
            put.reasons.add("left")
        self.book.leave()

    def die(self) -> None:
        """The process ends; its engine's writes may go on until that is proven."""
        self.alive = self.running = False
        for put in self.puts:
            put.reasons.add("died")


class Receiver:
    """A receiving process: its book, its pool, its callers."""

    def __init__(self, world: World, place: int) -> None:
        self.world = world
        self.place = place
        self.pool = Pool(RECEIVER_POOL, INBOUND)
        self.book = Inbox(self.pool, prepost_limit=20 * UNIT, quarantine_limit=30 * UNIT)
        self.pool.on_free = self.book.find_room
        self.channel = self.book.open_channel(world.token())
        self.alive = self.running = True
        self.connection: Connection | None = None
        self.pulse = 0
        self.leases: list[tuple[Extent, Put]] = []

    # --- callers ------------------------------------------------------------------------------------------

    def interests(self, *states: State) -> list[Interest]:
        return [i for i in self.channel.interests.values() if i.state in states]

    def get(self, key: str, *, bound: bool = False) -> Interest | None:
        try:
            return self.book.post(self.channel, key, epoch=self.channel.epoch if bound else None)
        except NoRoom:
            assert self.book.quarantined >= 30 * UNIT
            return None

    def take(self, interest: Interest) -> None:
        self.book.take(interest)

    def acknowledge(self, interest: Interest, *, lease: bool) -> None:
        put = self.payload_of(interest)
        extent = self.book.acknowledge(interest)
        put.takers += 1
        put.reasons.add("acknowledged")
        if extent is not None and lease:
            self.leases.append((extent, put))
        elif extent is not None:
            self.book.release(extent)

    def release(self, index: int) -> None:
        extent, _ = self.leases.pop(index)
        self.book.release(extent)

    def payload_of(self, interest: Interest) -> Put:
        """The put that arrived, judged by its header."""
        return self.world.puts[int.from_bytes(interest.header, "big")]

    # --- the shell ----------------------------------------------------------------------------------------

    def hello(self) -> None:
        """Say hello on the present connection, if there is one."""
        if self.connection is None:
            return
        channel = self.channel
        hello = wire.Hello(1, 1, channel.token, channel.generation, 5.0, [], DEPLOYMENT)
        self.connection.up.append(wire.encode(hello))

    def beat(self) -> None:
        if self.channel.up:
            self.book.heartbeat(self.channel)
        else:
            self.hello()

    def connect(self) -> None:
        """A new connection to whoever has the address now."""
        self.connection = Connection(self, self.world.sender)
        self.world.connections.append(self.connection)
        self.channel.generation += 1
        self.hello()

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.open = False
            self.connection = None
        self.book.disconnected(self.channel, self.world.now)

    def receive(self, frames: list[bytes]) -> None:
        body = wire.decode_from_sender(frames)
        channel = self.channel
        assert isinstance(body, wire.Welcome | wire.Stale | wire.Replies)
        if body.session != channel.token or body.generation != channel.generation:
            return
        if isinstance(body, wire.Welcome):
            if not self.book.welcome(channel, body.epoch):
                self.world.excuse_deliveries(self)
                self.book.rename(channel, self.world.token())
                self._hello_again()
            elif body.epoch in self.world.buried:
                # These were its last words: whoever begins to watch it finds it gone.
                self.book.fenced(channel, body.epoch, self.world.now)
        elif isinstance(body, wire.Stale):
            self._hello_again()
        elif body.epoch == channel.epoch:
            for message in body.messages:
                if isinstance(message, wire.Pulse):
                    self.pulse = max(self.pulse, message.sequence)
                self.book.on_message(channel, message, self.world.now)

    def _hello_again(self) -> None:
        self.book.disconnected(self.channel, self.world.now)
        self.channel.generation += 1
        self.hello()

    def flush(self) -> bool:
        self.book.find_room()
        self._hear()
        if not self.book.talking:
            return False
        self.book.talking.clear()
        channel = self.channel
        messages, channel.outgoing = channel.outgoing, []
        if not messages or channel.epoch is None or self.connection is None:
            return False
        body = wire.Requests(channel.token, channel.generation, channel.epoch, messages)
        self.connection.up.append(wire.encode(body))
        return True

    def _hear(self) -> None:
        for interest in self.book.waking:
            if interest.failure is not None and interest.failure[0] in (wire.GONE, wire.EXPIRED):
                for put in self.world.puts.values():
                    put.told = put.told or put.key == interest.key
        self.book.waking.clear()

    def destination_of(self, sender: Sender, fetch_id: int, offset: int) -> Extent:
        """Which extent a write of a sender goes to."""
        extent = self.pool.at(offset)
        assert extent is not None, "a write was started into free memory"
        interest = self.channel.interests.get(fetch_id)
        if interest is not None and interest.extent is extent:
            return extent
        assert extent in self.channel.ghosts.get(sender.epoch, ()), "a write was started into somebody else's memory"
        return extent

    def leave(self) -> None:
        """Close in good order: give everything back, and say farewell if the sender has heard all that was said."""
        for interest in list(self.channel.interests.values()):
            self.book.give_back(interest)
        while self.leases:
            self.release(0)
        self.beat()
        self.world.pump()
        channel = self.channel
        heard = channel.up and not channel.interests and self.pulse == channel.sequence
        if self.connection is not None and channel.epoch is not None and heard:
            farewell = wire.Requests(channel.token, channel.generation, channel.epoch, [wire.Bye()])
            self.connection.up.append(wire.encode(farewell))

    def hear_of_death(self, sender: Sender) -> None:
        """The end of a sender's process is proven: nothing of it moves any more."""
        sender.copies = [c for c in sender.copies if c.receiver is not self]
        self.book.fenced(self.channel, sender.epoch, self.world.now)

    def die(self) -> None:
        self.alive = self.running = False
        if self.connection is not None:
            self.connection.open = False


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
                    frames, connection.up = connection.up, []
                    for one in frames:
                        connection.deliver("up", one)
                    moved = True
                if connection.down and receiver.running and (place, "down") not in self.held:
                    frames, connection.down = connection.down, []
                    for one in frames:
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

    def replace_sender(self, how: str, *, noticed: bool) -> None:
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
        self.give_address(self.senders[-1], noticed=noticed)

    def give_address(self, sender: Sender, *, noticed: bool) -> None:
        """Whoever dials from now on reaches that process."""
        self.sender = sender
        for receiver in self.receivers:
            broken = receiver.connection
            if not receiver.running or broken is None:
                continue
            receiver.disconnect()
            if noticed and broken.sender.running:
                broken.sender.notice_disconnect(broken)
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
        if answer != wire.TRANSFER_DONE:
            return
        assert pull is not None, "an answer to nobody"
        put = pull.put
        put.reasons.add("stock")
        if not any(c.receiver is None for c in sender.copies):  # else a late one may have spoiled it: it owns no pool
            expected = put.data if put.entry.is_raw else put.encoded
            start = pull.destination
            memory = self.stock_memory[caller.route]
            assert memory[start : start + pull.length] == expected, "a stock receiver has other bytes"


DEPLOYMENT = wire.Deployment("model", 0, 0, 0, "")


def _connection_of(session: Session) -> Connection:
    assert isinstance(session.handle, Connection)
    return session.handle
