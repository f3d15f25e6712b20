"""The sender's book: who asked for which payload, and what may be done with it.

Pure and synchronous. The shell calls a method for each thing that happened (a put, a message, the end of a write,
a deadline) and then carries out what the book left for it:

* `starting`: writes to start, each ended later by `write_ended`;
* `talking`: sessions with messages in `Session.outgoing`;
* `pulls.answers`: replies to stock callers;
* `expired`: keys of payloads that nobody fetched in time;
* `silent`: sessions that were connected and have not said anything for too long;
* `forgotten`: sessions that made place for others, whose handles are not needed any more.

Its parts, each of which knows those before it and none of those behind it:

* `Shelf`: the payloads and their memory;
* `Roster`: the receivers' sessions, and what is said to them;
* `Tickets`: the writes that have not ended, and why memory that they read is safe;
* `Matching`: which fetch has which payload, and why no destination is written to twice;
* `Pulls`: stock receivers;
* `Writes`: what comes of a write's end;
* `Fetches`: what receivers say, why no payload is lost, and why every answer can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

import attrs

from .._errors import KeyBusy, NoRoom
from . import wire
from .alarm import Alarm
from .entries import Counters, Course, Entry, Fetch, Phase, Session, StockCaller, Ticket, Want
from .extents import Extents
from .fetches import Fetches
from .matching import Matching
from .pulls import Pulls
from .roster import Roster
from .shelf import Shelf
from .tickets import Tickets
from .writes import Writes


@attrs.frozen(kw_only=True)
class OutboxLimits:
    """The sender's configuration, in seconds and counts."""

    ttl: float
    acknowledge_timeout: float
    transfer_timeout: Callable[[int], float]
    max_fetches: int
    max_sessions: int
    stock_keep: float


class Outbox:
    """See the module's text."""

    def __init__(self, extents: Extents, limits: OutboxLimits) -> None:
        self.counters = counters = Counters()
        self.starting: list[Ticket] = []
        self.forgotten: list[Session] = []
        self.expired: list[str] = []
        self.silent: list[Session] = []
        self._limits = limits
        self._left = False
        self._alarm = alarm = Alarm()
        self.shelf = shelf = Shelf(extents, limits.ttl, alarm)
        self._roster = roster = Roster(alarm, limits.acknowledge_timeout)
        self._tickets = tickets = Tickets(alarm, limits.transfer_timeout)
        self._matching = matching = Matching(shelf, roster, start=self._start)
        self.pulls = pulls = Pulls(
            shelf, matching, start=self._start, counters=counters, alarm=alarm, keep=limits.stock_keep
        )
        self._writes = writes = Writes(shelf, roster, tickets, matching, pulls, counters=counters)
        self._fetches = Fetches(shelf, roster, tickets, matching, counters=counters, limit=limits.max_fetches)
        # The same ones as the parts have: nobody puts others in their place.
        self.sessions: Final = roster.sessions
        self.talking: Final = roster.talking
        self.tickets: Final = tickets.unended
        # What a part does alone. After a pause a call takes 1 to 2 us, so that none is there to pass another on.
        self.stage: Final = shelf.stage
        self.unstage: Final = shelf.drop
        self.speaker: Final = roster.speaker
        self.has_left: Final = roster.has_left
        self.next_fetch: Final = matching.next_fetch
        self.excuse: Final = roster.excuse
        self.watch: Final = tickets.watch
        self.doubts: Final = tickets.doubts
        self.write_ended: Final = writes.ended

    def _start(self, ticket: Ticket) -> None:
        ticket.entry.pins += 1
        self.tickets[ticket] = None
        self.starting.append(ticket)

    @property
    def alarm(self) -> float:
        """The earliest deadline that was set since `next_deadline` was last asked: whoever sleeps longer is woken."""
        return self._alarm.at

    # --- puts ---------------------------------------------------------------------------------------------

    def publish(self, entry: Entry, *, header: bytes, size: int, is_raw: bool, now: float) -> None:
        """File a staged entry under its key; the newest wins.

        Raises:
            KeyBusy: the key's payload is being transferred; the new one is gone without a trace.
        """
        try:
            self.shelf.check_free(entry.key)
        except KeyBusy:
            self.shelf.drop(entry)
            raise
        current = self.shelf.find(entry.key)
        entry.header, entry.size, entry.is_raw = header, size, is_raw
        self.shelf.file(entry, now)
        self.counters.puts += 1
        if current is not None:
            self.counters.replaced += 1
            # A delivered one lives on under its fetch only; any other makes place.
            if current.phase is not Phase.DELIVERED:
                if isinstance(current.holder, Fetch):
                    self._matching.requeue(current.holder)
                self.shelf.drop(current)
        self._matching.match(entry)

    def cleanup(self, entries: Iterable[Entry], *, tell: bool = True) -> int:
        """Drop entries, and let the next fetch of each know unless `tell` is false. Returns how many there were."""
        dropped = [e for e in entries if e.phase is not Phase.DYING]
        for entry in dropped:
            entry.is_forgotten = not tell
            self._give_up(entry, wire.GONE)
        self.counters.cleaned += len(dropped)
        return len(dropped)

    def lose(self, key: str) -> None:
        """Nothing comes under a key, after what is there: tell the first that waits for it, or whoever asks next."""
        self._matching.lose(key, wire.GONE)

    def _give_up(self, entry: Entry, code: int) -> None:
        holder, phase = entry.holder, entry.phase
        newest = self.shelf.find(entry.key) is entry
        self.shelf.drop(entry)
        if isinstance(holder, Fetch) and holder.state is Want.OFFERED:
            self._matching.fail(holder, code, self.shelf.describe(code, entry.size), settled=True)
        elif entry.is_forgotten:
            pass
        elif isinstance(holder, Fetch) and holder.state is Want.DELIVERED and newest:
            holder.lost = code
        elif phase is Phase.PUBLISHED or (phase is Phase.CLAIMED and not _is_writing(holder)):
            self._matching.bury(entry.key, code, entry.size)  # who is being written to is told when that ends

    # --- receivers' sessions ------------------------------------------------------------------------------

    def open_session(
        self, token: bytes, generation: int, *, region_size: int, handle: object, now: float
    ) -> Session | None:
        """A hello came: a new session, or a new connection of one. None: an old hello, which changes nothing.

        Raises:
            NoRoom: too many receivers, and none of them can be forgotten.
        """
        session = self.sessions.get(token)
        if session is None:
            if len(self.sessions) >= self._limits.max_sessions:
                self._evict()
            session = self.sessions[token] = Session(token, generation, region_size, handle, now)
            self._roster.await_word(session)
            return session
        if generation < session.generation:
            return None
        session.generation, session.handle = generation, handle
        session.last_heard = now
        # What was not taken yet is said again when the receiver repeats its fetches.
        session.outgoing.clear()
        self._fetches.revive(session)
        if self._left:
            self._say_farewell(session)  # it was said on the connection before
        return session

    def _evict(self) -> None:
        for session in self.sessions.values():
            if not session.connected and not self._fetches.owe(session):
                self.bye(session)
                self.forgotten.append(session)
                return
        limit = self._limits.max_sessions
        raise NoRoom(f"{limit} receivers are connected, which is the most: raise max_peers", size=1, free=0)

    def disconnected(self, session: Session) -> None:
        """Its link broke. Writes under way go on; none is started until it is back."""
        session.connected = session.is_quiet = False
        self._roster.await_word(session)

    def bye(self, session: Session) -> None:
        """It closed, or is forgotten: what it had and did not acknowledge goes to others."""
        session.connected = False
        self._fetches.withdraw_all(session)
        self._roster.forget(session)

    @property
    def is_touched(self) -> bool:
        """Whether memory of the pool is read by a write, or written by a put or an encoding, that has not ended."""
        return bool(self.tickets) or bool(self.shelf.staged) or self.shelf.pinned

    def is_written_to(self, session: Session) -> bool:
        """Whether a write to it may still be under way."""
        return bool(self._tickets.of(session))

    def fenced(self, session: Session, now: float) -> None:
        """Its process is proven dead: as `bye`, and writes that the engine gave up on are over, too.

        What such a write may still do, it does to memory that no longer exists.
        """
        session.fenced = True
        self.bye(session)
        for ticket in self._tickets.of(session):
            if ticket.course is Course.UNSETTLED:
                self._writes.settle(ticket, now, None)

    # --- messages -----------------------------------------------------------------------------------------

    def on_message(
        self, session: Session, message: wire.Fetch | wire.Cancel | wire.Ack | wire.Heartbeat | wire.Still, now: float
    ) -> None:
        """A message arrived of a session that is its `speaker`."""
        if self._roster.has_left(session):
            return  # it stood behind a farewell
        session.last_heard = now
        if not session.connected:
            self._fetches.revive(session)
        if isinstance(message, wire.Fetch):
            self._fetches.on_fetch(session, message)
        elif isinstance(message, wire.Ack):
            for fetch_id in message.ids:
                self._fetches.on_ack(session, fetch_id)
        elif isinstance(message, wire.Cancel):
            for fetch_id in message.ids:
                self._fetches.on_cancel(session, fetch_id)
        elif isinstance(message, wire.Heartbeat):
            self._fetches.on_heartbeat(session, message)
        elif message.base == session.sequence < message.sequence:
            self._fetches.on_still(session, message.sequence)

    def pull(self, caller: StockCaller, entry: Entry, *, destination: int, length: int, region_size: int) -> None:
        """Serve a stock pull: start its write, or refuse it. The answer comes in `pulls.answers`."""
        if self._matching.is_stopped:
            self.pulls.refuse(caller)
        else:
            self.pulls.serve(caller, entry, destination=destination, length=length, region_size=region_size)

    # --- time ---------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Do what is due: fail slow writes, drop what nobody fetched, give up on silent receivers."""
        silent = self._roster.silent(now)
        self.silent += [s for s in silent if s.connected]
        for session in silent:
            session.connected = False  # all of them first: what one gives up must not go to another
        self._writes.fail_overdue(now)
        for entry in self.shelf.expired(now):
            self.counters.expired += 1
            self.expired.append(entry.key)
            self._give_up(entry, wire.EXPIRED)
        for session in silent:
            self._fetches.lapse(session)
        self.pulls.expire(now)

    def next_deadline(self) -> float:
        """When `expire` has something to do next; `inf` if never."""
        when = min(self.shelf.next_expiry() or inf, self._tickets.next_deadline(), self.pulls.next_deadline())
        for session in self.sessions.values():
            if session.connected or self._fetches.may_lapse(session):
                when = min(when, self._roster.silent_at(session))
        self._alarm.at = when
        return when

    # --- closing ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No write is started from now on; those under way go on."""
        self._matching.is_stopped = True

    def leave(self) -> None:
        """Forget all payloads, and tell every session which writes into its pool have not ended.

        What is staged stays: its put may be copying into it, and ends it.
        """
        self._left = True
        for session in self.sessions.values():
            self._say_farewell(session)
        for entry in self.shelf.everything():
            if entry.phase not in (Phase.STAGED, Phase.DYING):
                self.shelf.drop(entry)

    def begin_anew(self) -> None:
        """After `leave`, when all sessions are gone: be the book of a sender that has just come."""
        self._left = False

    def _say_farewell(self, session: Session) -> None:
        self._roster.say(session, wire.Leaving(self._tickets.fetch_ids(session)))


def _is_writing(holder: Fetch | StockCaller | None) -> bool:
    return isinstance(holder, Fetch) and holder.state is Want.WRITING
