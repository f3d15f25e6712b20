from __future__ import annotations

import pytest
from desks import KEY, UNIT, SenderDesk

from trio_mori._protocol import wire
from trio_mori._protocol.extents import OUTBOUND

pytestmark = pytest.mark.deterministic


# --- closing ----------------------------------------------------------------------------------------------


def test_after_the_farewell_a_silent_receiver_lapses_without_harm() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1, room=0)
    desk.book.stop()
    desk.book.leave()
    desk.wait(31)
    assert desk.clean


def test_a_destination_that_comes_after_the_stop_is_not_written_to() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1, room=0)
    desk.book.stop()
    desk.said(session)
    desk.fetch(session, 1, round=1)
    assert not desk.book.starting
    assert not desk.said(session), "an answer would only make it ask again"
    desk.book.leave()
    desk.fetch(session, 1, round=1)
    assert not desk.book.starting
    assert desk.clean


def test_a_put_that_is_copying_keeps_its_memory_until_it_ends_it_itself() -> None:
    desk = SenderDesk()
    entry = desk.book.stage(KEY, desk.pool.allocate(UNIT, OUTBOUND))
    desk.book.stop()
    desk.book.leave()
    assert not desk.clean
    desk.book.unstage(entry)
    assert desk.clean


# --- writes that fail or take too long --------------------------------------------------------------------


def test_a_receiver_that_heard_neither_of_the_failure_nor_of_its_end_is_told_again() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.wait(21)
    desk.end(ticket)
    assert [type(m) for m in desk.said(session)] == [wire.Failed, wire.Closed]  # both are lost
    desk.beat(session, 1, 1, open=[1])
    failure = desk.said(session)[0]
    assert isinstance(failure, wire.Failed)
    assert failure.settled
    desk.hear(session, wire.Ack([1]))
    assert not session.fetches


# --- sessions that end ------------------------------------------------------------------------------------


def test_what_stands_behind_a_farewell_is_not_heard() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.book.bye(session)
    desk.put()
    desk.fetch(session, 1)
    assert not desk.book.starting


def test_what_a_session_gives_up_at_its_end_is_not_written_to_it_once_more() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.deliver(session, 1)
    desk.fetch(session, 2)
    desk.book.bye(session)
    assert not desk.book.starting


# --- limits -----------------------------------------------------------------------------------------------


def test_a_fetch_above_the_limit_is_refused_for_good_and_told_until_it_is_heard() -> None:
    desk = SenderDesk(max_fetches=1)
    session = desk.meet()
    desk.fetch(session, 1)
    desk.fetch(session, 2)
    assert [(m.id, m.code) for m in desk.said(session)] == [(2, wire.LIMIT)]  # which is lost
    desk.hear(session, wire.Cancel([1]))
    desk.put()
    desk.fetch(session, 2)
    assert not desk.book.starting, "the receiver may have heard of the refusal, and freed the destination"
    desk.said(session)
    desk.beat(session, 1, 2, open=[2])
    failure, pulse = desk.said(session)
    assert failure == wire.Failed(2, wire.LIMIT, failure.detail, True)
    assert pulse == wire.Pulse(1, [])


# --- time -------------------------------------------------------------------------------------------------


def test_a_delivery_to_a_receiver_that_is_silent_already_sets_the_alarm() -> None:
    desk = SenderDesk(transfer_timeout=lambda size: 100.0)
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.wait(30)
    desk.end(ticket)
    assert desk.book.alarm == desk.book.next_deadline() == 30.0


def test_an_acknowledged_payload_that_an_earlier_write_still_reads_goes_when_that_ends() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    desk.put()
    desk.fetch(first, 1)
    overdue = desk.begun()
    desk.wait(21)
    desk.fetch(second, 1)
    desk.written()
    desk.hear(second, wire.Ack([1]))
    assert not desk.clean
    assert desk.book.shelf.find(KEY) is None
    desk.end(overdue)
    assert desk.clean
