"""The contract of a link as tests: every sentence of `trio_mori.abc.Link` that can be seen from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import inf
from typing import Protocol

import trio
from trio.testing import assert_checkpoints

from .._errors import ConnectorClosed
from .._scope import open_service
from ..abc import Arrived, Connected, Disconnected, Link, LinkEvent

# More than fit into any buffer on the way.
MANY = 10_000
LARGE = 100_000

# Seconds: of two messages within this time the second does not follow a pause.
BURST = 0.0005


class LinkNetwork(Protocol):
    """A listening link, and diallers of it."""

    @property
    def listener(self) -> Link:
        """The listening link. It closes when the context that gave this network ends."""

    def dial(self) -> AbstractAsyncContextManager[Link]:
        """A new link that dials it."""


OpenNetwork = Callable[[], AbstractAsyncContextManager[LinkNetwork]]


async def check_link(open_network: OpenNetwork, *, timeout: float = inf) -> None:
    """Run every check of `LINK_CHECKS`; an AssertionError says what a link does not keep.

    Args:
        open_network: Opens a network of its own for each check.
        timeout: Seconds for each check.
    """
    for check in LINK_CHECKS:
        with trio.fail_after(timeout):
            await check(open_network)


class Reader:
    """Takes single events out of a link's batches."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._events: list[LinkEvent] = []

    async def event(self) -> LinkEvent:
        """The next event."""
        if not self._events:
            self._events = await self.link.receive()
            _expect(bool(self._events), "receive() returned an empty list")
        return self._events.pop(0)

    async def message(self) -> Arrived:
        """The next event, which has to be a message."""
        event = await self.event()
        if not isinstance(event, Arrived):
            raise AssertionError(f"expected a message, got {event}")
        return event


async def check_connected_comes_first(open_network: OpenNetwork) -> None:
    """The first event of a dialling link is `Connected`; of a listening link it is a message."""
    async with open_network() as network, network.dial() as dialler:
        _expect(await Reader(dialler).event() == Connected(), "the first event of a dialling link is not Connected")
        dialler.send([b"hello"])
        message = await Reader(network.listener).message()
        _expect(bool(message.route), "a message of a listening link has no route")
        _expect(bool(dialler.address and network.listener.address), "a link has no address")


async def check_messages_arrive_whole(open_network: OpenNetwork) -> None:
    """Messages have the frames that were sent, empty ones and large ones too, in both directions."""
    messages = [
        [b"x"],
        [b""],
        [b"", b"payload"],
        [b"", b"", b""],
        [b"magic", b"\xc1" + bytes(range(256))],
        [b"x" * LARGE],
        [bytes([n]) * LARGE for n in range(3)],
        [b"", b"y" * LARGE, b""],
    ]
    async with open_network() as network, network.dial() as dialler:
        there, back = Reader(network.listener), Reader(dialler)
        await back.event()
        for frames in messages:
            dialler.send(frames)
        for frames in messages:
            message = await there.message()
            _expect(list(message.frames) == frames, f"{_shape(frames)} arrived as {_shape(message.frames)}")
            _expect(all(type(frame) is bytes for frame in message.frames), "a frame is not bytes")
            network.listener.send(message.frames, message.route)
        for frames in messages:
            message = await back.message()
            _expect(list(message.frames) == frames, f"{_shape(frames)} came back as {_shape(message.frames)}")
            _expect(message.route == b"", "a message of a dialling link has a route")


async def check_send_never_blocks_and_keeps_the_order(open_network: OpenNetwork) -> None:
    """However much is queued, it all arrives, in order, once."""
    async with open_network() as network, network.dial() as dialler:
        there, back = Reader(network.listener), Reader(dialler)
        await back.event()
        for number in range(MANY):
            dialler.send([b"%d" % number])
        for number in range(MANY):
            message = await there.message()
            _expect(message.frames[0] == b"%d" % number, f"message {number} of {MANY} is missing or out of order")
        for number in range(MANY):
            network.listener.send([b"%d" % number], message.route)
        for number in range(MANY):
            _expect((await back.message()).frames[0] == b"%d" % number, f"answer {number} is missing or out of order")


async def check_a_message_can_be_composed_when_it_leaves(open_network: OpenNetwork) -> None:
    """A callable is called once, after what the sending task did before it yielded; None is no message."""
    async with open_network() as network, network.dial() as dialler:
        await Reader(dialler).event()
        reader, calls = Reader(network.listener), list[int]()

        def compose() -> list[bytes]:
            calls.append(len(said))
            return said

        is_burst = False
        while not is_burst:  # the processor was taken away between the two: a message after a pause may leave at once
            said = [b"at once"]
            calls.clear()
            began = trio.current_time()
            dialler.send(lambda: None)
            dialler.send(compose)
            is_burst = trio.current_time() - began < BURST
            said.append(b"a little later")
            message = await reader.message()
        _expect(list(message.frames) == [b"at once", b"a little later"], "a message was composed when it was queued")
        _expect(calls == [2], f"the callable of one message was called {len(calls)} times")


async def check_a_message_that_is_dropped_was_composed_too(open_network: OpenNetwork) -> None:
    """A callable is called even if there is no connection: its owner may wait for that to queue the next one."""
    async with _open_until(open_network) as (network, stop), network.dial() as dialler:
        reader = Reader(dialler)
        await reader.event()
        stop.set()
        _expect(await reader.event() == Disconnected(), "a dialling link was not told that its connection broke")
        called = trio.Event()

        def compose() -> list[bytes]:
            called.set()
            return [b"for nobody"]

        dialler.send(compose)
        await called.wait()


async def check_a_nudge_says_nothing(open_network: OpenNetwork) -> None:
    """However often a peer is nudged, before, between and after messages, these are all that arrives."""
    async with open_network() as network, network.dial() as dialler:
        there, back = Reader(network.listener), Reader(dialler)
        await back.event()
        dialler.send([b"hello"])
        route = (await there.message()).route
        network.listener.nudge(b"nobody")
        for number in range(5):
            for _ in range(3):
                network.listener.nudge(route)
                dialler.nudge()
            await trio.sleep(0.002)  # whoever is taken to be awake is not nudged at all
            network.listener.nudge(route)
            network.listener.send([b"%d" % number], route)
            dialler.send([b"%d" % number])
            _expect((await back.message()).frames == [b"%d" % number], "a nudge harmed what was said after it")
            _expect((await there.message()).frames == [b"%d" % number], "a nudge harmed what was said after it")
        network.listener.nudge(route)
        with trio.move_on_after(0.005):
            raise AssertionError(f"a nudge was told to the peer as {await back.event()}")


async def check_receive_is_a_checkpoint(open_network: OpenNetwork) -> None:
    """`receive` yields and can be cancelled, though there is something to return; and that stays."""
    async with open_network() as network, network.dial() as dialler:
        with assert_checkpoints():
            await dialler.receive()
        dialler.send([b"one"])
        with trio.CancelScope() as scope:
            scope.cancel()
            await network.listener.receive()
        _expect(scope.cancelled_caught, "receive() in a cancelled scope returned")
        with assert_checkpoints():
            batch = await network.listener.receive()
        _expect([e.frames[0] for e in batch if isinstance(e, Arrived)] == [b"one"], "a cancelled receive() took it")


async def check_a_cancelled_receive_loses_nothing(open_network: OpenNetwork) -> None:
    """Cancelled just before, just when and just after something arrives, `receive` leaves it to the next call."""
    rounds = 400
    async with open_network() as network, network.dial() as dialler:
        await Reader(dialler).event()
        received: list[LinkEvent] = []

        async def receive(scope: trio.CancelScope) -> None:
            with scope:
                received.extend(await network.listener.receive())

        for number in range(rounds):
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                nursery.start_soon(receive, scope)
                dialler.send([b"%d" % number])
                for _ in range(number % 40):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        while len(received) < rounds:
            received += await network.listener.receive()
        got = [event.frames[0] for event in received if isinstance(event, Arrived)]
        _expect(got == [b"%d" % n for n in range(rounds)], "messages were lost or reordered by cancelled calls")


async def check_routes_tell_diallers_apart(open_network: OpenNetwork) -> None:
    """Each dialler has a route of its own, and an answer to a route reaches that dialler only."""
    async with open_network() as network, network.dial() as one, network.dial() as other:
        reader = Reader(network.listener)
        routes = {}
        for dialler, name in ((one, b"one"), (other, b"other")):
            await Reader(dialler).event()
            dialler.send([name])
            message = await reader.message()
            routes[message.frames[0]] = message.route
        _expect(len(set(routes.values())) == 2, "two diallers have the same route")
        for name, route in routes.items():
            network.listener.send([b"to " + name], route)
        for dialler, name in ((one, b"one"), (other, b"other")):
            message = await Reader(dialler).message()
            _expect(list(message.frames) == [b"to " + name], f"dialler {name!r} got {message.frames!r}")


async def check_a_gone_route_is_reported(open_network: OpenNetwork) -> None:
    """Sending to a dialler that has left is answered by `Disconnected` with its route; the others are unharmed."""
    async with open_network() as network, network.dial() as staying:
        reader = Reader(network.listener)
        await Reader(staying).event()
        async with network.dial() as leaving:
            await Reader(leaving).event()
            leaving.send([b"hello"])
            route = (await reader.message()).route

        async def keep_sending() -> None:
            # The listener's side may learn of the loss late, and in a thread that is not ours.
            while True:
                network.listener.send([b"are you there?"], route)
                await trio.sleep(0.001)

        async with open_service() as service:
            service.start_soon(keep_sending)
            _expect(await reader.event() == Disconnected(route), "the report of a gone route names another one")
        staying.send([b"still here"])
        event = await reader.event()
        while event == Disconnected(route):
            event = await reader.event()
        _expect(isinstance(event, Arrived) and event.frames[0] == b"still here", "a message of another dialler is lost")


async def check_a_broken_connection_is_reported(open_network: OpenNetwork) -> None:
    """When the listener goes away, its dialler is told, after whatever still arrived, and nothing comes then."""
    async with _open_until(open_network) as (network, stop), network.dial() as dialler:
        reader = Reader(dialler)
        await reader.event()
        dialler.send([b"hello"])
        route = (await Reader(network.listener).message()).route
        for number in range(3):
            network.listener.send([b"%d" % number], route)
        stop.set()
        number = 0
        while isinstance(event := await reader.event(), Arrived):
            _expect(event.frames[0] == b"%d" % number, "messages before the end of a connection are out of order")
            number += 1
        _expect(event == Disconnected(), "a dialling link was not told that its connection broke")
        with trio.move_on_after(0.05):
            raise AssertionError(f"{await reader.event()} came by a connection that is gone")


async def check_closing_ends_receive(open_network: OpenNetwork) -> None:
    """A waiting `receive` is ended by `ConnectorClosed` when the link closes, whether it was ever connected or not."""
    ended: list[Link] = []

    async def receive_until_closed(link: Link) -> None:
        try:
            while True:
                await link.receive()
        except ConnectorClosed:
            ended.append(link)

    async with trio.open_nursery() as nursery, open_network() as network, network.dial() as dialler:
        await Reader(dialler).event()
        nursery.start_soon(receive_until_closed, network.listener)
        nursery.start_soon(receive_until_closed, dialler)
        async with network.dial() as unconnected:
            nursery.start_soon(receive_until_closed, unconnected)
            await trio.lowlevel.checkpoint()
    _expect(len(ended) == 3, "closing a link did not end receive()")


async def check_a_closed_link_refuses(open_network: OpenNetwork) -> None:
    """After the end, `send` and `receive` raise `ConnectorClosed`."""
    async with open_network() as network, network.dial() as dialler:
        await Reader(dialler).event()
    for link in (dialler, network.listener):
        try:
            link.send([b"too late"])
        except ConnectorClosed as error:
            _expect(link.address in str(error), "the error does not say which link is closed")
        else:
            raise AssertionError("send() on a closed link was accepted")
        try:
            await link.receive()
        except ConnectorClosed:
            continue
        raise AssertionError("receive() on a closed link returned")


async def check_sends_of_other_tasks_cost_no_wake_up(open_network: OpenNetwork) -> None:
    """While one task receives, others send by the same link; nothing stays behind unnoticed."""
    tasks, rounds = 8, 100
    async with open_network() as network, network.dial() as dialler, open_service() as service:
        await Reader(dialler).event()
        answered = [trio.Event() for _ in range(tasks)]

        async def echo() -> None:
            reader = Reader(network.listener)
            while True:
                message = await reader.message()
                network.listener.send(message.frames, message.route)

        async def read_answers() -> None:
            reader = Reader(dialler)
            while True:
                answered[int((await reader.message()).frames[0])].set()

        async def ask(number: int) -> None:
            for _ in range(rounds):
                answered[number] = trio.Event()
                dialler.send([b"%d" % number])
                await answered[number].wait()

        service.start_soon(echo)
        service.start_soon(read_answers)
        async with trio.open_nursery() as asking:
            for number in range(tasks):
                asking.start_soon(ask, number)


@asynccontextmanager
async def _open_until(open_network: OpenNetwork) -> AsyncIterator[tuple[LinkNetwork, trio.Event]]:
    """A network whose listener goes away, before its diallers do, when the event is set."""
    stop = trio.Event()

    async def hold_open(task_status: trio.TaskStatus[LinkNetwork]) -> None:
        async with open_network() as network:
            task_status.started(network)
            await stop.wait()

    async with open_service() as service:
        yield await service.start(hold_open), stop


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def _shape(frames: object) -> str:
    return f"frames of {[len(frame) for frame in frames]} bytes" if isinstance(frames, list) else repr(frames)


Check = Callable[[OpenNetwork], Awaitable[None]]

LINK_CHECKS: tuple[Check, ...] = (
    check_connected_comes_first,
    check_messages_arrive_whole,
    check_send_never_blocks_and_keeps_the_order,
    check_a_message_can_be_composed_when_it_leaves,
    check_a_message_that_is_dropped_was_composed_too,
    check_a_nudge_says_nothing,
    check_receive_is_a_checkpoint,
    check_a_cancelled_receive_loses_nothing,
    check_routes_tell_diallers_apart,
    check_a_gone_route_is_reported,
    check_a_broken_connection_is_reported,
    check_closing_ends_receive,
    check_a_closed_link_refuses,
    check_sends_of_other_tasks_cost_no_wake_up,
)
