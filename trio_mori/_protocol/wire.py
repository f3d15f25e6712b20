"""Messages between peers of the native dialect, and their encoding.

Two frames: `MAGIC`, and a body that is `0xC1` followed by one msgpack array. No msgpack decoder accepts `0xC1`, and a
stock sender decodes the last frame whatever came before it: it answers `trans_error`, which is how we learn what it is.
A body is a `Hello`, a `Welcome`, a `VersionRange`, a `Stale`, or a batch of messages under one header: the receiver's
session, the connection's generation, the sender's epoch. A batch whose header does not match changes nothing. Between
two senders that want one port it is an `Inquiry` or a `Holder`.

Decoding trusts nothing: a body is decoded straight into typed structs with bounded fields, and anything else raises
`RemoteProtocolError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from .._errors import RemoteProtocolError

MAGIC = b"\xc1trio-mori"
VERSION = 1
OLDEST_VERSION = 1

# A message larger than this is refused before it is decoded. Skeletons above 32 KiB travel in the pool, so that
# what remains is a heartbeat with all of a peer's open fetches (see `MAX_OPEN`).
MAX_BODY = 1 << 20

# Fetches that are not over, of one receiver at one sender. Each is listed in every heartbeat by at most 9 bytes.
MAX_OPEN = 32768

# Characters of a key with its edge. Those of vllm-omni have some 60.
MAX_KEY = 1024

Uint = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Ids = Annotated[list[Uint], msgspec.Meta(max_length=65536)]
Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY)]
Blob = Annotated[bytes, msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the native messages; each subclass has a small integer as its tag."""


class Offer(Message, frozen=True):
    """An engine through which a peer's pool can be reached."""

    name: Text
    engine: Blob
    memory: Blob


class Deployment(Message, frozen=True):
    """Who a connector is within its deployment."""

    host: Text
    stage: int
    rank: int
    replica: int
    digest: Text


# --- receiver to sender -----------------------------------------------------------------------------------


class Fetch(Message, frozen=True, tag=1):
    """I want this key. With a destination (`capacity` > 0) the sender may write as soon as it has it.

    Sent again, with the `round` of the last `Ready`, it brings the destination that was asked for; a destination
    of an earlier round is void.
    """

    id: Uint
    key: Key
    round: Uint
    offset: Uint
    capacity: Uint


class Cancel(Message, frozen=True, tag=2):
    """I do not want these, or not any more, whatever became of them: the payloads stay with you.

    Answered `Closed` once no write to their destinations is or will be under way. It serves for a delivered fetch
    that nobody took, too (a negative acknowledgement).
    """

    ids: Ids


class Ack(Message, frozen=True, tag=3):
    """These were delivered and taken: free them."""

    ids: Ids


class Heartbeat(Message, frozen=True, tag=4):
    """I am alive, and of all fetches up to `highest` these are not over.

    A delivered fetch that is in none of the lists was acknowledged; any other one was cancelled. `returning` are
    the cancelled ones whose `Closed` is outstanding.
    """

    sequence: Uint
    highest: Uint
    open: Ids
    unacknowledged: Ids
    returning: Ids


class Bye(Message, frozen=True, tag=5):
    """The receiver closes, after it has cancelled everything: forget the session."""


class Still(Message, frozen=True, tag=6):
    """A heartbeat that says what the one numbered `base` said, word for word.

    `base` was answered, and nothing else was said on this connection since. One that does not follow the sender's
    last heartbeat changes nothing and is not answered; the next is a `Heartbeat`.
    """

    sequence: Uint
    base: Uint


# --- sender to receiver -----------------------------------------------------------------------------------


class Done(Message, frozen=True, tag=16):
    """The payload is in the destination of that round. `header` describes it (see `trio_mori._payload`)."""

    id: Uint
    round: Uint
    size: Uint
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY)]


class Ready(Message, frozen=True, tag=17):
    """The payload is here and needs a destination of at least `size` bytes; any earlier destination is void."""

    id: Uint
    round: Uint
    size: Uint


class Failed(Message, frozen=True, tag=18):
    """The fetch is over without data. `settled`: no byte can still arrive in its destination; else it is said again."""

    id: Uint
    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    detail: Text
    settled: bool


class Closed(Message, frozen=True, tag=19):
    """Answer to `Cancel`: the destinations are free."""

    ids: Ids


class Pulse(Message, frozen=True, tag=20):
    """Answer to a heartbeat. `unknown`: open at the receiver but not known here; say them again."""

    sequence: Uint
    unknown: Ids


class Leaving(Message, frozen=True, tag=21):
    """The sender closes; every write has ended, except those into the fetches in `unsettled`. Answered `Bye`."""

    unsettled: Ids


# Reasons in `Failed.code`.
EXPIRED = 1
GONE = 2
TRANSFER_FAILED = 3
UNREACHABLE = 4  # the sender cannot write into the receiver's pool
LIMIT = 5  # more fetches than the sender allows one peer

ToSender = Fetch | Cancel | Ack | Heartbeat | Bye | Still


class Retracted(Message, frozen=True, tag=22):
    """What was offered up to this round went elsewhere, and a destination that was placed for it is kept in vain."""

    id: Uint
    round: Uint


ToReceiver = Done | Ready | Failed | Closed | Pulse | Leaving | Retracted

# --- bodies -----------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=32):
    """First message of a receiver on every connection."""

    oldest: Uint
    newest: Uint
    session: Token
    generation: Uint
    heartbeat: float
    offers: Annotated[list[Offer], msgspec.Meta(max_length=16)]
    deployment: Deployment


class Welcome(Message, frozen=True, tag=33):
    """The sender's answer: its epoch, its engines, and which of the receiver's offers it will write through.

    `local` names its listener for processes of its host, to which the receiver may go over; empty: it has none.
    """

    version: Uint
    session: Token
    generation: Uint
    epoch: Token
    max_fetches: Uint
    chosen: Text
    local: Text
    offers: Annotated[list[Offer], msgspec.Meta(max_length=16)]
    deployment: Deployment


class VersionRange(Message, frozen=True, tag=34):
    """Answer to a hello whose versions are all unknown here."""

    oldest: Uint
    newest: Uint


class Stale(Message, frozen=True, tag=35):
    """Answer to a batch whose header does not match: say hello again."""

    session: Token
    generation: Uint
    epoch: Token


class Mismatch(Message, frozen=True, tag=36):
    """Answer to a hello: no engine in common. Names the sender's engines and says why each offer was refused."""

    session: Token
    generation: Uint
    engines: Annotated[list[Text], msgspec.Meta(max_length=16)]
    detail: Text


class Inquiry(Message, frozen=True, tag=37):
    """Another sender would listen where this one does: who is it? `wanted`: and may the other one have the port?

    The only message on its connection; answered `Holder`.
    """

    oldest: Uint
    newest: Uint
    wanted: bool
    deployment: Deployment


class Holder(Message, frozen=True, tag=38):
    """Who listens here. `yields`: it stops, and the port is free as soon as this connection has ended."""

    version: Uint
    deployment: Deployment
    pid: Uint
    yields: bool


class Requests(Message, frozen=True, tag=48):
    """A batch from a receiver."""

    session: Token
    generation: Uint
    epoch: Token
    messages: Annotated[list[ToSender], msgspec.Meta(max_length=65536)]


class Replies(Message, frozen=True, tag=49):
    """A batch from a sender."""

    session: Token
    generation: Uint
    epoch: Token
    messages: Annotated[list[ToReceiver], msgspec.Meta(max_length=65536)]


FromReceiver = Hello | Requests | Inquiry
FromSender = Welcome | VersionRange | Stale | Mismatch | Replies
FromHolder = Holder | VersionRange

_Body = TypeVar("_Body")
_encoder = msgspec.msgpack.Encoder()
_from_receiver: msgspec.msgpack.Decoder[FromReceiver] = msgspec.msgpack.Decoder(FromReceiver)
_from_sender: msgspec.msgpack.Decoder[FromSender] = msgspec.msgpack.Decoder(FromSender)
_from_holder: msgspec.msgpack.Decoder[FromHolder] = msgspec.msgpack.Decoder(FromHolder)


def encode(body: FromReceiver | FromSender | FromHolder) -> list[bytes]:
    """The frames of one native message."""
    return [MAGIC, b"\xc1" + _encoder.encode(body)]


def encode_batch(batch: Requests | Replies) -> tuple[list[bytes], int]:
    """The frames of a batch's first messages, and how many they are: not so many that a peer would refuse them."""
    count = len(batch.messages)
    while True:
        frames = encode(batch)
        if len(frames[1]) <= MAX_BODY or count == 1:
            return frames, count
        count = (count + 1) // 2
        batch = msgspec.structs.replace(batch, messages=batch.messages[:count])


def is_native(frames: Sequence[bytes]) -> bool:
    """Whether a message claims to be of the native dialect, also if it did not come whole."""
    return bool(frames) and frames[0] == MAGIC


def decode_from_receiver(frames: Sequence[bytes]) -> FromReceiver:
    """Decode what a sender got from a receiver.

    Raises:
        RemoteProtocolError: not a well-formed message of this direction.
    """
    return _decode(frames, _from_receiver)


def decode_from_sender(frames: Sequence[bytes]) -> FromSender:
    """Decode what a receiver got from a sender.

    Raises:
        RemoteProtocolError: not a well-formed message of this direction.
    """
    return _decode(frames, _from_sender)


def decode_from_holder(frames: Sequence[bytes]) -> FromHolder:
    """Decode the answer to an `Inquiry`.

    Raises:
        RemoteProtocolError: not a well-formed answer.
    """
    return _decode(frames, _from_holder)


def _decode(frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[_Body]) -> _Body:
    if len(frames) != 2 or frames[0] != MAGIC:
        raise RemoteProtocolError(f"not a native message: {len(frames)} frames, or the first is not {MAGIC!r}")
    body = frames[1]
    if len(body) > MAX_BODY or body[:1] != b"\xc1":
        raise RemoteProtocolError(f"native message of {len(body)} bytes refused: over {MAX_BODY}, or not begun by 0xC1")
    try:
        return decoder.decode(memoryview(body)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed native message: {error}") from error
