"""The contract of a link, over the fake and over ZMQ; and what the fake does at a test's command."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs
import pytest
import trio
from trio.abc import Clock
from trio.testing import wait_all_tasks_blocked

from trio_mori._errors import ConnectorClosed
from trio_mori._link import Message
from trio_mori._unix import UnixDialler, UnixListener, open_unix_dialler, open_unix_listener
from trio_mori._zmq_dialler import DiallingLink, open_dialler
from trio_mori._zmq_listener import ListeningLink, open_listener
from trio_mori.abc import Arrived, Connected, Disconnected, Link, LinkEvent
from trio_mori.testing import (
    LINK_CHECKS,
    MemoryCable,
    MemoryDialler,
    MemoryListener,
    MemoryNetwork,
    check_link,
    memory_link_pair,
)
from trio_mori.testing._link_checks import (
    Check,
    OpenNetwork,
    check_a_cancelled_receive_loses_nothing,
    check_a_gone_route_is_reported,
    check_a_message_can_be_composed_when_it_leaves,
    check_messages_arrive_whole,
    check_receive_is_a_checkpoint,
    check_send_never_blocks_and_keeps_the_order,
    check_sends_of_other_tasks_cost_no_wake_up,
)

deterministic = pytest.mark.deterministic

# Seconds for one check over real sockets; the longest takes 0.3 on an idle machine.
CHECK_TIMEOUT = 20


@attrs.frozen
class ZmqNetwork:
    """A listening link on one address, and diallers of it."""

    host: str
    listener: ListeningLink

    def dial(self) -> AbstractAsyncContextManager[DiallingLink]:
        return open_dialler(self.host, self.listener.port)


@asynccontextmanager
async def open_tcp_network(host: str = "127.0.0.1") -> AsyncIterator[ZmqNetwork]:
    async with open_listener([host], 0) as listener:
        yield ZmqNetwork(host, listener)


def open_tcp6_network() -> AbstractAsyncContextManager[ZmqNetwork]:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no ::1")
    return open_tcp_network("::1")


@attrs.frozen
class UnixNetwork:
    """A listening link on a name of its own, and diallers of it."""

    listener: UnixListener

    def dial(self) -> AbstractAsyncContextManager[UnixDialler]:
        return open_unix_dialler(self.listener.name)


@asynccontextmanager
async def open_unix_network() -> AsyncIterator[UnixNetwork]:
    async with open_unix_listener(f"trio-mori-test-{os.urandom(8).hex()}") as listener:
        yield UnixNetwork(listener)


NETWORKS: dict[str, OpenNetwork] = {
    "memory": MemoryNetwork,
    "tcp": open_tcp_network,
    "tcp6": open_tcp6_network,
    "unix": open_unix_network,
}


# What is run a thousand times leaves out the twin of tcp, and ten thousand messages.
EVERY_CHECK = [
    pytest.param(
        check,
        open_network,
        id=f"{check.__name__}-{name}",
        marks=[]
        if name == "tcp6" or check is check_send_never_blocks_and_keeps_the_order
        else [pytest.mark.deterministic],
    )
    for check in LINK_CHECKS
    for name, open_network in NETWORKS.items()
]


@pytest.mark.parametrize(("check", "open_network"), EVERY_CHECK)
async def test_a_link_keeps_the_contract(check: Check, open_network: OpenNetwork) -> None:
    with trio.fail_after(CHECK_TIMEOUT):
        await check(open_network)


@deterministic
async def test_check_link_runs_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, OpenNetwork]] = []

    async def one(open_network: OpenNetwork) -> None:
        ran.append(("one", open_network))

    async def other(open_network: OpenNetwork) -> None:
        ran.append(("other", open_network))
        await trio.sleep_forever()

    monkeypatch.setattr("trio_mori.testing._link_checks.LINK_CHECKS", (one, other))
    with pytest.raises(trio.TooSlowError):
        await check_link(MemoryNetwork, timeout=0.01)
    assert ran == [("one", MemoryNetwork), ("other", MemoryNetwork)]


async def take_then_yield(self: MemoryListener) -> list[LinkEvent]:
    batch = await receive(self)
    await trio.lowlevel.checkpoint()
    return batch


async def return_at_once(self: MemoryListener) -> list[LinkEvent]:
    if not self._inbox:
        return await receive(self)
    batch, self._inbox = self._inbox, []
    return batch


async def return_nothing(self: MemoryListener) -> list[LinkEvent]:
    await trio.lowlevel.checkpoint()
    batch, self._inbox = self._inbox, []
    return batch


def swap(self: MemoryCable, frames: Sequence[bytes]) -> None:
    if not self._to_reverse:
        self.reverse(2)
    carry(self, frames)


def join(self: MemoryCable, frames: Sequence[bytes]) -> None:
    carry(self, [b"".join(frames)])


def keep_quiet(self: MemoryListener, event: LinkEvent) -> None:
    if not isinstance(event, Disconnected):
        happen(self, event)


def call_twice(self: MemoryDialler, frames: Message, route: bytes = b"") -> None:
    if callable(frames):
        frames()
    send_queued(self, frames, route)


receive = MemoryListener.receive
happen = MemoryListener.happen
send_queued = MemoryDialler.send
carry = MemoryCable.carry


@deterministic
@pytest.mark.parametrize(
    ("kind", "method", "fault", "check"),
    [
        (MemoryListener, "receive", take_then_yield, check_a_cancelled_receive_loses_nothing),
        (MemoryListener, "receive", return_at_once, check_receive_is_a_checkpoint),
        (MemoryListener, "receive", return_nothing, check_sends_of_other_tasks_cost_no_wake_up),
        (MemoryListener, "happen", keep_quiet, check_a_gone_route_is_reported),
        (MemoryDialler, "send", call_twice, check_a_message_can_be_composed_when_it_leaves),
        (MemoryCable, "carry", swap, check_messages_arrive_whole),
        (MemoryCable, "carry", join, check_messages_arrive_whole),
    ],
)
async def test_a_check_finds_a_planted_fault(
    kind: type, method: str, fault: object, check: Check, monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    assert check in LINK_CHECKS
    monkeypatch.setattr(kind, method, fault)
    with pytest.raises((AssertionError, trio.TooSlowError)), trio.fail_after(1):
        await check(MemoryNetwork)


# --- the fake ---------------------------------------------------------------------------------------------


async def events_of(link: Link) -> list[LinkEvent]:
    """All that has happened when nothing moves any more."""
    events: list[LinkEvent] = []

    async def receive() -> None:
        events.extend(await link.receive())

    await wait_all_tasks_blocked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return events


async def arrived(link: Link) -> list[bytes]:
    """The first frames of the messages among these, which have to be all."""
    events = await events_of(link)
    assert all(isinstance(event, Arrived) for event in events), events
    return [event.frames[0] for event in events if isinstance(event, Arrived)]


def send(link: Link, *frames: bytes, route: bytes = b"") -> None:
    for frame in frames:
        link.send([frame], route)


@deterministic
async def test_a_cable_drops_the_next_messages() -> None:
    dialler, listener = memory_link_pair()
    dialler.outgoing.drop(2)
    send(dialler, b"1", b"2", b"3")
    assert await arrived(listener) == [b"3"]


@deterministic
async def test_a_cable_duplicates_the_next_message() -> None:
    dialler, listener = memory_link_pair()
    dialler.outgoing.duplicate()
    send(dialler, b"1", b"2")
    assert await arrived(listener) == [b"1", b"1", b"2"]


@deterministic
async def test_a_cable_reverses_the_next_messages_once_all_have_left() -> None:
    dialler, listener = memory_link_pair()
    dialler.outgoing.reverse(3)
    send(dialler, b"1", b"2")
    assert await arrived(listener) == []
    send(dialler, b"3", b"4")
    assert await arrived(listener) == [b"3", b"2", b"1", b"4"]


@deterministic
async def test_a_held_cable_lets_messages_through_one_by_one_or_all_at_once() -> None:
    dialler, listener = memory_link_pair()
    dialler.outgoing.hold()
    send(dialler, b"1", b"2", b"3")
    assert await arrived(listener) == []
    assert list(dialler.outgoing.in_flight) == [[b"1"], [b"2"], [b"3"]]
    dialler.outgoing.release(1)
    assert await arrived(listener) == [b"1"]
    send(dialler, b"4")
    assert await arrived(listener) == []
    dialler.outgoing.release()
    assert await arrived(listener) == [b"2", b"3", b"4"]
    send(dialler, b"5")
    assert await arrived(listener) == [b"5"]


@deterministic
async def test_the_two_directions_of_a_connection_fail_independently() -> None:
    dialler, listener = memory_link_pair()
    assert await events_of(dialler) == [Connected()]
    dialler.incoming.drop()
    send(dialler, b"there")
    assert await arrived(listener) == [b"there"]
    send(listener, b"lost", b"back", route=dialler.route)
    assert await arrived(dialler) == [b"back"]


@deterministic
async def test_a_cut_loses_what_is_in_flight_and_the_listener_notices_when_it_sends() -> None:
    dialler, listener = memory_link_pair()
    route = dialler.route
    dialler.outgoing.hold()
    send(dialler, b"in flight")
    await wait_all_tasks_blocked()
    dialler.cut()
    dialler.cut()
    dialler.outgoing.release()
    send(dialler, b"to nobody")
    assert await events_of(dialler) == [Connected(), Disconnected()]
    assert await events_of(listener) == []
    send(listener, b"hello?", b"hello?", route=route)
    assert await events_of(listener) == [Disconnected(route)]


@deterministic
async def test_a_restored_connection_has_a_new_route() -> None:
    dialler, listener = memory_link_pair()
    old = dialler.route
    dialler.cut()
    dialler.restore()
    dialler.restore()
    assert dialler.route != old
    assert await events_of(dialler) == [Connected(), Disconnected(), Connected()]
    send(dialler, b"again")
    assert await events_of(listener) == [Arrived([b"again"], dialler.route)]


@deterministic
async def test_a_dialler_may_be_connected_later() -> None:
    dialler, listener = memory_link_pair(connected=False)
    send(dialler, b"too early")
    assert await events_of(dialler) == []
    dialler.restore()
    send(dialler, b"now")
    assert await events_of(dialler) == [Connected()]
    assert await arrived(listener) == [b"now"]


@deterministic
async def test_a_replaced_listener_is_another_process_on_the_same_address() -> None:
    network = MemoryNetwork()
    one, other, absent = network.dial(), network.dial(), network.dial(connected=False)
    old = network.listener
    new = network.replace_listener()
    assert network.listener is new
    with pytest.raises(ConnectorClosed):
        await old.receive()
    for dialler in (one, other):
        assert await events_of(dialler) == [Connected(), Disconnected(), Connected()]
        send(dialler, b"hello")
    assert await events_of(new) == [Arrived([b"hello"], one.route), Arrived([b"hello"], other.route)]
    assert await events_of(absent) == []
