"""Engines as a hello names them."""

from __future__ import annotations

from ._protocol import wire
from .abc import Descriptor, Engine


def offer_of(engine: Engine) -> wire.Offer:
    """What peers are told of an engine."""
    descriptor = engine.descriptor
    return wire.Offer(engine.name, descriptor.engine, descriptor.memory)


def find_offer(offers: list[wire.Offer], engine: Engine) -> Descriptor | None:
    """What a peer told of its engine of the same kind; None if it has none."""
    for offer in offers:
        if offer.name == engine.name:
            return Descriptor(offer.engine, offer.memory)
    return None
