"""Senders come, go, and are replaced: what that does to the interests, and what a heartbeat says of them."""

from __future__ import annotations

from math import inf

from . import wire
from .asking import Asking
from .extents import Extents
from .interests import CLOSED, ENDED, PEER_LOST, PEER_RESTARTED, Cause, Channel, Interest, State
from .placement import Placement
from .returns import Returns


class Senders:
    """A part of `Inbox`: the links to senders, and their incarnations."""

    def __init__(self, extents: Extents, asking: Asking, placement: Placement, returns: Returns) -> None:
        self._extents = extents
        self._asking = asking
        self._placement = placement
        self._returns = returns

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
        channel.epoch, channel.up, channel.lost_since, channel.end = epoch, True, inf, ""
        channel.outgoing.clear()
        channel.is_steady = False
        for interest in list(channel.interests.values()):
            if interest.state is State.POSTED:
                if interest.extent is None:
                    self._placement.prepost(interest)
                self._asking.ask(interest)
        self.heartbeat(channel)
        self._placement.find_room()
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
        self._placement.leave(interest)
        if interest.state is State.RETURNING:
            self._returns.vanish(interest)
        elif interest.epoch is not None:
            self._returns.part(interest, reason)
        elif interest.state in (State.POSTED, State.OFFERED):
            self._asking.move(interest, Cause.REPOST)
            interest.round = 0

    def disconnected(self, channel: Channel, now: float) -> None:
        """The connection broke. Nothing is said until the next welcome; nothing else changes."""
        channel.up = False
        self._asking.hush(channel)
        if channel.epoch is not None:
            channel.lost_since = min(channel.lost_since, now)

    def fenced(self, channel: Channel, epoch: bytes, now: float) -> None:
        """The sender of that epoch is proven dead: no byte of it can come any more."""
        for extent in channel.ghosts.pop(epoch, []):
            self._extents.free(extent)
        if channel.epoch == epoch:
            self._lose(channel, frozenset(), now, ENDED)

    def leave(self, channel: Channel, unsettled: frozenset[int], now: float) -> None:
        """The sender has closed, and said so."""
        self._lose(channel, unsettled, now, CLOSED)

    def _lose(self, channel: Channel, unsettled: frozenset[int], now: float, end: str) -> None:
        """The sender has left or is dead. It may still write for these fetches; for the others nothing comes."""
        assert channel.epoch is not None
        channel.end = end
        self.disconnected(channel, now)  # first: nothing is called back from it while its memory is freed
        for interest in list(channel.interests.values()):
            if interest.state not in (State.POSTED, State.OFFERED, State.RETURNING):
                continue
            if interest.id in unsettled and interest.extent is not None:
                channel.ghosts.setdefault(channel.epoch, []).append(interest.extent)
                interest.extent = None
            self._placement.free(interest)
            self._orphan(interest, PEER_LOST)
        channel.former.add(channel.epoch)
        channel.epoch = None
        self._placement.find_room()

    def heartbeat(self, channel: Channel) -> None:
        """Say that we live, and which interests are not over. While the channel is not up, only time is counted.

        What the sender has read already is not looked through again: in a process that has slept for seconds, a
        thousand interests take milliseconds to be touched.
        """
        channel.sequence += 1
        channel.repeats = False
        if not channel.up:
            return
        base, channel.said = channel.said, channel.sequence
        if channel.is_steady and channel.answered == base:
            self._asking.say(channel, wire.Still(channel.sequence, base))
            channel.is_steady = channel.repeats = True
            return
        lists: dict[State, list[int]] = {state: [] for state in State}
        for interest in channel.interests.values():
            lists[interest.state].append(interest.id)
        open_, unacknowledged = lists[State.POSTED] + lists[State.OFFERED], lists[State.ARRIVED] + lists[State.TAKEN]
        returning = lists[State.RETURNING]
        self._asking.say(
            channel, wire.Heartbeat(channel.sequence, channel.next_id - 1, open_, unacknowledged, returning)
        )
        channel.is_steady, channel.owes = True, bool(unacknowledged or returning)
