"""Floods, crowds and forgeries at the port of a sender, with traffic beside them that goes on."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

import msgspec
import pytest
import trio
from beside import DEPLOYMENT, REMOTE, answers_to, beside_traffic, malformed
from descriptors import open_files
from rig import LIMIT, open_pair, port_of, wait_until

from trio_mori import open_connector
from trio_mori._engines import _shm_owner as owners
from trio_mori._offers import offers_of
from trio_mori._protocol import wire
from trio_mori._zmq_dialler import open_dialler
from trio_mori.abc import Arrived, Connected


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
