"""What is kept of a peer that has gone, and for how long."""

from __future__ import annotations

import errno
import logging
from contextlib import AsyncExitStack

import pytest
import torch
import trio
from ports import free_port
from rig import (
    FAST,
    LIMIT,
    POOL,
    UNIT,
    assert_free,
    begin,
    filled,
    open_pair,
    port_of,
    receiver_config,
    sender_config,
    start_stage,
    wait_until,
)
from stock_peers import open_stock_client
from trio.testing import MockClock

from trio_mori import DescriptorRefused, NoRoom, NotReady, PeerLost, TransferFailed, open_connector
from trio_mori._protocol import wire
from trio_mori.abc import Descriptor, EnginePeer
from trio_mori.testing import MemoryEngine, MemoryFabric

pytestmark = pytest.mark.deterministic


# A receiver that was sent away would hear at its next heartbeat that it is unknown, and come back.
SILENT = {"heartbeat_interval": 100, "peer_timeout": 300}


def dropped(engine: MemoryEngine) -> int:
    """How often the engine was told to forget a peer."""
    return sum(call.method == "drop_peer" for call in engine.calls)


async def test_a_receiver_that_left_is_watched_while_a_write_to_it_may_not_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair(sender={"close_grace": 0}, receiver={"close_grace": 0, **SILENT}) as pair:
        pair.sender_engine.fail(settled=False)
        await pair.put("k", filled(1000))
        with pytest.raises(TransferFailed):
            await pair.get("k")
        await pair.sender.cleanup("k")
        await pair.receiver._wind_up()
        monkeypatch.setattr("trio_mori._receiver.FAREWELL", 0.01)  # nobody answers the one at its end
        await wait_until(lambda: pair.sender.statistics().peers == 0)
        assert pair.sender.statistics().held["pinned"] == UNIT
        assert not dropped(pair.sender_engine)
        pair.receiver_engine.kill()
        await assert_free(pair.sender)
        await wait_until(lambda: dropped(pair.sender_engine) == 1)


async def test_a_receiver_that_left_during_a_write_is_forgotten_when_that_has_ended() -> None:
    async with open_pair(receiver=SILENT) as pair, trio.open_nursery() as nursery:
        await pair.hold_one(nursery, "k", filled(1000))
        assert pair.sender._sender is not None
        book = pair.sender._sender.book
        (session,) = book.sessions.values()
        pair.sender._sender.reception._say_goodbye(session)
        assert book.is_written_to(session)
        assert not dropped(pair.sender_engine)
        pair.sender_engine.release()
        await wait_until(lambda: dropped(pair.sender_engine) == 1)
        nursery.cancel_scope.cancel()


async def test_a_sender_that_cannot_be_watched_for_want_of_descriptors_is_welcome_when_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair(receiver=FAST) as pair, trio.open_nursery() as nursery:
        add_peer = pair.receiver_engine.add_peer
        refusals = [OSError(errno.EMFILE, "too many open files")] * 3

        def add_peer_later(descriptor: Descriptor) -> EnginePeer:
            if refusals:
                raise DescriptorRefused("it cannot be watched") from refusals.pop()
            return add_peer(descriptor)

        monkeypatch.setattr(pair.receiver_engine, "add_peer", add_peer_later)
        await pair.hold_one(nursery, "k", filled(1000))
        assert not refusals
        pair.sender_engine.kill()
        await assert_free(pair.receiver)
        nursery.cancel_scope.cancel()


async def test_a_stock_receiver_is_forgotten_when_its_process_has_ended() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(10):
        async with fabric.open(pool_size=POOL) as ours, fabric.open(pool_size=POOL) as theirs:
            async with open_connector(sender_config(), engine=ours) as sender:
                with open_stock_client(port_of(sender), theirs) as client:
                    await sender.put("0", "1", "k", filled(1000))
                    assert await client.pull("k@0_1", 0, 1000) == b"trans_done"
                assert not dropped(ours)
                theirs.kill()
                await wait_until(lambda: dropped(ours) == 1)


async def test_of_stock_receivers_only_as_many_are_kept_as_there_may_be_peers() -> None:
    fabric = MemoryFabric()
    with trio.fail_after(10):
        async with AsyncExitStack() as stack:
            ours = await stack.enter_async_context(fabric.open(pool_size=POOL))
            sender = await stack.enter_async_context(open_connector(sender_config(max_peers=2), engine=ours))
            for number in range(4):
                theirs = await stack.enter_async_context(fabric.open(pool_size=POOL))
                with open_stock_client(port_of(sender), theirs) as client:
                    await sender.put("0", "1", "k", filled(1000))
                    assert await client.pull("k@0_1", 0, 1000) == b"trans_done"
                assert dropped(ours) == max(0, number - 1)


async def test_a_batch_that_no_peer_would_accept_leaves_in_several_parts() -> None:
    async with open_pair() as pair:
        payloads = {f"k{number}": {"text": "x" * 30_000, "number": number} for number in range(60)}
        for key, payload in payloads.items():
            pair.sender.put_nowait("0", "1", key, payload)
        assert sum(len(payload["text"]) for payload in payloads.values()) > wire.MAX_BODY
        got: dict[str, object] = {}

        async def get(key: str) -> None:
            got[key] = await pair.get(key)

        async with trio.open_nursery() as nursery:
            for key in payloads:
                nursery.start_soon(get, key)
        assert got == payloads
        assert pair.receiver.statistics().events["malformed_in"] == 0
        await pair.assert_whole()


async def test_more_gets_than_a_heartbeat_can_list_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_OPEN", 2)
    async with open_pair() as pair:
        for key in ("a", "b"):
            with pytest.raises(NotReady):
                pair.get_nowait(key)
        with pytest.raises(NoRoom, match="2 gets of this sender are open"):
            pair.get_nowait("c")
        await pair.receiver.cleanup("a")
        await wait_until(lambda: pair.receiver.statistics().parked == 1)
        with pytest.raises(NotReady):
            pair.get_nowait("c")


async def test_a_process_that_was_stuck_blames_nobody_for_what_it_did_not_hear_meanwhile(
    caplog: pytest.LogCaptureFixture, clock: MockClock
) -> None:
    """To a loop that nothing lets run, time makes a jump."""
    async with open_pair(sender=FAST, receiver=FAST) as pair, trio.open_nursery() as nursery:
        for number in range(10):
            waiting = await pair.get_later(nursery, f"k{number}")
            await pair.put("taken", filled(100))
            await pair.get("taken")
            clock.jump(0.5)
            await pair.put(f"k{number}", filled(100))
            assert torch.equal(await waiting.wait(), filled(100))  # type: ignore[arg-type]
        assert "silent" not in caplog.text
        assert pair.receiver.health()["timeouts"] == 0
        await pair.assert_whole()


@pytest.mark.parametrize(("crash", "end"), [(True, "its process ended"), (False, "it closed")])
async def test_whoever_waits_for_a_sender_that_is_not_replaced_is_told_how_it_ended(
    crash: bool, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="trio_mori")
    port, fabric = free_port(), MemoryFabric()
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            sender = await start_stage(nursery, fabric, **sender_config() | {"zmq_port": port})
            receiver = await start_stage(nursery, fabric, **receiver_config(port, **FAST))
            waiting = begin(nursery, receiver.connector.get, "0", "1", "never")
            async with receiver.connector.open_chunk_receiver("r", "0", to_stage="1") as chunks:
                await sender.connector.put("0", "1", "r_0_0", (0, 0, b"one"))
                assert await chunks.__anext__() == b"one"
                streaming = begin(nursery, chunks.__anext__)
                await (sender.crash() if crash else sender.close())
                # A stream does not outlive its sender; a get may be served by the one that comes in its place.
                with pytest.raises(PeerLost, match=f"r_0_1.*: {end}; a stream .* begin it again"):
                    await streaming.wait()
            with pytest.raises(PeerLost, match=f"silent for .*: {end} .* ago, and none came in its place; start it"):
                await waiting.wait()
            assert ("which closed, can write here no more" in caplog.text) is not crash
            assert ("its process has ended" in caplog.text) is crash
            await receiver.close()
