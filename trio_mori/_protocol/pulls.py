"""The sender's book of stock receivers: sockets with one request in flight each, and no acknowledgements.

After `trans_done` a payload is kept until its socket's next request, or for a few seconds: a reply that was lost is
repaired by the retry.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from . import stock_wire
from .alarm import Alarm
from .entries import ENTRY_TABLE, Counters, Course, Encoding, Entry, Event, Phase, StockCaller, Ticket, step
from .extents import Extent
from .matching import Matching
from .shelf import Shelf


class Pulls:
    """A part of `Outbox`: who pulls what, and what each is answered.

    Args:
        start: Have a write started.
        keep: Seconds that a delivered payload is kept for a retry.

    Attributes:
        answers: Replies for the shell to send.
    """

    def __init__(
        self,
        shelf: Shelf,
        matching: Matching,
        *,
        start: Callable[[Ticket], None],
        counters: Counters,
        alarm: Alarm,
        keep: float,
    ) -> None:
        self.answers: list[tuple[StockCaller, bytes]] = []
        self._shelf = shelf
        self._matching = matching
        self._start = start
        self._counters = counters
        self._alarm = alarm
        self._keep = keep
        self._callers: dict[bytes, StockCaller] = {}

    def begin(self, route: bytes, key: str) -> tuple[StockCaller, Entry | None]:
        """A request came by a route: who asks, and the entry that it may have, if there is one.

        The payload that was kept for the caller's last request is freed now, or published again if this request is
        for it: the answer to the last one was lost.
        """
        caller = self._callers.pop(route, None) or StockCaller(route)
        held, caller.held, caller.held_until = caller.held, None, inf
        if caller.ticket is not None:
            self._callers[route] = caller
        if held is not None and held.phase is Phase.DELIVERED and held.holder is caller:
            if held.key == key:
                self._matching.release(held)
            else:
                self._shelf.drop(held, Event.ACKNOWLEDGE)
        entry = self._shelf.find(key)
        return caller, entry if entry is not None and entry.phase is Phase.PUBLISHED else None

    def begin_encoding(self, entry: Entry, extent: Extent, size: int) -> None:
        """Room was taken for an entry's stock form; it is the entry's. It is written until `end_encoding`."""
        entry.encoding = Encoding(extent, size)
        entry.pins += 1

    def end_encoding(self, entry: Entry, *, made: bool = True) -> None:
        """The stock form is there; or it could not be made, and stock receivers can never have the entry."""
        assert entry.encoding is not None
        entry.encoding.ready = made
        entry.pins -= 1
        self._shelf.unpinned(entry)

    def serve(self, caller: StockCaller, entry: Entry, *, destination: int, length: int, region_size: int) -> None:
        """Start the write of a pull, or refuse it. The answer comes in `answers`."""
        size = entry.stock_size
        if size is None or length != size or destination + length > region_size or caller.ticket is not None:
            self.refuse(caller)
            return
        extent = entry.extent if entry.is_raw or entry.encoding is None else entry.encoding.extent
        entry.phase = step(ENTRY_TABLE, entry.phase, Event.CLAIM)
        entry.holder = caller
        caller.ticket = Ticket(entry, caller, extent.offset, destination, size)
        self._callers[caller.route] = caller
        self._start(caller.ticket)

    def refuse(self, caller: StockCaller) -> None:
        """Answer a pull with `trans_error`; the payload stays."""
        self._counters.refused_pulls += 1
        self.fail(caller)

    def fail(self, caller: StockCaller) -> None:
        """Tell a caller that its pull came to nothing."""
        self.answers.append((caller, stock_wire.TRANSFER_ERROR))

    def give_up(self, caller: StockCaller) -> None:
        """Tell a caller that its pull failed, though its write may still go on; its next request is a new caller's.

        It has its answer, so that it may ask again by the same socket, and the write may never end.
        """
        self._callers.pop(caller.route, None)
        self.fail(caller)

    def ended(self, ticket: Ticket, caller: StockCaller, now: float, error: str | None) -> None:
        """The write of a pull is over."""
        if ticket.course is not Course.RUNNING:
            return  # it was given up
        caller.ticket = None
        entry = ticket.entry
        if error is None and entry.phase is Phase.CLAIMED:
            entry.phase = step(ENTRY_TABLE, entry.phase, Event.COMPLETE)
            self._counters.stock_delivered += 1
            caller.held, caller.held_until = entry, now + self._keep
            self._alarm.at = min(self._alarm.at, caller.held_until)
            self.answers.append((caller, stock_wire.TRANSFER_DONE))
            return
        self._callers.pop(caller.route, None)
        self.fail(caller)

    def expire(self, now: float) -> None:
        """Free what was kept for retries that did not come."""
        for caller in [c for c in self._callers.values() if c.held_until <= now]:
            held = caller.held
            del self._callers[caller.route]
            if held is not None and held.holder is caller and held.phase is Phase.DELIVERED:
                self._shelf.drop(held, Event.ACKNOWLEDGE)

    def next_deadline(self) -> float:
        """When `expire` has something to do next; `inf` if never."""
        return min((c.held_until for c in self._callers.values()), default=inf)
