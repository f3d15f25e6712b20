"""What becomes of a payload, and what its receiver is told, when a write has ended or has taken too long."""

from __future__ import annotations

import msgspec

from .._errors import TransferFailed
from . import wire
from .entries import ENTRY_TABLE, Counters, Course, Event, Fetch, Phase, Step, StockCaller, Ticket, Want, step
from .matching import Matching
from .pulls import Pulls
from .roster import Roster
from .shelf import Shelf
from .tickets import Tickets


class Writes:
    """A part of `Outbox`: how writes end."""

    def __init__(
        self, shelf: Shelf, roster: Roster, tickets: Tickets, matching: Matching, pulls: Pulls, *, counters: Counters
    ) -> None:
        self._shelf = shelf
        self._roster = roster
        self._tickets = tickets
        self._matching = matching
        self._pulls = pulls
        self._counters = counters

    def ended(self, ticket: Ticket, now: float, error: TransferFailed | None = None) -> None:
        """The engine is done with a write: no byte of it moves any more, unless the error is not settled.

        It may be called once more for a write whose error was not settled, when that has ended after all.
        """
        if error is not None:
            self._counters.failed_writes += 1
        holder = ticket.holder
        into_nothing = isinstance(holder, Fetch) and holder.session.fenced
        if error is not None and not error.settled and not into_nothing:
            self._tell_failed(ticket, Course.UNSETTLED, str(error))
        else:
            self.settle(ticket, now, None if error is None else str(error))

    def fail_overdue(self, now: float) -> None:
        """Tell receivers of writes whose time is over; they stay pinned."""
        for ticket in self._tickets.overdue(now):
            self._counters.overdue_writes += 1
            seconds = self._tickets.time_limit(ticket.size)
            self._tell_failed(ticket, Course.OVERDUE, f"{ticket.size} bytes were not written within {seconds:g} s")

    def _tell_failed(self, ticket: Ticket, course: Course, why: str) -> None:
        """Fail a write to its receiver that may still move bytes; source and destination stay out of use."""
        told = ticket.course is not Course.RUNNING
        ticket.course = course
        holder, entry = ticket.holder, ticket.entry
        if told:
            return
        if isinstance(holder, StockCaller):
            self._pulls.give_up(holder)
        elif holder.state is Want.WRITING:
            code = wire.GONE if entry.phase is Phase.DYING else wire.TRANSFER_FAILED
            self._matching.fail(holder, code, why, settled=False)
        if entry.phase is Phase.CLAIMED and entry.holder is holder:
            self._matching.release(entry)

    def settle(self, ticket: Ticket, now: float, error: str | None) -> None:
        """No byte of a write moves any more."""
        del self._tickets.unended[ticket]
        entry, holder = ticket.entry, ticket.holder
        entry.pins -= 1
        if isinstance(holder, StockCaller):
            self._pulls.ended(ticket, holder, now, error)
        elif holder.state is Want.WITHDRAWN:
            holder.session.close(holder.id)
            self._roster.say(holder.session, wire.Closed([holder.id]))
        elif holder.failure is not None:
            # It was told of the failure while bytes might still move: now they do not. The record stays until the
            # receiver says that it is over, for it may have heard neither, or has given up and said so meanwhile.
            holder.failure = msgspec.structs.replace(holder.failure, settled=True)
            self._roster.say(holder.session, holder.failure)
        elif entry.phase is Phase.DYING:
            self._matching.fail(holder, wire.GONE, "the sender cleaned it up", settled=True)
        elif error is not None:
            self._matching.fail(holder, wire.TRANSFER_FAILED, error, settled=True)
        else:
            holder.move(Step.DELIVER)
            holder.given = entry
            self._roster.await_word(holder.session)
            entry.phase = step(ENTRY_TABLE, entry.phase, Event.COMPLETE)
            self._counters.delivered += 1
            self._roster.say(holder.session, wire.Done(holder.id, holder.round, entry.size, entry.header))
        self._shelf.unpinned(entry)
        if entry.phase is Phase.CLAIMED and entry.holder is holder:
            self._matching.release(entry)
