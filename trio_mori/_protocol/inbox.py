"""The receiver's book: what was asked of whom, where it may be written, and what arrived.

Pure and synchronous. The shell calls a method for each thing that happened and then carries out what the book left:

* `talking`: channels with messages in `Channel.outgoing`;
* `waking`: interests that arrived or failed, for their callers;
* `hungry`: offered payloads that wait at their senders for room here, for `find_room` when there is some.

**What keeps memory safe.** A destination that was named to a sender is given back to the allocator only when that
sender has said that no write to it is or will be under way (`Done`, a settled `Failed`, `Closed`, a new round, or
`Leaving`), or when the sender's process is proven dead. A get that gives up changes nothing about that: its
destination is in *quarantine* until then. So is one that was chosen ahead of the data and called back, because a
payload that is there needs the room: its fetch goes on under another id, without it. A disconnect, silence and a
restarted sender prove nothing; what a sender of an earlier epoch may still write to is kept under that epoch, until
that process is fenced.

**What keeps payloads from being lost.** Only `acknowledge` tells the sender that it may forget a payload. Whatever
else becomes of an interest, it is listed in each heartbeat until the sender has confirmed that it has it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import attrs

from .._errors import InternalError, NoRoom, RemoteProtocolError, TooBig
from . import doubts, wire
from .doubts import Doubt
from .entries import step
from .extents import INBOUND, Extent, Extents, format_size
from .interests import (
    HELD_AS,
    INTEREST_TABLE,
    PEER_LOST,
    PEER_RESTARTED,
    TOO_BIG,
    Cause,
    Channel,
    Interest,
    State,
)
from .keys import edge_of
from .line import Line

# The destination of the first fetches on an edge whose payloads' sizes are not known yet: a codec chunk or the hidden
# states of a few tokens fit; a larger payload costs one more round trip, once.
FIRST_CAPACITY = 64 * 1024

# How many arrivals the "largest recent size" of an edge looks back, at least; at most twice as many.
RECENT = 64


@attrs.define
class InboxCounters:
    """What happened since the book was opened."""

    posted: int = 0
    arrived: int = 0
    acknowledged: int = 0
    given_back: int = 0
    failed: int = 0
    preposted_hits: int = 0


@attrs.define
class _Recent:
    """The largest of the last payloads of an edge, by two windows."""

    previous: int = 0
    current: int = 0
    count: int = 0

    def add(self, size: int) -> None:
        self.current = max(self.current, size)
        self.count += 1
        if self.count == RECENT:
            self.previous, self.current, self.count = self.current, 0, 0

    @property
    def largest(self) -> int:
        return max(self.previous, self.current)


class Inbox:
    """See the module's text.

    Args:
        extents: The pool's allocator.
        prepost_limit: Bytes that destinations ahead of the data may hold together.
        quarantine_limit: Bytes in quarantine at which new interests are refused.
    """

    def __init__(self, extents: Extents, *, prepost_limit: int, quarantine_limit: int) -> None:
        self.counters = InboxCounters()
        self.channels: dict[Channel, None] = {}
        self.talking: dict[Channel, None] = {}
        self.waking: list[Interest] = []
        self._extents = extents
        self._prepost_limit = prepost_limit
        self._quarantine_limit = quarantine_limit
        self._preposted = 0
        self._ahead: dict[Interest, None] = {}  # those that hold it, in the order in which they got it
        self._recent: dict[str, _Recent] = {}
        self.hungry = Line[Interest](extents, INBOUND)  # offered, and no room yet
        self._leased: dict[Extent, None] = {}
        self._exposed: dict[Extent, None] = {}
        self._doubted: dict[Extent, str] = {}
        self._returning: dict[Interest, None] = {}

    # --- what callers do ----------------------------------------------------------------------------------

    def open_channel(self, token: bytes) -> Channel:
        """Begin to keep a book of one sender."""
        channel = Channel(token)
        self.channels[channel] = None
        return channel

    def post(self, channel: Channel, key: str, *, epoch: bytes | None = None) -> Interest:
        """Ask for a full key; it is said as soon as the channel is up.

        Args:
            epoch: Ask this incarnation of the sender only, and fail when it is gone.

        Raises:
            NoRoom: too much of the pool is in quarantine, or too much is asked for already.
        """
        self.check_quarantine(key)
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
                self._part(interest, PEER_LOST if channel.epoch is None else PEER_RESTARTED)
        if channel.up and interest.failure is None:
            self._prepost(interest)
            self._ask(interest)
        return interest

    def check_quarantine(self, key: str) -> None:
        """Whether more may be asked for.

        Raises:
            NoRoom: too much of the pool is in quarantine.
        """
        quarantined = self.held_back
        if quarantined and quarantined >= self._quarantine_limit:
            raise NoRoom(
                f"get of {key!r} refused: {format_size(quarantined)} of the pool are held back (limit "
                f"{format_size(self._quarantine_limit)}, quarantine_fraction), because silent peers may still "
                "write there; they come back when those processes answer or exit",
                size=0,
                free=self._extents.free_bytes,
                quarantined=quarantined,
            )

    def take(self, interest: Interest) -> None:
        """A caller begins to read what arrived; end with `acknowledge` or `give_back`."""
        self._move(interest, Cause.TAKE)

    def acknowledge(self, interest: Interest) -> Extent | None:
        """The caller has it: the sender may forget it. Its memory is the caller's until `release`."""
        self._move(interest, Cause.ACKNOWLEDGE)
        del interest.channel.interests[interest.id]
        self.counters.acknowledged += 1
        if interest.channel.epoch is not None:
            self._say(interest.channel, wire.Ack([interest.id]))
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
        self._doubted[extent] = sender

    def settle(self, extent: Extent, *, lease: bool) -> None:
        """The stock sender has answered: the memory is free, or what a caller was given."""
        self._exposed.pop(extent, None)
        self._doubted.pop(extent, None)
        if lease:
            self._leased[extent] = None
        else:
            self._extents.free(extent)

    def give_back(self, interest: Interest) -> None:
        """The caller does not want it, whatever became of it; the payload stays with the sender."""
        self._return(interest)
        self.find_room()

    def _return(self, interest: Interest) -> None:
        if interest.state in (State.RETURNING, State.OVER):
            return
        channel = interest.channel
        if interest.state in (State.ARRIVED, State.TAKEN):
            self.counters.given_back += 1
            self._free_extent(interest)  # the write ended
        if channel.epoch is None:
            self._free_extent(interest)
            self._vanish(interest)
            return
        self._move(interest, Cause.GIVE_BACK)
        self._leave_queues(interest)
        self._say(channel, wire.Cancel([interest.id]))

    def refuse(self, interest: Interest, code: int) -> None:
        """Give back what arrived and nobody has begun to take; whoever comes for it is told why."""
        interest.failure = (code, "")
        self.give_back(interest)

    # --- the link -----------------------------------------------------------------------------------------

    def welcome(self, channel: Channel, epoch: bytes) -> bool:
        """The sender answered our hello of the present generation: tell it everything that is open.

        Returns:
            False when it was given up before and has come back. It would write to, and speak of, destinations of that
            time. Nothing was changed: say hello again under a new name (`rename`).
        """
        if epoch in channel.former:
            return False
        if channel.epoch is not None and channel.epoch != epoch:
            self._succeed(channel)
        channel.epoch, channel.up, channel.lost_since = epoch, True, inf
        channel.outgoing.clear()
        channel.is_steady = False
        for interest in list(channel.interests.values()):
            if interest.state is State.POSTED:
                if interest.extent is None:
                    self._prepost(interest)
                self._ask(interest)
        self.heartbeat(channel)
        self.find_room()
        return True

    def rename(self, channel: Channel, token: bytes) -> None:
        """From the next hello on, be a receiver that no sender knows.

        Not even the last one: what it says to the new name is not about what the old one asked of it.
        """
        if channel.epoch is not None:
            self._succeed(channel)
        channel.token = token
        channel.former.clear()

    def _succeed(self, channel: Channel) -> None:
        """Another incarnation of the sender answers; the one before may still write."""
        assert channel.epoch is not None
        ghosts = channel.ghosts.setdefault(channel.epoch, [])
        for interest in list(channel.interests.values()):
            if interest.state in (State.POSTED, State.OFFERED, State.RETURNING):
                if interest.extent is not None:
                    ghosts.append(interest.extent)
                    interest.extent = None
                self._orphan(interest, PEER_RESTARTED)
        if not ghosts:
            del channel.ghosts[channel.epoch]
        channel.former.add(channel.epoch)
        channel.epoch = None

    def _orphan(self, interest: Interest, reason: int) -> None:
        """Its sender is gone, and it holds no memory that was named to it any more."""
        self._leave_queues(interest)
        if interest.state is State.RETURNING:
            self._vanish(interest)
        elif interest.epoch is not None:
            self._part(interest, reason)
        elif interest.state in (State.POSTED, State.OFFERED):
            self._move(interest, Cause.REPOST)
            interest.round = 0

    def _part(self, interest: Interest, reason: int) -> None:
        """The one incarnation of the sender that would have done is gone."""
        restarted = reason == PEER_RESTARTED
        self._fail(interest, reason, "its process was replaced by another" if restarted else "its process has ended")
        self._vanish(interest)

    def disconnected(self, channel: Channel, now: float) -> None:
        """The connection broke. Nothing is said until the next welcome; nothing else changes."""
        channel.up = False
        channel.outgoing.clear()
        self.talking.pop(channel, None)
        if channel.epoch is not None:
            channel.lost_since = min(channel.lost_since, now)

    def fenced(self, channel: Channel, epoch: bytes, now: float) -> None:
        """The sender of that epoch is proven dead: no byte of it can come any more."""
        for extent in channel.ghosts.pop(epoch, []):
            self._extents.free(extent)
        if channel.epoch == epoch:
            self._lose(channel, frozenset(), now)

    def _lose(self, channel: Channel, unsettled: frozenset[int], now: float) -> None:
        assert channel.epoch is not None
        self.disconnected(channel, now)  # first: nothing is called back from it while its memory is freed
        for interest in list(channel.interests.values()):
            if interest.state not in (State.POSTED, State.OFFERED, State.RETURNING):
                continue
            if interest.id in unsettled and interest.extent is not None:
                channel.ghosts.setdefault(channel.epoch, []).append(interest.extent)
                interest.extent = None
            self._free_extent(interest)
            self._orphan(interest, PEER_LOST)
        channel.former.add(channel.epoch)
        channel.epoch = None
        self.find_room()

    def fail_all(self, channel: Channel, code: int, detail: str) -> None:
        """Nothing can come by this channel for now: tell every caller that waits."""
        for interest in list(channel.interests.values()):
            if interest.state not in (State.POSTED, State.OFFERED):
                continue
            self._fail(interest, code, detail)
            if channel.epoch is None:
                self._free_extent(interest)
                self._vanish(interest)
            else:
                self._move(interest, Cause.GIVE_BACK)
                self._leave_queues(interest)
                self._say(channel, wire.Cancel([interest.id]))
        self.find_room()

    def heartbeat(self, channel: Channel) -> None:
        """Say that we live, and which interests are not over. While the channel is not up, only time is counted.

        What the sender has read already is not looked through again: in a process that has slept for seconds, a
        thousand interests take milliseconds to be touched.
        """
        channel.sequence += 1
        if not channel.up:
            return
        base, channel.said = channel.said, channel.sequence
        if channel.is_steady and channel.answered == base:
            self._say(channel, wire.Still(channel.sequence, base))
            channel.is_steady = True
            return
        lists: dict[State, list[int]] = {state: [] for state in State}
        for interest in channel.interests.values():
            lists[interest.state].append(interest.id)
        self._say(
            channel,
            wire.Heartbeat(
                channel.sequence,
                channel.next_id - 1,
                lists[State.POSTED] + lists[State.OFFERED],
                lists[State.ARRIVED] + lists[State.TAKEN],
                lists[State.RETURNING],
            ),
        )
        channel.is_steady = True

    # --- messages -----------------------------------------------------------------------------------------

    def on_message(self, channel: Channel, message: wire.ToReceiver, now: float) -> None:
        """A message of the sender arrived, with the right session, generation and epoch.

        Raises:
            RemoteProtocolError: it says what cannot be; nothing was changed.
        """
        if not channel.up:
            return  # it stood behind a farewell
        if isinstance(message, wire.Done):
            self._on_done(channel, message)
        elif isinstance(message, wire.Ready):
            self._on_ready(channel, message)
        elif isinstance(message, wire.Failed):
            self._on_failed(channel, message)
        elif isinstance(message, wire.Closed):
            for fetch_id in message.ids:
                self._on_closed(channel, fetch_id)
        elif isinstance(message, wire.Pulse):
            channel.answered = max(channel.answered, message.sequence)
            for fetch_id in message.unknown:
                interest = channel.interests.get(fetch_id)
                if interest is not None and interest.state in (State.POSTED, State.OFFERED):
                    self._ask(interest)
        elif isinstance(message, wire.Retracted):
            self._on_retracted(channel, message)
        elif isinstance(message, wire.Leaving):
            self._lose(channel, frozenset(message.unsettled), now)

    def _on_done(self, channel: Channel, message: wire.Done) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state in (State.ARRIVED, State.TAKEN) or message.round < interest.round:
            return
        capacity = 0 if interest.extent is None else interest.extent.size
        if interest.state is not State.RETURNING and message.size > capacity:
            raise RemoteProtocolError(
                f"the sender says it wrote {message.size} bytes of {interest.key!r} into a destination of {capacity}"
            )
        self._move(interest, Cause.ARRIVE)
        self._leave_queues(interest)
        self.find_room()
        if interest.state is State.RETURNING:
            self._free_extent(interest)  # the cancel is on its way; `Closed` will confirm it
            return
        interest.size, interest.header, interest.epoch = message.size, message.header, channel.epoch
        self.counters.arrived += 1
        self.counters.preposted_hits += interest.round == 0 and capacity > 0
        edge = edge_of(interest.key)
        recent = self._recent.get(edge)
        if recent is None:
            recent = self._recent[edge] = _Recent()
        recent.add(message.size)
        self.waking.append(interest)

    def _on_ready(self, channel: Channel, message: wire.Ready) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state not in (State.POSTED, State.OFFERED):
            return
        if message.round <= interest.round:
            if message.round == interest.round and interest.extent is not None:
                self._ask(interest)  # what we said was lost, or it crossed
            return
        interest.round, interest.needed = message.round, message.size
        if interest.extent is not None and interest.extent.size >= message.size:
            self._move(interest, Cause.PLACE)
            self._ask(interest)
            return
        self._leave_queues(interest)
        self._free_extent(interest)  # void by the new round
        self._move(interest, Cause.OFFER)
        try:
            self.hungry.join(interest, message.size)
        except TooBig as error:
            self._fail(interest, TOO_BIG, str(error))
            self._return(interest)
        self.find_room()

    def _on_retracted(self, channel: Channel, message: wire.Retracted) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state is not State.POSTED or message.round < interest.round:
            return
        # Nothing counts this destination against those ahead of the data, and it may lie in the way of a payload.
        if interest.extent is not None and len(channel.interests) <= wire.MAX_OPEN:  # else at the next heartbeat
            self._ask_anew(interest)

    def _on_failed(self, channel: Channel, message: wire.Failed) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state in (State.ARRIVED, State.TAKEN):
            return
        cause = Cause.FAIL if message.settled else Cause.DOUBT
        if interest.state is not State.RETURNING:
            self._fail(interest, message.code, message.detail)
        elif interest.is_told and message.settled:
            cause = Cause.CONFIRM
        if not message.settled:
            interest.returned = -2
        self._move(interest, cause)
        self._leave_queues(interest)
        if message.settled:
            self._free_extent(interest)
        if interest.state is State.OVER:
            self._forget(interest)
            self._say(channel, wire.Ack([interest.id]))
        self.find_room()

    def _on_closed(self, channel: Channel, fetch_id: int) -> None:
        interest = channel.interests.get(fetch_id)
        if interest is None or interest.state is not State.RETURNING:
            return
        self._move(interest, Cause.CONFIRM)
        self._free_extent(interest)
        self._forget(interest)

    # --- room ---------------------------------------------------------------------------------------------

    def find_room(self) -> None:
        """Place offered payloads while there is room.

        To be called when memory was freed, and when one of them may have left that was in the way of others.
        """
        if not self.hungry.waiting:
            return
        while served := self.hungry.serve():
            interest, extent = served
            interest.extent = extent
            self._move(interest, Cause.PLACE)
            self._ask(interest)
        if first := self.hungry.first:
            self._call_back(first.needed)

    def _prepost(self, interest: Interest) -> None:
        """Choose a destination ahead of the data, if that leaves enough room for data that is there."""
        if self.hungry.waiting:
            return
        recent = self._recent.get(edge_of(interest.key))
        size = FIRST_CAPACITY if recent is None else recent.largest
        if self._preposted + size > self._prepost_limit:
            return
        try:
            interest.extent = self._extents.allocate(size, INBOUND)
        except (NoRoom, TooBig):
            return
        interest.preposted = interest.extent.size
        self._preposted += interest.preposted
        self._ahead[interest] = None

    def _call_back(self, size: int) -> None:
        """Get destinations ahead of the data back, the newest first, for a payload of this size that is there.

        What comes back anyway counts. If the room that they leave does not do, the next look for room calls for more.
        """
        missing = size - sum(extent.size for channel, extent in self._coming_back() if channel.up)
        chosen: list[Interest] = []
        for interest in reversed(self._ahead):
            if missing <= 0:
                break
            channel = interest.channel
            # Else nobody would answer; or there would at last be more ids than a heartbeat can list.
            if channel.up and len(channel.interests) <= wire.MAX_OPEN:
                chosen.append(interest)
                missing -= interest.preposted
        for interest in reversed(chosen):
            self._ask_anew(interest)

    def _ask_anew(self, interest: Interest) -> None:
        """Cancel a fetch, and ask for the same without a destination, under another id.

        The sender may be writing to the destination. So it stays with the old id, in quarantine, until the sender has
        confirmed; and what has arrived there meanwhile goes back, and comes by the new id.
        """
        channel = interest.channel
        old = Interest(channel, interest.key, interest.id, round=interest.round, extent=interest.extent)
        channel.interests[old.id] = old
        self._move(old, Cause.GIVE_BACK)
        self._leave_queues(interest)
        interest.id, interest.round, interest.extent = channel.next_id, 0, None
        channel.next_id += 1
        channel.interests[interest.id] = interest
        self._say(channel, wire.Cancel([old.id]))
        self._ask(interest)

    def _leave_queues(self, interest: Interest) -> None:
        if self.hungry.waiting:
            self.hungry.leave(interest)
        self._ahead.pop(interest, None)
        self._preposted -= interest.preposted
        interest.preposted = 0

    def _free_extent(self, interest: Interest) -> None:
        if interest.extent is not None:
            extent, interest.extent = interest.extent, None
            self._extents.free(extent)

    # --- small steps --------------------------------------------------------------------------------------

    def _move(self, interest: Interest, cause: Cause) -> None:
        interest.state = step(INTEREST_TABLE, interest.state, cause)
        interest.channel.is_steady = False
        if interest.state is State.RETURNING:
            if cause is Cause.GIVE_BACK:
                interest.returned = interest.channel.sequence
            self._returning[interest] = None
        else:
            self._returning.pop(interest, None)

    def _ask(self, interest: Interest) -> None:
        extent = interest.extent
        offset, capacity = (0, 0) if extent is None else (extent.offset, extent.size)
        self._say(interest.channel, wire.Fetch(interest.id, interest.key, interest.round, offset, capacity))

    def _fail(self, interest: Interest, code: int, detail: str) -> None:
        self.counters.failed += 1
        interest.failure = (code, detail)
        self.waking.append(interest)

    def _vanish(self, interest: Interest) -> None:
        self._move(interest, Cause.VANISH)
        self._forget(interest)

    def _forget(self, interest: Interest) -> None:
        self._leave_queues(interest)
        interest.channel.interests.pop(interest.id, None)

    def _say(self, channel: Channel, message: wire.ToSender) -> None:
        if channel.up:
            channel.outgoing.append(message)
            channel.is_steady = False
            self.talking[channel] = None

    # --- looking ------------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """Bytes of the pool by what they are held for."""
        total = {
            "posted": sum(e.size for e in self._exposed),
            "arrived": 0,
            "leased": sum(e.size for e in self._leased),
            "quarantined": sum(e.size for e in self._doubted),
        }
        for channel in self.channels:
            for interest in channel.interests.values():
                if interest.extent is not None:
                    total[HELD_AS[interest.state]] += interest.extent.size
            total["quarantined"] += sum(e.size for extents in channel.ghosts.values() for e in extents)
        return total

    @property
    def held_back(self) -> int:
        """Of the bytes in quarantine those that do not seem to come back soon.

        A sender that lives answers a cancel within a round trip, or when its link is back, and what was cancelled a
        moment ago is no reason to refuse anything. Two heartbeats later it is.
        """
        return self.quarantined - sum(e.size for _, e in self._coming_back())

    def _coming_back(self) -> Iterator[tuple[Channel, Extent]]:
        """What else is in quarantine, and whose it is."""
        for interest in self._returning:
            if interest.extent is not None and interest.channel.sequence <= interest.returned + 1:
                yield interest.channel, interest.extent

    @property
    def quarantined(self) -> int:
        """Bytes that a peer may still write to although nobody waits for them."""
        returning = sum(i.extent.size for i in self._returning if i.extent is not None)
        ghosts = sum(e.size for channel in self.channels for extents in channel.ghosts.values() for e in extents)
        return returning + ghosts + sum(e.size for e in self._doubted)

    def doubts(self) -> list[Doubt]:
        """What `quarantined` counts."""
        found = [Doubt(extent, extent.size, sender, doubts.UNANSWERED) for extent, sender in self._doubted.items()]
        for interest in self._returning:
            extent, channel = interest.extent, interest.channel
            if extent is not None:
                found.append(Doubt(extent, extent.size, channel, doubts.UNCONFIRMED if channel.up else doubts.AWAY))
        for channel in self.channels:
            for extents in channel.ghosts.values():
                found += [Doubt(extent, extent.size, channel, doubts.FORMER) for extent in extents]
        return found

    @property
    def touched(self) -> int:
        """How many pieces of memory are written to by a peer, or read by a caller, that may still go on with it."""
        reading = sum(i.state is State.TAKEN for channel in self.channels for i in channel.interests.values())
        ghosts = sum(len(extents) for channel in self.channels for extents in channel.ghosts.values())
        returning = sum(i.extent is not None for i in self._returning)
        return reading + ghosts + returning + len(self._exposed) + len(self._doubted)

    def live_extents(self) -> list[Extent]:
        """Every extent that the book holds, for checks."""
        extents = [*self._leased, *self._exposed, *self._doubted]
        for channel in self.channels:
            extents += [i.extent for i in channel.interests.values() if i.extent is not None]
            extents += [e for ghosts in channel.ghosts.values() for e in ghosts]
        return extents

    def close_channel(self, channel: Channel) -> None:
        """Forget a sender to which nothing is owed.

        Raises:
            InternalError: destinations named to it are not free.
        """
        if channel.ghosts or any(i.extent is not None for i in channel.interests.values()):
            raise InternalError("a channel was closed while its sender may still write")
        del self.channels[channel]
        self.talking.pop(channel, None)
