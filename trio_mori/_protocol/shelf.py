"""The sender's payloads, found by key, by request and by age, and the memory of those that are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import attrs

from .._errors import KeyBusy
from . import wire
from .alarm import Alarm
from .entries import ENTRY_TABLE, Entry, Event, Phase, step
from .extents import Extent, Extents
from .keys import edge_of, names_of

# Keys whose payload expired or was cleaned up, remembered until the next fetch has been told. A fetch that finds
# nothing simply waits, so that forgetting the oldest costs an answer, not correctness; 65,536 keys are about 20 MB.
MAX_TOMBSTONES = 65536

# What memory is held for.
HELD_AS = ("pinned", *(phase.name.lower() for phase in Phase if phase is not Phase.FREED))


@attrs.frozen
class Tombstone:
    """What is remembered of a payload that is gone.

    Attributes:
        reason: A code of `wire.Failed`.
        detail: What the next fetch is told beside that.
    """

    reason: int
    detail: str


class Shelf:
    """Owns every extent of outgoing payloads: they are given back in `free` only, and only unpinned.

    An entry is *staged*, then *filed* under its key until it is dropped, acknowledged or replaced. A delivered
    entry whose key was taken by a newer one stays on the shelf, but is not found any more.

    Attributes:
        on_empty: Called whenever it has become empty, if there is one: whoever waits for that sets it.
    """

    def __init__(self, extents: Extents, ttl: float, alarm: Alarm) -> None:
        self._extents = extents
        self._ttl = ttl
        self._alarm = alarm
        self._staged: dict[Entry, None] = {}
        # Everything that was filed and is not freed, oldest first. All have the same time to live, so that this is
        # the order of expiry, too.
        self._filed: dict[Entry, None] = {}
        self._by_key: dict[str, Entry] = {}
        self._by_name: dict[str, dict[Entry, None]] = {}
        self._tombstones: OrderedDict[str, Tombstone] = OrderedDict()
        self._buried: dict[str, dict[str, None]] = {}  # their keys, by name
        self.on_empty: Callable[[], None] | None = None

    def stage(self, key: str, extent: Extent) -> Entry:
        """Take over an extent for a put that is under way; end it with `Outbox.publish` or `Outbox.unstage`."""
        entry = Entry(key, extent)
        self._staged[entry] = None
        return entry

    @property
    def staged(self) -> int:
        """How many puts are under way."""
        return len(self._staged)

    @property
    def pinned(self) -> bool:
        """Whether any entry is."""
        return any(entry.pins for entry in self._filed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held for a receiver: what was put is delivered and acknowledged, or was given up."""
        return not self._staged and all(entry.phase is Phase.DYING for entry in self._filed)

    def unfetched(self) -> list[Entry]:
        """What was put and no receiver has been given, oldest first."""
        return [entry for entry in self._filed if entry.phase in (Phase.PUBLISHED, Phase.CLAIMED)]

    def check_free(self, key: str) -> None:
        """Whether a new payload may take this key.

        Raises:
            KeyBusy: the payload that has it is being transferred.
        """
        current = self._by_key.get(key)
        if current is not None and current.transferred:
            raise KeyBusy(
                f"put of {key!r} refused: its payload is being transferred right now; put again when it has left"
            )

    def file(self, entry: Entry, now: float) -> None:
        """Publish a staged entry under its key, which is free."""
        entry.phase = step(ENTRY_TABLE, entry.phase, Event.PUBLISH)
        del self._staged[entry]
        self._filed[entry] = None
        self._by_key[entry.key] = entry
        if entry.key in self._tombstones:
            self._unbury(entry.key)
        entry.names = names_of(entry.key)
        for name in entry.names:
            self._by_name.setdefault(name, {})[entry] = None
        entry.expires_at = now + self._ttl
        self._alarm.at = min(self._alarm.at, entry.expires_at)

    def republish(self, entry: Entry) -> None:
        """A filed entry that nobody has any more is for whoever asks next."""
        entry.phase = step(ENTRY_TABLE, entry.phase, Event.RELEASE)
        self._alarm.at = min(self._alarm.at, entry.expires_at)

    def find(self, key: str) -> Entry | None:
        """The entry that has a key, whatever its phase."""
        return self._by_key.get(key)

    def named(self, name: str) -> list[Entry]:
        """The entries with that key or of that request, on every edge."""
        return list(self._by_name.get(name, ()))

    def drop(self, entry: Entry, cause: Event = Event.DROP) -> None:
        """Give up an entry: at once, or when the last write that reads it has ended."""
        if entry.pins:
            entry.phase = Phase.DYING
            self._unfile(entry)
            if self.on_empty is not None and self.is_empty:
                self.on_empty()
        else:
            self.free(entry, cause)

    def unpinned(self, entry: Entry) -> None:
        """Somebody does not read it any more."""
        if entry.phase is Phase.DYING and not entry.pins:
            self.free(entry, Event.SETTLE)
        self._alarm.at = min(self._alarm.at, entry.expires_at)

    def free(self, entry: Entry, cause: Event) -> None:
        """Give an unpinned entry's memory back."""
        entry.phase = step(ENTRY_TABLE, entry.phase, cause)
        entry.holder = None
        self._unfile(entry)
        self._staged.pop(entry, None)
        self._filed.pop(entry, None)
        if entry.encoding is not None:
            self._extents.free(entry.encoding.extent)
            entry.encoding = None
        self._extents.free(entry.extent)
        if self.on_empty is not None and self.is_empty:
            self.on_empty()

    def _unfile(self, entry: Entry) -> None:
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        for name in entry.names:
            namesakes = self._by_name.get(name)
            if namesakes is not None:
                namesakes.pop(entry, None)
                if not namesakes:
                    del self._by_name[name]

    def bury(self, key: str, reason: int, size: int = 0) -> None:
        """Remember why a key's payload, of so many bytes if that is known, is gone: for the next fetch."""
        self._tombstones[key] = Tombstone(reason, self.describe(reason, size))
        self._tombstones.move_to_end(key)
        for name in names_of(key):
            self._buried.setdefault(name, {})[key] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._unbury(next(iter(self._tombstones)))

    def describe(self, reason: int, size: int) -> str:
        """What is told of a payload that is gone, beside why."""
        parts = [f"{size} bytes"] if size else []
        if reason == wire.EXPIRED:
            parts.append(f"not fetched within {self._ttl:g} s")
        return ", ".join(parts)

    def exhume(self, key: str) -> Tombstone | None:
        """Why a key has no payload, once; None if nothing is known or there is one."""
        return self._unbury(key) if key in self._tombstones and key not in self._by_key else None

    def forget(self, name: str, edge: str | None) -> None:
        """Let nobody know why payloads with that key or of that request are gone."""
        for key in list(self._buried.get(name, ())):
            if edge is None or edge_of(key) == edge:
                self._unbury(key)

    def _unbury(self, key: str) -> Tombstone:
        for name in names_of(key):
            keys = self._buried[name]
            del keys[key]
            if not keys:
                del self._buried[name]
        return self._tombstones.pop(key)

    def expired(self, now: float) -> list[Entry]:
        """Entries whose time is over and which no engine reads."""
        due = []
        for entry in self._filed:
            if entry.expires_at > now:
                break
            if not entry.pins:
                due.append(entry)
        return due

    def next_expiry(self) -> float | None:
        """When the next unpinned entry expires."""
        return next((e.expires_at for e in self._filed if not e.pins), None)

    def everything(self) -> list[Entry]:
        """All entries, staged ones included."""
        return [*self._staged, *self._filed]

    def held(self) -> dict[str, int]:
        """Bytes of the pool by what they are held for: a phase's name, or ``pinned``; all of them, so that none comes
        and goes.
        """
        total = dict.fromkeys(HELD_AS, 0)
        for entry in self.everything():
            total["pinned" if entry.pins else entry.phase.name.lower()] += sum(e.size for e in extents_of(entry))
        return total


def extents_of(entry: Entry) -> list[Extent]:
    """What an entry holds of the pool."""
    return [entry.extent] if entry.encoding is None else [entry.extent, entry.encoding.extent]
