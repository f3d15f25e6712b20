"""What the sender's book keeps records of: payloads, the receivers' sessions, and their fetches.

Every record has one state, an Enum, that moves along a table of this module and in no other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from math import inf
from typing import TypeVar

import attrs

from .._errors import InternalError
from . import wire
from .extents import Extent


class Symbol(Enum):
    """A state or an event. Its hash is that of the object: nine look-ups for each payload took 12 us, and take 3."""

    __hash__ = object.__hash__


class Phase(Symbol):
    """Who a payload belongs to. Whether an engine touches it is `Entry.pins`, whatever the phase."""

    STAGED = auto()  # claimed by a put that has not finished; nobody else sees it
    PUBLISHED = auto()  # filed under its key, for the first fetch that comes
    CLAIMED = auto()  # a fetch or pull has it: a destination is awaited, or a write is under way
    DELIVERED = auto()  # written and announced, not acknowledged
    DYING = auto()  # dropped while an engine still reads it
    FREED = auto()


class Event(Symbol):
    """What happens to a payload."""

    PUBLISH = auto()
    CLAIM = auto()
    COMPLETE = auto()  # the write ended well
    RELEASE = auto()  # the write failed, or the fetch was cancelled, or its acknowledgement time is over
    ACKNOWLEDGE = auto()
    DROP = auto()  # expired, cleaned up, replaced, or its put failed
    SETTLE = auto()  # the last write that touched it ended


# A `DROP` leads to DYING instead of FREED while the entry is pinned; that is the one condition beside the table.
ENTRY_TABLE: Mapping[tuple[Phase, Event], Phase] = {
    (Phase.STAGED, Event.PUBLISH): Phase.PUBLISHED,
    (Phase.STAGED, Event.DROP): Phase.FREED,
    (Phase.PUBLISHED, Event.CLAIM): Phase.CLAIMED,
    (Phase.PUBLISHED, Event.ACKNOWLEDGE): Phase.FREED,  # an acknowledgement that came after its time
    (Phase.PUBLISHED, Event.DROP): Phase.FREED,
    (Phase.CLAIMED, Event.ACKNOWLEDGE): Phase.FREED,  # the same, when it was offered once more
    (Phase.CLAIMED, Event.COMPLETE): Phase.DELIVERED,
    (Phase.CLAIMED, Event.RELEASE): Phase.PUBLISHED,
    (Phase.CLAIMED, Event.DROP): Phase.FREED,
    (Phase.DELIVERED, Event.ACKNOWLEDGE): Phase.FREED,
    (Phase.DELIVERED, Event.RELEASE): Phase.PUBLISHED,
    (Phase.DELIVERED, Event.DROP): Phase.FREED,
    (Phase.DYING, Event.SETTLE): Phase.FREED,
}


class Want(Symbol):
    """How far a receiver's fetch has come, as the sender sees it."""

    WAITING = auto()  # for the payload, or behind another fetch
    OFFERED = auto()  # `Ready` was sent; the payload is claimed for it
    WRITING = auto()
    WITHDRAWN = auto()  # cancelled while a write is under way; answered when that ends
    DELIVERED = auto()  # `Done` was sent
    LAPSED = auto()  # delivered, but its acknowledgement time is over: the payload is published again
    FAILED = auto()  # `Failed` was sent; kept until the receiver stops listing it, for the answer may be lost


class Step(Symbol):
    """What happens to a fetch."""

    OFFER = auto()
    BEGIN = auto()
    REQUEUE = auto()
    DELIVER = auto()
    WITHDRAW = auto()
    FAIL = auto()
    LAPSE = auto()


WANT_TABLE: Mapping[tuple[Want, Step], Want] = {
    (Want.WAITING, Step.OFFER): Want.OFFERED,
    (Want.WAITING, Step.BEGIN): Want.WRITING,
    (Want.WAITING, Step.FAIL): Want.FAILED,
    (Want.OFFERED, Step.OFFER): Want.OFFERED,
    (Want.OFFERED, Step.BEGIN): Want.WRITING,
    (Want.OFFERED, Step.REQUEUE): Want.WAITING,
    (Want.OFFERED, Step.FAIL): Want.FAILED,
    (Want.WRITING, Step.DELIVER): Want.DELIVERED,
    (Want.WRITING, Step.WITHDRAW): Want.WITHDRAWN,
    (Want.WRITING, Step.FAIL): Want.FAILED,
    (Want.DELIVERED, Step.LAPSE): Want.LAPSED,
    (Want.LAPSED, Step.REQUEUE): Want.WAITING,  # the receiver never saw the `Done`
    (Want.FAILED, Step.WITHDRAW): Want.WITHDRAWN,
}

_State = TypeVar("_State", bound=Enum)
_Cause = TypeVar("_Cause", bound=Enum)


def step(table: Mapping[tuple[_State, _Cause], _State], state: _State, cause: _Cause) -> _State:
    """Where a cause leads from a state.

    Raises:
        InternalError: nowhere; the caller should have known.
    """
    try:
        return table[state, cause]
    except KeyError:
        raise InternalError(f"{type(state).__name__} {state.name} has no {cause.name}") from None


@attrs.define(eq=False)
class Encoding:
    """The vllm-omni encoding of an entry, made for a stock peer that asked for it.

    Attributes:
        ready: It has been written.
    """

    extent: Extent
    size: int
    ready: bool = False


@attrs.define(eq=False)
class Entry:
    """One payload in the pool.

    Attributes:
        key: Its full key, ``{key}@{from}_{to}``.
        extent: Where it lies.
        size: Its bytes in the pool; may be 0, for a structure without tensors.
        header: Describes it to a native receiver.
        is_raw: A single tensor or bytes: a stock receiver takes the pool bytes as they are.
        pins: Writes that read it right now, stuck ones included.
        expires_at: When it is dropped if nobody has fetched it.
        holder: The fetch or stock caller that has it while it is claimed or delivered.
        encoding: Its stock encoding, once a stock peer has asked.
        names: Under which it is filed for clean-up.
        is_forgotten: It was cleaned up, and whoever asks for its key from now on is to be told nothing of it.
    """

    key: str
    extent: Extent
    size: int = 0
    header: bytes = b""
    is_raw: bool = False
    phase: Phase = Phase.STAGED
    pins: int = 0
    expires_at: float = inf
    holder: Fetch | StockCaller | None = None
    encoding: Encoding | None = None
    names: tuple[str, ...] = ()
    is_forgotten: bool = False

    @property
    def stock_size(self) -> int | None:
        """Bytes that a stock receiver would be given; None while it can be given none."""
        if self.is_raw:
            return self.size
        return self.encoding.size if self.encoding is not None and self.encoding.ready else None

    @property
    def transferred(self) -> bool:
        """Whether it is on its way to its holder. A write that was given up may read it, too, and does not count."""
        offered = isinstance(self.holder, Fetch) and self.holder.state is Want.OFFERED
        return self.phase is Phase.CLAIMED and not offered


@attrs.define(eq=False)
class Session:
    """One receiver, by the token that it chose; outlives its connections.

    Attributes:
        token: Its name for itself, unique per receiver start.
        generation: Rises with each connection; messages of an earlier one are stale.
        region_size: Bytes of the receiver's pool; no destination reaches past it.
        handle: What the shell keeps for it (route, engine peer).
        connected: Whether writes may be started for it.
        fenced: Its process is proven dead.
        last_heard: When its last message came.
        highest, listed: The newest heartbeat: of all ids up to `highest` only those in `listed` may still start.
        sequence: Number of that heartbeat, or of the last one that said the same again.
        beat: That heartbeat.
        is_quiet: Nothing would come of it once more: it was answered with no more than a pulse, and since then nothing
            was said and no fetch has changed.
        floor: All ids up to this one are over, whatever the heartbeat says.
        closed: Ids above the floor that ended; they never start either.
        outgoing: Messages for it that the shell has not taken yet.
    """

    token: bytes
    generation: int
    region_size: int
    handle: object
    last_heard: float
    connected: bool = True
    fenced: bool = False
    highest: int = 0
    listed: frozenset[int] = frozenset()
    sequence: int = 0
    beat: wire.Heartbeat | None = None
    is_quiet: bool = False
    floor: int = 0
    closed: set[int] = attrs.field(factory=set)
    fetches: dict[int, Fetch] = attrs.field(factory=dict)
    outgoing: list[wire.ToReceiver] = attrs.field(factory=list)

    def may_start(self, fetch_id: int) -> bool:
        """Whether a fetch with this id can be new. A cancel that overtook its fetch, or an old copy, says no."""
        if fetch_id <= self.floor or fetch_id in self.closed:
            return False
        return fetch_id > self.highest or fetch_id in self.listed

    def close(self, fetch_id: int) -> None:
        """An id is over for good."""
        self.is_quiet = False
        self.fetches.pop(fetch_id, None)
        if fetch_id > self.floor:
            self.closed.add(fetch_id)
        while self.floor + 1 in self.closed:
            self.floor += 1
            self.closed.remove(self.floor)

    def judge(self, beat: wire.Heartbeat, listed: frozenset[int]) -> None:
        """A newer heartbeat says which ids up to its `highest` are not over at the receiver."""
        self.sequence, self.beat, self.highest, self.listed = beat.sequence, beat, beat.highest, listed
        highest = beat.highest
        self.closed = {i for i in self.closed if i > highest or i in listed}


@attrs.define(eq=False)
class Fetch:
    """One receiver's wish for one key.

    Attributes:
        round: Which destination counts; each `Ready` begins a new round and voids the destination before it.
        offset, capacity: The destination of this round; capacity 0 means none.
        entry: The payload that it claimed.
        given: The entry whose `Done` was sent, until a newer destination is written to. An acknowledgement, even one
            that comes after its time, is about this one.
        failure: The answer that was sent, kept to be repeated.
        lost: Why its payload is gone (a code of `wire.Failed`), until its receiver is known to have what it had of it,
            or to have heard; or 0.
    """

    session: Session
    id: int
    key: str
    round: int
    offset: int
    capacity: int
    state: Want = Want.WAITING
    entry: Entry | None = None
    given: Entry | None = None
    failure: wire.Failed | None = None
    lost: int = 0

    def move(self, event: Step) -> None:
        """Something happened to it."""
        self.state = step(WANT_TABLE, self.state, event)
        self.session.is_quiet = False


@attrs.define(eq=False)
class StockCaller:
    """One socket of a stock receiver: a single request in flight, no acknowledgements.

    After `trans_done` the payload is kept until the socket's next request, or for a few seconds: a reply that was
    lost is repaired by the retry.
    """

    route: bytes
    handle: object = None  # what the shell keeps for it
    held: Entry | None = None
    held_until: float = inf
    ticket: Ticket | None = None


class Course(Symbol):
    """How a write fares."""

    RUNNING = auto()
    OVERDUE = auto()  # its time ran out and its receiver was told; the engine still has it
    UNSETTLED = auto()  # the engine gave up on it without proof that it ended


@attrs.define(eq=False)
class Ticket:
    """One write that the book asks for, from `Outbox.starting` until `Outbox.write_ended`.

    Attributes:
        source: Offset in our pool.
        destination: Offset in the pool of the fetch's session, or in the stock caller's region.
        size: Bytes.
        deadline: When the receiver is told that it failed; the entry stays pinned all the same.
    """

    entry: Entry
    holder: Fetch | StockCaller
    source: int
    destination: int
    size: int
    deadline: float = inf
    course: Course = Course.RUNNING


@attrs.define
class Counters:
    """What happened since the book was opened."""

    puts: int = 0
    replaced: int = 0
    delivered: int = 0
    acknowledged: int = 0
    returned: int = 0
    expired: int = 0
    cleaned: int = 0
    failed_writes: int = 0
    overdue_writes: int = 0
    stock_delivered: int = 0
    refused_pulls: int = 0
