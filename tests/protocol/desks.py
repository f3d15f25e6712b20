"""One book with nothing around it, and short words for what happens to it."""

from __future__ import annotations

from typing import Any

from trio_mori._errors import TransferFailed
from trio_mori._protocol import wire
from trio_mori._protocol.entries import Entry, Session, Ticket
from trio_mori._protocol.extents import INBOUND, OUTBOUND, Extent, Extents
from trio_mori._protocol.inbox import Inbox
from trio_mori._protocol.interests import Channel, Interest, State
from trio_mori._protocol.outbox import Outbox, OutboxLimits

UNIT = 4096
KEY = "payload@0_1"
EPOCH = b"e" * 16
REGION = 64 * UNIT


def limits(**changes: Any) -> OutboxLimits:
    """The sender's limits: 300 s to live, 30 s to acknowledge, 20 s to write, 5 s for a stock peer to ask again."""
    given: dict[str, Any] = {
        "ttl": 300.0,
        "acknowledge_timeout": 30.0,
        "transfer_timeout": lambda size: 20.0,
        "max_fetches": 8,
        "max_sessions": 2,
        "stock_keep": 5.0,
    }
    return OutboxLimits(**{**given, **changes})


class SenderDesk:
    """A sender's book and its pool."""

    def __init__(self, **changes: Any) -> None:
        self.pool = Extents(16 * UNIT)
        self.book = Outbox(self.pool, limits(**changes))
        self.now = 0.0

    @property
    def clean(self) -> bool:
        """Whether the pool is wholly free."""
        self.pool.check()
        return self.pool.free_bytes == self.pool.size

    def put(self, key: str = KEY, size: int = 100, *, raw: bool = True) -> Entry:
        entry = self.book.stage(key, self.pool.allocate(size, OUTBOUND))
        self.book.publish(entry, header=b"h", size=size, is_raw=raw, now=self.now)
        return entry

    def occupy(self, units: int) -> Extent:
        return self.pool.allocate(units * UNIT, OUTBOUND)

    def meet(self, name: bytes = b"A", generation: int = 1) -> Session:
        """A receiver says hello."""
        session = self.book.open_session(name * 16, generation, region_size=REGION, handle=None, now=self.now)
        assert session is not None
        return session

    def fetch(self, session: Session, number: int, key: str = KEY, *, room: int = UNIT, round: int = 0) -> None:
        self.hear(session, wire.Fetch(number, key, round, number * UNIT if room else 0, room))

    def hear(self, session: Session, *messages: Any) -> None:
        for message in messages:
            self.book.on_message(session, message, self.now)

    def beat(
        self, session: Session, sequence: int, highest: int, *, open: Any = (), unacked: Any = (), returning: Any = ()
    ) -> None:
        self.hear(session, wire.Heartbeat(sequence, highest, list(open), list(unacked), list(returning)))

    def said(self, session: Session) -> list[wire.ToReceiver]:
        """What it has been told since this was last asked."""
        self.book.talking.pop(session, None)
        messages, session.outgoing = session.outgoing, []
        return messages

    def begun(self) -> Ticket:
        """The one write that is to be started."""
        assert len(self.book.starting) == 1
        ticket = self.book.starting.pop()
        self.book.watch(ticket, self.now)
        return ticket

    def written(self) -> Ticket:
        """The one write that is to be started is done at once."""
        ticket = self.begun()
        self.end(ticket)
        return ticket

    def end(self, ticket: Ticket) -> None:
        self.book.write_ended(ticket, self.now)

    def fail(self, ticket: Ticket, *, settled: bool) -> None:
        self.book.write_ended(ticket, self.now, TransferFailed("the engine says so", settled=settled))

    def wait(self, seconds: float) -> None:
        """Time passes, and what is due is done."""
        self.now += seconds
        self.book.expire(self.now)
        assert self.book.next_deadline() > self.now

    def deliver(self, session: Session, number: int, **changes: Any) -> Entry:
        """A payload is put, fetched, written and announced."""
        entry = self.put(**changes)
        self.fetch(session, number, entry.key, room=max(UNIT, entry.size))
        self.written()
        assert isinstance(self.said(session)[-1], wire.Done)
        return entry


class ReceiverDesk:
    """A receiver's book, its pool, and its channel to a sender that has welcomed it."""

    def __init__(self, *, units: int = 64, prepost: int = 32, quarantine: int = 32, welcomed: bool = True) -> None:
        self.pool = Extents(units * UNIT)
        self.book = Inbox(self.pool, prepost_limit=prepost * UNIT, quarantine_limit=quarantine * UNIT)
        self.pool.on_free = self.book.find_room
        self.channel = self.book.open_channel(b"A" * 16)
        self.now = 0.0
        if welcomed:
            self.welcome()

    @classmethod
    def full(cls, *, free: int = 2, front: bool = False) -> ReceiverDesk:
        """One with a few free units of eight, which names no destinations ahead of the data.

        Args:
            front: They are where whoever waits first gets its place.
        """
        desk = cls(units=8, prepost=0)
        if front:
            hole = desk.occupy(free)
            desk.occupy(8 - free)
            desk.pool.free(hole)
        else:
            desk.occupy(8 - free)
        return desk

    @property
    def clean(self) -> bool:
        """Whether the pool is wholly free."""
        self.pool.check()
        return self.pool.free_bytes == self.pool.size

    def welcome(self, epoch: bytes = EPOCH) -> None:
        self.channel.generation += 1
        self.book.welcome(self.channel, epoch)

    def get(self, key: str = KEY) -> Interest:
        return self.book.post(self.channel, key)

    def hear(self, *messages: wire.ToReceiver) -> None:
        for message in messages:
            self.book.on_message(self.channel, message, self.now)

    def said(self) -> list[Any]:
        """What the sender has been told since this was last asked, without the heartbeats."""
        messages, self.channel.outgoing = self.channel.outgoing, []
        return [m for m in messages if not isinstance(m, wire.Heartbeat)]

    def beat(self) -> wire.Heartbeat:
        self.book.heartbeat(self.channel)
        message = self.channel.outgoing.pop()
        assert isinstance(message, wire.Heartbeat)
        return message

    def arrived(self, size: int = 100) -> Interest:
        """A get whose payload has come."""
        interest = self.get()
        self.hear(wire.Done(interest.id, interest.round, size, b"h"))
        assert interest.state is State.ARRIVED
        return interest

    def offered(self, units: int = 3) -> Interest:
        """A get whose payload is at the sender, and waits for room here if there is none."""
        interest = self.get()
        self.hear(wire.Ready(interest.id, 1, units * UNIT))
        assert interest.extent is not None or interest.state is State.OFFERED
        self.said()
        return interest

    def occupy(self, units: int) -> Extent:
        return self.pool.allocate(units * UNIT, INBOUND)


def codes(desk: SenderDesk, session: Session) -> list[int]:
    """The reasons of failure that a receiver has been told."""
    return [m.code for m in desk.said(session) if isinstance(m, wire.Failed)]


def fetch_of(interest: Interest) -> wire.Fetch:
    """How it is asked for, with the destination that it has."""
    extent = interest.extent
    offset, capacity = (0, 0) if extent is None else (extent.offset, extent.size)
    return wire.Fetch(interest.id, interest.key, interest.round, offset, capacity)


__all__ = ["EPOCH", "KEY", "REGION", "UNIT", "Channel", "ReceiverDesk", "SenderDesk", "codes", "fetch_of", "limits"]
