"""The link between processes of one host: what is its own beside the contract of a link."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import trio
import trio.testing
from descriptors import no_descriptors_left
from rig import Sleeps

from trio_mori import PeerLost, _unix, _unix_transport
from trio_mori._unix import open_unix_dialler, open_unix_listener
from trio_mori._unix_transport import PACKET, Listening
from trio_mori.abc import Arrived, Connected, Disconnected, Link, LinkEvent

pytestmark = pytest.mark.deterministic


def new_name() -> str:
    return f"trio-mori-test-{os.urandom(8).hex()}"


def peer_process(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script])


async def next_event(link: Link) -> LinkEvent:
    with trio.fail_after(10):
        (event, *rest) = await link.receive()
    assert rest == []
    return event


async def test_a_name_that_nobody_listens_on_is_an_error_at_once() -> None:
    with pytest.raises(PeerLost, match="unix:@nobody"):
        async with open_unix_dialler("nobody"):
            pass


async def test_the_name_is_free_when_the_listener_is_closed() -> None:
    name = new_name()
    for _ in range(3):
        async with open_unix_listener(name), open_unix_dialler(name) as dialler:
            assert await next_event(dialler) == Connected()


async def test_what_is_taken_without_waiting_does_not_come_again_and_the_rest_does() -> None:
    name = new_name()
    async with open_unix_listener(name) as listener, open_unix_dialler(name) as dialler:
        assert await next_event(dialler) == Connected()
        dialler.send([b"hello"])
        (greeting,) = await listener.receive()
        assert isinstance(greeting, Arrived)
        events: list[LinkEvent] = []

        async def receive() -> None:
            while not events:
                events.extend(await dialler.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            assert dialler.receive_nowait() == []
            listener.send([b"one"], greeting.route)  # the first of a link leaves at once
            assert [each.frames for each in dialler.receive_nowait()] == [[b"one"]]
            assert dialler.receive_nowait() == []
            await trio.testing.wait_all_tasks_blocked()
            assert events == []
            listener.send([b"two"], greeting.route)
        assert [each.frames for each in events if isinstance(each, Arrived)] == [[b"two"]]


async def test_who_was_nudged_stays_awake_until_the_message_or_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = new_name()
    sleeps = Sleeps()
    async with open_unix_listener(name) as listener, open_unix_dialler(name) as dialler, trio.open_nursery() as nursery:
        assert await next_event(dialler) == Connected()
        dialler.send([b"hello"])
        (greeting,) = await listener.receive()
        assert isinstance(greeting, Arrived)
        events: list[LinkEvent] = []

        async def receive() -> None:
            while True:
                events.extend(await dialler.receive())

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        transport = dialler._transport
        assert transport is not None
        monkeypatch.setattr(_unix_transport, "AWAKE", 60)
        listener.nudge(greeting.route)
        with trio.fail_after(10):
            while transport.awake_until < 0:
                await trio.lowlevel.checkpoint()
        trio.lowlevel.add_instrument(sleeps)
        await trio.sleep(0.01)
        assert events == []
        assert sleeps.slept == 0
        listener.send([b"one"], greeting.route)
        await trio.testing.wait_all_tasks_blocked()
        assert [each.frames for each in events if isinstance(each, Arrived)] == [[b"one"]]
        await trio.sleep(0.01)
        assert sleeps.slept > 0
        trio.lowlevel.remove_instrument(sleeps)
        assert transport.awake_until < 0
        monkeypatch.setattr(_unix, "ASLEEP", 60)
        listener.nudge(greeting.route)  # of whom it is taken that it is awake still
        await trio.testing.wait_all_tasks_blocked()
        assert transport.awake_until < 0
        monkeypatch.setattr(_unix_transport, "AWAKE", 0.005)
        monkeypatch.setattr(_unix, "ASLEEP", 0)
        listener.nudge(greeting.route)
        await trio.testing.wait_all_tasks_blocked()
        assert 0 < transport.awake_until <= trio.current_time()
        listener.send([b"two"], greeting.route)
        await trio.testing.wait_all_tasks_blocked()
        assert [each.frames for each in events[1:] if isinstance(each, Arrived)] == [[b"two"]]
        listener.nudge(b"nobody")
        nursery.cancel_scope.cancel()


async def test_a_listener_hears_of_the_end_of_a_dialler_at_once() -> None:
    name = new_name()
    async with open_unix_listener(name) as listener:
        async with open_unix_dialler(name) as dialler:
            dialler.send([b"last words"])
            first = await next_event(listener)
            assert isinstance(first, Arrived)
        assert await next_event(listener) == Disconnected(first.route)


async def test_a_killed_process_is_noticed_at_once() -> None:
    name = new_name()
    script = (
        "import socket, time\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"s.connect('\\0{name}'); s.send(b'\\0\\1\\1\\0\\0\\0x'); time.sleep(60)\n"
    )
    async with open_unix_listener(name) as listener:
        with peer_process(script) as process:
            event = await next_event(listener)
            assert isinstance(event, Arrived)
            assert event.frames == [b"x"]
            process.kill()
            assert await next_event(listener) == Disconnected(event.route)


async def test_a_peer_that_does_not_read_delays_no_other_and_loses_nothing() -> None:
    name = new_name()
    body = b"x" * (PACKET // 2)
    async with open_unix_listener(name) as listener, open_unix_dialler(name) as slow, open_unix_dialler(name) as quick:
        routes = []
        for dialler in (slow, quick):
            assert await next_event(dialler) == Connected()
            dialler.send([b"hello"])
            event = await next_event(listener)
            assert isinstance(event, Arrived)
            routes.append(event.route)
        for number in range(200):
            listener.send([number.to_bytes(2, "big"), body], routes[0])
        listener.send([b"to the quick one"], routes[1])
        assert await next_event(quick) == Arrived([b"to the quick one"])
        numbers: list[int] = []
        with trio.fail_after(10):
            while len(numbers) < 200:
                numbers += [int.from_bytes(e.frames[0], "big") for e in await slow.receive() if isinstance(e, Arrived)]
        assert numbers == list(range(200))


async def test_what_a_dialler_could_not_send_yet_outlasts_a_wake_up_of_its_receiver() -> None:
    name = new_name()
    body = b"x" * (PACKET // 2)
    async with open_unix_listener(name) as listener, open_unix_dialler(name) as dialler, trio.open_nursery() as nursery:
        assert await next_event(dialler) == Connected()
        nursery.start_soon(dialler.receive)
        for number in range(200):
            dialler.send([number.to_bytes(2, "big"), body])
        await trio.testing.wait_all_tasks_blocked()
        dialler._wake()
        numbers: list[int] = []
        with trio.fail_after(10):
            while len(numbers) < 200:
                numbers += [int.from_bytes(e.frames[0], "big") for e in await listener.receive()]  # type: ignore[union-attr]
        assert numbers == list(range(200))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "packet",
    [b"", b"\0", b"\0\5", b"\0\1\xff\xff\xff\xff", b"\0\0", b"\0\2\1\0\0\0\1\0\0\0x", b"\0\xff" + b"\0" * 2000],
)
async def test_a_malformed_packet_is_dropped_and_the_next_message_arrives(packet: bytes) -> None:
    name = new_name()
    async with open_unix_listener(name) as listener:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0{name}")
            stranger.send(packet)
            if packet:
                stranger.send(b"\0\1\2\0\0\0ok")
                event = await next_event(listener)
                assert isinstance(event, Arrived)
                assert event.frames == [b"ok"]
                assert listener.statistics().oversized == 1


async def test_a_message_over_the_limit_is_dropped_and_counted() -> None:
    name = new_name()
    async with open_unix_listener(name, max_bytes=3 * PACKET) as listener, open_unix_dialler(name) as dialler:
        dialler.send([b"x" * 4 * PACKET])
        dialler.send([b"x" * 2 * PACKET])
        event = await next_event(listener)
        assert isinstance(event, Arrived)
        assert len(event.frames[0]) == 2 * PACKET
        assert listener.statistics().oversized == 1


@contextmanager
def raw_connection(name: str) -> Iterator[socket.socket]:
    """A peer that keeps to nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{name}")
        yield connection


async def test_a_part_of_a_message_without_content_ends_its_connection() -> None:
    name = new_name()
    async with open_unix_listener(name) as listener:
        with raw_connection(name) as connection:
            connection.send(b"\1")
            assert isinstance(await next_event(listener), Disconnected)
            assert connection.recv(1) == b""


async def test_parts_of_a_message_without_an_end_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unix_transport, "PACKETS", 10)
    name = new_name()
    async with open_unix_listener(name) as listener:
        with raw_connection(name) as connection:
            for _ in range(25):
                connection.send(b"\1part")
            transport = listener._transport
            assert isinstance(transport, Listening)
            taken = []
            while not taken or taken[-1] < 25:
                assert not transport.settle()
                taken += [len(record.parts) for record in transport._connections.values()]
                assert not transport.readable, "the next look waits for the descriptor, so that others have their turn"
            assert all(b - a <= 10 for a, b in zip([0, *taken], taken, strict=False)), taken


async def test_a_process_without_descriptors_looks_for_whoever_waits_now_and_then_and_takes_it_when_it_can() -> None:
    name = new_name()
    async with open_unix_listener(name) as listener:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, ExitStack() as shortage:
            stranger.connect(f"\0{name}")
            stranger.send(b"\0\1\2\0\0\0ok")
            shortage.enter_context(no_descriptors_left())
            woken = 0
            with trio.move_on_after(0.35):
                while True:
                    await trio.lowlevel.wait_readable(listener._transport.fd)  # type: ignore[union-attr]
                    assert not listener._transport.settle()  # type: ignore[union-attr]
                    woken += 1
            assert 1 <= woken <= 10
            shortage.close()
            event = await next_event(listener)
            assert isinstance(event, Arrived)
            assert event.frames == [b"ok"]


async def test_what_waits_for_a_peer_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mori._unix_transport.MAX_BACKLOG", 10)
    name = new_name()
    async with open_unix_listener(name) as listener, open_unix_dialler(name) as deaf:
        assert await next_event(deaf) == Connected()
        deaf.send([b"hello"])
        arrived = await next_event(listener)
        assert isinstance(arrived, Arrived)
        for _ in range(100):
            listener.send([b"x" * (PACKET // 2)], arrived.route)
        assert await next_event(listener) == Disconnected(arrived.route)
        assert listener.statistics().dropped_unroutable > 0
        seen = 0
        while seen < listener.statistics().sent:
            seen += len(await deaf.receive())
        listener.send([b"goes on"], arrived.route)
        assert await next_event(deaf) == Arrived([b"goes on"])
