"""Which fetch gets which payload, and who is told that nothing comes.

The first live fetch of a key owns its payload: others wait behind it, and have it when the first has failed, was
cancelled, or did not acknowledge in time.

**Why a destination is never written to twice.** A destination belongs to one round of one fetch. `Ready` begins a new
round and voids it; so does a lapse. A fetch that is sent again brings a destination only for the round that waits
for one.
"""

from __future__ import annotations

from collections.abc import Callable

from . import wire
from .entries import ENTRY_TABLE, Entry, Event, Fetch, Phase, Step, Ticket, step
from .roster import Roster
from .shelf import Shelf


class Matching:
    """A part of `Outbox`: the fetches that wait, and the payloads that they are given.

    Args:
        start: Have a write started.

    Attributes:
        waiting: The fetches of each key that have no payload yet, in the order in which they are served.
        is_stopped: No write is started any more.
    """

    def __init__(self, shelf: Shelf, roster: Roster, *, start: Callable[[Ticket], None]) -> None:
        self.waiting: dict[str, dict[Fetch, None]] = {}
        self.is_stopped = False
        self._shelf = shelf
        self._roster = roster
        self._start = start

    # --- fetches ------------------------------------------------------------------------------------------

    def join(self, fetch: Fetch) -> None:
        """A new fetch: the last of its key."""
        self.waiting.setdefault(fetch.key, {})[fetch] = None
        self.look_for(fetch)

    def look_for(self, fetch: Fetch) -> None:
        """Give a waiting fetch what there is, or tell it that it is gone."""
        entry = self._shelf.find(fetch.key)
        if entry is not None:
            self.match(entry)
        elif tombstone := self._shelf.exhume(fetch.key):
            self.fail(fetch, tombstone.reason, tombstone.detail, settled=True)

    def requeue(self, fetch: Fetch) -> None:
        """Its payload was replaced or went to others before it had it: first in the queue again."""
        fetch.move(Step.REQUEUE)
        fetch.entry = None
        self.waiting[fetch.key] = {fetch: None, **self.waiting.get(fetch.key, {})}

    def leave(self, fetch: Fetch) -> None:
        """It waits no longer, if it did."""
        queue = self.waiting.get(fetch.key)
        if queue is not None and fetch in queue:
            del queue[fetch]
            if not queue:
                del self.waiting[fetch.key]

    def fail(self, fetch: Fetch, code: int, detail: str, *, settled: bool) -> None:
        """Tell a fetch that nothing comes; `settled`: and that no byte of a write to it moves any more."""
        self.leave(fetch)
        fetch.move(Step.FAIL)
        is_forgotten = fetch.entry is not None and fetch.entry.is_forgotten
        fetch.entry = None
        fetch.failure = wire.Failed(fetch.id, code, detail[:1024], settled)
        fetch.lost = code if code in (wire.EXPIRED, wire.GONE) and not is_forgotten else 0
        if fetch.lost:
            self._roster.await_word(fetch.session)
        self._roster.say(fetch.session, fetch.failure)

    # --- payloads -----------------------------------------------------------------------------------------

    def match(self, entry: Entry) -> None:
        """Give a published entry to the first live fetch of its key."""
        queue = self.waiting.get(entry.key)
        if queue is None or entry.phase is not Phase.PUBLISHED or self.is_stopped:
            return
        for fetch in queue:
            if fetch.session.connected:
                break
        else:
            return
        self.leave(fetch)
        entry.phase = step(ENTRY_TABLE, entry.phase, Event.CLAIM)
        entry.holder, fetch.entry = fetch, entry
        self.serve(fetch, entry)

    def next_fetch(self, key: str) -> Fetch | None:
        """The first live fetch that waits for a key: what is published next is for that."""
        for fetch in self.waiting.get(key, ()):
            if fetch.session.connected:
                return fetch
        return None

    def serve(self, fetch: Fetch, entry: Entry) -> None:
        """Have the payload that a fetch claimed written to its destination, or ask for one that it fits."""
        # After a lapse nothing is given anew before the receiver has answered: it may have taken what it was given
        # before, and its acknowledgement would be understood of the wrong payload.
        if fetch.capacity >= entry.size and fetch.given is None:
            fetch.move(Step.BEGIN)
            self._start(Ticket(entry, fetch, entry.extent.offset, fetch.offset, entry.size))
        else:
            # From here on the old destination is void: the receiver may free it as soon as it reads this.
            fetch.move(Step.OFFER)
            fetch.round, fetch.capacity = fetch.round + 1, 0
            self._roster.say(fetch.session, wire.Ready(fetch.id, fetch.round, entry.size))

    def release(self, entry: Entry) -> None:
        """Nobody has it any more: publish it again, unless a newer one took its key."""
        entry.holder = None
        if self._shelf.find(entry.key) is not entry:
            self._shelf.drop(entry)
            return
        self._shelf.republish(entry)
        self.match(entry)

    def bury(self, key: str, reason: int, size: int = 0) -> None:
        """A payload is gone: let somebody know, unless a newer one is there."""
        if self._shelf.find(key) is None:
            self.lose(key, reason, size)

    def lose(self, key: str, reason: int, size: int = 0) -> None:
        """Nothing comes under a key, after what is there: tell the first that waits for it, or whoever asks next."""
        self._shelf.bury(key, reason, size)
        fetch = self.next_fetch(key)
        if fetch is not None:
            self.look_for(fetch)
