"""Where payloads may be written: destinations ahead of the data, and room for what waits at its sender.

What was named ahead of the data holds a bounded part of the pool, and makes place when a payload that is there needs
the room.
"""

from __future__ import annotations

from .._errors import NoRoom, TooBig
from . import wire
from .asking import Asking
from .extents import INBOUND, Extents
from .interests import Cause, Interest
from .line import Line
from .quarantine import Quarantine
from .sizes import RecentSizes


class Placement:
    """A part of `Inbox`: the destinations of interests.

    Args:
        limit: Bytes that destinations ahead of the data may hold together.

    Attributes:
        hungry: Interests that are offered, and have no room yet.
        sizes: What is expected of an edge.
    """

    def __init__(self, extents: Extents, asking: Asking, quarantine: Quarantine, *, limit: int) -> None:
        self.hungry = Line[Interest](extents, INBOUND)
        self.sizes = RecentSizes()
        self._extents = extents
        self._asking = asking
        self._quarantine = quarantine
        self._prepost_limit = limit
        self._preposted = 0
        self._ahead: dict[Interest, None] = {}  # those that hold it, in the order in which they got it

    def find_room(self) -> None:
        """Place offered payloads while there is room.

        To be called when memory was freed, and when one of them may have left that was in the way of others.
        """
        if not self.hungry.waiting:
            return
        while served := self.hungry.serve():
            interest, extent = served
            interest.extent = extent
            self._asking.move(interest, Cause.PLACE)
            self._asking.ask(interest)
        if first := self.hungry.first:
            self._call_back(first.needed)

    def prepost(self, interest: Interest) -> None:
        """Choose a destination ahead of the data, if that leaves enough room for data that is there."""
        if self.hungry.waiting:
            return
        size = self.sizes.expect(interest.key)
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
        missing = size - sum(extent.size for channel, extent in self._quarantine.coming_back() if channel.up)
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
            self.ask_anew(interest)

    def ask_anew(self, interest: Interest) -> None:
        """Cancel a fetch, and ask for the same without a destination, under another id.

        The sender may be writing to the destination. So it stays with the old id, in quarantine, until the sender has
        confirmed; and what has arrived there meanwhile goes back, and comes by the new id.
        """
        channel = interest.channel
        old = Interest(channel, interest.key, interest.id, round=interest.round, extent=interest.extent)
        channel.interests[old.id] = old
        self._asking.move(old, Cause.GIVE_BACK)
        self.leave(interest)
        interest.id, interest.round, interest.extent = channel.next_id, 0, None
        channel.next_id += 1
        channel.interests[interest.id] = interest
        self._asking.say(channel, wire.Cancel([old.id]))
        self._asking.ask(interest)

    def leave(self, interest: Interest) -> None:
        """It waits for no room, and its destination is not ahead of the data any more."""
        if self.hungry.waiting:
            self.hungry.leave(interest)
        self._ahead.pop(interest, None)
        self._preposted -= interest.preposted
        interest.preposted = 0

    def free(self, interest: Interest) -> None:
        """Nobody writes to its destination, or needs it: give the memory back."""
        if interest.extent is not None:
            extent, interest.extent = interest.extent, None
            self._extents.free(extent)
