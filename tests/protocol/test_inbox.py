"""The receiver's book: what is asked for, and what senders say."""

from __future__ import annotations

import pytest
from desks import EPOCH, KEY, UNIT, ReceiverDesk, fetch_of

from trio_mori._errors import NoRoom, RemoteProtocolError
from trio_mori._protocol import wire
from trio_mori._protocol.interests import TOO_BIG, State
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
