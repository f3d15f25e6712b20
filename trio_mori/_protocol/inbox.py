"""The receiver's book: what was asked of whom, where it may be written, and what arrived.

Pure and synchronous. The shell calls a method for each thing that happened and then carries out what the book left:

* `talking`: channels with messages in `Channel.outgoing`;
* `waking`: interests that arrived or failed, for their callers;
* `hungry`: offered payloads that wait at their senders for room here, for `find_room` when there is some.

Only `acknowledge` tells a sender that it may forget a payload.

The parts of the book, each of which knows those before it and none of those behind it:

* `Quarantine`: memory that senders may still write to, and why it is safe;
* `Asking`: how interests move, and what is said of them;
* `Placement`: destinations, ahead of the data and for data that is there;
* `Returns`: interests that end without being taken, and why their payloads are not lost;
* `Senders`: links, restarts, ends, heartbeats;
* `Answers`: what senders say.
"""

from __future__ import annotations

from typing import Final

from .._errors import InternalError, NoRoom
from . import wire
from .answers import Answers
from .asking import Asking, InboxCounters
from .extents import Extent, Extents
from .interests import HELD_AS, PEER_LOST, PEER_RESTARTED, Cause, Channel, Interest, State
from .placement import Placement
from .quarantine import Quarantine
from .returns import Returns
from .senders import Senders


class Inbox:
    """See the module's text.

    Args:
        extents: The pool's allocator.
        prepost_limit: Bytes that destinations ahead of the data may hold together.
        quarantine_limit: Bytes in quarantine at which new interests are refused.
    """

    def __init__(self, extents: Extents, *, prepost_limit: int, quarantine_limit: int) -> None:
        self.counters = counters = InboxCounters()
        self.channels: dict[Channel, None] = {}
        self._extents = extents
        self._leased: dict[Extent, None] = {}
        self._exposed: dict[Extent, None] = {}
        self.talking: dict[Channel, None] = {}
        self.waking: list[Interest] = []
        self._quarantine = quarantine = Quarantine(extents, self.channels, quarantine_limit)
        self._asking = asking = Asking(counters, quarantine.returning, say=self._say, hush=self._hush, wake=self._wake)
        self._placement = placement = Placement(extents, asking, quarantine, limit=prepost_limit)
        self._returns = returns = Returns(asking, placement, counters)
        senders = Senders(extents, asking, placement, returns)
        answers = Answers(asking, placement, returns, senders, counters)
        # The same one as the part has: nobody puts another in its place.
        self.hungry: Final = placement.hungry
        # What a part does alone. After a pause a call takes 1 to 2 us, so that none is there to pass another on.
        self.check_quarantine: Final = quarantine.check
        self.doubts: Final = quarantine.doubts
        self.find_room: Final = placement.find_room
        self.give_back: Final = returns.give_back
        self.refuse: Final = returns.refuse
        self.fail_all: Final = returns.fail_all
        self.welcome: Final = senders.welcome
        self.rename: Final = senders.rename
        self.disconnected: Final = senders.disconnected
        self.fenced: Final = senders.fenced
        self.heartbeat: Final = senders.heartbeat
        self.concerns: Final = answers.concerns
        self.on_message: Final = answers.on_message

    def _say(self, channel: Channel, message: wire.ToSender) -> None:
        if channel.up:
            channel.outgoing.append(message)
            channel.is_steady = False
            self.talking[channel] = None

    def _hush(self, channel: Channel) -> None:
        channel.outgoing.clear()
        self.talking.pop(channel, None)

    def _wake(self, interest: Interest) -> None:
        self.waking.append(interest)

    # --- what callers do ----------------------------------------------------------------------------------

    def post(self, channel: Channel, key: str, *, epoch: bytes | None = None) -> Interest:
        """Ask for a full key; it is said as soon as the channel is up.

        Args:
            epoch: Ask this incarnation of the sender only, and fail when it is gone.

        Raises:
            NoRoom: too much of the pool is in quarantine, or too much is asked for already.
        """
        self._quarantine.check(key)
        if len(channel.interests) >= wire.MAX_OPEN:
            raise NoRoom(
                f"get of {key!r} refused: {wire.MAX_OPEN} gets of this sender are open, which is the most; "
                "wait for some of them, or cancel them",
                size=0,
                free=self._extents.free_bytes,
            )
        interest = Interest(channel, key, channel.next_id)
        channel.next_id += 1
        channel.interests[interest.id] = interest
        self.counters.posted += 1
        if epoch is not None:
            interest.epoch = epoch
            if channel.epoch != epoch:
                self._returns.part(interest, PEER_LOST if channel.epoch is None else PEER_RESTARTED)
        if channel.up and interest.failure is None:
            self._placement.prepost(interest)
            self._asking.ask(interest)
        return interest

    def take(self, interest: Interest) -> None:
        """A caller begins to read what arrived; end with `acknowledge` or `give_back`."""
        self._asking.move(interest, Cause.TAKE)

    def acknowledge(self, interest: Interest) -> Extent | None:
        """The caller has it: the sender may forget it. Its memory is the caller's until `release`."""
        self._asking.move(interest, Cause.ACKNOWLEDGE)
        del interest.channel.interests[interest.id]
        self.counters.acknowledged += 1
        if interest.channel.epoch is not None:
            self._asking.say(interest.channel, wire.Ack([interest.id]))
        extent, interest.extent = interest.extent, None
        if extent is not None:
            self._leased[extent] = None
        return extent

    def release(self, extent: Extent) -> None:
        """A caller is done with memory that it was given by `acknowledge`."""
        del self._leased[extent]
        self._extents.free(extent)

    def hand_over(self, extent: Extent) -> None:
        """Memory that a caller was given is somebody else's now, who frees it."""
        del self._leased[extent]

    def expose(self, extent: Extent) -> None:
        """Keep account of a destination that a stock sender is told, which has no session and no interests."""
        self._exposed[extent] = None

    def doubt(self, extent: Extent, sender: str) -> None:
        """The stock sender of this name was given up, and may still write there."""
        del self._exposed[extent]
        self._quarantine.doubted[extent] = sender

    def settle(self, extent: Extent, *, lease: bool) -> None:
        """The stock sender has answered: the memory is free, or what a caller was given."""
        self._exposed.pop(extent, None)
        self._quarantine.doubted.pop(extent, None)
        if lease:
            self._leased[extent] = None
        else:
            self._extents.free(extent)

    # --- senders ------------------------------------------------------------------------------------------

    def open_channel(self, token: bytes) -> Channel:
        """Begin to keep a book of one sender."""
        channel = Channel(token)
        self.channels[channel] = None
        return channel

    def close_channel(self, channel: Channel) -> None:
        """Forget a sender to which nothing is owed.

        Raises:
            InternalError: destinations named to it are not free.
        """
        if channel.ghosts or any(i.extent is not None for i in channel.interests.values()):
            raise InternalError("a channel was closed while its sender may still write")
        del self.channels[channel]
        self.talking.pop(channel, None)

    # --- looking ------------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """Bytes of the pool by what they are held for."""
        total = {
            "posted": sum(e.size for e in self._exposed),
            "arrived": 0,
            "leased": sum(e.size for e in self._leased),
            "quarantined": sum(e.size for e in self._quarantine.doubted),
        }
        for channel in self.channels:
            for interest in channel.interests.values():
                if interest.extent is not None:
                    total[HELD_AS[interest.state]] += interest.extent.size
        total["quarantined"] += sum(extent.size for _, extent in self._quarantine.ghosts())
        return total

    @property
    def held_back(self) -> int:
        """Of the bytes in quarantine those that do not seem to come back soon."""
        return self._quarantine.held_back

    @property
    def quarantined(self) -> int:
        """Bytes that a peer may still write to although nobody waits for them."""
        return self._quarantine.quarantined

    @property
    def touched(self) -> int:
        """How many pieces of memory are written to by a peer, or read by a caller, that may still go on with it."""
        reading = sum(i.state is State.TAKEN for channel in self.channels for i in channel.interests.values())
        ghosts = sum(1 for _ in self._quarantine.ghosts())
        returning = sum(i.extent is not None for i in self._quarantine.returning)
        return reading + ghosts + returning + len(self._exposed) + len(self._quarantine.doubted)

    def live_extents(self) -> list[Extent]:
        """Every extent that the book holds, for checks."""
        extents = [*self._leased, *self._exposed, *self._quarantine.doubted]
        for channel in self.channels:
            extents += [i.extent for i in channel.interests.values() if i.extent is not None]
        extents += [extent for _, extent in self._quarantine.ghosts()]
        return extents
