from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_mori._errors import RemoteProtocolError
from trio_mori._protocol import stock_wire, wire

deterministic = pytest.mark.deterministic

KEY = "k@0_1"
SESSION, EPOCH = b"s" * 16, b"e" * 16
MOST = (1 << 63) - 1
DEPLOYMENT = wire.Deployment("host", 0, 1, 2, "digest")
OFFERS = [wire.Offer("shm", b"engine", b"memory"), wire.Offer("", b"", b"")]

TO_SENDER = [
    wire.Fetch(1, KEY, 0, 4096, 65536),
    wire.Fetch(MOST, "k" * 1024, MOST, MOST, MOST),
    wire.Cancel([]),
    wire.Cancel([1, MOST]),
    wire.Ack([7]),
    wire.Heartbeat(1, 2, [1], [2], [3]),
    wire.Bye(),
    wire.Still(3, 2),
]
TO_RECEIVER = [
    wire.Done(1, 2, 3, b"header"),
    wire.Done(0, 0, 0, b""),
    wire.Ready(1, 2, 3),
    wire.Failed(1, wire.TRANSFER_FAILED, "why", True),
    wire.Failed(1, 255, "", False),
    wire.Closed([1]),
    wire.Pulse(1, [2]),
    wire.Leaving([3]),
    wire.Retracted(1, 2),
]
FROM_RECEIVER = [
    wire.Hello(1, 1, SESSION, 1, 5.0, OFFERS, DEPLOYMENT),
    wire.Requests(SESSION, 1, EPOCH, []),
    wire.Requests(SESSION, 1, EPOCH, TO_SENDER),
    wire.Inquiry(1, 1, True, DEPLOYMENT),
]
FROM_SENDER = [
    wire.Welcome(1, SESSION, 1, EPOCH, 4096, "shm", "", OFFERS, DEPLOYMENT),
    wire.VersionRange(1, 2),
    wire.Stale(SESSION, 1, EPOCH),
    wire.Mismatch(SESSION, 1, ["shm"], "why"),
    wire.Replies(SESSION, 1, EPOCH, TO_RECEIVER),
]
FROM_HOLDER = [wire.Holder(1, DEPLOYMENT, 4711, False), wire.VersionRange(1, 2)]


# --- the native dialect -----------------------------------------------------------------------------------


@deterministic
@pytest.mark.parametrize("body", FROM_RECEIVER)
def test_what_a_receiver_says_arrives_as_it_was(body: wire.FromReceiver) -> None:
    assert wire.decode_from_receiver(wire.encode(body)) == body


@deterministic
@pytest.mark.parametrize("body", FROM_SENDER)
def test_what_a_sender_says_arrives_as_it_was(body: wire.FromSender) -> None:
    assert wire.decode_from_sender(wire.encode(body)) == body


@deterministic
@pytest.mark.parametrize("body", FROM_HOLDER)
def test_what_the_holder_of_a_port_says_arrives_as_it_was(body: wire.FromHolder) -> None:
    assert wire.decode_from_holder(wire.encode(body)) == body


@deterministic
def test_every_message_is_tried_here() -> None:
    """Who adds one adds it to the lists above."""
    assert {type(m) for m in TO_SENDER} == set(wire.ToSender.__args__)
    assert {type(m) for m in TO_RECEIVER} == set(wire.ToReceiver.__args__)
    assert {type(b) for b in FROM_RECEIVER} == set(wire.FromReceiver.__args__)
    assert {type(b) for b in FROM_SENDER} == set(wire.FromSender.__args__)
    assert {type(b) for b in FROM_HOLDER} == set(wire.FromHolder.__args__)


@deterministic
@pytest.mark.parametrize("body", FROM_RECEIVER + FROM_SENDER + FROM_HOLDER)
def test_the_last_frame_of_every_native_message_is_no_msgpack(body: Any) -> None:
    """A stock sender decodes it, fails, and says so; which is how we know what it is."""
    frames = wire.encode(body)
    assert wire.is_native(frames)
    assert frames[-1][0] == 0xC1
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(frames[-1])
    with pytest.raises(RemoteProtocolError):
        stock_wire.decode_request([b"", frames[-1]])


@deterministic
def test_what_peers_of_every_version_must_understand_has_always_the_same_bytes() -> None:
    assert wire.encode(wire.VersionRange(1, 3)) == [b"\xc1trio-mori", b"\xc1\x93\x22\x01\x03"]
    assert wire.encode(FROM_RECEIVER[0])[1].startswith(b"\xc1\x98\x20\x01\x01\xc4\x10" + SESSION)


@deterministic
def test_nobody_listens_to_what_is_not_for_it() -> None:
    for bodies, decode in (
        (FROM_RECEIVER + FROM_HOLDER[:1], wire.decode_from_sender),
        (FROM_SENDER + FROM_HOLDER, wire.decode_from_receiver),
        (FROM_RECEIVER + FROM_SENDER[:1] + FROM_SENDER[2:], wire.decode_from_holder),
    ):
        for body in bodies:
            with pytest.raises(RemoteProtocolError):
                decode(wire.encode(body))


def mangled(body: Any, change: Callable[[Any], Any]) -> list[bytes]:
    """The frames of a message, with something else in it."""
    fields = msgspec.msgpack.decode(wire.encode(body)[1][1:])
    return [wire.MAGIC, b"\xc1" + msgspec.msgpack.encode(change(fields))]


def replaced(*path: int, by: Any) -> Callable[[Any], Any]:
    """Something else at a place."""

    def change(fields: Any) -> Any:
        inner = fields
        for index in path[:-1]:
            inner = inner[index]
        inner[path[-1]] = by
        return fields

    return change


HELLO, BATCH = FROM_RECEIVER[0], wire.Requests(SESSION, 1, EPOCH, [wire.Fetch(1, KEY, 0, 0, 0), wire.Ack([1])])
REFUSED = {
    "a field too many": mangled(HELLO, lambda fields: [*fields, 1]),
    "a field too few": mangled(HELLO, lambda fields: fields[:-1]),
    "an unknown tag": mangled(HELLO, replaced(0, by=99)),
    "no array": mangled(HELLO, lambda fields: {"tag": 32}),
    "a short token": mangled(HELLO, replaced(3, by=b"s" * 15)),
    "a long token": mangled(HELLO, replaced(3, by=b"s" * 17)),
    "a negative generation": mangled(HELLO, replaced(4, by=-1)),
    "a generation of 64 bits": mangled(HELLO, replaced(4, by=1 << 63)),
    "seventeen offers": mangled(HELLO, replaced(6, by=[["shm", b"", b""]] * 17)),
    "a long name": mangled(HELLO, replaced(6, 0, 0, by="n" * 1025)),
    "a long descriptor": mangled(HELLO, replaced(6, 0, 1, by=b"d" * 4097)),
    "text for bytes": mangled(HELLO, replaced(6, 0, 1, by="text")),
    "a stage that is no number": mangled(HELLO, replaced(7, 1, by="0")),
    "an empty key": mangled(BATCH, replaced(4, 0, 2, by="")),
    "a long key": mangled(BATCH, replaced(4, 0, 2, by="k" * 1025)),
    "a fraction": mangled(BATCH, replaced(4, 0, 1, by=1.5)),
    "a flag for a number": mangled(BATCH, replaced(4, 0, 1, by=True)),
    "a message of senders": mangled(BATCH, replaced(4, 0, by=[19, [1]])),
    "a hello in a batch": mangled(BATCH, replaced(4, 0, by=[33])),
    "too many ids": mangled(BATCH, replaced(4, 1, 1, by=[1] * 65537)),
    "too many messages": mangled(BATCH, replaced(4, by=[[5]] * 65537)),
    "another magic": [b"\xc1trio_mori", wire.encode(HELLO)[1]],
    "no magic": wire.encode(HELLO)[1:],
    "no body": [wire.MAGIC],
    "an empty body": [wire.MAGIC, b""],
    "a body that does not begin as it should": [wire.MAGIC, wire.encode(HELLO)[1][1:]],
    "nothing behind the beginning": [wire.MAGIC, b"\xc1"],
    "more behind the end": [wire.MAGIC, wire.encode(HELLO)[1] + b"\xc0"],
    "a frame too many": [*wire.encode(HELLO), b""],
    "no frame": [],
    "a large body": [wire.MAGIC, b"\xc1" + b"\xc0" * wire.MAX_BODY],
    "a deep body": [wire.MAGIC, b"\xc1" + b"\x91" * (wire.MAX_BODY - 10)],
    "a deep field": [wire.MAGIC, b"\xc1\x98\x20\x01\x01" + b"\x91" * 100_000],
    "an array of four billion": [wire.MAGIC, b"\xc1\xdd\xff\xff\xff\xff"],
    "a text of four billion": [wire.MAGIC, b"\xc1\x91\xdb\xff\xff\xff\xff"],
}


@deterministic
@pytest.mark.parametrize("frames", REFUSED.values(), ids=REFUSED)
def test_what_no_peer_says_is_refused(frames: Sequence[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode_from_receiver(frames)
    with pytest.raises(RemoteProtocolError):
        wire.decode_from_sender(frames)
    with pytest.raises(RemoteProtocolError):
        wire.decode_from_holder(frames)


@deterministic
def test_the_longest_heartbeat_is_understood() -> None:
    ids = list(range(MOST - wire.MAX_OPEN, MOST))
    body = wire.Requests(SESSION, 1, EPOCH, [wire.Heartbeat(1, MOST, ids, [], [])])
    assert wire.decode_from_receiver(wire.encode(body)) == body


@deterministic
def test_a_batch_is_split_so_that_each_part_is_understood_and_nothing_is_lost() -> None:
    messages = [wire.Done(i, 0, 1, bytes(wire.MAX_BODY // 5)) for i in range(11)]
    arrived: list[wire.ToReceiver] = []
    while len(arrived) < len(messages):
        rest = wire.Replies(SESSION, 1, EPOCH, messages[len(arrived) :])
        frames, count = wire.encode_batch(rest)
        part = wire.decode_from_sender(frames)
        assert isinstance(part, wire.Replies)
        assert len(part.messages) == count > 0
        arrived += part.messages
    assert arrived == messages


# --- the vllm-omni dialect --------------------------------------------------------------------------------

# As the stock connector spells them, byte for byte.
QUERY = b"query_info\x81\xaarequest_id\xa5k@0_1"
PULL = (
    b"\x85\xaarequest_id\xa5k@0_1\xb2engine_desc_packed\xc4\x02ed\xafmem_desc_packed\xc4\x02md"
    b"\xaadst_offset\xcd\x10\x00\xa6length\xce\x00\x01\x00\x00"
)
FOUND = b"\x83\xaarequest_id\xa5k@0_1\xa9data_size\xcd\x01\x00\xacis_fast_path\xc3"


@deterministic
def test_requests_and_answers_have_the_bytes_of_the_stock_connector() -> None:
    query, pull = stock_wire.Query(KEY), stock_wire.Pull(KEY, b"ed", b"md", 4096, 65536)
    assert stock_wire.encode_request(query) == [b"", QUERY]
    assert stock_wire.encode_request(pull) == [b"", PULL]
    assert stock_wire.decode_request([b"", QUERY]) == query
    assert stock_wire.decode_request([b"", PULL]) == pull
    assert stock_wire.encode_answer(stock_wire.Found(KEY, 256, True)) == [b"", FOUND]
    assert stock_wire.decode_answer([b"", FOUND]) == stock_wire.Found(KEY, 256, True)


@deterministic
@pytest.mark.parametrize("answer", [b"info_not_found", b"trans_done", b"trans_error"])
def test_the_fixed_answers_are_the_stock_connectors(answer: bytes) -> None:
    assert answer in (stock_wire.NOT_FOUND, stock_wire.TRANSFER_DONE, stock_wire.TRANSFER_ERROR)
    assert stock_wire.encode_answer(answer) == [b"", answer]
    assert stock_wire.decode_answer([b"", answer]) == answer


@deterministic
def test_what_a_later_stock_connector_may_add_is_not_looked_at() -> None:
    more = {"request_id": KEY, "data_size": 1, "is_fast_path": False, "checksum": 5}
    assert stock_wire.decode_answer([b"", msgspec.msgpack.encode(more)]) == stock_wire.Found(KEY, 1, False)
    assert stock_wire.decode_request([b"", b"query_info" + msgspec.msgpack.encode(more)]) == stock_wire.Query(KEY)


def packed(**changes: Any) -> bytes:
    """A pull with something else in it."""
    fields = {**msgspec.msgpack.decode(PULL), **changes}
    return msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not None})


REFUSED_STOCK = {
    "nothing": [],
    "no delimiter": [QUERY],
    "a delimiter with something in it": [b"x", QUERY],
    "a frame too many": [b"", QUERY, b""],
    "empty": [b"", b""],
    "a query of nothing": [b"", b"query_info"],
    "a query of a list": [b"", b"query_info\x90"],
    "a query for a number": [b"", b"query_info\x81\xaarequest_id\x01"],
    "a query for an empty key": [b"", b"query_info\x81\xaarequest_id\xa0"],
    "a query cut off": [b"", QUERY[:-1]],
    "a query with more behind it": [b"", QUERY + b"\xc0"],
    "a pull without a length": [b"", packed(length=None)],
    "a pull of a negative length": [b"", packed(length=-1)],
    "a pull of a fraction": [b"", packed(length=1.5)],
    "a pull to a negative offset": [b"", packed(dst_offset=-4096)],
    "a pull to an offset of 64 bits": [b"", packed(dst_offset=1 << 63)],
    "a pull with a long descriptor": [b"", packed(mem_desc_packed=b"d" * 4097)],
    "a pull with text for a descriptor": [b"", packed(engine_desc_packed="text")],
    "a pull of a long key": [b"", packed(request_id="k" * 1025)],
    "large": [b"", b"\xc0" * (wire.MAX_BODY + 1)],
    "deep": [b"", b"\x81\xa1x" * 100_000],
    "a deep query": [b"", b"query_info" + b"\x91" * 100_000],
}


@deterministic
@pytest.mark.parametrize("frames", REFUSED_STOCK.values(), ids=REFUSED_STOCK)
def test_what_is_no_request_of_a_stock_connector_is_refused(frames: Sequence[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        stock_wire.decode_request(frames)
    with pytest.raises(RemoteProtocolError):
        stock_wire.decode_answer(frames)


@deterministic
@pytest.mark.parametrize("answer", [b"trans_don", b"trans_done ", b"\xc3", FOUND[:-1], b"\x80", b"\x92\x01\x02"])
def test_what_is_no_answer_of_a_stock_connector_is_refused(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        stock_wire.decode_answer([b"", answer])


# --- whatever comes ---------------------------------------------------------------------------------------

CODECS: list[tuple[Callable[[Sequence[bytes]], Any], Callable[[Any], list[bytes]]]] = [
    (wire.decode_from_receiver, wire.encode),
    (wire.decode_from_sender, wire.encode),
    (wire.decode_from_holder, wire.encode),
    (stock_wire.decode_request, stock_wire.encode_request),
    (stock_wire.decode_answer, stock_wire.encode_answer),
]
GOOD = [wire.encode(body) for body in FROM_RECEIVER + FROM_SENDER + FROM_HOLDER] + [
    [b"", each] for each in (QUERY, PULL, FOUND)
]


def _spoil(frames: list[bytes], at: int, cut: int, junk: bytes) -> list[bytes]:
    last = frames[-1]
    at %= len(last) + 1
    return [*frames[:-1], last[:at] + junk + last[at + cut :]]


spoiled = st.builds(
    _spoil, st.sampled_from(GOOD), st.integers(0, 400), st.sampled_from((0, 0, 1, 1, 2, 30)), st.binary(max_size=4)
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text() | st.integers(0, 50), inner, max_size=5),
)
tagged = st.builds(
    lambda tag, rest: [tag, *rest], st.sampled_from((1, 2, 4, 16, 19, 32, 33, 37, 38, 48, 49)), st.lists(values)
)
well_formed = st.builds(
    lambda native, value: [wire.MAGIC if native else b"", b"\xc1" * native + msgspec.msgpack.encode(value)],
    st.booleans(),
    values | tagged,
)
junk = st.lists(st.binary(max_size=40) | st.sampled_from((wire.MAGIC, b"")), max_size=3)


@given(frames=spoiled | well_formed | junk | st.binary(max_size=60).map(lambda body: [wire.MAGIC, b"\xc1" + body]))
def test_whatever_comes_is_understood_or_refused_and_nothing_else(frames: list[bytes]) -> None:
    for decode, encode in CODECS:
        try:
            body = decode(frames)
        except RemoteProtocolError:
            continue
        again = encode(body)
        assert encode(decode(again)) == again  # not the bodies: a number in them may be none, and equals nothing
