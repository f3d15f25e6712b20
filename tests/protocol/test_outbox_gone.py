"""The sender's book: payloads that were cleaned up or expired, and who is told."""

from __future__ import annotations

import pytest
from desks import KEY, UNIT, SenderDesk, codes

from trio_mori._protocol import wire
from trio_mori._protocol.entries import Phase, Want

pytestmark = pytest.mark.deterministic


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


@pytest.mark.parametrize("what", ["delivered", "being written", "written in vain", "offered"])
def test_one_that_its_receiver_has_in_hand_and_gives_back_is_told_to_nobody_either(what: str) -> None:
    desk = SenderDesk()
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1, room=0 if what == "offered" else UNIT)
    if what == "delivered":
        desk.written()
    ticket = desk.begun() if "writ" in what else None
    desk.book.cleanup([entry], tell=False)
    if ticket is not None and what == "written in vain":
        desk.end(ticket)
    desk.hear(session, wire.Cancel([1]))
    if ticket is not None and what == "being written":
        desk.end(ticket)
    assert desk.clean
    desk.said(session)
    desk.fetch(session, 2)
    assert codes(desk, session) == []
    assert session.fetches[2].state is Want.WAITING


@pytest.mark.parametrize("name", ["r", "r_0_1"])
def test_why_payloads_of_a_request_are_gone_can_be_forgotten(name: str) -> None:
    desk = SenderDesk()
    session = desk.meet()
    keys = ["r_0_0@0_1", "r_0_1@0_1", "r_0_1@0_2", "s_0_1@0_1"]
    for key in keys:
        desk.put(key)
    desk.wait(300)
    desk.book.lose("r_0_1@0_1")
    desk.book.shelf.forget(name, "0_1")
    for number, key in enumerate(keys):
        desk.fetch(session, number + 1, key)
    told = [each.id - 1 for each in desk.said(session) if isinstance(each, wire.Failed)]
    assert told == [number for number in range(4) if number > 1 or (name != "r" and number == 0)]
    assert not desk.book.shelf._buried


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
