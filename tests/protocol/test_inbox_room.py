"""The receiver's book when the pool is full: who gets which room, and what is called back for it."""

from __future__ import annotations

import pytest
from desks import EPOCH, KEY, UNIT, ReceiverDesk, SenderDesk, fetch_of

from trio_mori._protocol import wire
from trio_mori._protocol.interests import PEER_LOST, TOO_BIG, State
from trio_mori._protocol.sizes import FIRST_CAPACITY

pytestmark = pytest.mark.deterministic


# --- room -------------------------------------------------------------------------------------------------


def test_a_payload_is_not_put_where_one_that_was_offered_earlier_is_to_be() -> None:
    desk = ReceiverDesk.full(front=True)
    large, small = desk.offered(3), desk.get()
    desk.hear(wire.Ready(small.id, 1, UNIT))
    assert len(desk.book.hungry) == 2, "the first would never get room if others were put there"
    desk.said()
    desk.pool.free(next(iter(desk.pool)))
    assert len(desk.book.hungry) == 0
    assert {m.id: m for m in desk.said()} == {i.id: fetch_of(i) for i in (large, small)}


def test_a_payload_does_not_stand_behind_a_larger_one_in_whose_way_it_is_not() -> None:
    desk = ReceiverDesk.full()
    large, small = desk.offered(3), desk.offered(1)
    assert (large.state, small.state) == (State.OFFERED, State.POSTED)
    held = next(iter(desk.pool))
    for _ in range(100):  # however many pass
        desk.hear(wire.Done(small.id, 1, UNIT, b"h"))
        desk.book.give_back(small)
        small = desk.offered(1)
        assert small.extent is not None
    desk.pool.free(held)
    assert large.extent is not None


def test_one_that_can_never_fit_does_not_keep_others_from_their_room() -> None:
    desk = ReceiverDesk.full()
    first, never, last = desk.offered(3), desk.get(), desk.get()
    desk.hear(wire.Ready(never.id, 1, 9 * UNIT), wire.Ready(last.id, 1, UNIT))
    desk.book.give_back(first)
    assert never.failure is not None
    assert never.failure[0] == TOO_BIG
    assert last.extent is not None


@pytest.mark.parametrize("how", ["given back", "failed", "empty", "all failed", "farewell", "restart", "fenced"])
def test_whoever_waits_behind_one_that_wants_no_room_any_more_gets_its_own(how: str) -> None:
    desk = ReceiverDesk.full(front=True)
    other = desk.book.open_channel(b"C" * 16)
    desk.book.welcome(other, b"g" * 16)
    first, second = desk.get(), desk.book.post(other, KEY)
    desk.hear(wire.Ready(first.id, 1, 3 * UNIT))
    desk.book.on_message(other, wire.Ready(second.id, 1, UNIT), desk.now)
    assert second.state is State.OFFERED
    if how == "given back":
        desk.book.give_back(first)
    elif how == "failed":
        desk.hear(wire.Failed(first.id, wire.GONE, "", True))
    elif how == "empty":
        desk.hear(wire.Done(first.id, 1, 0, b"h"))
    elif how == "all failed":
        desk.book.fail_all(desk.channel, PEER_LOST, "")
    elif how == "farewell":
        desk.hear(wire.Leaving([]))
    elif how == "restart":
        desk.welcome(b"f" * 16)
    else:
        desk.book.fenced(desk.channel, EPOCH, desk.now)
    assert second.state is State.POSTED
    assert second.extent is not None


def test_what_a_sender_offered_and_forgot_with_our_session_is_asked_for_again_while_room_is_awaited() -> None:
    desk = ReceiverDesk(units=8, prepost=0)
    desk.occupy(6)
    interest = desk.get()
    desk.hear(wire.Ready(interest.id, 1, 3 * UNIT))
    desk.said()
    desk.hear(wire.Pulse(1, [interest.id]))
    assert desk.said() == [wire.Fetch(interest.id, KEY, 1, 0, 0)]


@pytest.mark.parametrize("round", [1, 2])
def test_a_destination_whose_offer_was_retracted_comes_back_and_its_key_stays_asked_for(round: int) -> None:
    desk = ReceiverDesk(units=8, prepost=0)
    interest, big = desk.get(), desk.get("big@0_1")
    desk.hear(wire.Ready(interest.id, 1, UNIT), wire.Ready(big.id, 1, 8 * UNIT))
    old, destination = interest.id, interest.extent
    desk.said()
    desk.hear(wire.Retracted(old, round))
    assert desk.said() == [wire.Cancel([old]), wire.Fetch(interest.id, KEY, 0, 0, 0)]
    assert destination in desk.book.live_extents(), "the sender may write to it until it has confirmed"
    desk.hear(wire.Closed([old]))
    assert desk.said() == [fetch_of(big)]
    assert fetch_of(big).capacity == 8 * UNIT


def test_a_retraction_means_nothing_to_a_newer_round_nor_to_what_has_no_destination_or_has_come() -> None:
    desk = ReceiverDesk(units=8, prepost=0)
    newer, bare, here = desk.get(), desk.get(), desk.get()
    desk.hear(wire.Ready(newer.id, 2, UNIT), wire.Ready(here.id, 1, UNIT), wire.Done(here.id, 1, 100, b"h"))
    desk.said()
    desk.hear(*(wire.Retracted(each.id, 1) for each in (newer, bare, here)), wire.Retracted(99, 1))
    assert not desk.said()
    assert newer.extent is not None
    assert here.state is State.ARRIVED


# --- room that is kept for what may come ------------------------------------------------------------------


def test_a_destination_ahead_of_the_data_is_called_back_for_a_payload_that_is_there() -> None:
    desk = ReceiverDesk(units=40)
    first, second, big = desk.get("first@0_1"), desk.get("second@0_1"), desk.get()
    old, destination = second.id, second.extent
    desk.said()
    desk.hear(wire.Ready(big.id, 1, 12 * UNIT))
    assert desk.said() == [wire.Cancel([old]), wire.Fetch(second.id, "second@0_1", 0, 0, 0)]
    assert first.extent is not None, "the newest is enough"
    assert destination in desk.book.live_extents(), "the sender may write to it"
    assert desk.book.quarantined == FIRST_CAPACITY
    assert desk.beat() == wire.Heartbeat(2, second.id, [first.id, second.id, big.id], [], [old])
    desk.book.find_room()
    assert not desk.said(), "what comes back anyway is not called back again"
    desk.hear(wire.Closed([old]))
    assert desk.said() == [fetch_of(big)]
    assert fetch_of(big).capacity == 12 * UNIT
    desk.hear(wire.Ready(second.id, 1, 100), wire.Done(second.id, 1, 100, b"h"))
    assert desk.book.waking == [second]


def test_more_is_called_back_when_what_came_back_does_not_do() -> None:
    desk = ReceiverDesk(units=52, prepost=48)
    returning = desk.get()
    desk.occupy(1)
    second, third, big = desk.get(), desk.get(), desk.get()
    old = [second.id, third.id]
    desk.book.give_back(returning)
    desk.said()
    desk.hear(wire.Ready(big.id, 1, 20 * UNIT))
    assert desk.said() == [wire.Cancel([old[1]]), fetch_of(third)]
    desk.hear(wire.Closed([returning.id]), wire.Closed([old[1]]))
    assert desk.said() == [wire.Cancel([old[0]]), fetch_of(second)], "there are two pieces that do not meet"
    desk.hear(wire.Closed([old[0]]))
    assert desk.said() == [fetch_of(big)]


def test_the_order_of_gets_stays_when_their_destinations_are_called_back() -> None:
    desk = ReceiverDesk(units=40)
    first, second, big = desk.get(), desk.get(), desk.get("big@0_1")
    desk.said()
    desk.hear(wire.Ready(big.id, 1, 30 * UNIT))
    assert [m.id for m in desk.said() if isinstance(m, wire.Fetch)] == [first.id, second.id]
    assert first.id < second.id


def test_what_arrives_while_it_is_called_back_stays_with_the_sender_and_comes_again() -> None:
    sender, desk = SenderDesk(), ReceiverDesk(units=20, prepost=16)
    session = sender.meet()
    late, big = desk.get("late@0_1"), desk.get("big@0_1")
    old = late.id
    sender.hear(session, *desk.said())
    sender.put("big@0_1", 12 * UNIT)
    offer = sender.said(session)
    sender.put("late@0_1")
    sender.written()
    done = sender.said(session)
    desk.hear(*offer)
    assert late.id != old
    desk.hear(*done)
    assert not desk.book.waking
    assert late.state is State.POSTED
    assert big.extent is not None, "nothing is written to that destination any more"
    sender.hear(session, *desk.said())
    sender.written()
    desk.hear(*sender.said(session))
    assert desk.book.waking == [big]
    sender.hear(session, *desk.said())
    sender.written()
    desk.hear(*sender.said(session))
    assert desk.book.waking == [big, late]
    for interest in (big, late):
        desk.book.take(interest)
        extent = desk.book.acknowledge(interest)
        assert extent is not None
        desk.book.release(extent)
    sender.hear(session, *desk.said())
    assert desk.clean
    assert sender.clean
    assert not desk.channel.interests
    assert (session.floor, session.fetches) == (late.id, {})


def test_why_a_payload_is_gone_is_told_when_it_crosses_the_call() -> None:
    sender, desk = SenderDesk(), ReceiverDesk(units=20, prepost=16)
    session = sender.meet()
    late, big = desk.get("late@0_1"), desk.get("big@0_1")
    sender.hear(session, *desk.said())
    sender.put("big@0_1", 12 * UNIT)
    offer = sender.said(session)
    sender.put("late@0_1")
    ticket = sender.begun()
    sender.book.cleanup([ticket.entry])
    sender.end(ticket)
    failed = sender.said(session)
    desk.hear(*offer, *failed)
    assert late.failure is None
    assert big.extent is not None
    sender.hear(session, *desk.said())
    desk.hear(*sender.said(session))
    assert late.failure is not None
    assert late.failure[0] == wire.GONE


def test_no_destination_is_named_ahead_of_the_data_while_a_payload_waits_for_room() -> None:
    desk = ReceiverDesk(units=20)
    held = desk.occupy(3)
    big = desk.get()
    desk.hear(wire.Ready(big.id, 1, 18 * UNIT))
    assert big.state is State.OFFERED
    assert fetch_of(desk.get()).capacity == 0
    desk.welcome()
    assert desk.book.held()["posted"] == 0
    desk.pool.free(held)
    desk.hear(wire.Done(big.id, 1, 100, b"h"))
    assert fetch_of(desk.get()).capacity == UNIT


def test_nothing_is_called_back_from_a_sender_that_would_not_answer_until_it_is_back() -> None:
    desk = ReceiverDesk(units=20, prepost=16)
    waiting = desk.get()
    old = waiting.id
    other = desk.book.open_channel(b"C" * 16)
    desk.book.welcome(other, b"g" * 16)
    big = desk.book.post(other, KEY)
    desk.book.disconnected(desk.channel, desk.now)
    desk.book.on_message(other, wire.Ready(big.id, 1, 12 * UNIT), desk.now)
    assert (waiting.id, desk.book.quarantined) == (old, 0)
    desk.welcome()
    assert desk.said() == [wire.Fetch(old, KEY, 0, 0, FIRST_CAPACITY), wire.Cancel([old]), fetch_of(waiting)]


def test_never_more_is_called_back_than_a_heartbeat_can_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_OPEN", 3)
    desk = ReceiverDesk(units=40)
    first, second, big = desk.get(), desk.get(), desk.get()
    old = first.id
    desk.hear(wire.Ready(big.id, 1, 12 * UNIT))
    assert len(desk.channel.interests) == 4
    desk.beat()
    desk.beat()
    desk.book.find_room()
    assert (first.id, len(desk.channel.interests)) == (old, 4)
    desk.hear(wire.Closed([2]))
    assert second.id == 4
    assert big.extent is not None


def test_a_sender_that_leaves_is_not_called_while_its_memory_is_freed() -> None:
    desk = ReceiverDesk(units=51, prepost=48)
    gets = []
    for _ in range(3):
        gets.append(desk.get())
        desk.occupy(1)
    first, second, third = gets
    big = desk.get()
    named = third.extent
    desk.book.give_back(first)
    desk.book.give_back(second)
    desk.hear(wire.Ready(big.id, 1, 20 * UNIT))
    assert third.extent is named, "enough comes back"
    desk.hear(wire.Leaving([third.id]))
    assert desk.channel.ghosts == {EPOCH: [named]}
    assert list(desk.channel.interests.values()) == [third, big]
    assert desk.book.quarantined == FIRST_CAPACITY


@pytest.mark.parametrize("how", ["fenced", "restart"])
def test_what_was_called_back_from_a_sender_that_is_gone_is_asked_of_the_next_one(how: str) -> None:
    desk = ReceiverDesk(units=20, prepost=16)
    waiting, big = desk.get(), desk.get("big@0_1")
    desk.hear(wire.Ready(big.id, 1, 12 * UNIT))
    desk.said()
    if how == "fenced":
        desk.book.fenced(desk.channel, EPOCH, desk.now)
        assert desk.clean
    desk.welcome(b"f" * 16)
    assert list(desk.channel.interests.values()) == [big, waiting]
    assert {type(m) for m in desk.said()} == {wire.Fetch}
    assert desk.book.quarantined == (0 if how == "fenced" else FIRST_CAPACITY)
