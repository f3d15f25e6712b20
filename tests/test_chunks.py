"""Chunk streams: order, room, ends of every kind, and what a stream does when it is interfered with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest
import torch
import trio
import trio.testing
from rig import (
    FAST,
    LIMIT,
    POOL,
    SOON,
    UNIT,
    Pair,
    Stage,
    assert_books_agree,
    assert_free,
    begin,
    filled,
    open_pair,
    start_stage,
    wait_until,
)
from trio.testing import MockClock

from trio_mori import (
    ChunkReceiver,
    ChunkSender,
    ConnectorClosed,
    KeyBusy,
    Misuse,
    PayloadLost,
    PeerLost,
    PeerRestarted,
    RemoteProtocolError,
    StreamFailed,
    UnsupportedPayload,
)
from trio_mori._chunks import MAX_REASON, TERMINAL_GRACE
from trio_mori.testing import MemoryFabric

pytestmark = pytest.mark.deterministic


def sending(pair: Pair, request: str = "r") -> AbstractAsyncContextManager[ChunkSender]:
    """The sending end of a stream of the pair."""
    return pair.sender.open_chunk_sender(request, "1", from_stage="0")


def receiving(pair: Pair, request: str = "r") -> AbstractAsyncContextManager[ChunkReceiver]:
    """The receiving end of a stream of the pair."""
    return pair.receiver.open_chunk_receiver(request, "0", to_stage="1")


async def receive_all(pair: Pair, request: str = "r") -> list[object]:
    """All chunks of a stream."""
    async with receiving(pair, request) as chunks:
        return [chunk async for chunk in chunks]


async def send_all(pair: Pair, chunks: list[object], request: str = "r") -> None:
    """A whole stream."""
    async with sending(pair, request) as out:
        for chunk in chunks:
            await out.send(chunk)


def waiting_for_room(pair: Pair) -> int:
    """Puts that wait."""
    return pair.sender.statistics().pool.waiting


# --- the plain way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("receiver_first", [True, False])
async def test_chunks_come_in_order_and_then_the_end(receiver_first: bool) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        expected = [{"codes": torch.full((25,), number), "number": number} for number in range(20)]
        if receiver_first:
            outcome = begin(nursery, receive_all, pair)
            await wait_until(pair.parked)
            await send_all(pair, [*expected])
        else:
            await send_all(pair, [*expected])
            outcome = begin(nursery, receive_all, pair)
        got = await outcome.wait()
        assert isinstance(got, list)
        assert [chunk["number"] for chunk in got] == list(range(20))
        assert all(torch.equal(chunk["codes"], torch.full((25,), chunk["number"])) for chunk in got)
        await pair.assert_whole()


async def test_anything_that_can_be_put_can_be_a_chunk_also_what_looks_like_a_mark() -> None:
    chunks: list[object] = [None, b"", 0, (0, 1, 2), (1, 0), "", [], torch.empty(0, 3)]
    async with open_pair() as pair:
        await send_all(pair, chunks)
        *got, last = await receive_all(pair)
        assert got == chunks[:-1]
        assert isinstance(last, torch.Tensor)
        assert last.shape == (0, 3)
        await pair.assert_whole()


async def test_an_empty_stream_has_an_end() -> None:
    async with open_pair() as pair:
        await send_all(pair, [])
        assert await receive_all(pair) == []
        await pair.assert_whole()


async def test_both_ends_count() -> None:
    async with open_pair() as pair, sending(pair) as out, receiving(pair) as chunks:
        assert (out.sent, chunks.received) == (0, 0)
        await out.send("a")
        assert await chunks.__anext__() == "a"
        assert (out.sent, chunks.received) == (1, 1)


async def test_a_stream_that_has_ended_stays_so() -> None:
    async with open_pair() as pair:
        await send_all(pair, ["a"])
        async with receiving(pair) as chunks:
            assert [chunk async for chunk in chunks] == ["a"]
            assert [chunk async for chunk in chunks] == []
        await pair.assert_whole()


async def test_streams_of_many_requests_do_not_mix() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        outcomes = [begin(nursery, receive_all, pair, f"r_{number}") for number in range(8)]
        for number in range(8):
            nursery.start_soon(send_all, pair, [(number, chunk) for chunk in range(number)], f"r_{number}")
        for number, outcome in enumerate(outcomes):
            assert await outcome.wait() == [(number, chunk) for chunk in range(number)]
        await pair.assert_whole()


# --- room --------------------------------------------------------------------------------------------------


async def test_a_sender_waits_for_room_and_goes_on_as_chunks_are_read() -> None:
    async with open_pair(sender_pool=4 * UNIT) as pair, trio.open_nursery() as nursery:
        async with sending(pair) as out:
            outcome = begin(nursery, send_numbers, out, 10)
            await wait_until(lambda: waiting_for_room(pair))
            assert out.sent == 4
            async with receiving(pair) as chunks:
                for number in range(10):
                    chunk = await chunks.__anext__()
                    assert isinstance(chunk, torch.Tensor)
                    assert int(chunk[0]) == number
            await outcome.wait()
        await pair.receiver.cleanup("r")
        await pair.sender.cleanup("r")
        await assert_free(pair.sender, pair.receiver)


async def send_numbers(out: ChunkSender, chunks: int) -> None:
    """Send chunks of about one unit each."""
    for number in range(chunks):
        await out.send(filled(UNIT - 500, number))


async def test_a_chunk_that_waited_for_room_and_was_cancelled_was_not_sent() -> None:
    async with open_pair(sender_pool=2 * UNIT) as pair:
        async with sending(pair) as out:
            await send_numbers(out, 2)
            with trio.move_on_after(0) as scope:
                await out.send("given up")
            assert scope.cancelled_caught
            assert out.sent == 2
            async with receiving(pair) as chunks:
                assert torch.equal(await chunks.__anext__(), filled(UNIT - 500, 0))
                await out.send("instead")
                assert torch.equal(await chunks.__anext__(), filled(UNIT - 500, 1))
                assert await chunks.__anext__() == "instead"
        await pair.sender.cleanup("r")
        await assert_free(pair.sender, pair.receiver)


async def test_the_end_waits_for_room_like_any_chunk() -> None:
    async with open_pair(sender_pool=2 * UNIT) as pair, trio.open_nursery() as nursery:
        outcome = begin(nursery, send_all, pair, [filled(UNIT - 500, 0), filled(UNIT - 500, 1)])
        await wait_until(lambda: waiting_for_room(pair))
        assert len(await receive_all(pair)) == 2
        await outcome.wait()
        await pair.assert_whole()


async def test_a_refused_chunk_leaves_the_stream_as_it_was() -> None:
    async with open_pair() as pair:
        async with sending(pair) as out:
            await out.send("a")
            with pytest.raises(UnsupportedPayload, match=r"payload\[2\]\['x'\]"):
                await out.send({"x": object()})
            await out.send("b")
        assert await receive_all(pair) == ["a", "b"]
        await pair.assert_whole()


# --- ends --------------------------------------------------------------------------------------------------


async def send_and_raise(pair: Pair, chunk: object, error: Exception, cause: Exception | None = None) -> None:
    """A stream that its sender ends by an error."""
    async with sending(pair) as out:
        await out.send(chunk)
        raise error from cause


async def test_a_sender_that_fails_tells_the_receiver_why_and_keeps_its_error() -> None:
    async with open_pair() as pair:
        error, cause = ValueError("no codes"), KeyError("first")
        with pytest.raises(ValueError, match="no codes") as caught:
            await send_and_raise(pair, "a", error, cause)
        assert caught.value is error
        assert error.__cause__ is cause
        async with receiving(pair) as chunks:
            assert await chunks.__anext__() == "a"
            for _ in range(2):  # also when it is asked again
                with pytest.raises(
                    StreamFailed, match="0 ended the stream of 'r' after 1 chunks: ValueError"
                ) as failure:
                    await chunks.__anext__()
                assert (failure.value.request_id, failure.value.reason) == ("r", "ValueError: no codes")
        await pair.assert_whole()


class Mute(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("y" * (2 * POOL)), "ValueError: " + "y" * (MAX_REASON - 12) + "..."),
        (ValueError("ü" * MAX_REASON), "ValueError: " + "ü" * (MAX_REASON - 12) + "..."),
        (ValueError("\udcff.wav"), r"ValueError: \udcff.wav"),
        (Mute(), "Mute (without a text: its __str__ raises)"),
    ],
    ids=["long", "wide", "surrogate", "mute"],
)
async def test_a_reason_that_cannot_travel_is_cut_or_left_out_and_the_error_stays_the_sender_s(
    error: Exception, reason: str
) -> None:
    async with open_pair() as pair:
        with pytest.raises(type(error)) as caught:
            await send_and_raise(pair, "a", error)
        assert caught.value is error
        assert error.__cause__ is None
        async with receiving(pair) as chunks:
            assert await chunks.__anext__() == "a"
            with pytest.raises(StreamFailed) as failure:
                await chunks.__anext__()
            assert failure.value.reason == reason
        await pair.assert_whole()


async def fail_at_once(pair: Pair, error: Exception) -> None:
    """A stream of nothing but an error."""
    async with sending(pair):
        raise error


@pytest.mark.parametrize("waits_already", [True, False])
async def test_a_failed_stream_without_room_to_say_so_is_over_for_its_receiver_even_so(
    clock: MockClock, caplog: pytest.LogCaptureFixture, waits_already: bool
) -> None:
    error = ValueError("no codes")
    async with open_pair(sender_pool=UNIT) as pair, trio.open_nursery() as nursery, AsyncExitStack() as stack:
        await pair.put("all of it", filled(UNIT))
        if waits_already:
            chunks = await stack.enter_async_context(receiving(pair))
            await wait_until(pair.parked)
        sender = begin(nursery, fail_at_once, pair, error)
        await wait_until(lambda: waiting_for_room(pair))
        clock.jump(TERMINAL_GRACE)
        with pytest.raises(ValueError, match="no codes") as caught, trio.fail_after(SOON):
            await sender.wait()
        assert caught.value is error
        assert "'r' ended with no room for its last chunk within 2 s (ValueError: no codes)" in caplog.text
        if not waits_already:
            chunks = await stack.enter_async_context(receiving(pair))
        for _ in range(2):  # also when it is asked again
            with pytest.raises(PayloadLost, match=r"'r_0_0@0_1' was dropped by the sender .* its stream has ended"):
                await chunks.__anext__()
        await pair.get("all of it")
        await pair.assert_whole()


async def start_and_fail(pair: Pair, chunks: ChunkReceiver, error: Exception) -> None:
    """A stream that fails while its receiver is being written an older chunk under the key of its end."""
    async with sending(pair) as out:
        await out.send("new")
        assert await chunks.__anext__() == "new"
        await wait_until(lambda: pair.sender_engine.held)
        raise error


async def test_an_end_whose_key_is_busy_is_told_when_what_holds_the_key_has_left() -> None:
    async with open_pair() as pair:
        await send_all(pair, ["old", filled(100)])
        await pair.get("r_0_0")
        pair.sender_engine.hold()
        error = ValueError("no codes")
        async with receiving(pair) as chunks:
            with pytest.raises(ValueError, match="no codes") as caught:
                await start_and_fail(pair, chunks, error)
            assert caught.value is error
            assert isinstance(error.__cause__, KeyBusy)
            pair.sender_engine.release()
            with pytest.raises(PayloadLost, match=r"'r_0_1@0_1' was dropped by the sender .* its stream has ended"):
                await chunks.__anext__()
        await pair.sender.cleanup("r")
        await pair.assert_whole()


async def test_a_cancelled_sender_says_so() -> None:
    async with open_pair() as pair:
        with trio.CancelScope() as scope:
            async with sending(pair) as out:
                await out.send("a")
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        with pytest.raises(StreamFailed, match="after 1 chunks: cancelled"):
            await receive_all(pair)
        await pair.assert_whole()


async def test_a_cancelled_end_without_room_gives_up_in_time(clock: MockClock) -> None:
    async with open_pair(sender_pool=UNIT) as pair, trio.open_nursery() as nursery:
        await pair.put("all of it", filled(UNIT))
        outcome = begin(nursery, send_all, pair, [])
        await wait_until(lambda: waiting_for_room(pair))
        outcome.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not outcome.over.is_set()
        clock.jump(TERMINAL_GRACE)
        with trio.fail_after(SOON):
            await outcome.over.wait()
        assert outcome.scope.cancelled_caught
        await pair.get("all of it")
        await pair.assert_whole()


async def test_a_cancelled_end_gets_through_when_there_is_room_in_time() -> None:
    async with open_pair(sender_pool=UNIT) as pair, trio.open_nursery() as nursery:
        await pair.put("all of it", filled(UNIT))
        outcome = begin(nursery, send_all, pair, [])
        await wait_until(lambda: waiting_for_room(pair))
        outcome.scope.cancel()
        await pair.get("all of it")
        assert await receive_all(pair) == []
        await outcome.over.wait()
        await pair.assert_whole()


async def close_and_raise(pair: Pair, error: Exception) -> None:
    """A stream that is ended by an error, and cannot say so."""
    async with sending(pair):
        pair.sender._stop()
        raise error


async def test_an_error_at_the_end_does_not_hide_the_one_that_ended_the_stream() -> None:
    async with open_pair() as pair:
        with pytest.raises(ValueError, match="mine") as caught:
            await close_and_raise(pair, ValueError("mine"))
        assert isinstance(caught.value.__cause__, ConnectorClosed)


async def test_a_receiver_that_leaves_early_gives_back_what_it_asked_for() -> None:
    async with open_pair() as pair:
        async with sending(pair) as out:
            async with receiving(pair) as chunks:
                await out.send("a")
                assert await chunks.__anext__() == "a"
                await wait_until(pair.parked)
            await wait_until(lambda: not pair.parked())
            await out.send("b")
        assert await pair.sender.cleanup("r") == 2
        await pair.assert_whole()


async def test_the_chunk_that_a_cancelled_receiver_waited_for_comes_with_its_next_call() -> None:
    async with open_pair() as pair, sending(pair) as out, receiving(pair) as chunks:
        for number in range(5):
            with trio.move_on_after(0) as scope:
                await chunks.__anext__()
            assert scope.cancelled_caught
            await out.send(number)
            with trio.move_on_after(0):
                assert await chunks.__anext__() == number
                continue
            assert await chunks.__anext__() == number


async def test_a_request_that_is_cleaned_up_ends_its_stream_by_name() -> None:
    async with open_pair() as pair:
        async with sending(pair) as out:
            await out.send("a")
            await pair.sender.cleanup("r")
            async with receiving(pair) as chunks:
                with pytest.raises(PayloadLost, match="'r_0_0@0_1' was dropped by the sender") as lost:
                    await chunks.__anext__()
                assert lost.value.key == "r_0_0@0_1"
        await pair.sender.cleanup("r")
        await pair.assert_whole()


# --- peers that go away ------------------------------------------------------------------------------------


@asynccontextmanager
async def open_stages(fabric: MemoryFabric) -> AsyncIterator[tuple[trio.Nursery, Stage, Stage]]:
    """A sender that can be crashed, and a receiver that soon notices."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            source = await start_stage(nursery, fabric, role="sender", stage_id=0, **FAST)
            to = {"sender_host": "127.0.0.1", "sender_zmq_port": source.port}
            target = await start_stage(nursery, fabric, role="receiver", stage_id=1, **to, **FAST)
            yield nursery, source, target
            await target.close()


async def send_and_stay(stage: Stage, chunks: list[object]) -> None:
    """The beginning of a stream."""
    async with stage.connector.open_chunk_sender("r", "1") as out:
        for chunk in chunks:
            await out.send(chunk)
        await trio.sleep_forever()


async def test_a_sender_that_was_replaced_ends_the_stream() -> None:
    fabric = MemoryFabric()
    async with open_stages(fabric) as (nursery, source, target):
        first = begin(nursery, send_and_stay, source, ["a"])
        async with target.connector.open_chunk_receiver("r", "0") as chunks:
            assert await chunks.__anext__() == "a"
            port = source.port
            await source.crash()
            with pytest.raises(PeerLost, match="'r_0_1@0_1' will not come"):
                await chunks.__anext__()
            await wait_until(lambda: not target.connector.statistics().peers)
            second = await start_stage(nursery, fabric, role="sender", stage_id=0, zmq_port=port, **FAST)
            other = begin(nursery, send_and_stay, second, ["of another life", "of another life"])
            await wait_until(lambda: target.connector.statistics().peers)
            for _ in range(2):
                with pytest.raises(PeerRestarted, match="'r_0_1@0_1' will not come"):
                    await chunks.__anext__()
        async with target.connector.open_chunk_receiver("r", "0") as chunks:
            assert await chunks.__anext__() == "of another life"
        first.scope.cancel()
        other.scope.cancel()
        await other.over.wait()
        await second.close()


# --- interference ------------------------------------------------------------------------------------------


async def test_a_request_id_may_be_used_again_though_nobody_read_the_first_stream_to_its_end() -> None:
    async with open_pair() as pair:
        await send_all(pair, ["old 0", "old 1", "old 2", "old 3"])
        async with receiving(pair) as chunks:
            assert await chunks.__anext__() == "old 0"
        async with receiving(pair) as chunks, sending(pair) as out:
            for number in range(3):
                await out.send(f"new {number}")
                # The one ahead is asked for now; what lies under its key is old.
                assert await chunks.__anext__() == f"new {number}"
                await trio.testing.wait_all_tasks_blocked()
        await pair.sender.cleanup("r")
        await assert_free(pair.sender, pair.receiver)


async def test_a_stream_that_another_one_took_the_place_of_says_so() -> None:
    async with open_pair() as pair:
        async with sending(pair) as first, sending(pair) as second, receiving(pair) as chunks:
            await first.send("first")
            assert await chunks.__anext__() == "first"
            await second.send("second 0")
            await second.send("second 1")
            with pytest.raises(StreamFailed, match="another stream of this request took its place"):
                await chunks.__anext__()
        await pair.sender.cleanup("r")
        await assert_free(pair.sender, pair.receiver)


async def test_two_receivers_of_one_stream_share_its_chunks_and_lose_none() -> None:
    async with open_pair() as pair, receiving(pair) as one, receiving(pair) as two, trio.open_nursery() as nursery:
        async with sending(pair) as out:
            await out.send("a")
            assert await one.__anext__() == "a"
            outcome = begin(nursery, two.__anext__)  # what it waits for was given to the other one
            await trio.testing.wait_all_tasks_blocked()
            assert not outcome.over.is_set()
            outcome.scope.cancel()
            await outcome.over.wait()
        assert [chunk async for chunk in one] == []


async def test_two_tasks_cannot_receive_from_one_end() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        async with sending(pair) as out, receiving(pair) as chunks:
            outcome = begin(nursery, chunks.__anext__)
            await wait_until(pair.parked)
            with pytest.raises(Misuse, match="two tasks receive chunks of 'r' at once"):
                await chunks.__anext__()
            await out.send("a")
            assert await outcome.wait() == "a"
        await pair.sender.cleanup("r")


async def send_twice_at_once(pair: Pair, nursery: trio.Nursery) -> None:
    """A stream that is left while a task of that nursery still waits for room on it."""
    async with sending(pair) as out:
        nursery.start_soon(out.send, "a")
        await wait_until(lambda: waiting_for_room(pair))
        with pytest.raises(Misuse, match="two tasks send chunks of 'r' at once"):
            await out.send("b")


async def test_two_tasks_cannot_send_on_one_end() -> None:
    async with open_pair(sender_pool=UNIT) as pair, trio.open_nursery() as nursery:
        await pair.put("all of it", filled(UNIT))
        with pytest.raises(Misuse, match="left while another task sends"):
            await send_twice_at_once(pair, nursery)
        nursery.cancel_scope.cancel()


async def test_a_stream_that_is_left_while_another_task_sends_is_over_after_what_that_one_sent() -> None:
    async with open_pair(sender_pool=UNIT) as pair, trio.open_nursery() as nursery:
        await pair.put("all of it", filled(UNIT))
        with pytest.raises(Misuse, match="left while another task sends"):
            await send_twice_at_once(pair, nursery)
        await pair.get("all of it")
        async with receiving(pair) as chunks:
            assert await chunks.__anext__() == "a"
            with pytest.raises(PayloadLost, match="'r_0_1@0_1' was dropped by the sender"):
                await chunks.__anext__()
        await pair.assert_whole()


async def test_an_end_that_is_used_after_its_block_says_so() -> None:
    async with open_pair() as pair:
        async with sending(pair) as out, receiving(pair) as chunks:
            pass
        with pytest.raises(Misuse, match="a chunk of 'r' was sent after the end of its stream"):
            await out.send("late")
        with pytest.raises(Misuse, match="a chunk of 'r' was asked for after its block"):
            await chunks.__anext__()
        await pair.sender.cleanup("r")
        await pair.assert_whole()


@pytest.mark.parametrize("payload", [b"raw", (0, "a"), (3, 0, "a"), (0, "0", "a"), [0, 0, "a"]])
async def test_what_no_chunk_sender_sent_is_named(payload: object) -> None:
    async with open_pair() as pair:
        await pair.put("r_0_0", payload)
        async with receiving(pair) as chunks:
            for _ in range(2):
                with pytest.raises(RemoteProtocolError, match=r"stream of 'r' is broken: 'r_0_0@0_1' is consumed"):
                    await chunks.__anext__()
        await pair.assert_whole()


async def test_an_end_that_counts_other_chunks_than_came_is_no_end() -> None:
    async with open_pair() as pair:
        await pair.put("r_0_0", (1, 7, 3))
        with pytest.raises(RemoteProtocolError, match="it ended after 3 chunks, but 0 came"):
            await receive_all(pair)
        assert_books_agree(pair.sender, pair.receiver)
        await pair.assert_whole()


async def test_a_pool_that_is_full_of_one_stream_holds_up_no_other_receiver() -> None:
    async with open_pair(receiver_pool=POOL) as pair, trio.open_nursery() as nursery:
        async with sending(pair, "slow") as slow, receiving(pair, "slow"):
            await slow.send(filled(UNIT - 500))
            nursery.start_soon(send_all, pair, ["a", "b"], "fast")
            assert await receive_all(pair, "fast") == ["a", "b"]
        await pair.sender.cleanup("slow")
        await assert_free(pair.sender, pair.receiver)
