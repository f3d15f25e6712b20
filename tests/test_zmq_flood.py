"""Floods: a connection is cut off or made to wait before what it sends fills the memory, and no other one is."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest
import trio
import zmq
from plain_zmq import READY_SENDER, Lateness, memory, open_plain, shake_hands
from rig import LIMIT, wait_until
from trio.testing import MockClock

from trio_mori import NotReady, open_connector
from trio_mori import _zmq_flood as flood
from trio_mori._keys import Keys
from trio_mori._log_limit import LogLimit
from trio_mori._zmq_dialler import DiallingLink, open_dialler
from trio_mori._zmq_flood import Sluice, open_sluice
from trio_mori._zmq_listener import ListeningLink, open_listener
from trio_mori._zmq_socket import MAX_LEFT_OUT, RECEIVE_LIMIT, Happened, ZmqTransport, new_key_pair, open_socket
from trio_mori.abc import Arrived, Connected, Disconnected

MIB = 1 << 20

EMPTY_PART = b"\x01\x00"
LAST_PART = b"\x00\x00"

# Parts of a message without an end, or messages of as many as one may have, and the memory that they may have taken
# until their connection is cut off: those of two bytes take 64 each. That is of looks that come in time: libzmq reads
# on while a machine keeps us from looking, and then it is tried again.
CROWDED = EMPTY_PART * 2_000_000 + LAST_PART
ENDLESS = [
    (EMPTY_PART, 1024 * MIB),
    (b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB), 128 * MIB),
    (CROWDED, 1024 * MIB),
]
TRIES = 4
ENDLESS_NAMES = ["empty", "1 MiB", "whole messages of empty ones"]


async def echo(listener: ListeningLink) -> None:
    """Answer whatever comes."""
    while True:
        for event in await listener.receive():
            if isinstance(event, Arrived):
                listener.send(event.frames, event.route)


async def ask(link: DiallingLink, question: bytes) -> None:
    """Have something answered."""
    link.send([b"", question])
    arrived = [event for event in await link.receive() if isinstance(event, Arrived)]
    assert [each.frames[1] for each in arrived] == [question]


async def send_without_end(stream: trio.SocketStream, parts: bytes, cut_off: trio.Event) -> None:
    """Send parts until cut off."""
    try:
        while True:
            await stream.send_all(parts)
    except trio.BrokenResourceError:
        cut_off.set()


@pytest.mark.parametrize(("part", "most"), ENDLESS, ids=ENDLESS_NAMES)
async def test_a_message_without_an_end_is_cut_off_and_nobody_else_is_disturbed(
    part: bytes, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    await check_memory(partial(flood_a_listener, part, caplog), most)


async def check_memory(attempt: Callable[[Lateness], Awaitable[int]], most: int) -> None:
    """See that a flood takes less than that. One during which a look came too late to be one says nothing."""
    before = memory()
    for _ in range(TRIES):
        lateness = Lateness()
        taken = await attempt(lateness) - before
        if taken < most or lateness.most < flood.PAUSE:
            break
    assert taken < most


async def flood_a_listener(part: bytes, caplog: pytest.LogCaptureFixture, lateness: Lateness) -> int:
    """Have a message without an end cut off; returns the memory that this process then has."""
    caplog.clear()
    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], 0) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(lateness.watch)
            nursery.start_soon(echo, listener)
            async with open_dialler("127.0.0.1", listener.port) as link, open_plain(listener.port) as stream:
                assert await link.receive() == [Connected()]
                await ask(link, b"before")
                cut_off = trio.Event()
                nursery.start_soon(send_without_end, stream, part * max(1, 65536 // len(part)), cut_off)
                number = 0
                while not cut_off.is_set():
                    number += 1
                    await ask(link, b"%d" % number)
                taken = memory()
                await ask(link, b"after")
                assert listener.cut_off == 1
            nursery.cancel_scope.cancel()
    [record] = [each for each in caplog.records if getattr(each, "event", "") == "peer_cut_off"]
    assert "127.0.0.1" in record.getMessage()
    return taken


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "secured"])
async def test_what_is_held_back_of_a_message_of_libzmq_itself_has_it_cut_off(secured: bool) -> None:
    keys = None
    if secured:
        public, secret = new_key_pair()
        keys = Keys(public=public, secret=secret, sender=public, allowed={public: "stage"})
    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], 0, keys=keys) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(echo, listener)
            cut_off = trio.Event()
            port = await nursery.start(hold_back, listener.port, 30 * MIB, 40 * MIB, cut_off)
            async with open_dialler("127.0.0.1", port, keys=keys) as link:
                assert await link.receive() == [Connected()]
                await ask(link, b"before")
                # What comes before the first look is not held against it: all of this may, while that is yet to come.
                await wait_until(lambda: not listener._sluice._moving)
                link.send([b"", *[bytes(MIB)] * 40])
                await cut_off.wait()
                assert listener.cut_off == 1
            nursery.cancel_scope.cancel()


async def hold_back(
    port: int, size: int, whole: int, cut_off: trio.Event, *, task_status: trio.TaskStatus[int]
) -> None:
    """Pass a connection on to a port, but only so many bytes of what it sends.

    Once the port has cut it off, the whole of the bytes is taken from it: libzmq ends its process
    (session_base.cpp:233) if the connection of a message that is half sent and the socket close at once.
    """

    async def serve(stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as onward, trio.open_nursery() as nursery:

            async def answer() -> None:
                with suppress(trio.BrokenResourceError):
                    async for piece in onward:
                        await stream.send_all(piece)
                ended.set()

            ended = trio.Event()
            nursery.start_soon(answer)
            taken = 0
            while taken < whole:
                if taken >= size:
                    await ended.wait()
                piece = await stream.receive_some(65536)
                taken += len(piece)
                if not ended.is_set():
                    with suppress(trio.BrokenResourceError):
                        await onward.send_all(piece)
            cut_off.set()
            await trio.sleep_forever()

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(listener.socket.getsockname()[1])
    await trio.serve_listeners(serve, [listener])


async def flood_once(part: bytes, *, task_status: trio.TaskStatus[int]) -> None:
    """Be a sender that sends a message without an end by its first connection, and a whole one by each that follows."""
    connections = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        await shake_hands(stream, READY_SENDER)
        if connections == 1:
            await send_without_end(stream, part * max(1, 65536 // len(part)), trio.Event())
        else:
            await stream.send_all(LAST_PART)
            await trio.sleep_forever()

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(listener.socket.getsockname()[1])
    await trio.serve_listeners(serve, [listener])


@pytest.mark.parametrize(("part", "most"), ENDLESS, ids=ENDLESS_NAMES)
async def test_a_sender_whose_message_has_no_end_is_cut_off_and_dialled_again(
    part: bytes, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    await check_memory(partial(flood_a_dialler, part, caplog), most)


async def flood_a_dialler(part: bytes, caplog: pytest.LogCaptureFixture, lateness: Lateness) -> int:
    """The same of a sender that is dialled."""
    caplog.clear()
    cut_off: list[int] = []
    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], 0) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(lateness.watch)
            nursery.start_soon(echo, listener)
            port = await nursery.start(flood_once, part)
            async with (
                open_dialler("127.0.0.1", listener.port) as link,
                open_dialler("127.0.0.1", port, on_cut_off=lambda: cut_off.append(port)) as victim,
            ):
                assert await link.receive() == [Connected()]
                events: list[object] = []

                async def listen() -> None:
                    while len(events) < 4:
                        events.extend(await victim.receive())

                nursery.start_soon(listen)
                while len(events) < 4:
                    await ask(link, b"meanwhile")
                taken = memory()
                assert events == [Connected(), Disconnected(), Connected(), Arrived([b""])]
                assert cut_off == [port]
            nursery.cancel_scope.cancel()
    [record] = [each for each in caplog.records if getattr(each, "event", "") == "peer_cut_off"]
    assert f"127.0.0.1:{port}" in record.getMessage()
    return taken


async def test_a_sender_that_is_cut_off_each_time_fills_no_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_mori._log_limit.BURST", 2)
    monkeypatch.setattr("trio_mori._zmq_dialler.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(flood, "SLACK", 0)

    async def serve(stream: trio.SocketStream) -> None:
        await shake_hands(stream, READY_SENDER)
        await send_without_end(stream, EMPTY_PART * 32768, trio.Event())

    cut_off: list[int] = []
    with trio.fail_after(3 * LIMIT):  # each time may take as long as a look at all connections
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            port = listener.socket.getsockname()[1]
            async with open_dialler("127.0.0.1", port, on_cut_off=lambda: cut_off.append(port), max_bytes=MIB) as link:
                while len(cut_off) < 4:
                    await link.receive()
            nursery.cancel_scope.cancel()
    assert len([each for each in caplog.records if getattr(each, "event", "") == "peer_cut_off"]) == 2


@pytest.mark.parametrize("part", [EMPTY_PART, CROWDED], ids=["no end", "too many parts"])
async def test_a_sender_that_was_cut_off_is_counted(part: bytes) -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(flood_once, part)
            config = {"sender_host": "127.0.0.1", "sender_zmq_port": port, "memory_pool_size": MIB}
            async with open_connector({"role": "receiver", **config}) as receiver:
                with pytest.raises(NotReady):
                    receiver.get_nowait("0", "1", "k")
                await wait_until(lambda: receiver.statistics().events["cut_off_peers"] == 1, within=LIMIT)
            nursery.cancel_scope.cancel()


async def say_and_go(message: bytes, times: int, said: list[int], *, task_status: trio.TaskStatus[int]) -> None:
    """Be a sender that sends whole messages without waiting for anything, and is gone after the last.

    Args:
        said: What memory this process had after each.
    """

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await shake_hands(stream, READY_SENDER)
            for _ in range(times):
                await stream.send_all(message)
                said.append(memory())

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(listener.socket.getsockname()[1])
    async with listener:
        stream = await listener.accept()
    await serve(stream)


async def test_a_sender_waits_until_its_messages_are_read_and_its_end_comes_after_them() -> None:
    said: list[int] = []
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(say_and_go, b"\x02" + MIB.to_bytes(8, "big") + bytes(MIB), 300, said)
            async with open_dialler("127.0.0.1", port, on_cut_off=lambda: pytest.fail("it was")) as link:
                await wait_until(lambda: len(said) >= RECEIVE_LIMIT, within=LIMIT)
                await trio.sleep(10 * flood.PAUSE)  # for all that it would say to whoever does not read
                assert len(said) < 200  # what the kernel keeps comes on top
                events: list[object] = []
                while Disconnected() not in events:
                    events += await link.receive()
                assert events == [Connected(), *[Arrived([bytes(MIB)])] * 300, Disconnected()]


async def test_a_sender_that_says_more_than_a_connector_can_read_fills_no_memory() -> None:
    said: list[int] = []
    with trio.fail_after(3 * LIMIT):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(say_and_go, (b"\x00\x22" + bytes(34)) * 5000, 80, said)
            config = {"sender_host": "127.0.0.1", "sender_zmq_port": port, "memory_pool_size": MIB}
            async with open_connector({"role": "receiver", **config}) as receiver:
                before = memory()
                with pytest.raises(NotReady):
                    receiver.get_nowait("0", "1", "k")
                await wait_until(lambda: len(said) == 80, within=3 * LIMIT)
                assert max(said) - before < 20 * MIB  # what was said has 14 MiB, and would take 50 if it waited
                assert receiver.statistics().events["cut_off_peers"] == 0


async def test_a_sender_whose_whole_messages_wait_to_be_read_is_not_cut_off() -> None:
    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], 0) as listener, trio.open_nursery() as nursery:

            async def answer_a_hundredfold() -> None:
                [arrived] = await listener.receive()
                assert isinstance(arrived, Arrived)
                for _ in range(100):
                    listener.send([b"", bytes(MIB)], arrived.route)

            nursery.start_soon(answer_a_hundredfold)
            async with open_dialler("127.0.0.1", listener.port, on_cut_off=lambda: pytest.fail("it was")) as link:
                assert await link.receive() == [Connected()]
                link.send([b"", b"all of it"])
                await trio.sleep(5 * flood.PAUSE)  # for some looks at what nobody reads
                count = 0
                while count < 100:
                    events = await link.receive()
                    assert Disconnected() not in events
                    count += len(events)


async def test_whole_messages_that_wait_to_be_read_are_no_flood() -> None:
    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], 0) as listener:
            async with open_dialler("127.0.0.1", listener.port) as link:
                assert await link.receive() == [Connected()]
                for _ in range(100):
                    link.send([b"", bytes(MIB)])
                await trio.sleep(5 * flood.PAUSE)  # for some looks at what nobody reads
                count = 0
                while count < 100:
                    count += len(await listener.receive())
            assert listener.cut_off == 0
            assert listener.statistics().oversized == 0


async def test_a_flood_is_found_beside_one_of_messages() -> None:
    """Where the socket always has something to read, it is told by the turns that it gives to each connection."""
    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], 0) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(echo, listener)

            async def talk() -> None:
                async with open_dialler("127.0.0.1", listener.port) as link:
                    while True:
                        link.send([b"", bytes(1000)])
                        await link.receive()

            for _ in range(4):
                nursery.start_soon(talk)
            async with open_plain(listener.port) as stream:
                await send_without_end(stream, EMPTY_PART * 32768, trio.Event())
            assert listener.cut_off == 1
            nursery.cancel_scope.cancel()


# --- the rule, on connections without libzmq ------------------------------------------------------------------


class Reader(ZmqTransport):
    """A socket of which is said whether it has input."""

    has_input = False

    def settle(self) -> bool:
        return self.has_input


class Bench:
    """One connection that is watched; what comes by it is read at once."""

    def __init__(self, sluice: Sluice, transport: Reader) -> None:
        self.sluice, self.transport = sluice, transport
        self.near, self.far = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """A connection that was just accepted."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        self.sluice.note(Happened(int(zmq.EVENT_ACCEPTED), near.fileno()))
        return near, far

    def come(self, size: int) -> None:
        """Bytes come, are read, and the sluice looks."""
        while size > 0:
            piece = min(size, 65536)
            self.far.sendall(bytes(piece))
            while piece:
                piece -= len(self.near.recv(piece))
            size -= 65536
        self.sluice._moving.add(self.near.fileno())
        self.look()

    def look(self) -> None:
        """Time has passed."""
        self.sluice._look()

    def deliver(self) -> None:
        """A message of it is read."""
        self.transport.doubted.discard(self.near.fileno())

    def is_cut(self) -> bool:
        """Whether the other end sees an end."""
        self.far.setblocking(False)
        try:
            return self.far.recv(1) == b""
        except BlockingIOError:
            return False
        finally:
            self.far.setblocking(True)


@contextmanager
def open_bench() -> Iterator[Bench]:
    with open_socket(zmq.ROUTER, MIB) as unused:
        transport = Reader(unused)
        with open_sluice(transport, limit=4 * MIB, address="here", log_limit=LogLimit()) as sluice:
            bench = Bench(sluice, transport)
            with bench.near, bench.far:
                yield bench


deterministic = pytest.mark.deterministic


@deterministic
async def test_a_connection_that_is_read_from_may_send_any_amount() -> None:
    with open_bench() as bench:
        for _ in range(20):
            bench.come(2 * MIB)
            bench.deliver()
        assert not bench.is_cut()
        bench.come(1)
        for _ in range(3):
            assert not bench.is_cut()
            bench.come(2 * MIB)
        assert bench.is_cut()
        assert bench.sluice.cut == 1


@deterministic
async def test_pauses_between_the_parts_are_no_excuse() -> None:
    with open_bench() as bench:
        bench.come(100)
        bench.deliver()
        for _ in range(2):
            bench.look()
        for _ in range(54):  # the first are not counted, as a message of them may have been read; 5 MiB are the limit
            assert not bench.is_cut()
            bench.come(100_000)
            for _ in range(2):
                bench.look()
            assert not bench.sluice._moving
        assert bench.is_cut()


@deterministic
async def test_messages_are_not_asked_where_they_come_from_while_none_is_in_doubt() -> None:
    with open_bench() as bench:
        bench.come(100)
        bench.deliver()
        for _ in range(2):
            bench.look()
        assert not bench.transport.doubted


@deterministic
async def test_what_waits_to_be_read_is_held_against_nobody_until_each_had_its_turns() -> None:
    with open_bench() as bench:
        bench.transport.has_input = True
        for _ in range(10):
            bench.come(2 * MIB)
        bench.look()
        assert not bench.is_cut()
        bench.transport.reads += 1000
        bench.look()
        assert bench.is_cut()


@deterministic
async def test_another_connection_that_got_the_descriptor_is_left_alone() -> None:
    with open_bench() as bench:
        bench.come(1)
        old = bench.near.fileno()
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            other = stack.enter_context(socket.create_connection(server.getsockname()))
            near, _ = server.accept()
            stack.enter_context(near)
            os.dup2(other.fileno(), old)  # at once: nobody else can get the number in between
            for _ in range(100):  # more than it may, of what is no affair of ours
                near.sendall(bytes(65536))
                other.recv(65536, socket.MSG_WAITALL)
            bench.sluice._moving.add(old)
            bench.sluice._look()
            assert bench.sluice.cut == 0
            near.sendall(b"still there")
            assert other.recv(100) == b"still there"


def take_descriptors(stack: ExitStack) -> None:
    """Take one after the other until the system refuses."""
    while True:
        stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))


@deterministic
async def test_a_flood_is_cut_off_though_no_descriptor_is_left() -> None:
    with open_bench() as bench, no_descriptors():
        for _ in range(3):
            bench.come(2 * MIB)
        assert bench.is_cut()


@deterministic
async def test_a_connection_with_itself_is_known_though_no_descriptor_is_left() -> None:
    with open_bench() as bench, socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        connection.connect(connection.getsockname())
        with no_descriptors():
            assert bench.sluice.is_alone(connection.fileno())
            assert not bench.sluice.is_alone(bench.far.fileno())


@contextmanager
def no_descriptors() -> Iterator[None]:
    """The process has none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        with pytest.raises(OSError, match="Too many open files"):
            take_descriptors(stack)
        yield


@deterministic
async def test_a_message_of_too_many_parts_has_its_connection_cut_off_and_not_one_that_got_its_descriptor() -> None:
    with open_bench() as bench:
        bench.come(2 * MAX_LEFT_OUT - 1)  # less than such a message has
        bench.transport.crowded.add(bench.near.fileno())
        bench.look()
        assert not bench.is_cut()
        bench.come(1)
        assert not bench.is_cut()
        bench.transport.crowded.add(bench.near.fileno())
        bench.look()
        assert bench.is_cut()
        assert bench.sluice.cut == 1


@deterministic
async def test_the_longer_nobody_speaks_the_rarer_all_are_looked_at(autojump_clock: MockClock) -> None:
    with open_bench() as bench:
        looks: list[float] = []

        def look() -> bool:
            looks.append(trio.current_time())
            return Sluice._look(bench.sluice)

        bench.sluice._look = look  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.sluice.watch_forever, lambda: None)
            await trio.sleep(121)
            assert looks == [5, 15, 35, 75, 115]
            near, far = bench.connect()
            with near, far:
                await trio.sleep(16)
                assert looks[5:] == [126, 136]  # one that has come just now is not left alone for so long
                bench.far.sendall(b"unseen")
                bench.near.recv(6)
                looks.clear()
                await trio.sleep(25)
                assert [each for each in looks if each > 137] == pytest.approx([156, 156.05, 161.05], abs=0.01)
            nursery.cancel_scope.cancel()


@deterministic
async def test_a_connection_at_rest_is_not_looked_at() -> None:
    with open_bench() as bench:
        bench.come(1)
        bench.sluice._look()
        assert not bench.sluice._moving
        assert not bench.sluice._poll.poll(0)
        bench.far.sendall(b"x")
        assert bench.sluice._poll.poll(1)
