"""The records that the receiver's book keeps, and how their states move.

Every record has one state that moves along the table of this module and in no other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import auto
from math import inf

import attrs

from . import wire
from .entries import Symbol
from .extents import Extent

# Reason of `Interest.failure` beside the codes of `wire.Failed`.
PEER_LOST = 256
PEER_RESTARTED = 257
TOO_BIG = 258
MISMATCH = 259

# How an incarnation of a sender ends, in words.
CLOSED = "it closed"
ENDED = "its process ended"


class State(Symbol):
    """How far an interest has come."""

    POSTED = auto()  # asked for, with or without a destination
    OFFERED = auto()  # the sender has it; room for it is awaited here
    ARRIVED = auto()
    TAKEN = auto()  # a caller reads it, not acknowledged yet
    RETURNING = auto()  # given up; the sender has not confirmed yet, and may write to the destination if there is one
    OVER = auto()


class Cause(Symbol):
    """What happens to an interest."""

    OFFER = auto()
    PLACE = auto()  # room was found: asked again, with a destination
    ARRIVE = auto()
    TAKE = auto()
    GIVE_BACK = auto()  # by the caller, or because it can never fit
    FAIL = auto()  # the sender said so, and no byte can come
    DOUBT = auto()  # the sender said so, but bytes may still come
    ACKNOWLEDGE = auto()
    CONFIRM = auto()  # the sender has it back
    REPOST = auto()  # the sender is gone: ask its successor
    VANISH = auto()  # the sender is gone, and nothing is owed


INTEREST_TABLE: Mapping[tuple[State, Cause], State] = {
    (State.POSTED, Cause.OFFER): State.OFFERED,
    (State.POSTED, Cause.PLACE): State.POSTED,
    (State.POSTED, Cause.ARRIVE): State.ARRIVED,
    (State.POSTED, Cause.GIVE_BACK): State.RETURNING,
    (State.POSTED, Cause.FAIL): State.OVER,
    (State.POSTED, Cause.DOUBT): State.RETURNING,
    (State.POSTED, Cause.REPOST): State.POSTED,
    (State.POSTED, Cause.VANISH): State.OVER,
    (State.OFFERED, Cause.OFFER): State.OFFERED,
    (State.OFFERED, Cause.PLACE): State.POSTED,
    (State.OFFERED, Cause.ARRIVE): State.ARRIVED,  # a payload without tensors needs no destination
    (State.OFFERED, Cause.GIVE_BACK): State.RETURNING,
    (State.OFFERED, Cause.FAIL): State.OVER,
    (State.OFFERED, Cause.DOUBT): State.RETURNING,
    (State.OFFERED, Cause.REPOST): State.POSTED,
    (State.OFFERED, Cause.VANISH): State.OVER,
    (State.ARRIVED, Cause.TAKE): State.TAKEN,
    (State.ARRIVED, Cause.GIVE_BACK): State.RETURNING,
    (State.ARRIVED, Cause.VANISH): State.OVER,
    (State.TAKEN, Cause.ACKNOWLEDGE): State.OVER,
    (State.TAKEN, Cause.GIVE_BACK): State.RETURNING,
    (State.TAKEN, Cause.VANISH): State.OVER,
    (State.RETURNING, Cause.ARRIVE): State.RETURNING,  # `Done` crossed the cancel: the destination is free
    (State.RETURNING, Cause.FAIL): State.RETURNING,
    (State.RETURNING, Cause.DOUBT): State.RETURNING,
    (State.RETURNING, Cause.CONFIRM): State.OVER,
    (State.RETURNING, Cause.VANISH): State.OVER,
}


@attrs.define(eq=False)
class Interest:
    """One wish for one key.

    Attributes:
        id: Rises per channel; names it on the wire. It gets another one when its destination is called back.
        round: Of the destination; see `wire.Fetch`.
        extent: The destination that the sender was told, or where the payload lies.
        preposted: Bytes that it holds of the room for destinations ahead of the data.
        needed: Bytes that the sender asked for in its last `Ready`.
        epoch: The only incarnation of the sender that will do, if one was named; that of the one that sent it.
        size, header: Of the payload that arrived.
        failure: Why it failed: a code of `wire.Failed` or of this module, and the sender's words.
        returned: Number of the last heartbeat when it was given up; -2 if its sender has said that it may still write.
        waiter: What the shell wakes.
    """

    channel: Channel
    key: str
    id: int
    state: State = State.POSTED
    round: int = 0
    extent: Extent | None = None
    preposted: int = 0
    needed: int = 0
    epoch: bytes | None = None
    size: int = 0
    header: bytes = b""
    failure: tuple[int, str] | None = None
    returned: int = 0
    waiter: object = None

    @property
    def settled(self) -> bool:
        """Whether a caller that waits for it can stop waiting."""
        return self.failure is not None or self.state in (State.ARRIVED, State.OVER)

    @property
    def is_told(self) -> bool:
        """Whether the sender has said that it failed before the caller gave it up."""
        return self.failure is not None and self.failure[0] < PEER_LOST


@attrs.define(eq=False)
class Channel:
    """Our session with one sender.

    Attributes:
        token: Our name for ourselves towards it.
        handle: What the shell keeps for it.
        generation: Of the connection; raised by the shell with each hello.
        epoch: The sender's incarnation; None while none is known to live.
        up: Whether a welcome came for this generation: only then something is said.
        interests: All that are not over, by id.
        ghosts: Destinations that senders of earlier epochs may still write to.
        former: Epochs that know this token and were given up: what they have under our ids is not what we have.
        end: How the last incarnation ended, if it is known to have and no other came: `CLOSED` or `ENDED`.
        lost_since: When an established sender went away; `inf` while it is there or never was.
        sequence: Number of the last heartbeat, said or only counted.
        said: Number of the last one that was said.
        answered: The highest number of one that was answered.
        is_steady: Nothing that a heartbeat lists has changed since the last one was said, and nothing was said.
        owes: The last full heartbeat listed payloads that are here, and not acknowledged or not given back.
        repeats: The last heartbeat said what one before it had said, and the sender had answered.
    """

    token: bytes
    handle: object = None
    generation: int = 0
    epoch: bytes | None = None
    up: bool = False
    next_id: int = 1
    sequence: int = 0
    interests: dict[int, Interest] = attrs.field(factory=dict)
    ghosts: dict[bytes, list[Extent]] = attrs.field(factory=dict)
    former: set[bytes] = attrs.field(factory=set)
    outgoing: list[wire.ToSender] = attrs.field(factory=list)
    end: str = ""
    lost_since: float = inf
    said: int = 0
    answered: int = 0
    is_steady: bool = False
    owes: bool = False
    repeats: bool = False

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is lost if the next heartbeat comes later: all is said and heard, and nothing is owed."""
        return self.up and self.is_steady and self.repeats and not self.owes


# What the memory of an interest is held for.
HELD_AS: Mapping[State, str] = {
    State.POSTED: "posted",
    State.OFFERED: "posted",
    State.ARRIVED: "arrived",
    State.TAKEN: "leased",
    State.RETURNING: "quarantined",
}
