from __future__ import annotations

from typing import Any

import msgspec
import pytest
from desks import KEY, REGION, UNIT, SenderDesk

from trio_mori._protocol import fetches, shelf, wire
from trio_mori._protocol.entries import Phase, Want

pytestmark = pytest.mark.deterministic


# --- fetches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fetched_first", [False, True])
def test_a_payload_is_written_to_the_destination_of_its_fetch_whichever_comes_first(fetched_first: bool) -> None:
    desk = SenderDesk()
    session = desk.meet()
    if fetched_first:
        desk.fetch(session, 3)
    entry = desk.put(size=100)
    if not fetched_first:
        desk.fetch(session, 3)
    ticket = desk.begun()
    assert (ticket.source, ticket.destination, ticket.size) == (entry.extent.offset, 3 * UNIT, 100)
    assert not desk.said(session)
    desk.end(ticket)
    assert desk.said(session) == [wire.Done(3, 0, 100, b"h")]
    desk.hear(session, wire.Ack([3]))
    assert desk.clean
    counters = desk.book.counters
    assert (counters.puts, counters.delivered, counters.acknowledged) == (1, 1, 1)


def test_a_payload_without_bytes_goes_also_where_there_is_no_room() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put(size=0)
    desk.fetch(session, 1, room=0)
    desk.written()
    assert desk.said(session) == [wire.Done(1, 0, 0, b"h")]


def test_the_first_to_ask_gets_the_payload_and_the_next_one_what_comes_back() -> None:
    desk = SenderDesk()
    first, second = desk.meet(b"A"), desk.meet(b"B")
    desk.fetch(first, 1)
    desk.fetch(second, 1)
    desk.put()
    desk.written()
    assert not desk.book.starting
    desk.hear(first, wire.Cancel([1]))
    assert desk.said(first)[-1] == wire.Closed([1])
    assert desk.book.counters.returned == 1
    assert desk.written().holder is second.fetches[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_destination_past_the_receivers_pool_is_refused_and_the_payload_stays(ahead: bool) -> None:
    desk = SenderDesk()
    session, other = desk.meet(b"A"), desk.meet(b"B")
    desk.put()
    if not ahead:
        desk.fetch(session, 1, room=0)
        desk.said(session)
    desk.hear(session, wire.Fetch(1, KEY, 0 if ahead else 1, REGION - UNIT + 1, UNIT))
    (failure,) = desk.said(session)
    assert isinstance(failure, wire.Failed)
    assert (failure.code, failure.settled) == (wire.TRANSFER_FAILED, True)
    assert "past the 262144 bytes" in failure.detail
    desk.fetch(other, 1)
    assert desk.begun().holder is other.fetches[1]


def told(desk: SenderDesk, state: Want) -> list[wire.ToReceiver]:
    """Bring a fetch to a state; what was said last."""
    session = desk.meet()
    if state is Want.FAILED:
        desk.book.cleanup([desk.put()])
    elif state is not Want.WAITING:
        desk.put()
    desk.fetch(session, 1, room=0 if state is Want.OFFERED else UNIT)
    if state in (Want.DELIVERED, Want.WITHDRAWN):
        ticket = desk.begun()
        if state is Want.DELIVERED:
            desk.end(ticket)
        else:
            desk.hear(session, wire.Cancel([1]))
    assert session.fetches[1].state is state
    return desk.said(session)


@pytest.mark.parametrize("by_heartbeat", [False, True])
@pytest.mark.parametrize("state", [s for s in Want if s is not Want.LAPSED])
def test_a_copy_of_a_fetch_is_answered_with_what_was_said_and_starts_nothing(state: Want, by_heartbeat: bool) -> None:
    desk = SenderDesk()
    said = told(desk, state)
    session = desk.book.sessions[b"A" * 16]
    desk.book.starting.clear()
    if by_heartbeat:
        desk.beat(session, 1, 1, open=[1])
        said = [*said, wire.Pulse(1, [])]
    else:
        desk.fetch(session, 1, room=0 if state is Want.OFFERED else UNIT)
    assert desk.said(session) == said
    assert session.fetches[1].state is state
    assert not desk.book.starting


def test_a_destination_that_comes_for_an_offer_that_is_over_is_said_to_be_kept_in_vain_until_it_is_given_up() -> None:
    desk = SenderDesk()
    slow, other = desk.meet(b"A"), desk.meet(b"B")
    desk.put()
    desk.fetch(slow, 1, room=0)
    assert desk.said(slow) == [wire.Ready(1, 1, 100)]
    desk.fetch(other, 1)
    desk.now += 20
    desk.beat(other, 1, 1, open=[1])
    desk.wait(10)
    desk.written()
    desk.hear(other, wire.Ack([1]))
    desk.said(slow)
    desk.fetch(slow, 1, round=1)
    assert desk.said(slow) == [wire.Retracted(1, 1)]
    desk.beat(slow, 1, 1, open=[1])
    assert desk.said(slow) == [wire.Retracted(1, 1), wire.Pulse(1, [])], "the first may have been lost"
    desk.hear(slow, wire.Cancel([1]))
    assert desk.said(slow) == [wire.Closed([1])]


def test_a_destination_ahead_of_the_data_is_never_in_vain() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.fetch(session, 1)
    desk.fetch(session, 1)
    desk.beat(session, 1, 1, open=[1])
    assert desk.said(session) == [wire.Pulse(1, [])]


def test_an_id_that_is_over_never_starts_again() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.hear(session, wire.Cancel([2]))  # it overtook its fetch
    assert desk.said(session) == [wire.Closed([2])]
    desk.fetch(session, 2)
    assert not desk.book.starting
    desk.fetch(session, 1)
    desk.written()
    desk.hear(session, wire.Ack([1]))
    assert session.floor == 2
    desk.put()
    desk.fetch(session, 1)
    assert not desk.book.starting
    desk.hear(session, wire.Ack([1]), wire.Ack([7]))  # about nothing
    assert desk.book.counters.acknowledged == 1


def test_cancels_of_more_unknown_ids_than_can_be_kept_are_answered_after_a_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetches, "MAX_CLOSED", 2)
    desk = SenderDesk(max_fetches=1)
    session = desk.meet()
    desk.hear(session, wire.Cancel([3, 4, 5]))
    assert desk.said(session) == [wire.Closed([3]), wire.Closed([4])]
    desk.fetch(session, 6)
    desk.fetch(session, 7)  # one too many, and there is no place to remember that
    assert not desk.said(session)
    desk.beat(session, 1, 7, returning=[5])
    assert desk.said(session) == [wire.Closed([5]), wire.Pulse(1, [])]


# --- heartbeats -------------------------------------------------------------------------------------------


def listed(how: str) -> dict[str, Any]:
    return {"not at all": {}, "returning": {"returning": [1]}, "unacknowledged": {"unacked": [1]}}[how]


@pytest.mark.parametrize("how", ["not at all", "returning", "unacknowledged"])
@pytest.mark.parametrize("state", [Want.WAITING, Want.OFFERED, Want.WITHDRAWN, Want.DELIVERED, Want.FAILED])
def test_a_heartbeat_says_what_became_of_a_fetch(state: Want, how: str) -> None:
    desk = SenderDesk()
    told(desk, state)
    session = desk.book.sessions[b"A" * 16]
    entry = desk.book.shelf.find(KEY)
    desk.beat(session, 1, 1, **listed(how))
    said = desk.said(session)[:-1]
    if how == "unacknowledged":
        assert session.fetches[1].state is state
        assert not said
        return
    if state is Want.WITHDRAWN:
        assert 1 in session.fetches, "the write goes on"
        assert not said
    else:
        assert 1 not in session.fetches
        assert said == ([wire.Closed([1])] if how == "returning" else [])
    if state is Want.DELIVERED:
        assert entry is not None
        assert entry.phase is (Phase.PUBLISHED if how == "returning" else Phase.FREED)
    elif state is Want.OFFERED:
        assert entry is not None
        assert entry.phase is Phase.PUBLISHED


def test_a_write_to_a_fetch_that_is_not_listed_any_more_is_withdrawn() -> None:
    desk = SenderDesk()
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.beat(session, 1, 1)
    assert session.fetches[1].state is Want.WITHDRAWN
    desk.end(ticket)
    assert entry.phase is Phase.PUBLISHED


def test_an_old_heartbeat_changes_nothing_and_is_not_answered() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.deliver(session, 1)
    desk.beat(session, 2, 1, unacked=[1])
    desk.said(session)
    desk.beat(session, 1, 1)
    desk.beat(session, 2, 1)
    assert 1 in session.fetches
    assert not desk.said(session)


def test_a_heartbeat_is_answered_with_what_was_never_heard_of() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.fetch(session, 2)
    desk.beat(session, 1, 3, open=[1, 2, 3], unacked=[4])
    assert desk.said(session) == [wire.Pulse(1, [1, 3])]
    desk.fetch(session, 1)
    assert session.fetches[1].state is Want.WAITING


# --- payloads ---------------------------------------------------------------------------------------------


def test_clean_up_finds_a_payload_by_its_key_or_its_request_on_every_edge() -> None:
    desk = SenderDesk()
    keys = ("r_0_0@0_1", "r_0_1@0_1", "r_1_0@1_2", "r_0_0@0_2", "x@0_1")
    entries = {key: desk.put(key) for key in keys}
    named = desk.book.shelf.named
    assert named("r") == [entries[key] for key in keys[:4]]
    assert named("r_0_0") == [entries["r_0_0@0_1"], entries["r_0_0@0_2"]]
    assert named("x") == [entries["x@0_1"]]
    assert desk.book.cleanup(named("r")) == 4
    assert named("r") == []
    assert desk.book.counters.cleaned == 4


def test_only_so_many_payloads_that_are_gone_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "MAX_TOMBSTONES", 1)
    desk = SenderDesk()
    session = desk.meet()
    for key in ("first@0_1", "second@0_1"):
        desk.book.cleanup([desk.put(key)])
    desk.fetch(session, 1, "first@0_1")
    desk.fetch(session, 2, "second@0_1")
    assert [m.id for m in desk.said(session) if isinstance(m, wire.Failed)] == [2]


def test_what_a_pool_is_held_for_adds_up() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.deliver(session, 1, key="delivered@0_1", size=2 * UNIT)
    desk.put("published@0_1")
    staged = desk.book.stage("staged@0_1", desk.occupy(3))
    desk.put("pinned@0_1", size=4 * UNIT)
    desk.fetch(session, 2, "pinned@0_1", room=4 * UNIT)
    ticket = desk.begun()
    held = desk.book.shelf.held()
    assert {state: size for state, size in held.items() if size} == {
        "delivered": 2 * UNIT,
        "published": UNIT,
        "staged": 3 * UNIT,
        "pinned": 4 * UNIT,
    }
    assert sum(held.values()) + desk.pool.free_bytes == desk.pool.size
    assert desk.book.is_written_to(session)
    desk.end(ticket)
    assert not desk.book.is_written_to(session)
    desk.book.unstage(staged)


# --- sessions ---------------------------------------------------------------------------------------------


def test_a_farewell_is_said_again_on_the_next_connection() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.book.stop()
    desk.book.leave()
    assert desk.said(session) == [wire.Leaving([1])]
    assert desk.meet(generation=2) is session
    assert desk.said(session) == [wire.Leaving([1])]
    desk.end(ticket)
    desk.meet(generation=3)
    assert desk.said(session)[-1] == wire.Leaving([])
    assert desk.clean


def test_what_was_not_taken_yet_is_not_said_to_the_next_connection() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.deliver(session, 1)
    desk.beat(session, 1, 1, open=[1])
    desk.meet(generation=2)
    assert not desk.said(session)
    desk.fetch(session, 1)
    assert desk.said(session) == [wire.Done(1, 0, 100, b"h")]


def test_who_closed_is_forgotten_and_what_it_had_goes_to_others() -> None:
    desk = SenderDesk()
    session, other = desk.meet(b"A"), desk.meet(b"B")
    desk.deliver(session, 1)
    desk.fetch(other, 1)
    desk.book.bye(session)
    assert desk.book.has_left(session)
    assert not desk.said(session)
    assert desk.begun().holder is other.fetches[1]
    assert desk.meet(b"A") is not session


def test_a_book_that_is_begun_anew_says_no_farewell_to_who_comes_then() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.book.leave()
    assert desk.said(session) == [wire.Leaving([])]
    desk.book.bye(session)
    desk.book.begin_anew()
    session = desk.meet(b"B")
    assert not desk.said(session)
    desk.deliver(session, 1)
    desk.hear(session, wire.Ack([1]))
    assert desk.clean


# --- news -------------------------------------------------------------------------------------------------


def test_the_news_about_an_older_payload_is_nobodys_when_a_newer_one_is_there() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.book.cleanup([desk.put()])
    desk.fetch(session, 1)
    desk.put()
    desk.hear(session, wire.Cancel([1]))  # it may not have heard of the first
    desk.fetch(session, 2)
    desk.written()
    desk.hear(session, wire.Ack([2]))
    desk.said(session)
    desk.fetch(session, 3)
    assert not desk.said(session)


def test_a_write_that_fails_after_its_time_is_told_once_and_its_end_too() -> None:
    desk = SenderDesk()
    session = desk.meet()
    entry = desk.put()
    desk.fetch(session, 1)
    ticket = desk.begun()
    desk.wait(21)
    (failure,) = desk.said(session)
    assert isinstance(failure, wire.Failed)
    assert not failure.settled
    desk.fail(ticket, settled=False)
    assert not desk.said(session)
    assert entry.pins == 1
    desk.end(ticket)
    assert desk.said(session) == [msgspec.structs.replace(failure, settled=True)]
    assert entry.pins == 0
    assert (desk.book.counters.overdue_writes, desk.book.counters.failed_writes) == (1, 1)
