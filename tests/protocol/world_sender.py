"""A sending process: its book, its pool, and an engine that copies in steps."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

import attrs
from world_link import DEPLOYMENT, Connection, Letter, connection_of
from world_pool import LIMITS, SENDER_POOL, Pool, Put

from trio_mori._errors import KeyBusy, NoRoom, TransferFailed
from trio_mori._protocol import wire
from trio_mori._protocol.entries import Fetch, Phase, Session, StockCaller, Ticket, Want
from trio_mori._protocol.extents import OUTBOUND, Extent
from trio_mori._protocol.keys import names_of
from trio_mori._protocol.outbox import Outbox
from trio_mori._protocol.shelf import extents_of

if TYPE_CHECKING:
    from network import World
    from world_receiver import Receiver


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
        self.greetings: dict[bytes, int] = {}  # the last one of each session

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

    def receive(self, connection: Connection, letter: Letter) -> None:
        body = wire.decode_from_receiver(letter.frames)
        if isinstance(body, wire.Hello):
            self._on_hello(connection, body, letter.greeting)
            return
        assert isinstance(body, wire.Requests)
        session = self.book.speaker(body, self.epoch)
        if session is None:
            self._answer(connection, wire.Stale(body.session, body.generation, self.epoch), letter.greeting)
            return
        assert letter.greeting == self.greetings[session.token], "a former connection or session was listened to"
        assert letter.sender is self, "what was said to another process was listened to"
        for message in body.messages:
            if isinstance(message, wire.Bye):
                self.book.bye(session)
            else:
                self.book.on_message(session, message, self.world.now)

    def _answer(self, connection: Connection, body: wire.FromSender, greeting: int) -> None:
        connection.down.append(Letter(wire.encode(body), greeting, self))

    def _on_hello(self, connection: Connection, hello: wire.Hello, greeting: int) -> None:
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
            self._answer(connection, wire.Stale(hello.session, hello.generation, self.epoch), greeting)
            return
        self.greetings[session.token] = greeting
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
        self._answer(connection, welcome, greeting)

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
                self._answer(connection_of(session), body, self.greetings[session.token])
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
            copy.receiver = connection_of(holder.session).receiver
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
        wanted = (Phase.PUBLISHED, Phase.CLAIMED)
        read = [put for put in self.puts if put.entry.pins and put.entry.phase in wanted]
        self.book.expire(self.world.now)
        for put in self.puts:
            due = self.world.now >= put.filed_at + LIMITS.ttl and put.entry.phase is not Phase.FREED
            assert not due or put.entry.pins, "the time to live is over, and the payload is there"
            assert put not in read or put.entry.phase is not Phase.DYING, "the time to live ended while it was read"
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
        return [s for s in self.book.sessions.values() if connection_of(s).receiver is receiver]

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
