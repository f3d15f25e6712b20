"""What somebody who may connect, and means ill, cannot do: to memory, to the log, and to the transfers of others."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import trio
import zmq
from rig import LIMIT, POOL, UNIT, Pair, filled, open_pair, port_of, wait_until

from trio_mori import _zmq_socket as sockets
from trio_mori._log_limit import BURST
from trio_mori._offers import offers_of
from trio_mori._protocol import wire
from trio_mori._protocol.entries import Session
from trio_mori._zmq_dialler import DiallingLink, open_dialler
from trio_mori._zmq_listener import open_listener
from trio_mori.abc import Arrived, Connected, Disconnected
from trio_mori.testing import MemoryEngine

pytestmark = pytest.mark.deterministic

# On the ZMQ port, where strangers are; the unix link has its own check.
REMOTE = {"same_host_link": "off"}


class Stranger:
    """A connection of somebody else to a sender."""

    def __init__(self, link: DiallingLink) -> None:
        self._link = link

    async def say(self, frames: list[bytes]) -> object:
        """Say something; returns the answer, decoded."""
        self._link.send(frames)
        while True:
            for event in await self._link.receive():
                if isinstance(event, Arrived):
                    return wire.decode_from_sender(event.frames)

    async def repeat(self, session: Session, epoch: bytes, *messages: wire.ToSender) -> object:
        """Say something in another's name."""
        return await self.say(wire.encode(wire.Requests(session.token, session.generation, epoch, list(messages))))


@asynccontextmanager
async def open_stranger(pair: Pair) -> AsyncIterator[Stranger]:
    async with open_dialler("127.0.0.1", port_of(pair.sender)) as link:
        assert await link.receive() == [Connected()]
        yield Stranger(link)


def session_of(pair: Pair) -> tuple[Session, bytes]:
    """The receiver's session, and the sender's epoch."""
    assert pair.sender._sender is not None
    [session] = pair.sender._sender.book.sessions.values()
    return session, pair.sender._sender.epoch


def hello(engine: MemoryEngine, token: bytes, generation: int = 1) -> list[bytes]:
    """What a receiver with that engine says first."""
    deployment = wire.Deployment("h", 1, 0, 0, "")
    return wire.encode(wire.Hello(1, 1, token, generation, 5.0, offers_of(engine), deployment))


# --- transfers of others --------------------------------------------------------------------------------------


async def test_a_cancel_in_anothers_name_changes_nothing() -> None:
    async with open_pair(sender=REMOTE, receiver=REMOTE) as pair, trio.open_nursery() as nursery:
        waiting = await pair.get_later(nursery, "k")
        session, epoch = session_of(pair)
        async with open_stranger(pair) as stranger:
            answer = await stranger.repeat(session, epoch, wire.Cancel(list(session.fetches)), wire.Bye())
            assert isinstance(answer, wire.Stale)
        await pair.put("k", filled(100))
        assert torch.equal(await waiting.wait(), filled(100))  # type: ignore[arg-type]
        assert pair.sender.statistics().events["out_delivered"] == 1


async def test_an_acknowledgement_in_anothers_name_frees_nothing() -> None:
    async with open_pair(sender=REMOTE, receiver=REMOTE) as pair:
        with pytest.raises(Exception, match="has not come"):
            pair.get_nowait("k")
        await pair.put("k", filled(100))
        await wait_until(lambda: pair.sender.statistics().held.get("delivered"))
        session, epoch = session_of(pair)
        async with open_stranger(pair) as stranger:
            heartbeat = wire.Heartbeat(session.sequence + 1, 99, [], [], [])
            answer = await stranger.repeat(session, epoch, wire.Ack(list(session.fetches)), heartbeat)
            assert isinstance(answer, wire.Stale)
        assert pair.sender.statistics().held["delivered"] == UNIT
        assert torch.equal(pair.get_nowait("k"), filled(100))  # type: ignore[arg-type]


async def test_a_copy_of_a_hello_does_not_take_a_session_over() -> None:
    async with open_pair(sender=REMOTE, receiver=REMOTE) as pair, trio.open_nursery() as nursery:
        waiting = await pair.get_later(nursery, "k")
        session, _ = session_of(pair)
        async with open_stranger(pair) as stranger:
            answer = await stranger.say(hello(pair.receiver_engine, session.token, session.generation))
            assert isinstance(answer, wire.Stale)
            await pair.put("k", filled(100))
            assert torch.equal(await waiting.wait(), filled(100))  # type: ignore[arg-type]


# --- memory ---------------------------------------------------------------------------------------------------


async def test_one_connection_cannot_take_the_places_of_others() -> None:
    async with open_pair(sender={"max_peers": 3, **REMOTE}, receiver=REMOTE) as pair:
        async with pair.fabric.open(pool_size=POOL) as engine, open_stranger(pair) as stranger:
            for number in range(5):
                answer = await stranger.say(hello(engine, number.to_bytes(16, "big")))
                assert isinstance(answer, wire.Welcome)
            await pair.put("k", filled(100))
            assert torch.equal(await pair.get("k"), filled(100))  # type: ignore[arg-type]
            assert pair.sender.statistics().peers == 2


async def test_a_peer_that_reads_nothing_counts_as_gone_and_holds_no_more_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "SEND_LIMIT", 50)
    size = 100_000
    with trio.fail_after(LIMIT), zmq.Context() as context:
        async with open_listener(["127.0.0.1"], 0) as listener, open_dialler("127.0.0.1", listener.port) as other:
            with context.socket(zmq.DEALER) as deaf:
                deaf.linger, deaf.rcvhwm = 0, 1
                deaf.setsockopt(zmq.RCVBUF, 4096)
                deaf.connect(f"tcp://127.0.0.1:{listener.port}")
                deaf.send(b"hello")
                [arrived] = await listener.receive()
                assert isinstance(arrived, Arrived)
                for _ in range(1000):
                    listener.send([bytes(size)], arrived.route)
                assert await listener.receive() == [Disconnected(arrived.route)]
                assert listener.statistics().sent < 1000
                assert listener.statistics().dropped_unroutable > 0
                assert await other.receive() == [Connected()]
                other.send([b"still served"])
                event: object = None
                while not isinstance(event, Arrived):
                    event = (await listener.receive())[-1]  # once more that the other one is gone, perhaps
                assert event.frames == [b"still served"]


# --- the log --------------------------------------------------------------------------------------------------


async def test_hellos_that_are_refused_are_counted_and_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair(sender=REMOTE, receiver=REMOTE) as pair, open_stranger(pair) as stranger:
        for _ in range(3 * BURST):
            greeting = wire.Hello(1, 1, os.urandom(16), 1, 5.0, [], wire.Deployment("h", 1, 0, 0, ""))
            assert isinstance(await stranger.say(wire.encode(greeting)), wire.Mismatch)
        assert pair.sender.statistics().events["refused_receivers"] == 3 * BURST
        assert pair.sender.statistics().peers == 0
        await pair.assert_whole()
    assert 1 <= caplog.text.count("refused: the sender writes through") <= BURST
