"""Heartbeats of a receiver for which nothing has changed: two numbers, whatever it waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from desks import EPOCH, KEY, UNIT, ReceiverDesk, SenderDesk

from trio_mori._protocol import wire
from trio_mori._protocol.entries import Phase
from trio_mori._protocol.fetches import Fetches
from trio_mori._protocol.interests import Interest

pytestmark = pytest.mark.deterministic


# --- the receiver's side ----------------------------------------------------------------------------------


def beat(desk: ReceiverDesk) -> wire.ToSender:
    desk.book.heartbeat(desk.channel)
    message: wire.ToSender = desk.channel.outgoing.pop()
    return message


def answer(desk: ReceiverDesk, *unknown: int) -> None:
    desk.hear(wire.Pulse(desk.channel.sequence, list(unknown)))


def steady() -> tuple[ReceiverDesk, Interest, Interest]:
    """A desk that has said all it has to say, and heard that it was read; a get that waits, and one that arrived."""
    desk = ReceiverDesk()
    waiting, arrived = desk.get(), desk.arrived()
    beat(desk)
    answer(desk)
    desk.said()
    return desk, waiting, arrived


def test_a_heartbeat_that_was_answered_is_not_said_again() -> None:
    desk, _, _ = steady()
    base = desk.channel.sequence
    for number in range(base, base + 3):
        assert beat(desk) == wire.Still(number + 1, number)
        answer(desk)


def test_a_heartbeat_that_was_not_answered_is_said_again_in_full() -> None:
    desk, waiting, arrived = steady()
    assert isinstance(beat(desk), wire.Still)
    number = desk.channel.sequence + 1
    assert beat(desk) == wire.Heartbeat(number, arrived.id, [waiting.id], [arrived.id], [])
    desk.hear(wire.Pulse(number - 1, []))  # of the one before
    assert isinstance(beat(desk), wire.Heartbeat)
    answer(desk)
    assert isinstance(beat(desk), wire.Still)


def acknowledged(desk: ReceiverDesk, waiting: Interest, arrived: Interest) -> None:
    desk.book.take(arrived)
    desk.book.acknowledge(arrived)


# All that can happen to a channel, or be said on it, and what the sender is told of it may be lost.
CHANGES: dict[str, Callable[[ReceiverDesk, Interest, Interest], object]] = {
    "a get": lambda desk, waiting, arrived: desk.get("other@0_1"),
    "an arrival": lambda desk, waiting, arrived: desk.hear(wire.Done(waiting.id, waiting.round, UNIT, b"h")),
    "an acknowledgement": acknowledged,
    "a get that is given up": lambda desk, waiting, arrived: desk.book.give_back(waiting),
    "a payload that is given back": lambda desk, waiting, arrived: desk.book.give_back(arrived),
    "a failure": lambda desk, waiting, arrived: desk.hear(wire.Failed(waiting.id, wire.GONE, "", True)),
    "a failure in doubt": lambda desk, waiting, arrived: desk.hear(wire.Failed(waiting.id, wire.GONE, "", False)),
    "an offer": lambda desk, waiting, arrived: desk.hear(wire.Ready(waiting.id, 1, UNIT)),
    "a destination that is taken back": lambda desk, waiting, arrived: desk.hear(wire.Retracted(waiting.id, 0)),
    "what the sender has never heard of": lambda desk, waiting, arrived: answer(desk, waiting.id),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_heartbeat_lists_everything_after(change: str) -> None:
    desk, waiting, arrived = steady()
    CHANGES[change](desk, waiting, arrived)
    answer(desk)  # whatever was answered, it is not what is said now
    assert isinstance(beat(desk), wire.Heartbeat)


@pytest.mark.parametrize("epoch", [EPOCH, b"f" * 16])
def test_the_first_heartbeat_on_a_link_lists_everything(epoch: bytes) -> None:
    desk, waiting, _ = steady()
    desk.welcome(epoch)
    message = desk.channel.outgoing[-1]
    assert isinstance(message, wire.Heartbeat)
    assert message.open == [waiting.id]


# --- the sender's side ------------------------------------------------------------------------------------


def test_what_says_the_same_again_is_answered_without_a_look_at_any_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = SenderDesk()
    session = desk.meet()
    for number in (1, 2):
        desk.fetch(session, number, f"key{number}@0_1")
    desk.beat(session, 1, 2, open=[1, 2])
    assert desk.said(session) == [wire.Pulse(1, [])]
    monkeypatch.setattr(Fetches, "on_heartbeat", None)
    for number in (2, 3):
        desk.hear(session, wire.Still(number, number - 1))
        assert desk.said(session) == [wire.Pulse(number, [])]


def test_what_was_lost_on_the_way_is_repeated_as_after_a_whole_heartbeat() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.fetch(session, 1)
    desk.beat(session, 1, 1, open=[1])
    entry = desk.put(size=100)
    desk.written()
    desk.said(session)  # and nobody heard it
    for number in (2, 3):
        desk.hear(session, wire.Still(number, number - 1))
        assert desk.said(session) == [wire.Done(1, 0, 100, b"h"), wire.Pulse(number, [])]
    desk.beat(session, 4, 1, unacked=[1])
    desk.hear(session, wire.Still(5, 4))
    assert desk.said(session) == [wire.Pulse(4, []), wire.Pulse(5, [])]
    assert entry.phase is Phase.DELIVERED
    desk.beat(session, 6, 1)
    assert desk.clean, "not listed any more: it was acknowledged"


def test_a_silent_receiver_that_says_the_same_again_is_served() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.fetch(session, 1)
    desk.beat(session, 1, 1, open=[1])
    desk.book.disconnected(session)
    desk.put()
    assert not desk.book.starting
    desk.hear(session, wire.Still(2, 1))
    desk.written()


@pytest.mark.parametrize(("sequence", "base"), [(4, 3), (4, 1), (2, 2), (1, 2), (3, 0)])
def test_what_does_not_follow_the_last_heartbeat_changes_nothing_and_is_not_answered(sequence: int, base: int) -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.fetch(session, 1)
    desk.beat(session, 2, 1, open=[1])
    desk.said(session)
    desk.hear(session, wire.Still(sequence, base))
    assert not desk.said(session)
    assert session.sequence == 2


def test_what_follows_no_heartbeat_is_not_answered() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.fetch(session, 1, KEY)
    desk.hear(session, wire.Still(1, 0))
    assert not desk.said(session)
    assert session.fetches


def test_an_id_that_is_forgotten_after_a_heartbeat_is_closed_for_the_next_ones_too() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.beat(session, 1, 5, returning=[5])
    assert desk.said(session) == [wire.Closed([5]), wire.Pulse(1, [])]
    desk.hear(session, wire.Still(2, 1))
    assert desk.said(session) == [wire.Closed([5]), wire.Pulse(2, [])]
    desk.fetch(session, 5)  # a late copy
    assert not session.fetches
