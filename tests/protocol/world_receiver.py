"""A receiving process: its book, its pool, and its callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world_link import DEPLOYMENT, Connection, Letter
from world_pool import RECEIVER_POOL, UNIT, Pool, Put

from trio_mori._errors import NoRoom
from trio_mori._protocol import wire
from trio_mori._protocol.extents import INBOUND, Extent
from trio_mori._protocol.inbox import Inbox
from trio_mori._protocol.interests import Interest, State

if TYPE_CHECKING:
    from network import World
    from world_sender import Sender


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
        self.greeting = 0  # the last one said
        self.partner: Sender | None = None  # who answered the last one that was answered
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
        self._say(hello)

    def _say(self, body: wire.FromReceiver) -> None:
        assert self.connection is not None
        self.connection.up.append(Letter(wire.encode(body), self.greeting, self.partner))

    def beat(self) -> None:
        self.book.heartbeat(self.channel)
        if not self.channel.up:
            self.hello()

    def connect(self) -> None:
        """A new connection to whoever has the address now."""
        self.connection = Connection(self, self.world.sender)
        self.world.connections.append(self.connection)
        self._hello_anew()

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.open = False
            self.connection = None
        self.book.disconnected(self.channel, self.world.now)

    def receive(self, letter: Letter) -> None:
        body = wire.decode_from_sender(letter.frames)
        channel = self.channel
        assert isinstance(body, wire.Welcome | wire.Stale | wire.Replies)
        if not self.book.concerns(channel, body):
            return
        assert letter.greeting == self.greeting, "what was said to a former connection or session was listened to"
        if isinstance(body, wire.Welcome):
            if not self.book.welcome(channel, body.epoch):
                self.world.excuse_deliveries(self)
                self.book.rename(channel, self.world.token())
                self._hello_again()
                return
            self.partner = letter.sender
            if body.epoch in self.world.buried:
                # These were its last words: whoever begins to watch it finds it gone.
                self.book.fenced(channel, body.epoch, self.world.now)
        elif isinstance(body, wire.Stale):
            self._hello_again()
        else:
            assert letter.sender is self.partner, "another process than the one that was asked was listened to"
            for message in body.messages:
                if isinstance(message, wire.Pulse):
                    self.pulse = max(self.pulse, message.sequence)
                self.book.on_message(channel, message, self.world.now)

    def _hello_again(self) -> None:
        self.book.disconnected(self.channel, self.world.now)
        self._hello_anew()

    def _hello_anew(self) -> None:
        self.channel.generation += 1
        self.greeting = self.world.number()
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
        self._say(body)
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
            self._say(farewell)

    def hear_of_death(self, sender: Sender) -> None:
        """The end of a sender's process is proven: nothing of it moves any more."""
        sender.copies = [c for c in sender.copies if c.receiver is not self]
        self.book.fenced(self.channel, sender.epoch, self.world.now)
        if self.partner is sender:
            self.partner = None

    def die(self) -> None:
        self.alive = self.running = False
        if self.connection is not None:
            self.connection.open = False
