"""Memory that a sender may still write to although nobody waits for it any more, and how much of it there may be.

**What keeps memory safe.** A destination that was named to a sender is given back to the allocator only when that
sender has said that no write to it is or will be under way (`Done`, a settled `Failed`, `Closed`, a new round, or
`Leaving`), or when the sender's process is proven dead. A get that gives up changes nothing about that: its
destination is in *quarantine* until then. So is one that was chosen ahead of the data and called back, because a
payload that is there needs the room: its fetch goes on under another id, without it. A disconnect, silence and a
restarted sender prove nothing; what a sender of an earlier epoch may still write to is kept under that epoch, until
that process is fenced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .._errors import NoRoom
from . import doubts
from .doubts import Doubt
from .extents import Extent, Extents, format_size
from .interests import Channel, Interest


class Quarantine:
    """A part of `Inbox`: what is held back, and why.

    Args:
        channels: All senders; those of earlier epochs are in `Channel.ghosts`.
        limit: Bytes at which nothing more may be asked for.

    Attributes:
        returning: Interests that are RETURNING.
        doubted: What stock senders may still write to that were given up, and their names.
    """

    def __init__(self, extents: Extents, channels: Mapping[Channel, None], limit: int) -> None:
        self.returning: dict[Interest, None] = {}
        self.doubted: dict[Extent, str] = {}
        self._extents = extents
        self._channels = channels
        self._limit = limit

    def check(self, key: str) -> None:
        """Whether more may be asked for.

        Raises:
            NoRoom: too much of the pool is in quarantine.
        """
        quarantined = self.held_back
        if quarantined and quarantined >= self._limit:
            raise NoRoom(
                f"get of {key!r} refused: {format_size(quarantined)} of the pool are held back (limit "
                f"{format_size(self._limit)}, quarantine_fraction), because silent peers may still "
                "write there; they come back when those processes answer or exit",
                size=0,
                free=self._extents.free_bytes,
                quarantined=quarantined,
            )

    @property
    def held_back(self) -> int:
        """Of the bytes in quarantine those that do not seem to come back soon.

        A sender that lives answers a cancel within a round trip, or when its link is back, and what was cancelled a
        moment ago is no reason to refuse anything. Two heartbeats later it is.
        """
        return self.quarantined - sum(e.size for _, e in self.coming_back())

    def coming_back(self) -> Iterator[tuple[Channel, Extent]]:
        """What does seem to come back, and whose it is."""
        for interest in self.returning:
            if interest.extent is not None and interest.channel.sequence <= interest.returned + 1:
                yield interest.channel, interest.extent

    @property
    def quarantined(self) -> int:
        """Bytes that a peer may still write to although nobody waits for them."""
        returning = sum(i.extent.size for i in self.returning if i.extent is not None)
        ghosts = sum(e.size for channel in self._channels for extents in channel.ghosts.values() for e in extents)
        return returning + ghosts + sum(e.size for e in self.doubted)

    def ghosts(self) -> Iterator[tuple[Channel, Extent]]:
        """What senders of earlier epochs may still write to, and who followed them."""
        for channel in self._channels:
            for extents in channel.ghosts.values():
                for extent in extents:
                    yield channel, extent

    def doubts(self) -> list[Doubt]:
        """What `quarantined` counts."""
        found = [Doubt(extent, extent.size, sender, doubts.UNANSWERED) for extent, sender in self.doubted.items()]
        for interest in self.returning:
            extent, channel = interest.extent, interest.channel
            if extent is not None:
                found.append(Doubt(extent, extent.size, channel, doubts.UNCONFIRMED if channel.up else doubts.AWAY))
        found += [Doubt(extent, extent.size, channel, doubts.FORMER) for channel, extent in self.ghosts()]
        return found
