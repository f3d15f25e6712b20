from __future__ import annotations

import pytest
from desks import EPOCH, KEY, UNIT, ReceiverDesk, SenderDesk, fetch_of

from trio_mori._errors import NoRoom, RemoteProtocolError
from trio_mori._protocol import wire
from trio_mori._protocol.interests import MISMATCH, PEER_LOST, PEER_RESTARTED, TOO_BIG, State
from trio_mori._protocol.sizes import FIRST_CAPACITY, RECENT

pytestmark = pytest.mark.deterministic


# --- asking -----------------------------------------------------------------------------------------------


def test_a_get_names_a_destination_ahead_of_the_data() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    assert desk.said() == [fetch_of(interest)]
    assert interest.extent is not None
    assert interest.extent.size == FIRST_CAPACITY
    assert desk.book.held()["posted"] == FIRST_CAPACITY


def test_what_is_asked_before_the_sender_is_there_is_said_at_its_welcome_and_then_listed() -> None:
    desk = ReceiverDesk(welcomed=False)
    first, second = desk.get(), desk.get("another@0_1")
    assert first.extent is None, "nothing is kept for a sender that may never come"
    assert not desk.channel.outgoing
    assert not desk.book.talking
    desk.welcome()
    assert desk.channel.outgoing == [fetch_of(first), fetch_of(second), wire.Heartbeat(1, 2, [1, 2], [], [])]
    assert list(desk.book.talking) == [desk.channel]


def test_the_destination_is_as_large_as_the_largest_of_the_last_payloads_of_that_edge() -> None:
    desk = ReceiverDesk(units=256, prepost=256)

    def capacity(key: str = KEY) -> int:
        interest = desk.get(key)
        capacity = fetch_of(interest).capacity
        desk.book.give_back(interest)
        desk.hear(wire.Closed([interest.id]))
        return capacity // UNIT

    def receive(units: int) -> None:
        interest = desk.get()
        desk.hear(wire.Ready(interest.id, 1, units * UNIT), wire.Done(interest.id, 1, units * UNIT, b"h"))
        desk.book.give_back(interest)
        desk.hear(wire.Closed([interest.id]))

    receive(40)
    receive(3)
    assert capacity() == 40
    assert capacity("of another edge@1_2") == FIRST_CAPACITY // UNIT
    for _ in range(2 * RECENT):
        receive(3)
    assert capacity() == 3
    assert desk.clean


def test_destinations_ahead_of_the_data_hold_a_part_of_the_pool_only() -> None:
    desk = ReceiverDesk(prepost=40)
    first, second, third = desk.get(), desk.get(), desk.get()
    assert [fetch_of(i).capacity // UNIT for i in (first, second, third)] == [16, 16, 0]
    desk.hear(wire.Done(first.id, 0, 100, b"h"))
    assert fetch_of(desk.get()).capacity == UNIT, "what arrived is not ahead of the data any more"


def test_a_get_in_a_full_pool_asks_without_a_destination() -> None:
    desk = ReceiverDesk(units=8)
    desk.occupy(8)
    interest = desk.get()
    assert desk.said() == [wire.Fetch(interest.id, KEY, 0, 0, 0)]


def test_no_more_is_asked_of_a_sender_than_one_heartbeat_can_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_OPEN", 2)
    desk = ReceiverDesk()
    desk.get()
    second = desk.get()
    with pytest.raises(NoRoom, match="2 gets of this sender"):
        desk.get()
    desk.hear(wire.Failed(second.id, wire.GONE, "", True))
    desk.get()


# --- what a sender says -----------------------------------------------------------------------------------


def test_what_arrived_wakes_its_caller_and_can_be_kept_or_released() -> None:
    desk = ReceiverDesk()
    interest = desk.arrived(100)
    assert (interest.size, interest.header, interest.epoch) == (100, b"h", EPOCH)
    assert interest.settled
    assert desk.book.waking == [interest]
    assert desk.book.held()["arrived"] == FIRST_CAPACITY
    desk.book.take(interest)
    assert desk.book.held()["leased"] == FIRST_CAPACITY
    assert desk.book.touched == 1
    desk.said()
    extent = desk.book.acknowledge(interest)
    assert desk.said() == [wire.Ack([interest.id])]
    assert extent is not None
    assert desk.book.held()["leased"] == FIRST_CAPACITY
    assert desk.book.live_extents() == [extent]
    desk.book.release(extent)
    assert desk.clean
    counters = desk.book.counters
    assert (counters.posted, counters.arrived, counters.acknowledged, counters.preposted_hits) == (1, 1, 1, 1)


def test_memory_that_was_handed_over_is_not_the_books_any_more() -> None:
    desk = ReceiverDesk()
    interest = desk.arrived()
    desk.book.take(interest)
    extent = desk.book.acknowledge(interest)
    assert extent is not None
    desk.book.hand_over(extent)
    assert not desk.book.live_extents()
    desk.pool.free(extent)
    assert desk.clean


def test_a_payload_without_bytes_needs_no_memory() -> None:
    desk = ReceiverDesk.full(free=0)
    interest = desk.get()
    desk.hear(wire.Done(interest.id, 0, 0, b"h"))
    desk.book.take(interest)
    assert desk.book.acknowledge(interest) is None


@pytest.mark.parametrize("prepost", [0, 16])
def test_a_sender_that_claims_to_have_written_more_than_there_is_room_for_is_not_believed(prepost: int) -> None:
    desk = ReceiverDesk(prepost=prepost)
    interest = desk.get()
    size = fetch_of(interest).capacity + 1
    with pytest.raises(RemoteProtocolError, match=f"wrote {size} bytes"):
        desk.hear(wire.Done(interest.id, 0, size, b"h"))
    assert interest.state is State.POSTED
    assert not desk.book.waking


def test_what_was_said_before_or_is_about_nothing_changes_nothing() -> None:
    desk = ReceiverDesk()
    arrived, taken = desk.arrived(), desk.arrived()
    desk.book.take(taken)
    posted = desk.get()
    over = desk.get()
    desk.hear(wire.Failed(over.id, wire.GONE, "", True))
    desk.said()
    desk.book.waking.clear()
    before = desk.book.held()
    for number in (arrived.id, taken.id, over.id, 99):
        desk.hear(
            wire.Done(number, 0, 50, b"again"),
            wire.Done(number, 7, 50, b"again"),
            wire.Ready(number, 7, 50),
            wire.Failed(number, wire.GONE, "", True),
            wire.Failed(number, wire.GONE, "", False),
            wire.Closed([number]),
            wire.Pulse(1, [number]),
        )
    desk.hear(wire.Closed([posted.id]), wire.Ready(posted.id, 0, UNIT))
    assert [i.state for i in (arrived, taken, posted)] == [State.ARRIVED, State.TAKEN, State.POSTED]
    assert (arrived.size, arrived.header) == (100, b"h")
    assert desk.book.held() == before
    assert not desk.book.waking
    assert desk.said() == [fetch_of(posted)], "an offer of the round that it is in means that it was not heard"


def test_an_offer_that_fits_the_destination_is_answered_with_it() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    extent = interest.extent
    desk.said()
    desk.hear(wire.Ready(interest.id, 1, FIRST_CAPACITY))
    assert interest.extent is extent
    assert desk.said() == [wire.Fetch(interest.id, KEY, 1, 0, FIRST_CAPACITY)]


def test_an_offer_that_does_not_fit_gets_a_larger_destination_and_frees_the_other() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    desk.said()
    desk.hear(wire.Ready(interest.id, 1, 20 * UNIT))
    assert interest.state is State.POSTED
    assert desk.said() == [wire.Fetch(interest.id, KEY, 1, fetch_of(interest).offset, 20 * UNIT)]
    assert desk.book.held()["posted"] == 20 * UNIT


def test_an_offer_that_can_never_fit_is_given_back_and_told() -> None:
    desk = ReceiverDesk(units=8)
    interest = desk.get()
    desk.said()
    desk.hear(wire.Ready(interest.id, 1, 9 * UNIT))
    assert interest.failure is not None
    assert interest.failure[0] == TOO_BIG
    assert "36 KiB can never fit" in interest.failure[1]
    assert interest.settled
    assert desk.book.waking == [interest]
    assert desk.said() == [wire.Cancel([interest.id])]
    assert desk.clean


@pytest.mark.parametrize("state", [State.POSTED, State.OFFERED])
def test_a_failure_is_told_and_need_not_be_repeated(state: State) -> None:
    desk = ReceiverDesk.full()
    interest = desk.offered() if state is State.OFFERED else desk.get()
    desk.said()
    desk.hear(wire.Failed(interest.id, wire.EXPIRED, "why", True))
    assert interest.failure == (wire.EXPIRED, "why")
    assert desk.book.waking == [interest]
    assert desk.said() == [wire.Ack([interest.id])]
    assert desk.beat() == wire.Heartbeat(2, 1, [], [], [])
    assert len(desk.book.hungry) == 0


def test_memory_of_a_failed_write_is_held_back_until_its_end_is_known() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    desk.hear(wire.Failed(interest.id, wire.TRANSFER_FAILED, "why", False))
    assert interest.failure == (wire.TRANSFER_FAILED, "why")
    assert interest.state is State.RETURNING
    assert desk.book.quarantined == desk.book.held()["quarantined"] == FIRST_CAPACITY
    assert desk.beat().returning == [interest.id]
    desk.hear(wire.Failed(interest.id, wire.TRANSFER_FAILED, "why", True))
    assert desk.book.waking == [interest], "it was told"
    assert desk.said()[-1] == wire.Ack([interest.id])
    assert desk.clean
    assert not desk.channel.interests


def test_who_gave_up_before_it_heard_of_a_failure_says_so_until_the_sender_knows() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    desk.book.give_back(interest)
    desk.said()
    for settled in (False, True):
        desk.hear(wire.Failed(interest.id, wire.GONE, "why", settled))
    assert desk.clean
    assert not desk.said()
    assert desk.beat().returning == [interest.id], "nobody was told that the payload is gone"
    desk.hear(wire.Closed([interest.id]))
    assert not desk.channel.interests


def test_what_a_sender_does_not_know_is_asked_for_again() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    desk.said()
    desk.hear(wire.Pulse(1, [interest.id]))
    assert desk.said() == [fetch_of(interest)]


# --- giving back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
def test_what_is_given_back_is_free_when_no_byte_can_come_any_more(state: State) -> None:
    desk = ReceiverDesk.full() if state is State.OFFERED else ReceiverDesk()
    free = desk.pool.free_bytes
    if state is State.OFFERED:
        interest = desk.offered()
    elif state in (State.ARRIVED, State.TAKEN):
        interest = desk.arrived()
        if state is State.TAKEN:
            desk.book.take(interest)
    else:
        interest = desk.get()
    if state is State.RETURNING:
        desk.book.give_back(interest)
    elif state is State.OVER:
        desk.hear(wire.Failed(interest.id, wire.GONE, "", True))
    desk.said()
    desk.book.give_back(interest)
    if state is State.OVER:
        assert not desk.said()
        return
    assert desk.said() == ([] if state is State.RETURNING else [wire.Cancel([interest.id])])
    may_be_written_to = state in (State.POSTED, State.RETURNING)
    assert desk.book.quarantined == (FIRST_CAPACITY if may_be_written_to else 0)
    assert desk.book.touched == may_be_written_to
    assert desk.beat().returning == [interest.id]
    desk.hear(wire.Closed([interest.id]))
    assert desk.pool.free_bytes == free
    assert not desk.channel.interests
    assert desk.book.counters.given_back == (state in (State.ARRIVED, State.TAKEN))


@pytest.mark.parametrize("state", [State.POSTED, State.ARRIVED, State.TAKEN])
def test_what_is_given_back_without_a_sender_is_over(state: State) -> None:
    desk = ReceiverDesk()
    interest = desk.get() if state is State.POSTED else desk.arrived()
    if state is State.TAKEN:
        desk.book.take(interest)
    desk.book.fenced(desk.channel, EPOCH, desk.now)
    desk.book.give_back(interest)
    assert interest.state is State.OVER
    assert not desk.channel.interests
    assert desk.clean


def test_a_done_that_crosses_a_cancel_frees_the_destination_and_is_given_to_nobody() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    desk.book.give_back(interest)
    desk.hear(wire.Done(interest.id, 0, 100, b"h"))
    assert desk.clean
    assert not desk.book.waking
    assert interest.state is State.RETURNING, "the sender may yet hear of it"


def test_what_is_refused_goes_back_with_a_reason_for_whoever_comes_for_it() -> None:
    desk = ReceiverDesk()
    interest = desk.arrived()
    desk.said()
    desk.book.refuse(interest, PEER_RESTARTED)
    assert interest.failure == (PEER_RESTARTED, "")
    assert desk.said() == [wire.Cancel([interest.id])]
    assert desk.clean


@pytest.mark.parametrize("known", [False, True])
def test_when_nothing_can_come_everybody_who_waits_is_told_and_what_came_stays(known: bool) -> None:
    desk = ReceiverDesk(welcomed=known)
    waiting = desk.get()
    arrived = desk.arrived() if known else None
    desk.said()
    desk.book.waking.clear()
    desk.book.fail_all(desk.channel, MISMATCH, "why")
    assert waiting.failure == (MISMATCH, "why")
    assert desk.book.waking == [waiting]
    if arrived is None:
        assert waiting.state is State.OVER
        assert desk.clean
    else:
        assert desk.said() == [wire.Cancel([waiting.id])]
        assert desk.book.quarantined == FIRST_CAPACITY
        assert arrived.state is State.ARRIVED


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
