"""Connectors over Mori whose peer's process is killed, or comes back."""

from __future__ import annotations

import pytest
import torch
import trio
from mori_lane import delayed, emulated
from mori_processes import SIZE, Talker, open_talker
from rig import SOON, assert_free, begin, port_of, wait_until

from trio_mori import Connector, ConnectorConfig, PeerLost, open_connector

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

# Seconds for a whole test, of which starting the first process takes three.
LIMIT = 60

# Seconds that a copy takes which is to be interrupted.
LONG = 5.0


def config(role: str, port: int = 0, **more: object) -> ConnectorConfig:
    keys = {"zmq_port": 0} if role == "sender" else {"sender_host": "127.0.0.1", "sender_zmq_port": port}
    device = "cuda:0" if role == "sender" else "cuda:1"
    pool = {"backend_type": "xgmi", "memory_pool_device": device, "memory_pool_size": 16 * SIZE}
    return ConnectorConfig.from_dict({"role": role, "host": "127.0.0.1", **pool, **keys, **more})


def filled(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8)


async def put(talker: Talker, key: str, value: int) -> None:
    """Have it put, and wait until Mori writes."""
    await talker.say(f"put {key} {value}")
    assert await talker.hear() == "put"
    assert await talker.hear() == "writing"


@emulated
async def test_after_a_sender_that_is_killed_during_a_write_the_next_under_its_address_is_served_from() -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery, open_talker("mori_stage", "sender", 0, LONG) as first:
            port = int(await first.hear())
            async with open_connector(config("receiver", port)) as receiver:
                outcome = begin(nursery, receiver.get, "0", "1", "k")
                await wait_until(lambda: receiver.statistics().held["posted"])
                await put(first, "k", 1)
                await first.kill()
                async with open_talker("mori_stage", "sender", port) as second:
                    assert int(await second.hear()) == port
                    await second.say("put k 2")
                    await outcome.over.wait()
                    assert torch.equal(await outcome.wait(), filled(2))
                    await assert_free(receiver)


@emulated
async def test_a_sender_that_is_killed_during_a_write_is_lost_in_time_and_its_destination_is_free_again() -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery, open_talker("mori_stage", "sender", 0, LONG) as sender:
            port = int(await sender.hear())
            times = {"heartbeat_interval": 0.1, "peer_timeout": 1.0}
            async with open_connector(config("receiver", port, **times)) as receiver:
                outcome = begin(nursery, receiver.get, "0", "1", "k")
                await wait_until(lambda: receiver.statistics().held["posted"])
                await put(sender, "k", 1)
                with trio.fail_after(times["peer_timeout"] + SOON):
                    await sender.kill()
                    with pytest.raises(PeerLost):
                        await outcome.wait()
                    await assert_free(receiver)


async def served(sender: Connector) -> None:
    """A receiver in another process gets what the sender has, and the sender's pool is free then."""
    async with open_talker("mori_stage", "receiver", port_of(sender)) as receiver:
        assert await receiver.hear() == "ready"
        await receiver.say("get k")
        assert {await receiver.hear(), await receiver.hear()} >= {"3"}
        await assert_free(sender)


@emulated
async def test_what_was_written_to_a_receiver_that_is_killed_goes_to_the_next() -> None:
    with trio.fail_after(LIMIT):
        async with open_connector(config("sender")) as sender:
            async with open_talker("mori_stage", "receiver", port_of(sender)) as receiver:
                assert await receiver.hear() == "ready"
                await receiver.say("get k")
                assert await receiver.hear() == "asked"
                with delayed(0.5):
                    await sender.put("0", "1", "k", filled(3))
                    await wait_until(lambda: sender.statistics().held.get("pinned"))
                    await receiver.kill()
            await served(sender)


async def test_what_is_put_for_a_receiver_that_is_dead_before_the_first_write_goes_to_the_next() -> None:
    with trio.fail_after(LIMIT):
        async with open_connector(config("sender")) as sender:
            async with open_talker("mori_stage", "receiver", port_of(sender)) as receiver:
                assert await receiver.hear() == "ready"
                await receiver.say("get k")
                assert await receiver.hear() == "asked"
                await receiver.kill()
                await sender.put("0", "1", "k", filled(3))
            await served(sender)
