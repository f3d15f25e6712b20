"""The sender's book: who asked for which payload, and what may be done with it.

Pure and synchronous. The shell calls a method for each thing that happened (a put, a message, the end of a write,
a deadline) and then carries out what the book left for it:

* `starting`: writes to start, each ended later by `write_ended`;
* `talking`: sessions with messages in `Session.outgoing`;
* `pulls.answers`: replies to stock callers;
* `expired`: keys of payloads that nobody fetched in time;
* `silent`: sessions that were connected and have not said anything for too long;
* `forgotten`: sessions that made place for others, whose handles are not needed any more.

**What keeps memory safe.** A write pins its entry from the moment its ticket is made, and a pinned entry's extent is
not given back. A ticket ends in `write_ended` (the engine says that no byte moves any more); or, when the engine
could not say that, with the proven death of the receiver's process. A write that runs out of time is failed to its
receiver and stays pinned.

**What keeps payloads from being lost.** A delivered entry is freed by an acknowledgement, or by a heartbeat that no
longer lists its fetch: both mean that the receiver took it. Everything else (a cancel, silence, the end of the
receiver) publishes it again.

**Why every answer can be repeated.** A fetch's record stays until the receiver says that its id is over, so that a
copy of a fetch, or a heartbeat that still lists it, is answered with what was said before.

**Why a destination is never written to twice.** A destination belongs to one round of one fetch. `Ready` begins a new
round and voids it; so does a lapse. A fetch that is sent again brings a destination only for the round that waits
for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import attrs
import msgspec

from .._errors import KeyBusy, NoRoom, TransferFailed
from . import doubts, wire
from .doubts import Doubt
from .entries import (
    ENTRY_TABLE,
    WANT_TABLE,
    Counters,
    Course,
    Entry,
    Event,
    Fetch,
    Phase,
    Session,
    Step,
    StockCaller,
    Ticket,
    Want,
    step,
)
from .extents import Extent, Extents
from .pulls import Pulls
from .shelf import Shelf

# Cancels of ids that we do not know (they overtook their fetch) are remembered until the next heartbeat. A peer that
# sends more than this between two heartbeats is not answered until then.
MAX_CLOSED = 65536


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
        self.limits = limits
        self.shelf = Shelf(extents, limits.ttl)
        self.counters = Counters()
        self.sessions: dict[bytes, Session] = {}
        self.tickets: dict[Ticket, None] = {}
        self.starting: list[Ticket] = []
        self.talking: dict[Session, None] = {}
        self.forgotten: list[Session] = []
        self.expired: list[str] = []
        self.silent: list[Session] = []
        # The earliest deadline that was set since `next_deadline` was last asked: whoever sleeps longer is woken.
        self.alarm = inf
        self._closing = False
        self._left = False
        self._interests: dict[str, dict[Fetch, None]] = {}
        self.pulls = Pulls(
            self.shelf,
            self.counters,
            keep=limits.stock_keep,
            start=self._start,
            release=self._release,
            unpinned=self._unpinned,
        )

    # --- puts ---------------------------------------------------------------------------------------------

    def stage(self, key: str, extent: Extent) -> Entry:
        """Take over an extent for a put that is under way; end it with `publish` or `unstage`."""
        return self.shelf.stage(key, extent)

    def unstage(self, entry: Entry) -> None:
        """The put failed or was cancelled: the extent is free again."""
        self.shelf.drop(entry)

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
        self.alarm = min(self.alarm, entry.expires_at)
        self.counters.puts += 1
        if current is not None:
            self.counters.replaced += 1
            # A delivered one lives on under its fetch only; any other makes place.
            if current.phase is not Phase.DELIVERED:
                if isinstance(current.holder, Fetch):
                    self._requeue(current.holder)
                self.shelf.drop(current)
        self._match(entry)

    def cleanup(self, entries: Iterable[Entry], *, tell: bool = True) -> int:
        """Drop entries, and let the next fetch of each know unless `tell` is false. Returns how many there were."""
        dropped = [e for e in entries if e.phase is not Phase.DYING]
        for entry in dropped:
            self._give_up(entry, wire.GONE, "the sender cleaned it up", tell=tell)
        self.counters.cleaned += len(dropped)
        return len(dropped)

    def _give_up(self, entry: Entry, code: int, detail: str, *, tell: bool = True) -> None:
        holder, phase = entry.holder, entry.phase
        newest = self.shelf.find(entry.key) is entry
        self.shelf.drop(entry)
        if isinstance(holder, Fetch) and holder.state is Want.OFFERED:
            self._fail(holder, code, detail, settled=True)
        elif isinstance(holder, Fetch) and holder.state is Want.DELIVERED and newest:
            holder.lost = code
        elif tell and (phase is Phase.PUBLISHED or (phase is Phase.CLAIMED and not _is_writing(holder))):
            self._bury(entry.key, code)  # who is being written to is told when that ends

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
            if len(self.sessions) >= self.limits.max_sessions:
                self._evict()
            session = self.sessions[token] = Session(token, generation, region_size, handle, now)
            self._await_word(session)
            return session
        if generation < session.generation:
            return None
        session.generation, session.handle = generation, handle
        session.last_heard = now
        # What was not taken yet is said again when the receiver repeats its fetches.
        session.outgoing.clear()
        self._revive(session)
        if self._left:
            self._say_farewell(session)  # it was said on the connection before
        return session

    def _evict(self) -> None:
        for session in self.sessions.values():
            if not session.connected and not any(self._is_owed(f) for f in session.fetches.values()):
                self.bye(session)
                self.forgotten.append(session)
                return
        limit = self.limits.max_sessions
        raise NoRoom(f"{limit} receivers are connected, which is the most (max_peers)", size=1, free=0)

    def _is_owed(self, fetch: Fetch) -> bool:
        """Whether its receiver may still take what it was given, or be written to."""
        return fetch.state is Want.DELIVERED or self._has_write(fetch)

    def disconnected(self, session: Session) -> None:
        """Its link broke. Writes under way go on; none is started until it is back."""
        session.connected = session.is_quiet = False
        self._await_word(session)

    def _await_word(self, session: Session) -> None:
        """If nothing is heard of it in time, what it was told and given counts as unheard."""
        self.alarm = min(self.alarm, session.last_heard + self.limits.acknowledge_timeout)

    def bye(self, session: Session) -> None:
        """It closed, or is forgotten: what it had and did not acknowledge goes to others."""
        session.connected = False
        for fetch in list(session.fetches.values()):
            self._withdraw(fetch)
        session.outgoing.clear()
        self.talking.pop(session, None)
        if not self.has_left(session):
            del self.sessions[session.token]

    def has_left(self, session: Session) -> bool:
        """Whether it was forgotten."""
        return self.sessions.get(session.token) is not session

    @property
    def is_touched(self) -> bool:
        """Whether memory of the pool is read by a write, or written by a put or an encoding, that has not ended."""
        return bool(self.tickets) or bool(self.shelf.staged) or self.shelf.pinned

    def doubts(self) -> list[Doubt]:
        """Sources of writes that do not end as they should."""
        return [
            Doubt(t, t.size, t.holder, doubts.OVERDUE if t.course is Course.OVERDUE else doubts.UNSETTLED)
            for t in self.tickets
            if t.course is not Course.RUNNING
        ]

    def is_written_to(self, session: Session) -> bool:
        """Whether a write to it may still be under way."""
        holders = (t.holder for t in self.tickets)
        return any(isinstance(h, Fetch) and h.session is session for h in holders)

    def fenced(self, session: Session, now: float) -> None:
        """Its process is proven dead: as `bye`, and writes that the engine gave up on are over, too.

        What such a write may still do, it does to memory that no longer exists.
        """
        session.fenced = True
        self.bye(session)
        for ticket in [t for t in self.tickets if t.course is Course.UNSETTLED]:
            if isinstance(ticket.holder, Fetch) and ticket.holder.session is session:
                self._end(ticket, now, None)

    # --- messages -----------------------------------------------------------------------------------------

    def on_message(
        self, session: Session, message: wire.Fetch | wire.Cancel | wire.Ack | wire.Heartbeat | wire.Still, now: float
    ) -> None:
        """A message of a session arrived, with the right generation and epoch."""
        if self.has_left(session):
            return  # it stood behind a farewell
        session.last_heard = now
        if not session.connected:
            self._revive(session)
        if isinstance(message, wire.Fetch):
            self._on_fetch(session, message)
        elif isinstance(message, wire.Ack):
            for fetch_id in message.ids:
                self._on_ack(session, fetch_id)
        elif isinstance(message, wire.Cancel):
            for fetch_id in message.ids:
                self._on_cancel(session, fetch_id)
        elif isinstance(message, wire.Heartbeat):
            self._on_heartbeat(session, message)
        elif message.base == session.sequence < message.sequence:
            self._on_still(session, message.sequence)

    def _revive(self, session: Session) -> None:
        session.connected = True
        self._await_word(session)
        for fetch in list(session.fetches.values()):
            if fetch.state is Want.WAITING:
                self._look_for(fetch)

    def _on_fetch(self, session: Session, message: wire.Fetch) -> None:
        fetch = session.fetches.get(message.id)
        if fetch is not None:
            self._on_repeated_fetch(fetch, message)
            return
        if not session.may_start(message.id):
            return
        if len(session.fetches) >= self.limits.max_fetches and _wanted(session) >= self.limits.max_fetches:
            # Closed, so that a copy of it does not start later: its destination is free from now on.
            if len(session.closed) < MAX_CLOSED:
                session.close(message.id)
                self._say_limit(session, message.id)
            return
        fetch = Fetch(session, message.id, message.key, message.round, message.offset, message.capacity)
        session.fetches[fetch.id] = fetch
        session.is_quiet = False
        if not self._destination_allowed(fetch):
            return
        self._interests.setdefault(fetch.key, {})[fetch] = None
        self._look_for(fetch)

    def _say_limit(self, session: Session, fetch_id: int) -> None:
        """Say that a fetch was refused. It leaves no record: that it is closed and still listed means just this."""
        limit = self.limits.max_fetches
        detail = f"{limit} fetches of one receiver are open, which is the most (max_fetches_per_peer)"
        self._say(session, wire.Failed(fetch_id, wire.LIMIT, detail, True))

    def _on_repeated_fetch(self, fetch: Fetch, message: wire.Fetch) -> None:
        if self._closing and fetch.state is Want.OFFERED:
            return  # nothing is begun any more; the farewell answers it
        awaited = fetch.state in (Want.WAITING, Want.OFFERED) and fetch.capacity == 0
        if awaited and message.round == fetch.round and message.capacity:
            # It answers the offer, so that it has not seen what was given before, and never will.
            fetch.given = None
            fetch.offset, fetch.capacity = message.offset, message.capacity
            if not self._destination_allowed(fetch):
                return
            if fetch.entry is not None:
                self._serve(fetch, fetch.entry)
                return
        self._repeat(fetch)

    def _destination_allowed(self, fetch: Fetch) -> bool:
        limit, entry = fetch.session.region_size, fetch.entry
        if fetch.offset + fetch.capacity <= limit:
            return True
        detail = f"destination {fetch.offset}+{fetch.capacity} is past the {limit} bytes of the receiver's pool"
        self._fail(fetch, wire.TRANSFER_FAILED, detail, settled=True)
        if entry is not None:
            self._release(entry)
        return False

    def _on_cancel(self, session: Session, fetch_id: int) -> None:
        fetch = session.fetches.get(fetch_id)
        if fetch is not None:
            self._withdraw(fetch)
            if fetch_id in session.fetches:
                return  # answered when the write ends
        elif len(session.closed) < MAX_CLOSED:
            session.close(fetch_id)
        else:
            return
        self._say(session, wire.Closed([fetch_id]))

    def _on_ack(self, session: Session, fetch_id: int) -> None:
        fetch = session.fetches.get(fetch_id)
        if fetch is None:
            return
        if fetch.given is not None:
            self._acknowledge(fetch)
        elif fetch.state is Want.FAILED and not self._has_write(fetch):
            session.close(fetch_id)

    def _on_heartbeat(self, session: Session, message: wire.Heartbeat) -> None:
        if message.sequence <= session.sequence:
            return
        session.is_quiet = True  # until something comes of it
        listed = frozenset(message.open).union(message.unacknowledged, message.returning)
        session.judge(message, listed)
        for fetch in [f for f in session.fetches.values() if f.id <= message.highest and f.id not in listed]:
            self._on_ack(session, fetch.id)
            if fetch.id in session.fetches:
                self._withdraw(fetch)
        for fetch_id in message.returning:
            self._on_cancel(session, fetch_id)
        unknown: list[int] = []
        for fetch_id in message.open:
            if fetch_id in session.fetches:
                self._repeat(session.fetches[fetch_id])
            elif session.may_start(fetch_id):
                unknown.append(fetch_id)
            else:
                self._say_limit(session, fetch_id)
        self._pulse(session, unknown)

    def _on_still(self, session: Session, sequence: int) -> None:
        """The last heartbeat once more."""
        if session.is_quiet:
            session.sequence = sequence
            self._pulse(session, [])
        elif session.beat is not None:
            self._on_heartbeat(session, msgspec.structs.replace(session.beat, sequence=sequence))

    def _pulse(self, session: Session, unknown: list[int]) -> None:
        quiet = session.is_quiet and not unknown
        self._say(session, wire.Pulse(session.sequence, unknown))
        session.is_quiet = quiet

    def _repeat(self, fetch: Fetch) -> None:
        """The receiver still waits for this one: say again what it was last told."""
        entry = fetch.entry
        if fetch.state is Want.DELIVERED and entry is not None:
            self._say(fetch.session, wire.Done(fetch.id, fetch.round, entry.size, entry.header))
        elif fetch.state is Want.OFFERED and entry is not None:
            self._say(fetch.session, wire.Ready(fetch.id, fetch.round, entry.size))
        elif fetch.failure is not None:
            self._say(fetch.session, fetch.failure)
        elif fetch.state is Want.WAITING:
            self._look_for(fetch)
            if fetch.state is Want.WAITING and fetch.round:  # else its destination is ahead of the data, if it has one
                self._say(fetch.session, wire.Retracted(fetch.id, fetch.round))
        elif fetch.state is Want.LAPSED:
            # Its `Done` was lost, or is still on its way: only a new round may be written to.
            fetch.round, fetch.capacity = fetch.round + 1, 0
            self._requeue(fetch)
            self._look_for(fetch)

    # --- from interest to write ---------------------------------------------------------------------------

    def _look_for(self, fetch: Fetch) -> None:
        """Give a waiting fetch what there is, or tell it that it is gone."""
        entry = self.shelf.find(fetch.key)
        if entry is not None:
            self._match(entry)
        elif reason := self.shelf.exhume(fetch.key):
            self._fail(fetch, reason, "", settled=True)

    def _bury(self, key: str, reason: int) -> None:
        """A payload is gone: let somebody know, unless a newer one is there."""
        if self.shelf.find(key) is None:
            self.lose(key, reason)

    def lose(self, key: str, reason: int = wire.GONE) -> None:
        """Nothing comes under a key, after what is there: tell the first that waits for it, or whoever asks next."""
        self.shelf.bury(key, reason)
        fetch = next((f for f in self._interests.get(key, ()) if f.session.connected), None)
        if fetch is not None:
            self._look_for(fetch)

    def _match(self, entry: Entry) -> None:
        """Give a published entry to the first live fetch of its key."""
        queue = self._interests.get(entry.key)
        if queue is None or entry.phase is not Phase.PUBLISHED or self._closing:
            return
        for fetch in queue:
            if fetch.session.connected:
                break
        else:
            return
        self._leave_queue(fetch)
        entry.phase = step(ENTRY_TABLE, entry.phase, Event.CLAIM)
        entry.holder, fetch.entry = fetch, entry
        self._serve(fetch, entry)

    def _serve(self, fetch: Fetch, entry: Entry) -> None:
        # After a lapse nothing is given anew before the receiver has answered: it may have taken what it was given
        # before, and its acknowledgement would be understood of the wrong payload.
        if fetch.capacity >= entry.size and fetch.given is None:
            _move(fetch, Step.BEGIN)
            self._start(Ticket(entry, fetch, entry.extent.offset, fetch.offset, entry.size))
        else:
            # From here on the old destination is void: the receiver may free it as soon as it reads this.
            _move(fetch, Step.OFFER)
            fetch.round, fetch.capacity = fetch.round + 1, 0
            self._say(fetch.session, wire.Ready(fetch.id, fetch.round, entry.size))

    def _start(self, ticket: Ticket) -> None:
        ticket.entry.pins += 1
        self.tickets[ticket] = None
        self.starting.append(ticket)

    def watch(self, ticket: Ticket, now: float) -> None:
        """A write did not end at once: from now on its time runs."""
        ticket.deadline = now + self.limits.transfer_timeout(ticket.size)
        self.alarm = min(self.alarm, ticket.deadline)

    def write_ended(self, ticket: Ticket, now: float, error: TransferFailed | None = None) -> None:
        """The engine is done with a write: no byte of it moves any more, unless the error is not settled.

        It may be called once more for a write whose error was not settled, when that has ended after all.
        """
        if error is not None:
            self.counters.failed_writes += 1
        holder = ticket.holder
        into_nothing = isinstance(holder, Fetch) and holder.session.fenced
        if error is not None and not error.settled and not into_nothing:
            self._tell_failed(ticket, Course.UNSETTLED, str(error))
        else:
            self._end(ticket, now, None if error is None else str(error))

    def _tell_failed(self, ticket: Ticket, course: Course, why: str) -> None:
        """Fail a write to its receiver that may still move bytes; source and destination stay out of use."""
        told = ticket.course is not Course.RUNNING
        ticket.course = course
        holder, entry = ticket.holder, ticket.entry
        if told:
            return
        if isinstance(holder, StockCaller):
            self.pulls.give_up(holder)
        elif holder.state is Want.WRITING:
            code = wire.GONE if entry.phase is Phase.DYING else wire.TRANSFER_FAILED
            self._fail(holder, code, why, settled=False)
        if entry.phase is Phase.CLAIMED and entry.holder is holder:
            self._release(entry)

    def _end(self, ticket: Ticket, now: float, error: str | None) -> None:
        del self.tickets[ticket]
        entry, holder = ticket.entry, ticket.holder
        entry.pins -= 1
        if isinstance(holder, StockCaller):
            self.pulls.ended(ticket, holder, now, error)
            self.alarm = min(self.alarm, holder.held_until)
        elif holder.state is Want.WITHDRAWN:
            holder.session.close(holder.id)
            self._say(holder.session, wire.Closed([holder.id]))
        elif holder.failure is not None:
            # It was told of the failure while bytes might still move: now they do not. The record stays until the
            # receiver says that it is over, for it may have heard neither, or has given up and said so meanwhile.
            holder.failure = msgspec.structs.replace(holder.failure, settled=True)
            self._say(holder.session, holder.failure)
        elif entry.phase is Phase.DYING:
            self._fail(holder, wire.GONE, "the sender cleaned it up", settled=True)
        elif error is not None:
            self._fail(holder, wire.TRANSFER_FAILED, error, settled=True)
        else:
            _move(holder, Step.DELIVER)
            holder.given = entry
            self._await_word(holder.session)
            entry.phase = step(ENTRY_TABLE, entry.phase, Event.COMPLETE)
            self.counters.delivered += 1
            self._say(holder.session, wire.Done(holder.id, holder.round, entry.size, entry.header))
        self._unpinned(entry)
        if entry.phase is Phase.CLAIMED and entry.holder is holder:
            self._release(entry)

    def _unpinned(self, entry: Entry) -> None:
        """Somebody does not read it any more."""
        if entry.phase is Phase.DYING and not entry.pins:
            self.shelf.free(entry, Event.SETTLE)
        self.alarm = min(self.alarm, entry.expires_at)

    def _release(self, entry: Entry) -> None:
        """Nobody has it any more: publish it again, unless a newer one took its key."""
        entry.holder = None
        if self.shelf.find(entry.key) is not entry:
            self.shelf.drop(entry)
            return
        entry.phase = step(ENTRY_TABLE, entry.phase, Event.RELEASE)
        self.alarm = min(self.alarm, entry.expires_at)
        self._match(entry)

    # --- how fetches end ----------------------------------------------------------------------------------

    def _requeue(self, fetch: Fetch) -> None:
        """Its payload was replaced or went to others before it had it: first in the queue again."""
        _move(fetch, Step.REQUEUE)
        fetch.entry = None
        self._interests[fetch.key] = {fetch: None, **self._interests.get(fetch.key, {})}

    def _withdraw(self, fetch: Fetch) -> None:
        """The receiver does not want it: over now, or when the write that is under way has ended."""
        if fetch.state is Want.WITHDRAWN:
            return
        if reason := self._untold(fetch):
            self._bury(fetch.key, reason)
        if self._has_write(fetch):
            _move(fetch, Step.WITHDRAW)
            return
        self._leave_queue(fetch)
        fetch.session.close(fetch.id)
        entry = fetch.entry
        if entry is not None and entry.holder is fetch and entry.phase in (Phase.CLAIMED, Phase.DELIVERED):
            self.counters.returned += fetch.state is Want.DELIVERED
            self._release(entry)

    def _untold(self, fetch: Fetch) -> int:
        """Why its payload is gone, if this receiver may not have heard of it."""
        dying = fetch.state is Want.WRITING and fetch.entry is not None and fetch.entry.phase is Phase.DYING
        return wire.GONE if dying else fetch.lost

    def _has_write(self, fetch: Fetch) -> bool:
        if fetch.state in (Want.WRITING, Want.WITHDRAWN):
            return True
        return fetch.state is Want.FAILED and any(t.holder is fetch for t in self.tickets)

    def _acknowledge(self, fetch: Fetch) -> None:
        """The receiver took what it was given, however long ago."""
        self._leave_queue(fetch)
        fetch.session.close(fetch.id)
        self.counters.acknowledged += 1
        given, claimed = fetch.given, fetch.entry
        kept = given is not None and given.phase is not Phase.FREED
        if given is not None and kept and (given.holder is fetch or given.phase is Phase.PUBLISHED):
            self.shelf.drop(given, Event.ACKNOWLEDGE)
        if fetch.state is Want.FAILED and fetch.lost:
            self._bury(fetch.key, fetch.lost)  # what it took was an earlier one; of the later one it has not heard
        if claimed is not None and claimed is not given and claimed.holder is fetch:
            self._release(claimed)

    def _fail(self, fetch: Fetch, code: int, detail: str, *, settled: bool) -> None:
        self._leave_queue(fetch)
        _move(fetch, Step.FAIL)
        fetch.entry = None
        fetch.failure = wire.Failed(fetch.id, code, detail[:1024], settled)
        fetch.lost = code if code in (wire.EXPIRED, wire.GONE) else 0
        if fetch.lost:
            self._await_word(fetch.session)
        self._say(fetch.session, fetch.failure)

    def _leave_queue(self, fetch: Fetch) -> None:
        queue = self._interests.get(fetch.key)
        if queue is not None and fetch in queue:
            del queue[fetch]
            if not queue:
                del self._interests[fetch.key]

    def _say(self, session: Session, message: wire.ToReceiver) -> None:
        if not self.has_left(session):
            session.outgoing.append(message)
            session.is_quiet = False
            self.talking[session] = None

    # --- stock receivers ----------------------------------------------------------------------------------

    def pull(self, caller: StockCaller, entry: Entry, *, destination: int, length: int, region_size: int) -> None:
        """Serve a stock pull: start its write, or refuse it. The answer comes in `pulls.answers`."""
        if self._closing:
            self.pulls.refuse(caller)
        else:
            self.pulls.serve(caller, entry, destination=destination, length=length, region_size=region_size)

    # --- time ---------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Do what is due: fail slow writes, drop what nobody fetched, give up on silent receivers."""
        silent = [s for s in self.sessions.values() if s.last_heard + self.limits.acknowledge_timeout <= now]
        self.silent += [s for s in silent if s.connected]
        for session in silent:
            session.connected = False  # all of them first: what one gives up must not go to another
        for ticket in [t for t in self.tickets if t.deadline <= now and t.course is Course.RUNNING]:
            self.counters.overdue_writes += 1
            seconds = self.limits.transfer_timeout(ticket.size)
            self._tell_failed(ticket, Course.OVERDUE, f"{ticket.size} bytes were not written within {seconds:g} s")
        for entry in self.shelf.expired(now):
            self.counters.expired += 1
            self.expired.append(entry.key)
            self._give_up(entry, wire.EXPIRED, f"not fetched within {self.limits.ttl:g} s")
        for session in silent:
            self._lapse(session)
        self.pulls.expire(now)

    def _lapse(self, session: Session) -> None:
        """Its acknowledgement time is over: what it was given or offered goes to whoever asks next."""
        for fetch in list(session.fetches.values()):
            entry = fetch.entry
            if fetch.lost:
                self._bury(fetch.key, fetch.lost)
                fetch.lost = 0
            if fetch.state is Want.DELIVERED:
                _move(fetch, Step.LAPSE)
            elif fetch.state is Want.OFFERED:
                self._requeue(fetch)
            else:
                continue
            if entry is not None and entry.holder is fetch:
                self._release(entry)

    def next_deadline(self) -> float:
        """When `expire` has something to do next; `inf` if never."""
        when = self.shelf.next_expiry() or inf
        for ticket in self.tickets:
            if ticket.course is Course.RUNNING:
                when = min(when, ticket.deadline)
        for session in self.sessions.values():
            if session.connected or any(map(_may_lapse, session.fetches.values())):
                when = min(when, session.last_heard + self.limits.acknowledge_timeout)
        self.alarm = when = min(when, self.pulls.next_deadline())
        return when

    # --- closing ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No write is started from now on; those under way go on."""
        self._closing = True

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
        fetches = [t.holder for t in self.tickets if isinstance(t.holder, Fetch)]
        self._say(session, wire.Leaving([f.id for f in fetches if f.session is session]))


def _move(fetch: Fetch, event: Step) -> None:
    fetch.state = step(WANT_TABLE, fetch.state, event)
    fetch.session.is_quiet = False


def _may_lapse(fetch: Fetch) -> bool:
    return fetch.state in (Want.DELIVERED, Want.OFFERED) or fetch.lost != 0


def _wanted(session: Session) -> int:
    """Its open fetches, without those that it cancelled and whose writes have not ended: it may have asked anew."""
    return sum(fetch.state is not Want.WITHDRAWN for fetch in session.fetches.values())


def _is_writing(holder: Fetch | StockCaller | None) -> bool:
    return isinstance(holder, Fetch) and holder.state is Want.WRITING
