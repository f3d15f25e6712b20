"""The sender's book: puts, limits, ends, and writes that fail or take too long."""

from __future__ import annotations

from typing import Any

import pytest
from desks import KEY, UNIT, SenderDesk

from trio_mori._errors import KeyBusy
from trio_mori._protocol import wire
from trio_mori._protocol.entries import Phase
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
    told: list[Any] = desk.said(session)  # both are lost
    assert [(type(m), m.settled) for m in told] == [(wire.Failed, False), (wire.Failed, True)]
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


def test_a_get_that_is_asked_anew_while_its_write_runs_counts_once() -> None:
    desk = SenderDesk(max_fetches=1)
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.hear(session, wire.Cancel([1]))
    desk.fetch(session, 2, room=0)
    assert not desk.said(session)
    desk.fetch(session, 3)
    assert [(m.id, m.code) for m in desk.said(session)] == [(3, wire.LIMIT)]
    desk.end(ticket)
    assert desk.said(session) == [wire.Closed([1]), wire.Ready(2, 1, 100)]


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


# --- writes that are not settled --------------------------------------------------------------------------


@pytest.mark.parametrize("fenced_first", [False, True])
def test_an_unsettled_write_is_over_when_its_receiver_is_proven_dead_whichever_comes_first(fenced_first: bool) -> None:
    desk = SenderDesk()
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    if fenced_first:
        desk.book.fenced(session, desk.now)
    desk.fail(ticket, settled=False)
    if not fenced_first:
        assert entry.pins
        desk.book.fenced(session, desk.now)
    assert not entry.pins
    assert not desk.book.tickets
    desk.fetch(desk.meet(b"B"), 1)
    desk.written()


def test_an_unsettled_write_that_ends_after_all_frees_both_ends() -> None:
    desk = SenderDesk()
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.fail(ticket, settled=False)
    desk.hear(session, wire.Cancel([1]))
    assert not [m for m in desk.said(session) if isinstance(m, wire.Closed)]
    desk.end(ticket)
    assert desk.said(session) == [wire.Closed([1])]
    assert not entry.pins


# --- puts -------------------------------------------------------------------------------------------------


def test_a_put_on_a_key_that_is_being_transferred_is_refused_without_a_trace() -> None:
    desk = SenderDesk()
    session = desk.meet()
    first = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    free = desk.pool.free_bytes
    with pytest.raises(KeyBusy, match=KEY):
        desk.put()
    assert desk.pool.free_bytes == free
    assert desk.book.shelf.find(KEY) is first
    desk.hear(session, wire.Cancel([1]))
    with pytest.raises(KeyBusy):
        desk.put()  # the write goes on
    desk.end(ticket)
    desk.put()
    assert first.phase is Phase.FREED


@pytest.mark.parametrize("phase", [Phase.PUBLISHED, Phase.CLAIMED, Phase.DELIVERED])
def test_a_put_takes_the_key_from_a_payload_that_only_a_stuck_write_still_reads(phase: Phase) -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    old = desk.put()
    desk.fetch(first, 1)
    stuck = desk.begun()
    desk.wait(21)
    if phase is not Phase.PUBLISHED:
        desk.fetch(second, 1, room=0 if phase is Phase.CLAIMED else UNIT)
    if phase is Phase.DELIVERED:
        desk.written()
    assert old.phase is phase
    new = desk.put()
    assert desk.book.shelf.find(KEY) is new
    desk.hear(second, wire.Ack([1]))
    desk.end(stuck)
    assert old.phase is Phase.FREED
