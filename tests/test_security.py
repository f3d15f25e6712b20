"""Who may connect: with keys both dialects work; without the right ones a peer is refused and told, and nobody else."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path

import attrs
import pytest
import torch
import trio
import trio.testing
import zmq
from ports import free_port
from rig import (
    LIMIT,
    SOON,
    UNIT,
    Pair,
    Stage,
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
from stock_peers import open_stock_client, open_stock_server
from threads import count_threads
from trio.testing import MockClock

from trio_mori import (
    AuthenticationFailed,
    BindFailed,
    ConfigError,
    Connector,
    ConnectorConfig,
    blocking,
    open_connector,
)
from trio_mori import _config as configuration
from trio_mori import _port as ports
from trio_mori._key_files import load_keys, write_pair
from trio_mori._keys import Keys
from trio_mori._zmq_guard import Guard
from trio_mori._zmq_socket import Happened
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic


class Ring:
    """Pairs of keys by name, in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def secret(self, name: str) -> str:
        """The file of a secret key."""
        path = self._folder / f"{name}.secret"
        if not path.exists():
            write_pair(str(self._folder / name), name)
        return str(path)

    def public(self, name: str) -> str:
        """The file of the public key."""
        self.secret(name)
        return str(self._folder / f"{name}.public")

    def keys(self, name: str, *, sender: str) -> Keys:
        """What a receiver of that name would hold."""
        config = ConnectorConfig(curve_secret_key=self.secret(name), curve_sender_key=self.public(sender))
        keys = load_keys(config)
        assert keys is not None
        return keys

    def sender(self, *allowed: str) -> dict[str, object]:
        """The configuration of a sender with its own key that lets these in."""
        config: dict[str, object] = {"curve_secret_key": self.secret("sender")}
        if allowed:
            path = self._folder / "allowed"
            path.write_text("".join(Path(self.public(name)).read_text() for name in allowed))
            path.chmod(0o600)
            config["curve_allowed_keys"] = str(path)
        return config

    def receiver(self, name: str, *, sender: str = "sender") -> dict[str, object]:
        """The configuration of a receiver with its own key."""
        return {"curve_secret_key": self.secret(name), "curve_sender_key": self.public(sender)}


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


def refused_by(connector: Connector) -> int:
    """How many connections a sender did not let in."""
    return connector.statistics().events["refused_peers"]


async def get_refused(connector: Connector, key: str = "k") -> AuthenticationFailed:
    """Get what will not come, and return why."""
    with pytest.raises(AuthenticationFailed) as caught, trio.fail_after(SOON):
        await connector.get("0", "1", key)
    assert caught.value.peer in str(caught.value)
    return caught.value


async def assert_works(pair: Pair, key: str = "works") -> None:
    """A payload comes across."""
    await pair.put(key, filled(UNIT))
    with trio.fail_after(SOON):
        assert torch.equal(await pair.get(key), filled(UNIT))


# --- with the right keys --------------------------------------------------------------------------------------


@deterministic
@pytest.mark.parametrize("link", ["auto", "off"])
async def test_stages_with_one_pair_of_keys_need_nothing_else(ring: Ring, link: str) -> None:
    keys = {"curve_secret_key": ring.secret("stages"), "same_host_link": link}
    async with open_pair(sender=keys, receiver=keys) as pair:
        await assert_works(pair)
        await assert_free(pair.sender, pair.receiver)
        assert refused_by(pair.sender) == 0


@deterministic
async def test_stages_with_keys_of_their_own_know_each_other_by_them(ring: Ring) -> None:
    async with open_pair(sender=ring.sender("middle", "last"), receiver=ring.receiver("last")) as pair:
        await assert_works(pair)
        assert refused_by(pair.sender) == 0


@deterministic
async def test_what_is_said_on_the_wire_cannot_be_read(ring: Ring) -> None:
    """A listener in the middle sees neither the key of a payload nor its header."""
    seen = bytearray()
    keys = {"curve_secret_key": ring.secret("stages"), "same_host_link": "off"}
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with fabric.open() as first, fabric.open() as second, trio.open_nursery() as nursery:
            async with open_connector(sender_config(**keys), engine=first) as sender:
                port = await nursery.start(tap, port_of(sender), seen)
                async with open_connector(receiver_config(port, **keys), engine=second) as receiver:
                    await sender.put("0", "1", "a-telling-name", {"a-telling-field": filled(10)})
                    await receiver.get("0", "1", "a-telling-name")
            nursery.cancel_scope.cancel()
    assert len(seen) > 500
    assert b"telling" not in seen


async def tap(port: int, seen: bytearray, *, task_status: trio.TaskStatus[int]) -> None:
    """Pass a connection on to a port, and keep what went over it."""

    async def pump(source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # whoever closes has not read all of it
            async for piece in source:
                seen.extend(piece)
                await target.send_all(piece)

    async def serve(stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as onward, trio.open_nursery() as nursery:
            nursery.start_soon(pump, stream, onward)
            await pump(onward, stream)
            nursery.cancel_scope.cancel()

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(listener.socket.getsockname()[1])
    await trio.serve_listeners(serve, [listener])


def test_the_blocking_facade_takes_keys_too(ring: Ring) -> None:
    keys = {"curve_secret_key": ring.secret("stages"), "memory_pool_size": 1 << 20}
    with blocking.open_connector({**sender_config(), **keys}) as sender:
        port = sender.get_connection_info()["zmq_port"]
        with blocking.open_connector({**receiver_config(port), **keys}) as receiver:
            sender.put("0", "1", "k", b"hello")
            assert bytes(receiver.get("0", "1", "k", timeout=SOON)) == b"hello"  # type: ignore[call-overload]


# --- with wrong ones, or none ---------------------------------------------------------------------------------


@deterministic
async def test_a_receiver_whose_key_is_not_allowed_is_told_and_named(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
        await assert_works(pair)
        config = receiver_config(pair.sender, **ring.receiver("stranger"))
        async with pair.fabric.open() as engine, open_connector(config, engine=engine) as stranger:
            assert "curve_allowed_keys" in str(await get_refused(stranger))
            with pytest.raises(AuthenticationFailed):
                stranger.get_nowait("0", "1", "k")
            assert stranger.statistics().events["refused_senders"] == 1
            assert [each.standing for each in stranger.statistics().senders] == ["refused"]
        await wait_until(lambda: refused_by(pair.sender))
        await assert_works(pair)
    key = ring.keys("stranger", sender="sender").public.decode()
    named = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "peer_refused"]
    [message] = [message for message in named if key in message]
    assert "127.0.0.1" in message


@deterministic
async def test_a_receiver_that_expects_another_sender_is_told(ring: Ring) -> None:
    wrong = ring.receiver("last", sender="impostor")
    async with open_pair(sender=ring.sender("last"), receiver=wrong) as pair:
        assert "curve_sender_key" in str(await get_refused(pair.receiver))
        await wait_until(lambda: refused_by(pair.sender))


@deterministic
async def test_a_receiver_without_keys_is_told(ring: Ring) -> None:
    async with open_pair(sender=ring.sender()) as pair:
        assert "set curve_secret_key" in str(await get_refused(pair.receiver))
        await wait_until(lambda: refused_by(pair.sender))


@deterministic
async def test_a_sender_without_keys_is_not_talked_to(ring: Ring) -> None:
    async with open_pair(receiver=ring.receiver("last")) as pair:
        assert "key" in str(await get_refused(pair.receiver))
        assert pair.sender.statistics().peers == 0


@deterministic
async def test_a_get_that_waits_is_told_when_the_sender_turns_out_to_refuse(ring: Ring) -> None:
    port = free_port()
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            receiver = await start_stage(nursery, fabric, **receiver_config(port))
            waiting = begin(nursery, receiver.connector.get, "0", "1", "k")
            sender = await start_stage(nursery, fabric, **sender_config(**ring.sender()) | {"zmq_port": port})
            with pytest.raises(AuthenticationFailed):
                await waiting.wait()
            await close(receiver, sender)


@deterministic
async def test_a_receiver_that_was_refused_comes_in_as_soon_as_it_may(ring: Ring) -> None:
    port = free_port()
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            config = receiver_config(port, **ring.receiver("last"))
            receiver = await start_stage(nursery, fabric, **config)
            sender = await start_stage(nursery, fabric, **sender_config(**ring.sender()) | {"zmq_port": port})
            await get_refused(receiver.connector)
            await sender.close()
            config = sender_config(**ring.sender("last")) | {"zmq_port": port}
            sender = await start_stage(nursery, fabric, **config)
            await wait_until(lambda: receiver.connector.statistics().peers)
            await sender.connector.put("0", "1", "k", b"x")
            assert bytes(await receiver.connector.get("0", "1", "k")) == b"x"  # type: ignore[call-overload]
            assert receiver.connector.statistics().events["refused_senders"] == 1
            await close(receiver, sender)


@deterministic
async def test_when_the_sender_that_refused_is_gone_another_one_is_waited_for(ring: Ring) -> None:
    port = free_port()
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            receiver = await start_stage(nursery, fabric, **receiver_config(port, **ring.receiver("last")))
            sender = await start_stage(nursery, fabric, **sender_config(**ring.sender()) | {"zmq_port": port})
            await get_refused(receiver.connector)
            await sender.close()
            [upstream] = receiver.connector._receiver.upstreams.values()
            await wait_until(lambda: upstream.refusal is None)
            waiting = begin(nursery, receiver.connector.get, "0", "1", "k")
            await trio.testing.wait_all_tasks_blocked()
            sender = await start_stage(nursery, fabric, **sender_config(**ring.sender("last")) | {"zmq_port": port})
            await sender.connector.put("0", "1", "k", b"x")
            assert bytes(await waiting.wait()) == b"x"  # type: ignore[call-overload]
            await close(receiver, sender)


async def close(*stages: Stage) -> None:
    """Close them in order."""
    for stage in stages:
        await stage.close()


# --- stock peers, and what is none ----------------------------------------------------------------------------


@deterministic
async def test_a_stock_receiver_is_refused_at_a_secured_port_and_disturbs_nobody(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
        async with pair.fabric.open() as engine:
            with open_stock_client(port_of(pair.sender), engine) as client:
                with suppress(zmq.Again):  # it may have been refused before it has asked
                    client.ask_nowait(b"query_info" + b"rubbish")
                await wait_until(lambda: refused_by(pair.sender))
                await assert_works(pair)
                assert pair.sender.statistics().events["malformed_out"] == 0
    assert "a stock peer" in caplog.text


@deterministic
async def test_a_stock_sender_is_refused_by_a_receiver_with_keys(ring: Ring) -> None:
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with open_stock_server(fabric) as stock, fabric.open() as engine:
            stock.put("k@0_1", filled(100))
            async with open_connector(receiver_config(stock.port, **ring.receiver("last")), engine=engine) as receiver:
                await get_refused(receiver)
            assert stock.pulls == []


@deterministic
async def test_a_peer_of_the_stock_dialect_with_keys_is_served(ring: Ring) -> None:
    async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
        async with pair.fabric.open() as engine:
            with open_stock_client(port_of(pair.sender), engine, ring.keys("last", sender="sender")) as client:
                await pair.put("k", filled(100))
                assert await client.query("k@0_1") is not None
                assert await client.pull("k@0_1", 0, 100) == b"trans_done"
                assert torch.equal(client.region(0, 100), filled(100))


@deterministic
async def test_a_sender_of_the_stock_dialect_with_keys_is_asked(ring: Ring) -> None:
    fabric = MemoryFabric()
    keys = ring.keys("sender", sender="sender")
    with trio.fail_after(LIMIT):
        async with open_stock_server(fabric, keys=keys) as stock, fabric.open() as engine:
            stock.put("k@0_1", filled(100))
            async with open_connector(receiver_config(stock.port, **ring.receiver("last")), engine=engine) as receiver:
                with await receiver.get("0", "1", "k") as buffer:  # type: ignore[attr-defined]
                    assert buffer.to_bytes() == bytes([7]) * 100


@deterministic
@pytest.mark.parametrize(
    ("words", "counted"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", False),  # libzmq hangs up without a word about it
        (b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(55, b"\0") + b"\x04\x01x", True),
    ],
    ids=["http", "a false handshake"],
)
async def test_rubbish_at_a_secured_port_disturbs_nobody(ring: Ring, words: bytes, counted: bool) -> None:
    async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
        async with await trio.open_tcp_stream("127.0.0.1", port_of(pair.sender)) as stream:
            with suppress(trio.BrokenResourceError):  # it hangs up at once
                await stream.send_all(words)
                while await stream.receive_some():
                    pass
        await assert_works(pair)
        await wait_until(lambda: refused_by(pair.sender) == counted)
        assert pair.sender.statistics().events["malformed_out"] == 0


# --- the port of a stage with several instances ---------------------------------------------------------------


@asynccontextmanager
async def another_instance(config: dict[str, object]) -> AsyncIterator[Connector]:
    """A connector in another process, as far as it knows."""
    token = ports.FAMILIES.set({})
    try:
        async with MemoryFabric().open() as engine, open_connector(config, engine=engine) as connector:
            yield connector
    finally:
        ports.FAMILIES.reset(token)


@deterministic
async def test_instances_with_the_same_keys_pass_a_secured_port_on(ring: Ring) -> None:
    config = sender_config(**ring.sender("last")) | {"zmq_port": free_port()}
    with trio.fail_after(LIMIT):
        async with another_instance(config) as first, another_instance(config) as second:
            assert (first.health()["port"], second.health()["port"]) == ("held", "passive")
            await second.put("0", "1", "k", b"x")
            assert (first.health()["port"], second.health()["port"]) == ("passive", "held")


@deterministic
async def test_an_instance_with_other_keys_cannot_ask_for_a_secured_port(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with trio.fail_after(LIMIT):
        async with another_instance(sender_config(**ring.sender()) | {"zmq_port": port}) as first:
            for config in ({}, {"curve_secret_key": ring.secret("stranger")}):
                began = time.monotonic()
                with pytest.raises(BindFailed, match="key"):
                    async with another_instance(sender_config(**config) | {"zmq_port": port}):
                        raise AssertionError
                assert time.monotonic() - began < 2
            assert first.health()["port"] == "held"


# --- what opening says ----------------------------------------------------------------------------------------


async def test_a_key_file_that_others_can_read_keeps_a_connector_from_opening(ring: Ring) -> None:
    os.chmod(ring.secret("sender"), 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        async with open_connector(sender_config(**ring.sender()) | {"memory_pool_size": 1 << 20}):
            raise AssertionError


def test_a_sender_listens_on_loopback_unless_it_is_told_otherwise() -> None:
    assert ConnectorConfig().host == "127.0.0.1"


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_warned", set())


@attrs.frozen
class Exposure:
    """A host, and whether it is warned of where the machine has an address beside loopback."""

    host: str
    keys: bool
    warns: bool


@pytest.mark.parametrize(
    "case",
    [
        Exposure("0.0.0.0", keys=False, warns=True),
        Exposure("0.0.0.0", keys=True, warns=False),
        Exposure("127.0.0.1", keys=False, warns=False),
        Exposure("auto", keys=False, warns=True),
        Exposure("auto", keys=True, warns=False),
    ],
    ids=str,
)
async def test_a_port_that_other_machines_reach_without_a_key_is_warned_of_once(
    ring: Ring, case: Exposure, unwarned: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_mori._endpoint._detected_address", lambda: "127.0.0.2")
    monkeypatch.setattr("trio_mori._config._is_loopback", lambda address: address == "127.0.0.1")
    keys = {"curve_secret_key": ring.secret("own")} if case.keys else {}
    for _ in range(2):
        async with MemoryFabric().open() as engine:
            async with open_connector({"zmq_port": 0, "host": case.host, **keys}, engine=engine):
                pass
    found = [record for record in caplog.records if "curve_secret_key" in record.getMessage()]
    assert len(found) == case.warns


# --- what it leaves -------------------------------------------------------------------------------------------


async def test_a_secured_listener_leaves_no_thread_and_no_descriptor(ring: Ring) -> None:
    counts: list[Callable[[], int]] = [count_threads, lambda: len(os.listdir("/proc/self/fd"))]
    async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
        await assert_works(pair)
    before = [count() for count in counts]
    for _ in range(5):
        async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
            await assert_works(pair)
    await wait_until(lambda: all(count() <= number for count, number in zip(counts, before, strict=True)))


async def test_it_closes_while_peers_are_in_the_middle_of_a_handshake(ring: Ring) -> None:
    async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
        streams = [socket.create_connection(("127.0.0.1", port_of(pair.sender))) for _ in range(20)]
        for stream in streams:
            stream.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        await assert_works(pair)
    for stream in streams:
        stream.close()
    assert threading.active_count() < 50


# --- what is logged of a refusal ------------------------------------------------------------------------------


class Visitors:
    """Refused connections to a guarded listener, as libzmq tells of them."""

    def __init__(self, ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
        self.guard = Guard(ring.keys("last", sender="last"), "tcp://here")
        self._caplog = caplog

    def come(self, failure: int, detail: int = 0, *, times: int = 1) -> None:
        """From this host."""
        for _ in range(times):
            with (
                socket.create_server(("127.0.0.1", 0)) as server,
                socket.create_connection(server.getsockname()),
                server.accept()[0] as accepted,
            ):
                self._refuse(accepted.fileno(), failure, detail)

    def vanish(self, failure: int, detail: int = 0, *, times: int = 1) -> None:
        """From somewhere, and gone before anybody can look from where."""
        for _ in range(times):
            self._refuse(-1, failure, detail)

    def _refuse(self, descriptor: int, failure: int, detail: int) -> None:
        self.guard.note(Happened(int(zmq.EVENT_ACCEPTED), descriptor))
        self.guard.note(Happened(failure, detail))
        self.guard.note(Happened(int(zmq.EVENT_DISCONNECTED), descriptor))

    def told(self) -> list[str]:
        """What was logged, by the words that tell the reasons apart."""
        words = ("hung up", "no keys: a stock", "another key")
        return [word for record in self._caplog.records for word in words if word in record.getMessage()]


SILENT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
TELLING = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


@deterministic
async def test_one_refusal_is_one_line_though_whoever_is_refused_dials_on_and_asks_why(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    visitors = Visitors(ring, caplog)
    for _ in range(3):
        visitors.vanish(SILENT)
        visitors.vanish(*TELLING)
        visitors.come(SILENT)
    assert visitors.told() == []
    visitors.come(*TELLING, times=2)
    visitors.guard.tell_held(inf)
    for _ in range(3):
        visitors.come(SILENT)
        visitors.vanish(*TELLING)
        visitors.vanish(SILENT)
    visitors.guard.tell_held(inf)
    assert visitors.told() == ["no keys: a stock"]
    assert visitors.guard.refused == 20
    assert visitors.guard.due == inf


@deterministic
@pytest.mark.parametrize("order", [1, -1])
async def test_of_what_little_is_known_the_most_is_told_after_a_while(
    ring: Ring, caplog: pytest.LogCaptureFixture, order: int
) -> None:
    visitors = Visitors(ring, caplog)
    for come in [lambda: visitors.vanish(SILENT), lambda: visitors.vanish(*TELLING)][::order]:
        come()
    due = visitors.guard.due
    assert 1 < due - trio.current_time() <= 2
    visitors.guard.tell_held(due - 0.5)
    assert visitors.told() == []
    visitors.guard.tell_held(due + 0.5)
    assert visitors.told() == ["no keys: a stock"]


@deterministic
async def test_a_peer_that_only_hangs_up_is_told_and_then_that_it_has_no_keys_is_not(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    visitors = Visitors(ring, caplog)
    visitors.come(SILENT, times=3)
    visitors.guard.tell_held(inf)
    assert visitors.told() == ["hung up"]
    visitors.come(*TELLING)
    visitors.guard.tell_held(inf)
    assert visitors.told() == ["hung up"], "which is what a peer without keys does, too"
    visitors.vanish(int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC), times=9)
    visitors.guard.tell_held(inf)
    assert visitors.told() == ["hung up", "another key"]


@deterministic
@pytest.mark.parametrize("closes", [False, True])
async def test_what_is_held_back_is_told_in_time_and_at_the_latest_by_a_close(
    ring: Ring, caplog: pytest.LogCaptureFixture, clock: MockClock, closes: bool
) -> None:
    async with open_pair(sender=ring.sender("last"), receiver=ring.receiver("last")) as pair:
        (await trio.open_tcp_stream("127.0.0.1", port_of(pair.sender))).socket.close()
        await wait_until(lambda: refused_by(pair.sender))
        assert "refused a connection" not in caplog.text
        if not closes:
            clock.jump(2)
            await wait_until(lambda: "refused a connection" in caplog.text)
    assert caplog.text.count("refused a connection") == 1


@deterministic
async def test_a_receiver_that_expects_another_sender_is_told_of_in_one_line(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = ring.receiver("last", sender="impostor")
    async with open_pair(sender=ring.sender("last"), receiver=wrong) as pair:
        await get_refused(pair.receiver)
        await wait_until(lambda: refused_by(pair.sender) >= 6)
    told = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "peer_refused"]
    assert [("another key" in each) for each in told] == [True]
