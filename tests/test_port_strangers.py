"""Who else may listen at a stage's address, and how it is asked."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import (
    asynccontextmanager,
    suppress,
)
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq
from port_site import (
    another_process,
    holder_of,
    open_and_fail,
    open_holder,
    open_site,
    put,
    sender_at,
    standing,
)
from ports import free_port
from rig import (
    LIMIT,
    begin,
    receiver_config,
    wait_until,
)
from stock_peers import open_stock_server

from trio_mori import (
    BindFailed,
    RemoteProtocolError,
    open_connector,
)
from trio_mori import _address as addresses
from trio_mori import _inquiry as inquiry
from trio_mori._protocol import wire
from trio_mori._zmq_dialler import open_dialler
from trio_mori._zmq_listener import open_listener
from trio_mori.abc import Arrived, Connected, Link
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic


# --- who else may listen there ------------------------------------------------------------------------------


async def test_a_program_without_zmq_fails_the_open_in_less_than_two_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        began = time.monotonic()
        error = await open_and_fail(stranger.getsockname()[1])
        assert time.monotonic() - began < 2
        assert "took no ZMQ connection" in str(error)
        assert "ss -tanp" in str(error)


@deterministic
async def test_a_sender_that_says_nothing_fails_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_TIMEOUT", 0.02)
    async with open_holder(lambda _: None) as port:
        assert "does not say who it is" in str(await open_and_fail(port))


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.REP, zmq.PULL], ids=["router", "rep", "pull"])
async def test_a_silent_zmq_program_fails_the_open_in_less_than_two_seconds(kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as stranger:
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        began = time.monotonic()
        error = await open_and_fail(port)
        assert time.monotonic() - began < 2
        assert "a process that" in str(error)


@deterministic
async def test_a_sender_that_is_busy_is_given_more_time_than_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "STRANGER_TIMEOUT", 0.001)
    async with open_listener(["127.0.0.1"], 0) as link, trio.open_nursery() as nursery:
        port = link.port
        nursery.start_soon(open_and_close, port)
        event = (await link.receive())[0]
        await trio.sleep(0.02)
        assert isinstance(event, Arrived)
        link.send(wire.encode(holder_of(port, yields=False)), event.route)


async def open_and_close(port: int) -> None:
    """Open a sender beside another one of its stage."""
    with another_process():
        async with MemoryFabric().open() as engine, open_connector(sender_at(port), engine=engine) as connector:
            assert connector.health()["port"] == "passive"


@deterministic
async def test_a_connection_that_has_the_port_as_its_own_end_fails_the_open() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.1", port)):
            began = time.monotonic()
            assert "a connection that has it as its own end" in str(await open_and_fail(port))
            assert time.monotonic() - began < 2


@deterministic
async def test_a_receiver_that_was_connected_with_itself_leaves_the_port_to_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the system does it, once in 28,000 attempts, where the sender's port is among those that it gives."""
    port, dials, connect = free_port(), 0, zmq.Socket.connect

    def connect_from_there(self: zmq.Socket[bytes], address: str) -> object:
        nonlocal dials
        if address.startswith("tcp://") and dials < 3:
            dials += 1
            address = f"{address};{address.removeprefix('tcp://')}"
        return connect(self, address)

    monkeypatch.setattr(zmq.Socket, "connect", connect_from_there)
    # Of this connection alone: what an earlier test had with that port may be there for another minute.
    itself = f"0100007F:{port:04X} 0100007F:{port:04X} "
    async with open_connector(receiver_config(port)) as receiver:
        async with trio.open_nursery() as nursery:
            got = begin(nursery, receiver.get, "0", "1", "k")
            await wait_until(lambda: dials == 3 and itself not in Path("/proc/net/tcp").read_text())
            async with open_connector(sender_at(port)) as sender:
                await sender.put("0", "1", "k", b"x")
                assert await got.wait() == b"x"


@deterministic
async def test_a_program_that_hangs_up_fails_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PAUSE", 0.0001)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def hang_up(stream: trio.SocketStream) -> None:
            await stream.aclose()

        nursery.start_soon(trio.serve_listeners, hang_up, [listener])
        assert "hang up" in str(await open_and_fail(listener.socket.getsockname()[1]))
        nursery.cancel_scope.cancel()


@deterministic
async def test_what_listens_for_a_while_only_is_not_waited_for() -> None:
    """Where it was, nobody is: a link would go on dialling."""
    async with trio.open_nursery() as nursery, MemoryFabric().open() as engine:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def end(stream: trio.SocketStream) -> None:
            await listener.aclose()
            await stream.aclose()

        async def serve() -> None:
            with suppress(trio.ClosedResourceError):
                await end(await listener.accept())

        nursery.start_soon(serve)
        began = time.monotonic()
        async with open_connector(sender_at(listener.socket.getsockname()[1]), engine=engine) as connector:
            assert connector.health()["port"] == "held"
        assert time.monotonic() - began < 1


@deterministic
async def test_a_stock_sender_fails_the_open_and_is_named() -> None:
    async with open_stock_server(MemoryFabric()) as server:
        assert "a sender of vllm-omni itself" in str(await open_and_fail(server.port))
        assert server.hellos == 1


@deterministic
@pytest.mark.parametrize(
    "answer",
    [
        [b"", b"info_not_found"],
        [b"", b"\xc0"],
        [b"hello"],
        [wire.MAGIC, b"\xc1\x90"],
        wire.encode(wire.Stale(bytes(16), 1, bytes(16))),
    ],
    ids=["stock", "none", "text", "empty", "native"],
)
async def test_a_socket_that_answers_something_else_fails_the_open(answer: list[bytes]) -> None:
    async with open_holder(lambda _: answer) as port:
        assert "a program that speaks another protocol" in str(await open_and_fail(port))


@deterministic
async def test_a_trio_mori_of_another_release_fails_the_open_and_is_named() -> None:
    async with open_holder(lambda _: wire.encode(wire.VersionRange(7, 9))) as port:
        assert "protocol versions 7 to 9, ours 1 to 1" in str(await open_and_fail(port))


@deterministic
@pytest.mark.parametrize("yields", [False, True])
async def test_a_trio_mori_of_another_deployment_fails_the_open_and_is_named(yields: bool) -> None:
    async with open_holder(lambda _: wire.encode(holder_of(port, yields=yields, digest="else"))) as port:
        error = await open_and_fail(port)
        assert "a trio_mori of another deployment, process 4711 (configuration 'else' where ours is" in str(error)


@deterministic
async def test_a_holder_that_ends_instead_of_answering_leaves_the_address() -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery, MemoryFabric().open() as engine:
            asked = trio.Event()

            def ask(_: wire.Inquiry) -> None:
                asked.set()

            async def hold(*, task_status: trio.TaskStatus[int]) -> None:
                async with open_holder(ask) as port:
                    task_status.started(port)
                    await asked.wait()

            port = await nursery.start(hold)
            async with open_connector(sender_at(port), engine=engine) as connector:
                assert connector.health()["port"] == "held"


@deterministic
async def test_a_holder_that_says_that_it_yields_and_does_not_fails_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PATIENCE", 0.02)
    asked: list[bool] = []

    def answer(question: wire.Inquiry) -> list[bytes]:
        asked.append(question.wanted)
        return wire.encode(holder_of(port, yields=question.wanted, close_grace=0))

    async with open_holder(answer) as port, MemoryFabric().open() as engine:
        async with open_connector({**sender_at(port), "close_grace": 0}, engine=engine) as connector:
            assert connector.health()["port"] == "passive"
            assert asked == [False]
            with pytest.raises(BindFailed, match=r"process 4711, which said 0\.02 s ago that it gives it up"):
                await connector.put("0", "1", "k", b"x")
            assert asked == [False, True]


@deterministic
async def test_holders_that_come_and_go_are_asked_for_a_while_and_then_fail_the_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def ask_one_that_goes(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(addresses, "PAUSE", 0.0001)
    monkeypatch.setattr(addresses, "ask_holder", ask_one_that_goes)
    with socket.create_server(("127.0.0.1", 0)) as next_one:
        assert "processes that come and go" in str(await open_and_fail(next_one.getsockname()[1]))
    assert asked == addresses.ATTEMPTS - 1


@deterministic
async def test_a_program_that_took_the_address_meanwhile_fails_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site() as site:
        first, second = await site.open(), await site.open_elsewhere()
        third = await site.open()
        monkeypatch.setattr(inquiry, "CONNECT_TIMEOUT", 0.05)
        await first.close()
        await third.close()
        with socket.create_server(("127.0.0.1", site.port)):
            with pytest.raises(BindFailed, match="took no ZMQ connection"):
                await put(second, "k", b"x")
        await put(second, "k", b"x")


# --- the question itself ------------------------------------------------------------------------------------


async def ask(port: int, frames: list[bytes]) -> list[bytes]:
    """Say something to a sender; returns the answer."""
    async with open_dialler("127.0.0.1", port) as link:
        while True:
            for event in await link.receive():
                if isinstance(event, Connected):
                    link.send(frames)
                elif isinstance(event, Arrived):
                    return list(event.frames)


@deterministic
async def test_a_sender_says_who_it_is_and_yields_to_its_own_deployment_only() -> None:
    async with open_site() as site:
        stage = await site.open()
        own = wire.Deployment(socket.gethostname(), 0, 0, 0, stage.connector.config.digest)
        other = wire.Deployment("elsewhere", 0, 0, 0, stage.connector.config.digest)
        for deployment, wanted in ((own, False), (other, False), (other, True)):
            answer = wire.decode_from_holder(await ask(site.port, wire.encode(wire.Inquiry(1, 1, wanted, deployment))))
            assert answer == wire.Holder(1, own, os.getpid(), False)
            assert standing(stage) == "held"
        answer = wire.decode_from_holder(await ask(site.port, wire.encode(wire.Inquiry(1, 9, True, own))))
        assert answer == wire.Holder(1, own, os.getpid(), True)
        await wait_until(lambda: standing(stage) == "passive")
        await put(stage, "k", b"x")
        assert standing(stage) == "held"


@deterministic
async def test_a_question_of_another_version_is_answered_by_ours() -> None:
    async with open_site() as site:
        await site.open()
        question = wire.Inquiry(2, 9, True, wire.Deployment("", 0, 0, 0, ""))
        answer = wire.decode_from_holder(await ask(site.port, wire.encode(question)))
        assert answer == wire.VersionRange(wire.OLDEST_VERSION, wire.VERSION)


@deterministic
async def test_an_answer_that_nobody_asked_for_does_a_receiver_no_harm() -> None:
    async with open_holder_of_hellos() as port, MemoryFabric().open() as engine:
        async with open_connector(receiver_config(port), engine=engine) as connector, trio.open_nursery() as nursery:
            outcome = begin(nursery, connector.get, "0", "1", "k")
            await wait_until(lambda: connector.statistics().events["malformed_in"])
            assert not outcome.over.is_set()
            outcome.scope.cancel()


@asynccontextmanager
async def open_holder_of_hellos() -> AsyncIterator[int]:
    """A listener that answers whatever it is told as if it had been asked who it is."""

    async def serve(link: Link) -> None:
        while True:
            for event in await link.receive():
                if isinstance(event, Arrived):
                    link.send(wire.encode(holder_of(link_port, yields=True)), event.route)

    async with open_listener(["127.0.0.1"], 0) as link, trio.open_nursery() as nursery:
        link_port = link.port
        nursery.start_soon(serve, link)
        yield link.port
        nursery.cancel_scope.cancel()


@deterministic
def test_what_is_no_answer_is_refused() -> None:
    good = wire.encode(holder_of(1, yields=True))
    assert wire.decode_from_holder(good) == holder_of(1, yields=True)
    stale = wire.encode(wire.Stale(bytes(16), 1, bytes(16)))
    for frames in ([], good[1:], [good[0], good[1][:-1]], stale):
        with pytest.raises(RemoteProtocolError):
            wire.decode_from_holder(frames)
