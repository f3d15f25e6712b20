"""A receiver for which nothing happens leaves every second heartbeat out, and none when something does."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
import trio
from rig import Pair, begin, filled, open_pair, wait_until
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_mori import NotReady
from trio_mori._protocol.interests import Channel

pytestmark = pytest.mark.deterministic

INTERVAL = 5.0


@attrs.define
class Pace:
    """When a receiver's heartbeats came."""

    clock: MockClock
    pair: Pair
    beats: list[float] = attrs.field(factory=list)

    @property
    def channel(self) -> Channel:
        """What it says to its first sender."""
        return next(iter(self.pair.receiver._receiver.upstreams.values())).channel

    async def pass_time(self, seconds: int) -> None:
        """Each heartbeat is answered in its second."""
        for _ in range(seconds):
            self.clock.jump(1)
            await wait_all_tasks_blocked()
            await wait_until(lambda: self.channel.up and self.channel.answered == self.channel.sequence)

    async def come_to_rest(self) -> None:
        """Up to the heartbeat after which the next one is left out."""
        while not self.channel.is_at_rest:
            await self.pass_time(1)

    def gaps(self) -> list[float]:
        """Seconds from each to the next, as many as passed by the test's jumps."""
        return [float(round(later - earlier)) for earlier, later in zip(self.beats, self.beats[1:], strict=False)]

    def since_the_last(self) -> float:
        """Seconds."""
        return trio.current_time() - self.beats[-1]


def watch(pair: Pair, clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> Pace:
    """Note its heartbeats from now on."""
    pace, book = Pace(clock, pair), pair.receiver._receiver.book
    plain = book.heartbeat

    def heartbeat(channel: Channel) -> None:
        pace.beats.append(trio.current_time())
        plain(channel)

    monkeypatch.setattr(book, "heartbeat", heartbeat)
    return pace


def config(**more: float) -> Mapping[str, object]:
    return {"heartbeat_interval": INTERVAL, "peer_timeout": 4 * INTERVAL, "acknowledge_timeout": 4 * INTERVAL, **more}


async def test_every_second_heartbeat_is_left_out_while_nothing_happens(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair(within=300, receiver=config()) as pair, trio.open_nursery() as nursery:
        pace = watch(pair, clock, monkeypatch)
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: bool(pair.receiver._receiver.upstreams))
        await pace.come_to_rest()
        del pace.beats[:-1]
        await pace.pass_time(41)
        assert pace.gaps() == [10, 10, 10, 10]
        await pair.put("k", filled(1000))
        assert await outcome.wait() is not None
        await pair.assert_whole()


@pytest.mark.parametrize("short", ["peer_timeout", "acknowledge_timeout"])
async def test_none_is_left_out_where_a_timeout_leaves_less_than_two_of_them(
    short: str, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        open_pair(within=300, receiver=config(**{short: 4 * INTERVAL - 1})) as pair,
        trio.open_nursery() as nursery,
    ):
        pace = watch(pair, clock, monkeypatch)
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: bool(pair.receiver._receiver.upstreams))
        await pace.come_to_rest()
        del pace.beats[:-1]
        await pace.pass_time(21)
        assert pace.gaps() == [5, 5, 5, 5]
        outcome.scope.cancel()


@pytest.mark.parametrize("after", [2, 7])
async def test_what_happens_is_told_within_one_interval(
    after: int, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair(within=300, receiver=config()) as pair, trio.open_nursery() as nursery:
        pace = watch(pair, clock, monkeypatch)
        outcomes = [begin(nursery, pair.get, "k")]
        await wait_until(lambda: bool(pair.receiver._receiver.upstreams))
        await pace.come_to_rest()
        await pace.pass_time(after)
        outcomes.append(begin(nursery, pair.get, "other"))
        await wait_all_tasks_blocked()
        await pace.pass_time(6)
        assert pace.gaps()[-1] == min(after + INTERVAL, 2 * INTERVAL)
        for outcome in outcomes:
            outcome.scope.cancel()


async def test_whoever_has_not_taken_what_came_leaves_none_out(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its sender would take it for silent, and give the payload to another, in the time of its own configuration.
    async with open_pair(within=300, receiver=config()) as pair:
        with pytest.raises(NotReady):
            pair.get_nowait("k")
        await pair.put("k", filled(1000))
        await wait_until(lambda: pair.receiver.statistics().held["arrived"] > 0)
        pace = watch(pair, clock, monkeypatch)
        await pace.pass_time(26)
        assert set(pace.gaps()) == {5}
        assert pair.get_nowait("k") is not None
        await pair.assert_whole()


async def test_a_sender_that_leaves_while_its_receiver_rests_is_missed_as_soon_as_ever(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair(within=300, receiver=config()) as pair, trio.open_nursery() as nursery:
        pace = watch(pair, clock, monkeypatch)
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: bool(pair.receiver._receiver.upstreams))
        await pace.come_to_rest()
        await pair.sender._wind_up()
        await wait_until(lambda: not pace.channel.up)
        left = trio.current_time()
        clock.jump(INTERVAL)
        await wait_until(lambda: pace.beats[-1] > left)
        assert pace.gaps()[-1] == INTERVAL
        outcome.scope.cancel()


async def test_another_sender_ends_the_rest(clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair(within=300, receiver=config()) as pair, trio.open_nursery() as nursery:
        pace = watch(pair, clock, monkeypatch)
        outcome = begin(nursery, pair.get, "k")
        await wait_until(lambda: bool(pair.receiver._receiver.upstreams))
        await pace.come_to_rest()
        absent = begin(nursery, pair.receiver.get, "0", "1", "k", {"source_host": "127.0.0.1", "source_port": 1})
        await wait_until(lambda: len(pair.receiver._receiver.upstreams) == 2)
        await pace.pass_time(6)
        assert pace.gaps()[-2:] == [5, 0]  # to both
        for each in (outcome, absent):
            each.scope.cancel()
