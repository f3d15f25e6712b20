"""Messages that did not come whole, or came at a bad moment: they cost time, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch
import trio
from msgspec import structs
from rig import FAST, Outcome, Pair, assert_free, begin, filled, is_local, open_pair, port_of, wait_until

from trio_mori import Gone, NotReady, RemoteProtocolError
from trio_mori._log_limit import BURST
from trio_mori._protocol import stock_wire, wire
from trio_mori._reception import NativePeer
from trio_mori._upstream import Upstream
from trio_mori._zmq_dialler import open_dialler
from trio_mori.abc import Arrived, Connected

pytestmark = pytest.mark.deterministic

NOT_UNDERSTOOD = wire.encode(wire.VersionRange(wire.OLDEST_VERSION, wire.VERSION))


def say_to_receiver(pair: Pair, frames: list[bytes]) -> None:
    """Have the sender send this to its one receiver."""
    assert pair.sender._sender is not None
    (session,) = pair.sender._sender.book.sessions.values()
    peer = session.handle
    assert isinstance(peer, NativePeer)
    peer.link.send(frames, peer.route)


def upstream_of(pair: Pair) -> Upstream:
    (upstream,) = pair.receiver._receiver.upstreams.values()
    return upstream


async def get_that_waits(pair: Pair, nursery: trio.Nursery) -> Outcome:
    """The sender knows of it, by the link that the two stay on: what is said on the way there counts for nothing."""
    outcome = await pair.get_later(nursery, "k")
    await settle(pair)
    return outcome


async def settle(pair: Pair) -> None:
    await wait_until(lambda: is_local(pair.receiver) and pair.parked() > 0)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_message_that_the_sender_could_not_understand_is_made_good_for_by_another_hello(times: int) -> None:
    async with open_pair(receiver=FAST) as pair, trio.open_nursery() as nursery:
        outcome = await get_that_waits(pair, nursery)
        generation = upstream_of(pair).channel.generation
        for _ in range(times):
            say_to_receiver(pair, NOT_UNDERSTOOD)
        await wait_until(lambda: upstream_of(pair).channel.generation > generation and upstream_of(pair).channel.up)
        await pair.put("k", filled(1000))
        value = await outcome.wait()
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, filled(1000))
        assert pair.receiver.statistics().events["malformed_in"] >= 1
        await pair.assert_whole()


async def test_a_sender_that_understands_no_hello_is_refused_by_name_and_greeted_again_at_each_heartbeat() -> None:
    async with open_pair(receiver=FAST) as pair, trio.open_nursery() as nursery:
        outcome = await get_that_waits(pair, nursery)
        for _ in range(5):
            say_to_receiver(pair, NOT_UNDERSTOOD)
        with pytest.raises(RemoteProtocolError, match="could not understand a message of this side, nor 3 hellos"):
            await outcome.wait()
        await wait_until(lambda: upstream_of(pair).channel.up and upstream_of(pair).refusal is None)
        await pair.assert_whole()


async def test_a_sender_that_refuses_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair() as pair:
        with pytest.raises(NotReady):
            pair.receiver.get_nowait("0", "1", "k")
        await settle(pair)
        upstream = upstream_of(pair)
        refusal = wire.Mismatch(upstream.channel.token, upstream.channel.generation, ["none"], "for no reason")
        for _ in range(3 * BURST):
            upstream.on_arrival(Arrived(wire.encode(refusal)))
    assert 1 <= caplog.text.count("for no reason") <= BURST


async def test_whoever_waited_is_told_why_although_the_sender_is_greeted_well_before_they_look() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await get_that_waits(pair, nursery)
        upstream_of(pair)._refuse(RemoteProtocolError("why"))
        upstream_of(pair).dialect.refusal = None
        pair.receiver._receiver.flush()
        with pytest.raises(RemoteProtocolError, match="why"):
            await outcome.wait()
        await pair.assert_whole()


async def test_a_refusal_that_ends_while_a_get_hears_of_it_is_raised_all_the_same() -> None:
    async with open_pair() as pair:
        await pair.assert_whole()
        upstream = upstream_of(pair)
        upstream.dialect.refusal = RemoteProtocolError("it was not understood")

        class Welcomed(trio.abc.Instrument):
            def after_task_step(self, task: trio.lowlevel.Task) -> None:
                upstream.dialect.refusal = None

        trio.lowlevel.add_instrument(Welcomed())
        with pytest.raises(RemoteProtocolError, match="it was not understood"):
            await pair.get("k")
        await pair.assert_whole()


async def test_a_sender_that_speaks_the_native_dialect_is_never_taken_for_a_stock_one_on_that_connection() -> None:
    async with open_pair(receiver=FAST) as pair, trio.open_nursery() as nursery:
        outcome = await get_that_waits(pair, nursery)
        say_to_receiver(pair, stock_wire.encode_answer(stock_wire.TRANSFER_ERROR))
        await wait_until(lambda: pair.receiver.statistics().events["malformed_in"])
        assert upstream_of(pair).stock is None
        await pair.put("k", {"a": 1})
        assert await outcome.wait() == {"a": 1}
        await pair.assert_whole()


@pytest.mark.parametrize("frames", [[wire.MAGIC], [wire.MAGIC, b"\xc1"], [wire.MAGIC, b"\xc1\x90", b""]], ids=len)
async def test_what_is_left_of_a_native_message_is_never_answered_as_a_stock_sender_would(frames: list[bytes]) -> None:
    async with open_pair() as pair, open_dialler("127.0.0.1", port_of(pair.sender)) as link:
        assert await link.receive() == [Connected()]
        link.send(frames)
        assert await link.receive() == [Arrived(NOT_UNDERSTOOD)]
        assert pair.sender.statistics().events["malformed_out"] == 1
        await pair.assert_whole()


@pytest.mark.parametrize("as_chunk", [False, True])
async def test_the_news_that_a_payload_is_gone_outlives_the_call_that_was_cancelled_when_it_came(
    as_chunk: bool,
) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        receiver = pair.receiver._receiver

        async def receive() -> object:
            if not as_chunk:
                return await pair.get("k")
            return await pair.receiver._ask("0", "1", "k", None).receive()

        outcome = None
        while outcome is None or not outcome.scope.cancelled_caught:
            # If not, a message had come just then: the call had been woken, and was told.
            assert outcome is None or isinstance(outcome.error, Gone)
            outcome = begin(nursery, receive)
            await wait_until(pair.parked)
            await settle(pair)
            channel = upstream_of(pair).channel
            (interest,) = channel.interests.values()
            outcome.scope.cancel()
            receiver.book.on_message(channel, wire.Failed(interest.id, wire.GONE, "", True), trio.current_time())
            receiver.flush()
            await outcome.over.wait()
        with pytest.raises(Gone):
            await receive()
        await assert_free(pair.sender, pair.receiver)
        await pair.assert_whole()


async def test_goodbyes_of_senders_that_nobody_watches_are_not_kept() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await get_that_waits(pair, nursery)
        upstream = upstream_of(pair)
        watched = dict(upstream._watch.followed)
        for _ in range(3):
            upstream._on_leaving(os.urandom(16))
        assert upstream._watch.followed == watched
        outcome.scope.cancel()


async def test_news_that_nobody_asks_for_again_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mori._upstream.MAX_NOTICES", 2)
    async with open_pair() as pair, trio.open_nursery() as nursery:
        receiver = pair.receiver._receiver
        assert pair.sender._sender is not None
        book = pair.sender._sender.book

        async def begin_get(key: str) -> Outcome:
            # By its key: how many the sender knows of changes when the two go over to their link.
            outcome = begin(nursery, pair.get, key)
            await wait_until(lambda: book.next_fetch(f"{key}@0_1") is not None)
            return outcome

        for number in range(5):
            outcome = await begin_get(f"k{number}")
            await settle(pair)
            interest = list(upstream_of(pair).channel.interests.values())[-1]
            outcome.scope.cancel()
            gone = wire.Failed(interest.id, wire.GONE, "", True)
            receiver.book.on_message(upstream_of(pair).channel, gone, trio.current_time())
            receiver.flush()
            await outcome.over.wait()
        assert list(upstream_of(pair).parked) == ["k3@0_1", "k4@0_1"]
        for number in (3, 4):
            with pytest.raises(Gone):
                await pair.get(f"k{number}")
        await pair.assert_whole()


# --- what is not of the present ------------------------------------------------------------------------------


def said_before(body: wire.Replies | wire.Requests, what: str) -> list[bytes]:
    """The same to an old generation, or of another incarnation of the sender."""
    if what == "generation":
        return wire.encode(structs.replace(body, generation=body.generation - 1))
    return wire.encode(structs.replace(body, epoch=os.urandom(16)))


@pytest.mark.parametrize("what", ["generation", "epoch"])
@pytest.mark.parametrize("message", ["failed", "leaving"])
async def test_what_a_receiver_is_told_of_an_old_generation_or_by_another_epoch_changes_nothing(
    what: str, message: str
) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await get_that_waits(pair, nursery)
        channel = upstream_of(pair).channel
        ((number, interest),) = channel.interests.items()
        assert channel.epoch is not None
        news = wire.Failed(number, wire.GONE, "", True) if message == "failed" else wire.Leaving([])
        body = wire.Replies(channel.token, channel.generation, channel.epoch, [news])
        say_to_receiver(pair, said_before(body, what))
        await pair.put("k", filled(1000))  # which is said behind it
        assert torch.equal(await outcome.wait(), filled(1000))
        assert interest.failure is None
        assert channel.up
        await pair.assert_whole()


@pytest.mark.parametrize("what", ["generation", "epoch"])
@pytest.mark.parametrize("message", [wire.Cancel([1]), wire.Bye()], ids=["cancel", "bye"])
async def test_what_a_sender_is_told_of_an_old_generation_or_for_another_epoch_changes_nothing(
    what: str, message: wire.Cancel | wire.Bye
) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcome = await get_that_waits(pair, nursery)
        upstream = upstream_of(pair)
        channel, link = upstream.channel, upstream._links.current
        generation = channel.generation
        assert link is not None
        assert channel.epoch is not None
        assert list(channel.interests) == [1]
        link.send(said_before(wire.Requests(channel.token, generation, channel.epoch, [message]), what))
        if what == "epoch":  # the answer is that it is stale, which asks for another hello
            await wait_until(lambda: channel.generation > generation and channel.up and pair.parked() == 1)
        else:  # so it is here, but not to this generation
            await pair.get_later(nursery, "another")  # which is said behind it
            assert pair.parked() == 2
            assert channel.generation == generation
        await pair.put("k", filled(1000))
        assert torch.equal(await outcome.wait(), filled(1000))
        nursery.cancel_scope.cancel()
