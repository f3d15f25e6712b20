"""A get that waits reads the link itself, in the place of the task that else listens, and hands it back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import inf

import pytest
import torch
import trio
import trio.testing
from rig import LIMIT, Outcome, Pair, begin, filled, is_local, open_pair, wait_until

from trio_mori import ConnectorClosed, Gone
from trio_mori._link import QueuedLink
from trio_mori._unix import UnixListener, open_unix_dialler, open_unix_listener
from trio_mori.abc import Arrived, Connected, LinkEvent

pytestmark = pytest.mark.deterministic

LINKS = pytest.mark.parametrize("link", ["auto", "off"], ids=["unix", "zmq"])


@pytest.fixture(autouse=True)
def _however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mori._upstream.QUIET", inf)


@asynccontextmanager
async def open_met(link: str) -> AsyncIterator[Pair]:
    """Two that have met, and talk by that link."""
    async with open_pair(receiver={"same_host_link": link}) as pair:
        await pair.put("first", filled(1))
        await pair.get("first")
        if link == "auto":
            await wait_until(lambda: is_local(pair.receiver))
        yield pair


def leading(pair: Pair) -> list[str]:
    """The keys whose gets read the link."""
    interests = [i for channel in pair.receiver._receiver.book.channels for i in channel.interests.values()]
    return [i.key.partition("@")[0] for i in interests if isinstance(i.waiter, QueuedLink)]


async def lead(pair: Pair, nursery: trio.Nursery, key: str) -> Outcome:
    """A get that waits and reads the link, being the first."""
    outcome = begin(nursery, pair.get, key)
    await wait_until(lambda: leading(pair) == [key])
    return outcome


@LINKS
async def test_the_first_get_that_waits_leads_and_the_others_have_theirs_by_it(link: str) -> None:
    async with open_met(link) as pair, trio.open_nursery() as nursery:
        await lead(pair, nursery, "a")
        others = [await pair.get_later(nursery, key) for key in "bc"]
        assert leading(pair) == ["a"]
        for key, outcome in zip("bc", others, strict=True):
            await pair.put(key, filled(9))
            assert torch.equal(await outcome.wait(), filled(9))  # type: ignore[arg-type]
        assert leading(pair) == ["a"]
        await pair.put("a", filled(9))


@LINKS
async def test_whoever_waits_still_has_its_payload_when_the_one_that_led_has_its_own(link: str) -> None:
    async with open_met(link) as pair, trio.open_nursery() as nursery:
        await lead(pair, nursery, "a")
        other = await pair.get_later(nursery, "b")
        await pair.put("a", filled(9))
        await wait_until(lambda: not leading(pair))
        await pair.put("b", filled(9))
        assert torch.equal(await other.wait(), filled(9))  # type: ignore[arg-type]


@LINKS
async def test_whoever_waits_still_has_its_payload_when_the_one_that_led_was_cancelled(link: str) -> None:
    async with open_met(link) as pair, trio.open_nursery() as nursery:
        first = await lead(pair, nursery, "a")
        other = await pair.get_later(nursery, "b")
        first.scope.cancel()
        await pair.put("b", filled(9))
        assert torch.equal(await other.wait(), filled(9))  # type: ignore[arg-type]
        await pair.put("a", filled(8))
        assert torch.equal(await pair.get("a"), filled(8))  # type: ignore[arg-type]


@LINKS
async def test_a_get_that_comes_long_after_the_last_message_leaves_the_link_to_the_task_that_waits(
    link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_met(link) as pair, trio.open_nursery() as nursery:
        [upstream] = pair.receiver._receiver.upstreams.values()
        links = upstream._links
        await wait_until(lambda: links.current is not None and links.current.is_watched)
        monkeypatch.setattr("trio_mori._upstream.QUIET", -1.0)
        outcome = await pair.get_later(nursery, "a")
        assert not leading(pair)
        await pair.put("a", filled(9))
        assert await outcome.wait() is not None
        await pair.assert_whole()


@LINKS
async def test_a_get_that_leads_is_told_that_nothing_comes(link: str) -> None:
    async with open_met(link) as pair, trio.open_nursery() as nursery:
        outcome = await lead(pair, nursery, "a")
        pair.sender.lose("0", "1", "a")
        with pytest.raises(Gone):
            await outcome.wait()


@LINKS
async def test_a_get_that_leads_ends_when_its_connector_is_closed(link: str) -> None:
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        pair = await stack.enter_async_context(open_met(link))
        outcome = await lead(pair, nursery, "a")
        await stack.aclose()
        with pytest.raises(ConnectorClosed):
            await outcome.wait()


async def test_a_stream_that_is_got_in_a_row_is_led_by_each_get_of_it() -> None:
    async with open_met("auto") as pair, trio.open_nursery() as nursery:
        got: list[str] = []

        async def get_all() -> None:
            for key in "abcdef":
                await pair.get(key)
                got.append(key)

        nursery.start_soon(get_all)
        for number, key in enumerate("abcdef"):
            await wait_until(lambda number=number, key=key: len(got) == number and leading(pair) == [key])
            await pair.put(key, filled(9))


# --- the link by itself ---------------------------------------------------------------------------------------


@asynccontextmanager
async def open_listened_to(events: list[LinkEvent]) -> AsyncIterator[tuple[QueuedLink, UnixListener, bytes]]:
    """A dialling link, which another task listens to, and its peer, with the route to the first."""
    with trio.fail_after(LIMIT):
        async with open_unix_listener("trio-mori-test-leading") as peer, open_unix_dialler(peer.name) as link:
            async with trio.open_nursery() as nursery:

                async def listen() -> None:
                    while True:
                        events.extend(await link.receive())

                nursery.start_soon(listen)
                link.send([b"here"])
                (hello,) = await peer.receive()
                assert isinstance(hello, Arrived)
                await wait_until(lambda: events == [Connected()])
                yield link, peer, hello.route
                nursery.cancel_scope.cancel()


async def test_what_arrives_while_a_task_leads_is_taken_by_it_and_what_comes_after_that_by_the_other() -> None:
    events: list[LinkEvent] = []
    async with open_listened_to(events) as (link, peer, route):
        await trio.testing.wait_all_tasks_blocked()
        assert link.may_lead
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.wait_input)
            await trio.testing.wait_all_tasks_blocked()
            assert not link.may_lead
            peer.send([b"one"], route)
        assert link.take_nowait() == [Arrived([b"one"], b"")]
        await trio.testing.wait_all_tasks_blocked()
        peer.send([b"two"], route)
        await trio.testing.wait_all_tasks_blocked()
        assert events == [Connected()]
        link.hand_over()
        await wait_until(lambda: events == [Connected(), Arrived([b"two"], b"")])


async def test_a_task_that_leads_is_roused_and_loses_nothing() -> None:
    events: list[LinkEvent] = []
    async with open_listened_to(events) as (link, peer, route):
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.wait_input)
            await trio.testing.wait_all_tasks_blocked()
            link.rouse()
        assert link.take_nowait() == []
        assert link.may_lead
        peer.send([b"one"], route)
        link.hand_over()
        await wait_until(lambda: events == [Connected(), Arrived([b"one"], b"")])


async def test_what_arrives_while_another_task_begins_to_lead_stays_in_order() -> None:
    async with trio.open_nursery() as nursery:
        for number in range(30):  # whether the one or the other goes first in a tick is drawn by lot
            events: list[LinkEvent] = []
            name = f"trio-mori-test-order-{number}"
            async with open_unix_listener(name) as peer, open_unix_dialler(name) as link:
                link.send([b"here"])
                (hello,) = await peer.receive()
                assert isinstance(hello, Arrived)

                def send(text: bytes, peer: UnixListener = peer, route: bytes = hello.route) -> None:
                    peer.send([text], route)
                    peer._flush(trio.current_time())

                async def listen(link: QueuedLink = link, events: list[LinkEvent] = events) -> None:
                    with suppress(ConnectorClosed):
                        while True:
                            events.extend(await link.receive())

                async def lead(
                    link: QueuedLink = link, events: list[LinkEvent] = events, send: Callable[[bytes], None] = send
                ) -> None:
                    send(b"2")
                    if link.may_lead:
                        await link.wait_input()
                        events.extend(link.take_nowait())
                        link.hand_over()

                send(b"1")
                nursery.start_soon(listen)
                nursery.start_soon(lead)
                await wait_until(lambda events=events: len(events) == 3)
            assert events == [Connected(), Arrived([b"1"], b""), Arrived([b"2"], b"")]


async def test_a_key_interrupt_does_not_come_before_the_link_is_to_be_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protected: list[bool] = []
    async with open_met("auto") as pair, trio.open_nursery() as nursery:
        receiver = pair.receiver._receiver
        hand_over_soon = receiver.hand_over_soon

        def note(link: QueuedLink) -> None:
            protected.append(trio.lowlevel.currently_ki_protected())
            hand_over_soon(link)

        monkeypatch.setattr(receiver, "hand_over_soon", note)
        outcome = await lead(pair, nursery, "a")
        await pair.put("a", filled(9))
        await outcome.wait()
    assert protected == [True]


@LINKS
async def test_what_fails_in_a_get_that_leads_ends_the_connector_as_it_would_elsewhere(
    link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[Outcome] = []

    async def fail() -> None:
        async with open_met(link) as pair, trio.open_nursery() as nursery:
            outcomes.append(await lead(pair, nursery, "a"))
            [upstream] = pair.receiver._receiver.upstreams.values()
            # Once: else what the sender says on the other link as this one breaks might fail, too.
            monkeypatch.setattr(upstream, "on_arrival", lambda event: monkeypatch.undo() or 1 // 0)
            await pair.put("a", filled(9))
            await trio.sleep_forever()

    with pytest.raises(ZeroDivisionError):
        await fail()
    [outcome] = outcomes
    assert not isinstance(outcome.error, ZeroDivisionError)
