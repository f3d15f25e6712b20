"""How interests end that nobody takes: given back, failed, or gone with their sender.

**What keeps payloads from being lost.** Whatever becomes of an interest that is not acknowledged, it is listed in each
heartbeat until the sender has confirmed that it has the payload back.
"""

from __future__ import annotations

from . import wire
from .asking import Asking, InboxCounters
from .interests import ENDED, PEER_RESTARTED, Cause, Channel, Interest, State
from .placement import Placement


class Returns:
    """A part of `Inbox`: what is given up."""

    def __init__(self, asking: Asking, placement: Placement, counters: InboxCounters) -> None:
        self._asking = asking
        self._placement = placement
        self._counters = counters

    def give_back(self, interest: Interest) -> None:
        """The caller does not want it, whatever became of it; the payload stays with the sender."""
        self.cancel(interest)
        self._placement.find_room()

    def cancel(self, interest: Interest) -> None:
        """As `give_back`, without a look at what the room would do for others."""
        if interest.state in (State.RETURNING, State.OVER):
            return
        channel = interest.channel
        if interest.state in (State.ARRIVED, State.TAKEN):
            self._counters.given_back += 1
            self._placement.free(interest)  # the write ended
        if channel.epoch is None:
            self._placement.free(interest)
            self.vanish(interest)
            return
        self._asking.move(interest, Cause.GIVE_BACK)
        self._placement.leave(interest)
        self._asking.say(channel, wire.Cancel([interest.id]))

    def refuse(self, interest: Interest, code: int) -> None:
        """Give back what arrived and nobody has begun to take; whoever comes for it is told why."""
        interest.failure = (code, "")
        self.give_back(interest)

    def fail_all(self, channel: Channel, code: int, detail: str) -> None:
        """Nothing can come by this channel for now: tell every caller that waits."""
        for interest in list(channel.interests.values()):
            if interest.state not in (State.POSTED, State.OFFERED):
                continue
            self._asking.fail(interest, code, detail)
            if channel.epoch is None:
                self._placement.free(interest)
                self.vanish(interest)
            else:
                self._asking.move(interest, Cause.GIVE_BACK)
                self._placement.leave(interest)
                self._asking.say(channel, wire.Cancel([interest.id]))
        self._placement.find_room()

    def part(self, interest: Interest, reason: int) -> None:
        """The one incarnation of the sender that would have done is gone."""
        restarted = reason == PEER_RESTARTED
        end = interest.channel.end or ENDED
        why = "its process was replaced by another" if restarted else end
        self._asking.fail(interest, reason, f"{why}; a stream does not outlive its sender, begin it again")
        self.vanish(interest)

    def vanish(self, interest: Interest) -> None:
        """Its sender is gone, and nothing is owed to it."""
        self._asking.move(interest, Cause.VANISH)
        self.forget(interest)

    def forget(self, interest: Interest) -> None:
        """It is over."""
        self._placement.leave(interest)
        interest.channel.interests.pop(interest.id, None)
