"""Faults in the code itself, of the kinds that the lane is there to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trio_mori._protocol.entries import Event
from trio_mori._protocol.fetches import Fetches
from trio_mori._protocol.outbox import Outbox
from trio_mori._protocol.returns import Returns
from trio_mori._protocol.shelf import Shelf


def plant(name: str) -> None:
    """Put this one in; nothing for an empty name."""
    if name:
        PLANTS[name]()


def _free_while_pinned() -> None:
    """A source's memory is free as soon as its write begins."""
    start, free = Outbox._start, Shelf.free
    early: set[int] = set()

    def start_and_free(self: Outbox, ticket: Any) -> None:
        start(self, ticket)
        if id(ticket.entry) not in early:
            early.add(id(ticket.entry))
            self.shelf._extents.free(ticket.entry.extent)

    def free_the_rest(self: Shelf, entry: Any, cause: Event) -> None:
        if id(entry) in early:
            early.discard(id(entry))
            entry.extent = self._extents.allocate(0, entry.extent.share)
        free(self, entry, cause)

    _replace(Outbox, "_start", start_and_free)
    _replace(Shelf, "free", free_the_rest)


def _free_destination_of_a_cancelled_get() -> None:
    """A destination is free as soon as its get was cancelled, whatever the sender does."""
    cancel = Returns.cancel

    def cancel_and_free(self: Returns, interest: Any) -> None:
        cancel(self, interest)
        self._placement.free(interest)

    _replace(Returns, "cancel", cancel_and_free)


def _ignore_acks() -> None:
    """The sender does not hear of what was taken."""
    _replace(Fetches, "on_ack", lambda *_: None)


PLANTS: dict[str, Callable[[], None]] = {
    "freed-while-pinned": _free_while_pinned,
    "freed-destination": _free_destination_of_a_cancelled_get,
    "ack-ignored": _ignore_acks,
}


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)
