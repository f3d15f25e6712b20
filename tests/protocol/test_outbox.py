from __future__ import annotations

from typing import Any

import pytest
from desks import KEY, REGION, UNIT, SenderDesk

from trio_mori._errors import KeyBusy, NoRoom
from trio_mori._protocol import wire
from trio_mori._protocol.entries import Entry, Phase, Session, Want
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


# --- payloads that are gone -------------------------------------------------------------------------------


def codes(desk: SenderDesk, session: Session) -> list[int]:
    """The reasons of failure that a receiver has been told."""
    return [m.code for m in desk.said(session) if isinstance(m, wire.Failed)]


def test_a_payload_that_was_cleaned_up_is_told_once_to_the_next_fetch() -> None:
    desk = SenderDesk()
    session = desk.meet()
    assert desk.book.cleanup([desk.put()]) == 1
    assert desk.clean
    desk.fetch(session, 1)
    assert codes(desk, session) == [wire.GONE]
    desk.fetch(session, 2)
    assert codes(desk, session) == []
    assert session.fetches[2].state is Want.WAITING


def test_a_payload_that_was_cleaned_up_quietly_is_told_to_nobody() -> None:
    desk = SenderDesk()
    session = desk.meet()
    assert desk.book.cleanup([desk.put()], tell=False) == 1
    assert desk.clean
    desk.fetch(session, 1)
    assert codes(desk, session) == []
    assert session.fetches[1].state is Want.WAITING


def test_that_nothing_comes_under_a_key_is_told_to_the_first_that_waits_and_takes_no_room() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    desk.fetch(first, 1)
    desk.fetch(second, 1)
    desk.book.lose(KEY)
    assert codes(desk, first) == [wire.GONE]
    assert codes(desk, second) == []
    assert desk.clean


def test_that_nothing_comes_under_a_key_any_more_is_told_after_what_is_there() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.book.lose(KEY)
    desk.fetch(session, 1)
    assert codes(desk, session) == []
    desk.written()
    desk.hear(session, wire.Ack([1]))
    desk.fetch(session, 2)
    assert codes(desk, session) == [wire.GONE]


def test_a_newer_put_takes_the_place_of_the_news_that_the_last_one_expired() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.wait(300)
    desk.put()
    desk.fetch(session, 1)
    desk.written()
    assert codes(desk, session) == []


def test_who_waits_behind_another_receiver_is_told_when_that_gives_back_what_is_gone() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    entry = desk.deliver(first, 1)
    desk.fetch(second, 1)
    desk.book.cleanup([entry])
    assert codes(desk, second) == []
    desk.hear(first, wire.Cancel([1]))
    assert codes(desk, second) == [wire.GONE]


def test_who_waits_behind_a_silent_receiver_is_told_that_its_payload_is_gone() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    entry = desk.deliver(first, 1)
    desk.fetch(second, 1)
    desk.book.cleanup([entry])
    desk.wait(20)
    desk.beat(second, 1, 1, open=[1])
    desk.wait(20)
    assert codes(desk, second) == [wire.GONE]


def test_who_asks_next_is_told_if_the_first_gave_up_while_its_last_write_would_not_end() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    entry = desk.put()
    desk.fetch(first, 1)
    ticket = desk.begun()
    desk.book.cleanup([entry])
    desk.wait(21)
    desk.end(ticket)
    desk.beat(first, 1, 1, returning=[1])  # its cancel was lost
    desk.fetch(second, 1)
    assert codes(desk, second) == [wire.GONE]


def test_a_fetch_that_waited_through_a_broken_connection_is_told_that_the_payload_expired() -> None:
    desk = SenderDesk(acknowledge_timeout=1000.0)
    session = desk.meet()
    desk.fetch(session, 1)
    desk.book.disconnected(session)
    desk.put()
    desk.wait(300)
    desk.meet(generation=2)
    assert codes(desk, session) == [wire.EXPIRED]


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("cancelled_first", [False, True])
def test_a_payload_that_is_cleaned_up_during_its_write_is_told_to_the_next_one_if_the_first_gives_up(
    failing: bool, cancelled_first: bool
) -> None:
    desk = SenderDesk()
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    if cancelled_first:
        desk.hear(session, wire.Cancel([1]))
    desk.book.cleanup([entry])
    assert entry.phase is Phase.DYING
    if not cancelled_first:
        desk.hear(session, wire.Cancel([1]))
    if failing:
        desk.fail(ticket, settled=True)
    else:
        desk.end(ticket)
    assert desk.clean
    desk.fetch(session, 2)
    assert codes(desk, session) == [wire.GONE]


@pytest.mark.parametrize("how", ["ends", "fails", "is overdue", "fails unsettled"])
def test_however_its_write_ends_a_payload_that_was_cleaned_up_meanwhile_is_gone(how: str) -> None:
    desk = SenderDesk()
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.book.cleanup([entry])
    if how == "ends":
        desk.end(ticket)
    elif how == "is overdue":
        desk.wait(21)
    else:
        desk.fail(ticket, settled=how == "fails")
    assert codes(desk, session) == [wire.GONE]
    assert desk.clean == (how in ("ends", "fails"))


def test_the_news_that_a_payload_is_gone_is_not_lost_when_it_crosses_a_cancel() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.book.cleanup([desk.put()])
    desk.fetch(session, 1)
    desk.hear(session, wire.Cancel([1]))
    desk.said(session)
    desk.fetch(session, 2)
    assert codes(desk, session) == [wire.GONE]
    desk.beat(session, 1, 2)  # not listed: it was heard
    desk.fetch(session, 3)
    assert codes(desk, session) == []


def test_a_newer_payload_is_not_declared_gone_with_an_older_one() -> None:
    desk = SenderDesk()
    session = desk.meet()
    old = desk.deliver(session, 1)
    desk.put()
    desk.book.cleanup([old])
    desk.hear(session, wire.Cancel([1]))
    desk.fetch(session, 2)
    desk.written()
    desk.hear(session, wire.Ack([2]))
    desk.said(session)
    desk.fetch(session, 3)
    assert codes(desk, session) == []


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


# --- silence ----------------------------------------------------------------------------------------------


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


# --- stock receivers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_time", [False, True])
def test_what_a_stock_receiver_has_keeps_its_memory_while_an_earlier_write_still_reads_it(by_time: bool) -> None:
    desk = SenderDesk()
    entry = desk.put(size=100)
    tickets = []
    for route in (b"a", b"b"):
        caller, found = desk.book.pulls.begin(route, KEY)
        assert found is entry
        desk.book.pull(caller, entry, destination=0, length=100, region_size=REGION)
        tickets.append(desk.begun())
        if route == b"a":
            desk.wait(21)
    desk.end(tickets[1])
    if by_time:
        desk.wait(6)
    else:
        desk.book.pulls.begin(b"b", "another@0_1")
    assert not desk.clean
    desk.end(tickets[0])
    assert desk.clean


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


# --- encodings for stock receivers ------------------------------------------------------------------------


def encoding(desk: SenderDesk, entry: Entry) -> None:
    """Begin to write the stock form of an entry."""
    desk.book.pulls.begin_encoding(entry, desk.pool.allocate(2 * UNIT, OUTBOUND), 2 * UNIT)


def test_a_structure_can_be_pulled_when_its_stock_form_has_been_written_and_not_before() -> None:
    desk = SenderDesk()
    entry = desk.put(raw=False)
    encoding(desk, entry)
    assert entry.stock_size is None
    caller, found = desk.book.pulls.begin(b"a", KEY)
    assert found is entry
    desk.book.pull(caller, entry, destination=0, length=2 * UNIT, region_size=REGION)
    assert desk.book.pulls.answers.pop() == (caller, wire.TRANSFER_ERROR)
    desk.book.pulls.end_encoding(entry)
    assert entry.stock_size == 2 * UNIT
    desk.book.pull(caller, entry, destination=0, length=2 * UNIT, region_size=REGION)
    desk.written()
    assert desk.book.pulls.answers.pop() == (caller, wire.TRANSFER_DONE)
    desk.wait(6)
    assert desk.clean


@pytest.mark.parametrize("end", ["cleanup", "replace", "leave"])
def test_what_is_dropped_while_its_stock_form_is_written_keeps_its_memory_until_that_has_ended(end: str) -> None:
    desk = SenderDesk()
    entry = desk.put(raw=False)
    encoding(desk, entry)
    if end == "cleanup":
        desk.book.cleanup([entry])
    elif end == "replace":
        desk.put(raw=False)
    else:
        desk.book.leave()
    assert entry.phase is Phase.DYING
    assert desk.book.is_touched
    desk.book.pulls.end_encoding(entry)
    assert entry.phase is Phase.FREED
    desk.book.leave()
    assert desk.clean
    assert not desk.book.is_touched
