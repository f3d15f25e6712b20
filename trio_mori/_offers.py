"""Engines as a hello names them, and by which of them a peer is written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import trio

from ._errors import SHORTAGES, DescriptorRefused, TransferFailed
from ._protocol import wire
from .abc import Descriptor, Engine, EnginePeer, Landing, Write


def offers_of(engine: Engine) -> list[wire.Offer]:
    """What peers are told of an engine, and of those that share its pool."""
    descriptors = [(member.name, member.descriptor) for member in engine.members]
    return [wire.Offer(name, descriptor.engine, descriptor.memory) for name, descriptor in descriptors]


def find_offer(offers: Sequence[wire.Offer], name: str) -> Descriptor | None:
    """What a peer told of its engine of that name; None if it has none."""
    for offer in offers:
        if offer.name == name:
            return Descriptor(offer.engine, offer.memory)
    return None


def landing_of(engine: Engine, chosen: str) -> Landing | None:
    """Where in host memory a peer's writes by that engine arrive, if not in the pool itself."""
    return next((member.landing for member in engine.members if member.name == chosen), None)


def names_of(engine: Engine) -> tuple[str, ...]:
    """The engines of a pool by name, in order of preference."""
    return tuple(member.name for member in engine.members)


# What became of trying peers out is kept of so many. One that comes again after more than these is tried out anew.
KEPT = 1024


@attrs.frozen
class Way:
    """How a peer is written to.

    Attributes:
        name: By which engine.
        reason: Why by none that comes before it in the order of preference; empty if it is the first.
    """

    name: str
    reason: str
    peer: EnginePeer


class Ways:
    """Finds the way to each peer. Where one is not the last, it is tried out before it is taken: GPUs have access to
    each other or have not, and nobody knows before one has mapped the other's memory.
    """

    def __init__(self, engine: Engine, nursery: trio.Nursery) -> None:
        self._engine = engine
        self._nursery = nursery
        # What became of the ways that were tried out; None while one is. Of peers that may come again, so it is kept.
        self._tried: dict[Descriptor, str | None] = {}

    def find(self, offers: Sequence[wire.Offer], again: Callable[[], None]) -> Way | None:
        """The first engine that reaches a peer with these offers. None: one is tried out, and `again` called then.

        Raises:
            DescriptorRefused: none does; says why of each.
            ConnectorClosed: the engine ends.
        """
        reasons = []
        members = self._engine.members
        for member in members:
            descriptor = find_offer(offers, member.name)
            if descriptor is None:
                reasons.append(f"{member.name} is not offered")
                continue
            failure = self._tried.get(descriptor, "")
            if failure is None:
                return None
            if failure:
                reasons.append(f"{member.name}: {failure}")
                continue
            try:
                peer = self._engine.add_peer_of(member, descriptor)
            except DescriptorRefused as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORTAGES:
                    raise
                reasons.append(f"{member.name}: {error}")
                continue
            if member is not members[-1] and descriptor not in self._tried:
                while len(self._tried) >= KEPT:
                    del self._tried[next(iter(self._tried))]
                self._tried[descriptor] = None
                self._nursery.start_soon(self._try_out, peer, descriptor, again)
                return None
            return Way(member.name, "; ".join(reasons), peer)
        offered = ", ".join(offer.name for offer in offers) or "none"
        if all(each.endswith("is not offered") for each in reasons):
            raise DescriptorRefused(
                f"the sender writes through {', '.join(names_of(self._engine))}; offered: {offered}"
            )
        raise DescriptorRefused("; ".join(reasons))

    async def _try_out(self, peer: EnginePeer, descriptor: Descriptor, again: Callable[[], None]) -> None:
        try:
            await self._engine.write(peer, Write(0, 0, 0))
            self._tried[descriptor] = ""
        except TransferFailed as error:
            self._engine.drop_peer(peer)
            self._tried[descriptor] = str(error)
        again()
