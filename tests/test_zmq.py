"""ZMQ links: connections that follow one another, peers that are not ours, and messages that nobody was woken for."""

from __future__ import annotations

import contextlib
import socket

import pytest
import trio
import trio.testing
import zmq
from ports import free_port
from zmq_links import V4, Inbox, Peer, bounded, connected_pair, plain_socket

from trio_mori._zmq_dialler import open_dialler
from trio_mori._zmq_listener import open_listener
from trio_mori.abc import Arrived, Connected, Disconnected, LinkEvent

# --- one connection after another -----------------------------------------------------------------------------


@bounded
async def test_a_dialler_may_be_opened_before_its_listener_and_what_it_sends_until_then_is_dropped() -> None:
    port = free_port()
    async with open_dialler(V4, port) as dialler:
        dialler.send([b"too early"])
        await trio.sleep(0.03)  # a few attempts fail
        async with open_listener([V4], port) as listener:
            assert await dialler.receive() == [Connected()]
            dialler.send([b"now"])
            assert (await Inbox(listener).message()).frames == [b"now"]
        assert dialler.statistics().dropped_unconnected == 1


@bounded
async def test_a_listener_that_is_replaced_is_a_new_connection() -> None:
    port = free_port()
    async with open_dialler(V4, port) as dialler:
        inbox = Inbox(dialler)
        for number in range(3):
            async with open_listener([V4], port) as listener:
                assert await inbox.next() == Connected()
                dialler.send([b"%d" % number])
                assert (await Inbox(listener).message()).frames == [b"%d" % number]
            assert await inbox.next() == Disconnected()


@bounded
async def test_what_arrived_before_the_connection_broke_comes_before_the_news_of_it() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
        peer.linger = 10_000
        port = peer.bind_to_random_port(f"tcp://{V4}")
        async with open_dialler(V4, port) as dialler:
            inbox = Inbox(dialler)
            assert await inbox.next() == Connected()
            dialler.send([b"hello"])
            await trio.lowlevel.checkpoint()
            route, _ = await trio.to_thread.run_sync(peer.recv_multipart)
            for number in range(500):
                peer.send_multipart([route, b"%d" % number])
            peer.close()
            for number in range(500):
                assert (await inbox.message()).frames == [b"%d" % number]
            assert await inbox.next() == Disconnected()


@bounded
async def test_what_was_sent_to_a_peer_that_is_gone_does_not_reach_its_successor() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as first, context.socket(zmq.ROUTER) as successor:
        first.linger = 0
        port = free_port()
        first.bind(f"tcp://{V4}:{port}")
        async with open_dialler(V4, port) as dialler:
            inbox = Inbox(dialler)
            assert await inbox.next() == Connected()
            first.close()
            bind_when_free(successor, port)
            for _ in range(10):
                dialler.send([b"for the first"])
            assert await inbox.next() == Disconnected()
            assert await inbox.next() == Connected()
            dialler.send([b"for the second"])
            await trio.lowlevel.checkpoint()
            successor.rcvtimeo = 10_000
            frames = await trio.to_thread.run_sync(successor.recv_multipart)
            assert frames[1:] == [b"for the second"]


def bind_when_free(peer: Peer, port: int) -> None:
    """Bind without giving the trio thread away, though libzmq's thread may still hold the port."""
    while True:
        with contextlib.suppress(zmq.ZMQError):
            peer.bind(f"tcp://{V4}:{port}")
            return


# --- peers that are not ours ----------------------------------------------------------------------------------


@bounded
async def test_a_req_socket_is_answered_in_its_own_framing() -> None:
    async with open_listener([V4], 0) as listener:
        with plain_socket(zmq.REQ, listener.port) as peer:
            peer.send(b"query_info")
            request = await Inbox(listener).message()
            assert request.frames == [b"", b"query_info"]
            listener.send([b"", b"info_not_found"], request.route)
            await trio.lowlevel.checkpoint()
            assert await trio.to_thread.run_sync(peer.recv_multipart) == [b"info_not_found"]


@bounded
async def test_messages_that_are_too_large_are_dropped_and_counted_and_the_next_one_arrives() -> None:
    async with open_listener([V4], 0, max_frames=3, max_bytes=1000) as listener:
        with plain_socket(zmq.DEALER, listener.port) as peer:
            peer.send_multipart([b"x"] * 4)
            peer.send_multipart([b"x"] * 10_000)
            peer.send_multipart([b"x" * 400] * 3)
            peer.send_multipart([b"x" * 300] * 3)
            assert (await Inbox(listener).message()).frames == [b"x" * 300] * 3
    assert listener.statistics().oversized == 3
    assert listener.statistics().received == 1


@bounded
@pytest.mark.parametrize(
    ("messages", "parts"), [(3000, 2), (1, 100_000)], ids=["of many messages", "of one with many parts"]
)
async def test_a_flood_of_messages_that_are_too_large_keeps_no_other_task_from_running(
    messages: int, parts: int
) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with open_listener([V4], 0, max_frames=1) as listener, trio.open_nursery() as nursery:
        with plain_socket(zmq.DEALER, listener.port) as peer:
            for _ in range(messages):
                peer.send_multipart([b"x"] * parts)
            peer.send(b"last")
            while not listener._transport.settle():  # type: ignore[union-attr]
                pass
            nursery.start_soon(count_turns)
            assert (await Inbox(listener).message()).frames == [b"last"]
            nursery.cancel_scope.cancel()
    assert turns >= 5
    assert listener.statistics().oversized == messages


@bounded
async def test_a_frame_that_is_too_large_costs_its_sender_the_connection_and_nobody_else_anything() -> None:
    async with open_listener([V4], 0, max_bytes=1000) as listener, open_dialler(V4, listener.port) as other:
        with plain_socket(zmq.DEALER, listener.port) as peer:
            with peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                peer.send(b"x" * 1001)
                await trio.to_thread.run_sync(monitor.recv_multipart)
                peer.disable_monitor()
            peer.send(b"after a reconnect")
            inbox = Inbox(listener)
            assert (await inbox.message()).frames == [b"after a reconnect"]
            assert await other.receive() == [Connected()]
            other.send([b"undisturbed"])
            assert (await inbox.message()).frames == [b"undisturbed"]


@bounded
async def test_a_dialler_outlives_a_peer_that_hangs_up_before_the_handshake() -> None:
    port = free_port()
    with socket.create_server((V4, port)) as rude:
        async with open_dialler(V4, port) as dialler:
            for _ in range(2):
                connection, _ = await trio.to_thread.run_sync(rude.accept)
                connection.close()
            rude.close()
            async with open_listener([V4], port):
                assert await dialler.receive() == [Connected()]


# --- lost wake-ups --------------------------------------------------------------------------------------------


@bounded
async def test_recheck_rescues_a_message_nobody_was_woken_for_and_counts_it() -> None:
    async with open_listener([V4], 0) as listener, trio.open_nursery() as nursery:
        batches: list[list[LinkEvent]] = []

        async def receive() -> None:
            batches.append(await listener.receive())

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        with plain_socket(zmq.DEALER, listener.port) as peer:
            peer.send(b"lost")
            transport = listener._transport
            assert transport is not None
            while not transport.settle():  # takes the edge, and tells nobody
                pass
            await trio.testing.wait_all_tasks_blocked()
            assert batches == []
            for _ in range(5):
                listener.recheck()
            await trio.testing.wait_all_tasks_blocked()
            assert [event.frames for event in batches[0] if isinstance(event, Arrived)] == [[b"lost"]]
    assert listener.statistics().rescued == 1


@bounded
async def test_recheck_does_not_count_a_message_whose_wake_up_is_on_its_way() -> None:
    async with open_listener([V4], 0) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(listener.receive)
        await trio.testing.wait_all_tasks_blocked()
        with plain_socket(zmq.DEALER, listener.port) as peer:
            peer.send(b"just in time")
            assert listener._transport is not None
            while listener._transport.is_silent():
                pass
            for _ in range(3):
                listener.recheck()
    assert listener.statistics().rescued == 0
    assert listener.statistics().received == 1


@bounded
async def test_recheck_of_a_link_that_is_not_connected_or_not_received_from_does_nothing() -> None:
    async with connected_pair() as (dialler, listener):
        for link in (dialler, listener):
            link.recheck()
            link.recheck()
            assert link.statistics().rescued == 0
    async with open_dialler(V4, listener.port) as unconnected:
        unconnected.recheck()
