"""The receiver's book: what is given back, refused, or can never come."""

from __future__ import annotations

import pytest
from desks import EPOCH, ReceiverDesk

from trio_mori._protocol import wire
from trio_mori._protocol.interests import MISMATCH, PEER_RESTARTED, State
from trio_mori._protocol.sizes import FIRST_CAPACITY

pytestmark = pytest.mark.deterministic


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
