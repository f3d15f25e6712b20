"""ZMQ links: what `check_link` cannot ask of every link. Addresses and ports, one connection after another, peers that
are not ours, and what is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ParamSpec

import pytest
import trio
import trio.testing
import zmq

from trio_mori import _zmq
from trio_mori._errors import BindFailed
from trio_mori._zmq import DiallingLink, ListeningLink, open_dialler, open_listener
from trio_mori.abc import Arrived, Connected, Disconnected, Link, LinkEvent

V4, V6 = "127.0.0.1", "::1"
Peer = zmq.Socket[bytes]


def _has_ipv6() -> bool:
    try:
        with socket.create_server((V6, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no ::1")


P = ParamSpec("P")


def bounded(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Fail a test that hangs. None of these starts a process."""

    @pytest.mark.deterministic
    @functools.wraps(test)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with trio.fail_after(20):
            await test(*args, **kwargs)

    return run


class Inbox:
    """Takes single events out of a link's batches."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.events: list[LinkEvent] = []

    async def next(self) -> LinkEvent:
        while not self.events:
            self.events += await self.link.receive()
        return self.events.pop(0)

    async def message(self) -> Arrived:
        event = await self.next()
        assert isinstance(event, Arrived), event
        return event


@contextmanager
def plain_socket(kind: int, port: int) -> Iterator[Peer]:
    """A blocking ZMQ socket of somebody else, connected to a port of ours."""
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.linger = 0
        peer.rcvtimeo = 10_000
        peer.connect(f"tcp://{V4}:{port}")
        yield peer


@asynccontextmanager
async def connected_pair() -> AsyncIterator[tuple[DiallingLink, ListeningLink]]:
    async with open_listener([V4], 0) as listener, open_dialler(V4, listener.port) as dialler:
        assert await dialler.receive() == [Connected()]
        yield dialler, listener


# --- addresses and ports --------------------------------------------------------------------------------------


@bounded
async def test_port_0_becomes_a_port_that_can_be_dialled() -> None:
    async with open_listener([V4], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port}"
        async with open_dialler(V4, listener.port) as dialler:
            assert dialler.address == listener.address
            assert await dialler.receive() == [Connected()]


@needs_ipv6
@bounded
async def test_one_port_on_addresses_of_both_families() -> None:
    async with open_listener([V4, V6], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port},tcp://[{V6}]:{listener.port}"
        inbox = Inbox(listener)
        for address in (V4, V6):
            async with open_dialler(address, listener.port) as dialler:
                assert await dialler.receive() == [Connected()]
                dialler.send([address.encode()])
                assert (await inbox.message()).frames == [address.encode()]


@bounded
async def test_an_address_given_twice_is_bound_once() -> None:
    async with open_listener([V4, V4], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port}"


@bounded
async def test_an_ephemeral_port_taken_on_the_second_address_is_given_up_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind = _zmq._bind
    thieves: list[socket.socket] = []

    def bind_late(zmq_socket: Peer, address: str, port: int) -> str:
        if address == "127.0.0.2" and len(thieves) < 3:
            thieves.append(socket.create_server((address, port)))
        return bind(zmq_socket, address, port)

    monkeypatch.setattr(_zmq, "_bind", bind_late)
    async with open_listener([V4, "127.0.0.2"], 0) as listener:
        taken = {thief.getsockname()[1] for thief in thieves}
        assert len(taken) == 3
        assert listener.port not in taken
        assert listener.address == f"tcp://{V4}:{listener.port},tcp://127.0.0.2:{listener.port}"
    for thief in thieves:
        thief.close()


@bounded
async def test_an_ephemeral_port_is_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zmq, "EPHEMERAL_ATTEMPTS", 3)
    with pytest.raises(BindFailed, match="no such address"):
        async with open_listener([V4, "203.0.113.7"], 0):
            pass
    with socket.create_server((V4, 0)) as thief:
        port = thief.getsockname()[1]
        monkeypatch.setattr(_zmq, "_port_of", lambda endpoints: port if endpoints else 0)
        with pytest.raises(BindFailed, match="another socket listens there"):
            async with open_listener(["127.0.0.3", V4], 0):
                pass


@bounded
async def test_the_port_is_free_as_soon_as_the_listener_has_been_left() -> None:
    port = 0
    for _ in range(20):
        async with open_listener([V4], port) as listener:
            port = listener.port
    async with open_listener([V4], port), open_dialler(V4, port) as dialler:
        assert await dialler.receive() == [Connected()]


@bounded
async def test_the_port_is_free_though_peers_are_connected_and_do_not_read() -> None:
    async with open_listener([V4], 0) as listener:
        port = listener.port
        with plain_socket(zmq.DEALER, port) as peer:
            peer.send(b"hello")
            route = (await Inbox(listener).message()).route
            for _ in range(100):
                listener.send([b"x" * 100_000], route)
            await trio.lowlevel.checkpoint()
    async with open_listener([V4], port):
        pass


@bounded
async def test_the_port_is_free_when_the_listener_was_cancelled() -> None:
    with trio.CancelScope() as scope:
        async with open_listener([V4], 0) as listener:
            port = listener.port
            scope.cancel()
            await trio.sleep_forever()
    async with open_listener([V4], port):
        pass


@pytest.mark.parametrize("hosts", [[V4], ["127.0.0.2", V4]])
@bounded
async def test_a_port_in_use_says_whose_and_what_to_do(hosts: list[str]) -> None:
    with socket.create_server((V4, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BindFailed) as caught:
            async with open_listener(hosts, port):
                pass
    error = caught.value
    assert (error.host, error.port, error.errno) == (V4, port, errno.EADDRINUSE)
    assert f"tcp://{V4}:{port}: Address already in use; another socket listens there (`ss -ltnp` names" in str(error)
    assert isinstance(error.__cause__, zmq.ZMQError)
    with socket.create_server(("127.0.0.2", port)):  # nothing of ours is left on the first address
        pass


@bounded
async def test_an_address_of_another_host_says_so() -> None:
    with pytest.raises(BindFailed, match=r"203\.0\.113\.7:50051: .*this host has no such address") as caught:
        async with open_listener(["203.0.113.7"], 50051):
            pass
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_a_port_that_needs_privileges_says_so() -> None:
    script = f"""
        import encodings.idna, errno, os, trio
        from trio_mori._errors import BindFailed
        from trio_mori._zmq import open_listener

        async def main():
            try:
                async with open_listener(["{V4}"], 81):
                    print("bound")
            except BindFailed as error:
                print(error.errno == errno.EACCES, error)

        if os.geteuid() == 0:
            os.setuid(65534)
        trio.run(main)
        """
    result = run_script(script)
    if result == "bound":
        pytest.skip("this host lets everybody listen on port 81")
    assert result.startswith("True ")
    assert result.endswith("set a port from 1024 to 65535, or 0 for any free one")


# --- names ----------------------------------------------------------------------------------------------------


class Resolver(trio.abc.HostnameResolver):
    """Knows names only after it was asked `failures` times."""

    def __init__(self, failures: int, addresses: list[str]) -> None:
        self.failures = failures
        self.addresses = addresses

    async def getaddrinfo(  # type: ignore[override]
        self, host: bytes, port: int, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        await trio.lowlevel.checkpoint()
        if self.failures:
            self.failures -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in self.addresses]
        return [(family, type, 0, "", (address, port)) for family, address in zip(families, self.addresses)]  # noqa: B905

    async def getnameinfo(self, sockaddr: object, flags: int) -> tuple[str, str]:
        raise NotImplementedError


@pytest.fixture
def resolver() -> Callable[[int, list[str]], None]:
    def resolve(failures: int, addresses: list[str]) -> None:
        trio.socket.set_custom_hostname_resolver(Resolver(failures, addresses))

    return resolve


@bounded
async def test_a_name_that_does_not_resolve_yet_is_tried_on_and_reported_once(
    resolver: Callable[[int, list[str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    resolver(2, [V6, V4])
    async with open_listener([V4], 0) as listener, open_dialler("stage-0", listener.port) as dialler:
        assert dialler.address == f"tcp://stage-0:{listener.port}"
        assert await dialler.receive() == [Connected()]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"stage-0:{listener.port}" in caplog.text


@bounded
async def test_listening_on_a_name_listens_on_its_address(resolver: Callable[[int, list[str]], None]) -> None:
    resolver(0, [V4])
    async with open_listener(["stage-0"], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port}"


@pytest.mark.parametrize("host", ["stage-0", "x" * 64])
@bounded
async def test_listening_on_a_name_that_does_not_resolve_fails_at_once(
    host: str, resolver: Callable[[int, list[str]], None]
) -> None:
    resolver(1, [V4])
    with pytest.raises(BindFailed, match=f"cannot listen on {host}:50051: .*or 'auto'") as caught:
        async with open_listener([host], 50051):
            pass
    assert caught.value.errno is None


# --- one connection after another -----------------------------------------------------------------------------


@bounded
async def test_a_dialler_may_be_opened_before_its_listener_and_what_it_sends_until_then_is_dropped() -> None:
    async with open_listener([V4], 0) as listener:
        port = listener.port
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
    async with open_listener([V4], 0) as listener:
        port = listener.port
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
        port = first.bind_to_random_port(f"tcp://{V4}")
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
async def test_a_flood_of_messages_that_are_too_large_keeps_no_other_task_from_running() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with open_listener([V4], 0, max_frames=1) as listener, trio.open_nursery() as nursery:
        with plain_socket(zmq.DEALER, listener.port) as peer:
            for _ in range(3000):
                peer.send_multipart([b"x", b"x"])
            peer.send(b"last")
            while not listener._transport.settle():  # type: ignore[union-attr]
                pass
            nursery.start_soon(count_turns)
            assert (await Inbox(listener).message()).frames == [b"last"]
            nursery.cancel_scope.cancel()
    assert turns >= 5
    assert listener.statistics().oversized == 3000


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
    with socket.create_server((V4, 0)) as rude:
        port = rude.getsockname()[1]
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


# --- what is left behind --------------------------------------------------------------------------------------


@bounded
async def test_links_leave_no_descriptor_open() -> None:
    async def use() -> None:
        async with connected_pair() as (dialler, listener):
            dialler.send([b"x"])
            await listener.receive()

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    await use()
    before = descriptors()
    for _ in range(20):
        await use()
    while descriptors() > before:  # noqa: ASYNC110 - libzmq closes them in its own thread
        await trio.sleep(0.01)


@bounded
async def test_opening_in_a_cancelled_scope_leaves_nothing() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with open_listener([V4], 0):
            pass
    with trio.CancelScope() as scope:
        scope.cancel()
        async with open_dialler(V4, 1):
            pass


def run_script(script: str) -> str:
    """Run a script in a process of its own, which has to end by itself; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


LINKS = f"""
    import os, sys, threading, trio
    from trio_mori._zmq import open_dialler, open_listener

    async def echo():
        async with open_listener(["{V4}"], 0) as listener, open_dialler("{V4}", listener.port) as dialler:
            await dialler.receive()
            dialler.send([b"hello"])
            [message] = await listener.receive()
            listener.send(message.frames, message.route)
            [message] = await dialler.receive()
            return message.frames[0].decode()
    """


def test_an_interpreter_exits_while_another_thread_has_links_open() -> None:
    script = """
    opened = threading.Event()

    async def stay():
        async with open_listener(["127.0.0.1"], 0) as listener, open_dialler("127.0.0.1", listener.port) as dialler:
            await dialler.receive()
            dialler.send([b"x" * 1000000])
            opened.set()
            await trio.sleep_forever()

    threading.Thread(target=trio.run, args=(stay,), daemon=True).start()
    opened.wait()
    print("exits")
    """
    assert run_script(textwrap.dedent(LINKS) + textwrap.dedent(script)) == "exits"


def test_an_interpreter_exits_from_within_a_link() -> None:
    script = """
    async def leave():
        async with open_listener(["127.0.0.1"], 0) as listener, open_dialler("127.0.0.1", listener.port) as dialler:
            await dialler.receive()
            print("exits", flush=True)
            sys.exit()

    trio.run(leave)
    """
    assert run_script(textwrap.dedent(LINKS) + textwrap.dedent(script)) == "exits"


@pytest.mark.parametrize("secured", [False, True])
def test_a_forked_child_has_links_of_its_own_and_leaves_the_parents_alone(secured: bool) -> None:
    script = f"""
    from trio_mori._keys import Keys
    from trio_mori._zmq_socket import new_key_pair

    public, secret = new_key_pair()
    keys = Keys(public=public, secret=secret, sender=public, allowed={{public: "own"}}) if {secured} else None

    async def main():
        async with (
            open_listener(["127.0.0.1"], 0, keys=keys) as listener,
            open_dialler("127.0.0.1", listener.port, keys=keys) as dialler,
        ):
            await dialler.receive()
            child = os.fork()
            if child == 0:
                os._exit(20 if run_child() == "hello" else 21)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            dialler.send([b"still there"])
            [message] = await listener.receive()
            print(message.frames[0].decode())

    def run_child():
        result = []
        thread = threading.Thread(target=lambda: result.append(trio.run(echo)))
        thread.start()
        thread.join()
        return result[0]

    trio.run(main)
    """
    assert run_script(textwrap.dedent(LINKS) + textwrap.dedent(script)).split("\n") == ["20", "still there"]
