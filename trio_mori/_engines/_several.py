"""Several engines over one pool, of which each peer is reached by the first that can."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import DescriptorRefused, TransferFailed
from ..abc import Descriptor, Engine, EnginePeer, Posted, Region, Write


class SeveralEngines(Engine):
    """Members, in order of preference. Whoever opened them closes them; a peer is that of one of them."""

    name = "auto"

    def __init__(self, members: Sequence[Engine]) -> None:
        self._members = tuple(members)
        self._whose: dict[EnginePeer, Engine] = {}

    @property
    def members(self) -> Sequence[Engine]:
        return self._members

    @property
    def region(self) -> Region:
        return self._members[0].region

    @property
    def descriptor(self) -> Descriptor:
        """That of the first: what a stock sender is told, which knows Mori only."""
        return self._members[0].descriptor

    def add_peer(self, descriptor: Descriptor) -> EnginePeer:
        refusals = []
        for member in self._members:
            try:
                return self.add_peer_of(member, descriptor)
            except DescriptorRefused as error:
                refusals.append(str(error))
        raise DescriptorRefused("; ".join(refusals))

    def add_peer_of(self, member: Engine, descriptor: Descriptor) -> EnginePeer:
        peer = member.add_peer(descriptor)
        self._whose[peer] = member
        return peer

    def drop_peer(self, peer: EnginePeer) -> None:
        member = self._whose.pop(peer, None)
        if member is not None:
            member.drop_peer(peer)

    def write_nowait(self, peer: EnginePeer, write: Write) -> bool | Posted:
        return self._member(peer).write_nowait(peer, write)

    async def write(self, peer: EnginePeer, write: Write) -> None:
        await self._member(peer).write(peer, write)

    async def wait_fenced(self, peer: EnginePeer) -> None:
        # One that was dropped is nobody's, about which nothing can be proven; any member says so.
        await self._whose.get(peer, self._members[0]).wait_fenced(peer)

    def abandon(self) -> None:
        for member in self._members:
            member.abandon()

    def _member(self, peer: EnginePeer) -> Engine:
        try:
            return self._whose[peer]
        except KeyError:
            raise TransferFailed(
                f"write to {peer.identity} refused: it is not a peer of this engine, or was dropped"
            ) from None
