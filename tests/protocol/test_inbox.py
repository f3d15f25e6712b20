from __future__ import annotations

import pytest
from desks import EPOCH, KEY, UNIT, ReceiverDesk

from trio_mori._protocol import wire
from trio_mori._protocol.inbox import PEER_LOST, State

pytestmark = pytest.mark.deterministic


# --- a sender's word about an earlier destination ---------------------------------------------------------


def test_a_late_done_about_an_earlier_destination_says_nothing_about_the_present_one() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    late = wire.Done(interest.id, 0, 100, b"h")
    # The sender heard nothing for too long and offers once more, while its `Done` is on the way.
    desk.hear(wire.Ready(interest.id, 1, 20 * UNIT))
    desk.hear(late)
    assert interest.state is State.POSTED
    assert interest.extent is not None
    desk.book.give_back(interest)
    desk.hear(late)
    assert interest.extent is not None, "it may be written to until the sender has confirmed"
    desk.hear(wire.Closed([interest.id]))
    assert desk.clean


# --- room -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["given back", "failed", "empty", "all failed", "farewell", "restart", "fenced"])
def test_whoever_waits_behind_one_that_wants_no_room_any_more_gets_its_own(how: str) -> None:
    desk = ReceiverDesk(units=8, prepost=0)
    desk.occupy(6)
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


# --- farewells --------------------------------------------------------------------------------------------


def test_what_stands_behind_a_farewell_is_not_heard() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    desk.hear(wire.Leaving([]), wire.Leaving([]), wire.Ready(interest.id, 1, UNIT), wire.Done(interest.id, 1, 0, b"h"))
    assert interest.state is State.POSTED
    assert desk.clean


# --- senders that follow one another ----------------------------------------------------------------------


def test_a_sender_that_was_given_up_and_has_come_back_is_met_under_a_new_name() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    ghost = interest.extent
    desk.welcome(b"f" * 16)
    assert interest.extent is not ghost
    channel, before = desk.channel, desk.book.held()
    assert not desk.book.welcome(channel, EPOCH), "it would say Done of what it writes to the ghost"
    assert desk.book.held() == before
    desk.book.rename(channel, b"B" * 16)
    assert desk.book.welcome(channel, EPOCH)
    assert channel.ghosts.keys() == {EPOCH, b"f" * 16}
    desk.book.fenced(channel, b"f" * 16, desk.now)
    desk.book.fenced(channel, EPOCH, desk.now)
    assert desk.clean


def test_under_a_new_name_no_sender_is_believed_about_what_the_old_one_asked_of_it() -> None:
    desk, last = ReceiverDesk(), b"f" * 16
    desk.welcome(last)
    interest = desk.get()
    desk.hear(wire.Failed(interest.id, wire.TRANSFER_FAILED, "", False))
    assert not desk.book.welcome(desk.channel, EPOCH)
    desk.book.rename(desk.channel, b"B" * 16)
    desk.welcome(last)  # it has the address once more, and knows nothing of the new name
    desk.hear(wire.Closed([interest.id]))
    assert desk.book.held()["quarantined"], "it may still write under the old one"
    desk.book.fenced(desk.channel, last, desk.now)
    assert desk.clean


def test_a_sender_that_comes_back_after_its_farewell_is_met_under_a_new_name() -> None:
    desk = ReceiverDesk()
    desk.hear(wire.Leaving([]))
    assert not desk.book.welcome(desk.channel, EPOCH)
