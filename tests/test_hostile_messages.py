"""Whatever is said to a connector, by port, unix name or a sender: counted and answered as the decoders have it.

Traffic beside it goes on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import trio
from beside import DEPLOYMENT, HELLO, REMOTE, answers_to, beside_traffic, malformed, mangled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig import POOL, Pair, begin, filled, open_pair, port_of, wait_until

from trio_mori import RemoteProtocolError, TrioMoriError
from trio_mori._offers import offers_of
from trio_mori._protocol import stock_wire, wire
from trio_mori._unix_transport import _pack, _unpack
from trio_mori._zmq_dialler import open_dialler
from trio_mori._zmq_listener import ListeningLink, open_listener
from trio_mori._zmq_socket import MAX_FRAMES
from trio_mori.abc import Arrived, Connected

TO_SENDER: list[list[bytes]] = [
    wire.encode(HELLO),
    wire.encode(wire.Inquiry(1, 1, True, DEPLOYMENT)),
    wire.encode(wire.Requests(b"s" * 16, 1, b"e" * 16, [wire.Fetch(1, "k@0_1", 0, 0, 100), wire.Ack([1])])),
    wire.encode(
        wire.Requests(b"s" * 16, 1, b"e" * 16, [wire.Cancel([1]), wire.Heartbeat(1, 1, [1], [], []), wire.Bye()])
    ),
    stock_wire.encode_request(stock_wire.Query("k@0_1")),
    stock_wire.encode_request(stock_wire.Pull("k@0_1", b"e", b"m", 0, 100)),
]
RANDOM = st.lists(st.binary(max_size=64), min_size=1, max_size=10)
MESSAGE = st.one_of(mangled(TO_SENDER), RANDOM)

# Its answer is like no other, and comes after those to all that was said before.
LAST = stock_wire.encode_request(stock_wire.Query("last@0_1"))
PACKET = st.one_of(
    MESSAGE.map(lambda frames: b"\0" + _pack(frames)),
    MESSAGE.map(lambda frames: b"\1" + _pack(frames)),
    st.binary(min_size=1, max_size=200),
)


def is_malformed(frames: Sequence[bytes]) -> bool:
    """Whether a sender's decoders refuse it."""
    try:
        if wire.is_native(frames):
            wire.decode_from_receiver(frames)
        else:
            stock_wire.decode_request(frames)
    except RemoteProtocolError:
        return True
    return False


def is_last(frames: Sequence[bytes]) -> bool:
    """Whether it answers `LAST`."""
    try:
        answer = stock_wire.decode_answer(frames)
    except RemoteProtocolError:
        return False
    return isinstance(answer, stock_wire.Found) and answer.request_id == "last@0_1"


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(messages=st.lists(MESSAGE, max_size=20))
async def test_what_is_malformed_by_the_decoders_is_counted_and_answered_once_and_nothing_else_is(
    messages: list[list[bytes]],
) -> None:
    heard = [frames for frames in messages if len(frames) <= MAX_FRAMES]  # the link leaves longer ones out
    expected = sum(map(is_malformed, heard))
    async with (
        open_pair(sender=REMOTE, receiver=REMOTE) as pair,
        beside_traffic(pair, "messages at random", payloads=3) as traffic,
    ):
        await pair.put("last", filled(1))
        async with open_dialler("127.0.0.1", port_of(pair.sender)) as link:
            assert await link.receive() == [Connected()]
            for frames in [*messages, LAST]:
                link.send(frames)
            answers: list[list[bytes]] = []
            while not any(map(is_last, answers)):
                answers += [event.frames for event in await link.receive() if isinstance(event, Arrived)]
            assert malformed(pair) == expected
            answers += await answers_to(link)
            assert expected <= len(answers) - 1 <= len(heard)
            assert pair.sender.statistics().peers <= 2
        await pair.sender.cleanup("last")
        await wait_until(lambda: traffic.seconds)
        assert malformed(pair) == expected


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(packets=st.lists(PACKET, max_size=30))
async def test_what_comes_by_the_unix_name_is_counted_and_answered_as_what_comes_by_the_port(
    packets: list[bytes],
) -> None:
    heard = messages_of(packets)
    expected = sum(map(is_malformed, heard))
    async with open_pair() as pair, beside_traffic(pair, "packets at random", payloads=3) as traffic:
        await pair.put("last", filled(1))
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            await stranger.connect(f"\0{local_name(pair)}")
            answers = []
            try:
                for packet in [
                    *packets,
                    b"\0",
                    b"\0" + _pack(LAST),
                ]:  # the first ends a message
                    await stranger.send(packet)
                while answer := await stranger.recv(65536):
                    answers.append(_unpack(answer[1:], MAX_FRAMES) or [])
                    if is_last(answers[-1]):
                        break
            except OSError:  # hung up on, and what it was told before may be lost
                pass
            await wait_until(lambda: malformed(pair) >= expected)
            assert len(answers) <= len(heard) + 1
        await pair.sender.cleanup("last")
        await wait_until(lambda: traffic.seconds)
        assert malformed(pair) == expected


def messages_of(packets: Sequence[bytes]) -> list[list[bytes]]:
    """What packets, and the end of a message, come to."""
    messages: list[list[bytes]] = []
    message = b""
    for packet in [*packets, b"\0"]:
        if packet == b"\1":  # a part without content: it is hung up on
            break
        if packet == b"\2":  # no part of a message
            continue
        message += packet[1:]
        if packet[:1] == b"\0":
            frames = _unpack(message, MAX_FRAMES)
            messages += [] if frames is None else [frames]
            message = b""
    return messages


def local_name(pair: Pair) -> str:
    assert pair.sender._sender is not None
    return pair.sender._sender.reception.local


# --- a hostile sender -----------------------------------------------------------------------------------------


def is_malformed_answer(frames: Sequence[bytes]) -> bool:
    """Whether a receiver's decoders refuse it."""
    try:
        if wire.is_native(frames):
            wire.decode_from_sender(frames)
        else:
            stock_wire.decode_answer(frames)
    except RemoteProtocolError:
        return True
    return False


async def next_hello(listener: ListeningLink) -> tuple[wire.Hello, bytes]:
    """The next one that comes, and its route."""
    while True:
        for event in await listener.receive():
            if isinstance(event, Arrived):
                body = wire.decode_from_receiver(event.frames)
                if isinstance(body, wire.Hello):
                    return body, event.route


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(data=st.data())
async def test_whatever_a_sender_says_is_counted_once_by_its_receiver_and_hurts_no_other_sender(
    data: st.DataObject,
) -> None:
    async with (
        open_pair(sender=REMOTE, receiver=REMOTE) as pair,
        beside_traffic(pair, "a sender at random", payloads=3) as traffic,
        pair.fabric.open(pool_size=POOL) as engine,
        open_listener(["127.0.0.1"], 0) as listener,
        trio.open_nursery() as nursery,
    ):
        place = {"source_host": "127.0.0.1", "source_port": listener.port}
        waiting = begin(nursery, pair.receiver.get, "0", "1", "k", place)
        hello, route = await next_hello(listener)
        epoch = os.urandom(16)
        head = (hello.session, hello.generation, epoch)
        welcome = wire.Welcome(
            1, hello.session, hello.generation, epoch, 9, engine.name, "", offers_of(engine), DEPLOYMENT
        )
        said = [
            wire.encode(welcome),
            wire.encode(wire.Replies(*head, [wire.Done(1, 0, 100, b"\x01\x90"), wire.Pulse(1, [1])])),
            wire.encode(wire.Replies(*head, [wire.Ready(1, 1, 1 << 40), wire.Closed([1, 2]), wire.Leaving([])])),
            wire.encode(wire.Replies(*head, [wire.Failed(1, 3, "no", True), wire.Retracted(1, 1)])),
            wire.encode(wire.Stale(*head)),
            wire.encode(wire.Mismatch(hello.session, hello.generation, ["shm"], "no")),
            wire.encode(wire.VersionRange(1, 1)),
            stock_wire.encode_answer(stock_wire.TRANSFER_ERROR),
            stock_wire.encode_answer(stock_wire.Found("k@0_1", 100, True)),
        ]
        messages = data.draw(st.lists(st.one_of(mangled(said), st.sampled_from(said), RANDOM), max_size=20))
        heard = [frames for frames in messages if len(frames) <= MAX_FRAMES]
        refused = [frames for frames in heard if is_malformed_answer(frames)]
        for frames in refused:
            listener.send(frames, route)
        await wait_until(lambda: pair.receiver.statistics().events["malformed_in"] >= len(refused))
        assert pair.receiver.statistics().events["malformed_in"] == len(refused)
        understood = [frames for frames in heard if frames not in refused]
        for frames in understood:
            listener.send(frames, route)
        # What is understood may be no answer to anything: it counts once at most, as what is not.
        listener.send([b"", b"junk"], route)
        await wait_until(lambda: pair.receiver.statistics().events["malformed_in"] > len(refused))
        seen = len(traffic.seconds)
        await wait_until(lambda: len(traffic.seconds) > seen)
        assert pair.receiver.statistics().events["malformed_in"] <= len(heard) + 1
        engine.kill()  # what it was given to write to comes back only with the proof that it cannot
        waiting.scope.cancel()
        await waiting.over.wait()
        assert waiting.error is None or isinstance(waiting.error, TrioMoriError)
