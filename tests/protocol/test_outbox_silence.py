"""The sender's book: receivers that are silent, late, or back."""

from __future__ import annotations

import pytest
from desks import REGION, SenderDesk, codes

from trio_mori._errors import NoRoom
from trio_mori._protocol import wire

pytestmark = pytest.mark.deterministic


def test_a_late_acknowledgement_is_not_understood_of_an_empty_payload_that_came_after() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    desk.deliver(first, 1)
    desk.wait(31)
    desk.fetch(second, 1)
    desk.written()
    desk.hear(second, wire.Ack([1]))
    empty = desk.put(size=0)
    desk.beat(first, 1, 1, open=[1])  # sent before the first receiver had read the `Done`, which it takes now
    assert not desk.book.starting
    desk.hear(first, wire.Ack([1]))
    desk.fetch(second, 2)
    assert desk.written().entry is empty


def test_a_receiver_too_many_takes_the_place_of_one_that_is_gone_and_is_owed_nothing() -> None:
    desk = SenderDesk(max_sessions=2)
    first, second = desk.meet(b"A"), desk.meet(b"B")
    with pytest.raises(NoRoom, match="2 receivers"):
        desk.meet(b"C")
    desk.deliver(first, 1)
    desk.book.disconnected(first)
    with pytest.raises(NoRoom):
        desk.meet(b"C")  # the first may still acknowledge
    desk.fetch(second, 1)
    desk.wait(20)
    desk.beat(second, 1, 1, open=[1])
    desk.wait(20)
    desk.begun()
    desk.meet(b"C")
    assert set(desk.book.sessions) == {b"B" * 16, b"C" * 16}


def test_the_news_that_a_payload_is_gone_goes_on_to_the_next_one_when_its_receiver_is_silent() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    desk.book.cleanup([desk.put()])
    desk.fetch(first, 1)
    desk.fetch(second, 1)
    desk.wait(20)
    desk.beat(second, 1, 1, open=[1])
    desk.book.disconnected(first)
    desk.wait(20)
    assert codes(desk, second) == [wire.GONE]


def test_what_a_silent_receiver_gives_up_does_not_go_to_another_silent_one() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    desk.deliver(first, 1)
    desk.fetch(second, 1)
    desk.wait(31)
    assert not desk.book.starting
    desk.beat(second, 1, 1, open=[1])
    assert desk.begun().holder is second.fetches[1]


def test_a_receiver_that_is_back_is_given_what_came_meanwhile() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.fetch(session, 1)
    desk.book.disconnected(session)
    desk.put()
    assert not desk.book.starting
    assert desk.meet(generation=2) is session
    assert desk.begun().holder is session.fetches[1]
    assert desk.book.open_session(b"A" * 16, 1, region_size=REGION, handle=None, now=desk.now) is None, "an old hello"
    assert session.generation == 2


def test_an_acknowledgement_of_an_earlier_payload_does_not_swallow_the_news_about_a_later_one() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.deliver(session, 1)
    second = desk.put()
    desk.wait(31)
    desk.beat(session, 1, 1, open=[1])  # sent before the `Done` was read
    assert desk.book.cleanup([second]) == 1
    assert codes(desk, session) == [wire.GONE]
    desk.hear(session, wire.Ack([1]))
    desk.fetch(session, 2)
    assert codes(desk, session) == [wire.GONE]


def test_news_that_a_silent_receiver_cannot_have_heard_wake_the_sender_for_the_next_one() -> None:
    desk = SenderDesk(transfer_timeout=lambda size: 100.0)
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.book.cleanup([entry])
    desk.now += 31  # the receiver's time is over, while its write goes on
    desk.book.expire(desk.now)
    desk.book.next_deadline()
    desk.end(ticket)
    assert desk.book.alarm <= desk.now
    desk.wait(0)
    other = desk.meet(b"B")
    desk.fetch(other, 1)
    failure = desk.said(other)[0]
    assert isinstance(failure, wire.Failed)
    assert failure.code == wire.GONE
