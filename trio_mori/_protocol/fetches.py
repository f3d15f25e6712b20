"""What receivers ask for and take: their fetches, from the first message of each to the last.

**What keeps payloads from being lost.** A delivered entry is freed by an acknowledgement, or by a heartbeat that no
longer lists its fetch: both mean that the receiver took it. Everything else (a cancel, silence, the end of the
receiver) publishes it again.

**Why every answer can be repeated.** A fetch's record stays until the receiver says that its id is over, so that a
copy of a fetch, or a heartbeat that still lists it, is answered with what was said before.
"""

from __future__ import annotations

import msgspec

from . import wire
from .entries import Counters, Event, Fetch, Phase, Session, Step, Want
from .matching import Matching
from .roster import Roster
from .shelf import Shelf
from .tickets import Tickets

# Cancels of ids that we do not know (they overtook their fetch) are remembered until the next heartbeat. A peer that
# sends more than this between two heartbeats is not answered until then.
MAX_CLOSED = 65536


class Fetches:
    """A part of `Outbox`: what each message of a receiver does to its fetches.

    Args:
        limit: How many a receiver may have open.
    """

    def __init__(
        self, shelf: Shelf, roster: Roster, tickets: Tickets, matching: Matching, *, counters: Counters, limit: int
    ) -> None:
        self._shelf = shelf
        self._roster = roster
        self._tickets = tickets
        self._matching = matching
        self._counters = counters
        self._limit = limit

    # --- messages -----------------------------------------------------------------------------------------

    def on_fetch(self, session: Session, message: wire.Fetch) -> None:
        """It asks for a key, for the first time or once more."""
        fetch = session.fetches.get(message.id)
        if fetch is not None:
            self._on_repeated_fetch(fetch, message)
            return
        if not session.may_start(message.id):
            return
        if len(session.fetches) >= self._limit and _wanted(session) >= self._limit:
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
        self._matching.join(fetch)

    def _say_limit(self, session: Session, fetch_id: int) -> None:
        """Say that a fetch was refused. It leaves no record: that it is closed and still listed means just this."""
        limit = self._limit
        detail = f"{limit} fetches of one receiver are open, which is the most (max_fetches_per_peer)"
        self._roster.say(session, wire.Failed(fetch_id, wire.LIMIT, detail, True))

    def _on_repeated_fetch(self, fetch: Fetch, message: wire.Fetch) -> None:
        if self._matching.is_stopped and fetch.state is Want.OFFERED:
            return  # nothing is begun any more; the farewell answers it
        awaited = fetch.state in (Want.WAITING, Want.OFFERED) and fetch.capacity == 0
        if awaited and message.round == fetch.round and message.capacity:
            # It answers the offer, so that it has not seen what was given before, and never will.
            fetch.given = None
            fetch.offset, fetch.capacity = message.offset, message.capacity
            if not self._destination_allowed(fetch):
                return
            if fetch.entry is not None:
                self._matching.serve(fetch, fetch.entry)
                return
        self._repeat(fetch)

    def _destination_allowed(self, fetch: Fetch) -> bool:
        limit, entry = fetch.session.region_size, fetch.entry
        if fetch.offset + fetch.capacity <= limit:
            return True
        detail = f"destination {fetch.offset}+{fetch.capacity} is past the {limit} bytes of the receiver's pool"
        self._matching.fail(fetch, wire.TRANSFER_FAILED, detail, settled=True)
        if entry is not None:
            self._matching.release(entry)
        return False

    def on_cancel(self, session: Session, fetch_id: int) -> None:
        """It wants none any more, whether or not we know of the fetch."""
        fetch = session.fetches.get(fetch_id)
        if fetch is not None:
            self.withdraw(fetch)
            if fetch_id in session.fetches:
                return  # answered when the write ends
        elif len(session.closed) < MAX_CLOSED:
            session.close(fetch_id)
        else:
            return
        self._roster.say(session, wire.Closed([fetch_id]))

    def on_ack(self, session: Session, fetch_id: int) -> None:
        """It has what it was given or told last."""
        fetch = session.fetches.get(fetch_id)
        if fetch is None:
            return
        if fetch.given is not None:
            self._acknowledge(fetch)
        elif fetch.state is Want.FAILED and not self._tickets.serves(fetch):
            session.close(fetch_id)

    def on_heartbeat(self, session: Session, message: wire.Heartbeat) -> None:
        """It lives, and these are its fetches that are not over: what is delivered and not listed was taken."""
        if message.sequence <= session.sequence:
            return
        session.is_quiet = True  # until something comes of it
        listed = frozenset(message.open).union(message.unacknowledged, message.returning)
        session.judge(message, listed)
        for fetch in [f for f in session.fetches.values() if f.id <= message.highest and f.id not in listed]:
            self.on_ack(session, fetch.id)
            if fetch.id in session.fetches:
                self.withdraw(fetch)
        for fetch_id in message.returning:
            self.on_cancel(session, fetch_id)
        unknown: list[int] = []
        for fetch_id in message.open:
            if fetch_id in session.fetches:
                self._repeat(session.fetches[fetch_id])
            elif session.may_start(fetch_id):
                unknown.append(fetch_id)
            else:
                self._say_limit(session, fetch_id)
        self._pulse(session, unknown)

    def on_still(self, session: Session, sequence: int) -> None:
        """The last heartbeat once more."""
        if session.is_quiet:
            session.sequence = sequence
            self._pulse(session, [])
        elif session.beat is not None:
            self.on_heartbeat(session, msgspec.structs.replace(session.beat, sequence=sequence))

    def _pulse(self, session: Session, unknown: list[int]) -> None:
        quiet = session.is_quiet and not unknown
        self._roster.say(session, wire.Pulse(session.sequence, unknown))
        session.is_quiet = quiet

    def _repeat(self, fetch: Fetch) -> None:
        """The receiver still waits for this one: say again what it was last told."""
        entry = fetch.entry
        if fetch.state is Want.DELIVERED and entry is not None:
            self._roster.say(fetch.session, wire.Done(fetch.id, fetch.round, entry.size, entry.header))
        elif fetch.state is Want.OFFERED and entry is not None:
            self._roster.say(fetch.session, wire.Ready(fetch.id, fetch.round, entry.size))
        elif fetch.failure is not None:
            self._roster.say(fetch.session, fetch.failure)
        elif fetch.state is Want.WAITING:
            self._matching.look_for(fetch)
            if fetch.state is Want.WAITING and fetch.round:  # else its destination is ahead of the data, if it has one
                self._roster.say(fetch.session, wire.Retracted(fetch.id, fetch.round))
        elif fetch.state is Want.LAPSED:
            # Its `Done` was lost, or is still on its way: only a new round may be written to.
            fetch.round, fetch.capacity = fetch.round + 1, 0
            self._matching.requeue(fetch)
            self._matching.look_for(fetch)

    # --- how fetches end ----------------------------------------------------------------------------------

    def withdraw(self, fetch: Fetch) -> None:
        """The receiver does not want it: over now, or when the write that is under way has ended."""
        if fetch.state is Want.WITHDRAWN:
            return
        if reason := self._untold(fetch):
            self._matching.bury(fetch.key, reason)
        if self._tickets.serves(fetch):
            fetch.move(Step.WITHDRAW)
            return
        self._matching.leave(fetch)
        fetch.session.close(fetch.id)
        entry = fetch.entry
        if entry is not None and entry.holder is fetch and entry.phase in (Phase.CLAIMED, Phase.DELIVERED):
            self._counters.returned += fetch.state is Want.DELIVERED
            self._matching.release(entry)

    def _untold(self, fetch: Fetch) -> int:
        """Why its payload is gone, if this receiver may not have heard of it."""
        entry = fetch.entry
        dying = fetch.state is Want.WRITING and entry is not None and entry.phase is Phase.DYING
        return wire.GONE if dying and entry is not None and not entry.is_forgotten else fetch.lost

    def _acknowledge(self, fetch: Fetch) -> None:
        """The receiver took what it was given, however long ago."""
        self._matching.leave(fetch)
        fetch.session.close(fetch.id)
        self._counters.acknowledged += 1
        given, claimed = fetch.given, fetch.entry
        kept = given is not None and given.phase is not Phase.FREED
        if given is not None and kept and (given.holder is fetch or given.phase is Phase.PUBLISHED):
            self._shelf.drop(given, Event.ACKNOWLEDGE)
        if fetch.state is Want.FAILED and fetch.lost:
            # What it took was an earlier one; of the later one it has not heard.
            self._matching.bury(fetch.key, fetch.lost)
        if claimed is not None and claimed is not given and claimed.holder is fetch:
            self._matching.release(claimed)

    def revive(self, session: Session) -> None:
        """It is heard again: its fetches are served."""
        session.connected = True
        self._roster.await_word(session)
        for fetch in list(session.fetches.values()):
            if fetch.state is Want.WAITING:
                self._matching.look_for(fetch)

    def withdraw_all(self, session: Session) -> None:
        """What it had and did not acknowledge goes to others."""
        for fetch in list(session.fetches.values()):
            self.withdraw(fetch)

    def lapse(self, session: Session) -> None:
        """Its acknowledgement time is over: what it was given or offered goes to whoever asks next."""
        for fetch in list(session.fetches.values()):
            entry = fetch.entry
            if fetch.lost:
                self._matching.bury(fetch.key, fetch.lost)
                fetch.lost = 0
            if fetch.state is Want.DELIVERED:
                fetch.move(Step.LAPSE)
            elif fetch.state is Want.OFFERED:
                self._matching.requeue(fetch)
            else:
                continue
            if entry is not None and entry.holder is fetch:
                self._matching.release(entry)

    def owe(self, session: Session) -> bool:
        """Whether it may still take what it was given, or be written to."""
        return any(f.state is Want.DELIVERED or self._tickets.serves(f) for f in session.fetches.values())

    def may_lapse(self, session: Session) -> bool:
        """Whether `lapse` has something to do."""
        fetches = session.fetches.values()
        return any(f.state in (Want.DELIVERED, Want.OFFERED) or f.lost != 0 for f in fetches)


def _wanted(session: Session) -> int:
    """Its open fetches, without those that it cancelled and whose writes have not ended: it may have asked anew."""
    return sum(fetch.state is not Want.WITHDRAWN for fetch in session.fetches.values())
