"""What comes by the ports of a sender from whoever can reach them, with traffic beside it that goes on.

How long the traffic takes meanwhile is measured and printed (`-s`), and is no part of what is asserted: the machine may
be busy.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from statistics import median

import msgspec
import pytest
import torch
import trio
from descriptors import open_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig import LIMIT, SOON, Pair, filled, open_pair, port_of, wait_until

from trio_mori import open_connector
from trio_mori._engines import _shm_owner as owners
from trio_mori._offers import offers_of
from trio_mori._protocol import stock_wire, wire
from trio_mori._zmq_dialler import open_dialler
from trio_mori.abc import Arrived, Connected, Link

REMOTE = {"same_host_link": "off"}

# Mangled copies of these come nearer to being understood than random bytes.
DEPLOYMENT = wire.Deployment("h", 1, 0, 0, "")
HELLO = wire.Hello(1, 1, b"s" * 16, 1, 5.0, [wire.Offer("shm", b"e", b"m")], DEPLOYMENT)
SEEDS: list[list[bytes]] = [
    wire.encode(HELLO),
    wire.encode(wire.Inquiry(1, 1, True, DEPLOYMENT)),
    wire.encode(wire.Requests(b"s" * 16, 1, b"e" * 16, [wire.Fetch(1, "k@0_1", 0, 0, 100), wire.Ack([1])])),
    wire.encode(
        wire.Requests(b"s" * 16, 1, b"e" * 16, [wire.Cancel([1]), wire.Heartbeat(1, 1, [1], [], []), wire.Bye()])
    ),
    stock_wire.encode_request(stock_wire.Query("k@0_1")),
    stock_wire.encode_request(stock_wire.Pull("k@0_1", b"e", b"m", 0, 100)),
]


@st.composite
def mangled(draw: st.DrawFn) -> list[bytes]:
    """One of them with bytes changed, cut off or added."""
    frames = list(draw(st.sampled_from(SEEDS)))
    frame = bytearray(frames[-1])
    for _ in range(draw(st.integers(0, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    frames[-1] = bytes(frame[: draw(st.integers(1, len(frame)))]) + draw(st.binary(max_size=8))
    return frames


MESSAGES = st.lists(st.one_of(mangled(), st.lists(st.binary(max_size=64), min_size=1, max_size=10)), max_size=20)


class Traffic:
    """Payloads from the sender to the receiver, one after the other."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.seconds: list[float] = []

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self.one()

    async def one(self) -> None:
        """One payload."""
        key = f"live{len(self.seconds)}"
        started = time.perf_counter()
        with trio.fail_after(SOON):
            await self._pair.put(key, filled(1000))
            value = await self._pair.get(key)
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, filled(1000))
        self.seconds.append(time.perf_counter() - started)


@asynccontextmanager
async def beside_traffic(pair: Pair, what: str, *, payloads: int = 50) -> AsyncIterator[Traffic]:
    """Payloads go across while the body does its worst; afterwards all is as it was.

    Args:
        payloads: How many go across before.
    """
    traffic = Traffic(pair)
    for _ in range(payloads):
        await traffic.one()
    before = median(traffic.seconds)
    traffic.seconds.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(traffic.run)
        yield traffic
        nursery.cancel_scope.cancel()
    if traffic.seconds:
        print(f"{what}: {1e3 * before:.2f} ms a payload before, {1e3 * median(traffic.seconds):.2f} ms beside it")
    for key in range(len(traffic.seconds) + 1):  # the last one was cut off
        await pair.sender.cleanup(f"live{key}")
    await pair.assert_whole()


def malformed(pair: Pair) -> int:
    return pair.sender.statistics().events["malformed_out"]


async def answers_to(link: Link, *, pause: float = 0.05) -> list[list[bytes]]:
    """What comes until nothing comes any more."""
    answers: list[list[bytes]] = []
    while True:
        with trio.move_on_after(pause) as scope:
            answers += [event.frames for event in await link.receive() if isinstance(event, Arrived)]
        if scope.cancelled_caught:
            return answers


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(messages=MESSAGES)
async def test_whatever_comes_by_the_port_is_answered_once_at_most_and_counted(messages: list[list[bytes]]) -> None:
    async with (
        open_pair(sender=REMOTE, receiver=REMOTE) as pair,
        beside_traffic(pair, "messages at random", payloads=3) as traffic,
    ):
        async with open_dialler("127.0.0.1", port_of(pair.sender)) as link:
            assert await link.receive() == [Connected()]
            before = malformed(pair)
            for frames in messages:
                link.send(frames)
            assert len(await answers_to(link)) <= len(messages)
            assert malformed(pair) - before <= len(messages)
            assert pair.sender.statistics().peers <= 2
        await wait_until(lambda: traffic.seconds)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(packets=st.lists(st.binary(min_size=1, max_size=200), max_size=30))
async def test_whatever_comes_by_the_unix_name_hurts_nobody(packets: list[bytes]) -> None:
    async with open_pair() as pair:
        await Traffic(pair).one()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0{local_name(pair)}")
            stranger.setblocking(False)
            for packet in packets:
                try:
                    stranger.send(packet)
                except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                    break
            await Traffic(pair).one()
        await pair.assert_whole()


def local_name(pair: Pair) -> str:
    assert pair.sender._sender is not None
    return pair.sender._sender.reception.local


async def test_a_flood_of_messages_that_are_none_costs_an_answer_and_a_count_each() -> None:
    async with open_pair(sender=REMOTE, receiver=REMOTE) as pair, beside_traffic(pair, "1,000 malformed messages"):
        async with open_dialler("127.0.0.1", port_of(pair.sender)) as link:
            assert await link.receive() == [Connected()]
            answers = 0
            for hundreds in range(1, 11):
                for number in range(100):
                    link.send([wire.MAGIC, b"\xc1junk"] if number % 2 else [b"", b"junk"])
                with trio.fail_after(LIMIT):
                    while answers < 100 * hundreds:
                        answers += len(await link.receive())
            assert answers == malformed(pair) == 1000
            assert await answers_to(link) == []


async def test_two_thousand_connections_that_come_and_go_leave_nothing() -> None:
    # Two thousand handshakes take five seconds on two idle cores.
    async with (
        open_pair(sender=REMOTE, receiver=REMOTE, within=10 * LIMIT) as pair,
        beside_traffic(pair, "connections that come and go"),
    ):
        assert pair.sender._sender is not None
        book, stock = pair.sender._sender.book, pair.sender._sender.reception.stock
        for _ in range(50):
            async with AsyncExitStack() as stack:
                links = []
                for _ in range(40):
                    links.append(await stack.enter_async_context(open_dialler("127.0.0.1", port_of(pair.sender))))
                for link in links:
                    assert await link.receive() == [Connected()]
                    link.send(wire.encode(wire.Hello(1, 1, os.urandom(16), 1, 5.0, HELLO.offers, DEPLOYMENT)))
                    link.send(stock_wire.encode_request(stock_wire.Query("nothing@0_1")))
                    link.send(stock_wire.encode_request(stock_wire.Pull("nothing@0_1", b"e", b"m", 0, 1)))
                for link in links:
                    answers: list[object] = []
                    while len(answers) < 3:
                        answers += await link.receive()
        assert len(book.sessions) == 1
        assert not stock.peers
        assert not book.pulls._callers


@pytest.mark.parametrize(
    "first",
    [b"", b"\xff", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", bytes(1000), b"\xff" * 200],
    ids=["silent", "slow", "http", "half", "zeros", "ones"],
)
async def test_sockets_that_speak_something_else_or_nothing_delay_nobody(first: bytes) -> None:
    async with open_pair(sender=REMOTE, receiver=REMOTE) as pair:
        await Traffic(pair).one()
        descriptors = len(os.listdir("/proc/self/fd"))
        async with beside_traffic(pair, f"100 sockets that say {first[:8]!r}"):
            with ExitStack() as stack:
                sockets = []
                for _ in range(100):
                    each = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(pair.sender))))
                    each.sendall(first)
                    sockets.append(each)
                await trio.sleep(0.1)
        await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
        assert pair.sender.statistics().peers == 1


@pytest.mark.deterministic
async def test_a_close_is_not_delayed_by_sockets_that_say_nothing() -> None:
    with ExitStack() as stack:
        async with open_pair(sender=REMOTE, receiver=REMOTE) as pair:
            for _ in range(20):
                stack.enter_context(socket.create_connection(("127.0.0.1", port_of(pair.sender))))
            await pair.assert_whole()
            began = time.monotonic()
        assert time.monotonic() - began < 5


async def test_forged_descriptors_of_shared_memory_are_refused_once_each_and_nothing_stays_open() -> None:
    """By the port, with real pools: another process's number, another file, a size past the end, half of another."""
    pool = {"memory_pool_size": 1 << 20, "host": "127.0.0.1", "zmq_port": 0}
    with trio.fail_after(LIMIT):
        async with open_connector({**pool, "role": "sender", **REMOTE}) as sender, open_connector(pool) as other:
            engine = other._engine
            (genuine,) = offers_of(engine)
            forged = [
                replaced(genuine, pid=1),
                replaced(genuine, pid=os.getppid()),
                replaced(genuine, started=1),
                replaced(genuine, fd=0),
                replaced(genuine, size=1 << 40),
                replaced(genuine, nonce=bytes(16)),
                replaced(genuine, uid=12345),
                wire.Offer("shm", b"", b""),
                wire.Offer("shm", genuine.engine, genuine.engine),
                wire.Offer("shm", os.urandom(4096), os.urandom(4096)),
            ]
            port = int(sender.get_connection_info()["zmq_port"])
            async with open_dialler("127.0.0.1", port) as link:
                assert await link.receive() == [Connected()]
                before = open_files()
                for offer in forged:
                    link.send(wire.encode(wire.Hello(1, 1, os.urandom(16), 1, 5.0, [offer], DEPLOYMENT)))
                    [event] = await link.receive()
                    assert isinstance(event, Arrived)
                    assert isinstance(wire.decode_from_sender(event.frames), wire.Mismatch)
                await wait_until(lambda: open_files() <= before)
                assert sender.statistics().peers == 0


def replaced(offer: wire.Offer, **fields: object) -> wire.Offer:
    """A descriptor that says something else."""
    owner = msgspec.msgpack.decode(offer.engine, type=owners.Owner)
    memory = msgspec.msgpack.decode(offer.memory, type=owners.Memory)
    of_owner = {name: value for name, value in fields.items() if name in owners.Owner.__struct_fields__}
    of_memory = {name: value for name, value in fields.items() if name in owners.Memory.__struct_fields__}
    return wire.Offer(
        offer.name,
        msgspec.msgpack.encode(msgspec.structs.replace(owner, **of_owner)),
        msgspec.msgpack.encode(msgspec.structs.replace(memory, **of_memory)),
    )
