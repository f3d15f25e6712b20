from __future__ import annotations

import pytest
from desks import EPOCH, KEY, UNIT, ReceiverDesk, fetch_of

from trio_mori._errors import InternalError, NoRoom
from trio_mori._protocol import wire
from trio_mori._protocol.extents import INBOUND
from trio_mori._protocol.interests import PEER_LOST, PEER_RESTARTED, State
from trio_mori._protocol.sizes import FIRST_CAPACITY

pytestmark = pytest.mark.deterministic

NEXT = b"f" * 16  # the epoch of a sender that takes the place of the first


# --- asking one incarnation of a sender only --------------------------------------------------------------


@pytest.mark.parametrize(("epoch", "welcomed", "code"), [(NEXT, True, PEER_RESTARTED), (EPOCH, False, PEER_LOST)])
def test_what_is_asked_of_a_sender_that_is_not_there_fails_at_once(epoch: bytes, welcomed: bool, code: int) -> None:
    desk = ReceiverDesk(welcomed=welcomed)
    interest = desk.book.post(desk.channel, KEY, epoch=epoch)
    assert interest.failure is not None
    assert interest.failure[0] == code
    assert interest.settled
    assert desk.book.waking == [interest]
    assert not desk.said()
    assert not desk.channel.interests


@pytest.mark.parametrize("state", [State.POSTED, State.OFFERED])
@pytest.mark.parametrize("how", ["restarted", "proven dead", "left"])
def test_what_was_asked_of_one_sender_only_fails_with_it(how: str, state: State) -> None:
    desk = ReceiverDesk.full() if state is State.OFFERED else ReceiverDesk()
    interest = desk.book.post(desk.channel, KEY, epoch=EPOCH)
    if state is State.OFFERED:
        desk.hear(wire.Ready(interest.id, 1, 3 * UNIT))
    if how == "restarted":
        desk.welcome(NEXT)
    elif how == "proven dead":
        desk.book.fenced(desk.channel, EPOCH, desk.now)
    else:
        desk.hear(wire.Leaving([]))
    assert interest.failure is not None
    assert interest.failure[0] == (PEER_RESTARTED if how == "restarted" else PEER_LOST)
    assert interest.state is State.OVER
    assert desk.book.waking == [interest]
    assert not desk.channel.interests


# --- links and senders that end ---------------------------------------------------------------------------


def test_between_two_connections_nothing_is_said_and_after_them_all_of_it_once() -> None:
    desk = ReceiverDesk()
    posted, arrived, returning = desk.get(), desk.arrived(), desk.get()
    desk.book.give_back(returning)
    extent = posted.extent
    desk.now = 5.0
    desk.book.disconnected(desk.channel, desk.now)
    assert desk.channel.lost_since == 5.0
    desk.book.disconnected(desk.channel, 6.0)
    assert desk.channel.lost_since == 5.0
    late = desk.get()
    desk.book.give_back(arrived)
    desk.book.heartbeat(desk.channel)
    assert not desk.channel.outgoing
    assert not desk.book.talking
    desk.welcome()
    assert posted.extent is extent
    numbers = [posted.id, late.id], [], [arrived.id, returning.id]
    assert desk.channel.outgoing == [fetch_of(posted), fetch_of(late), wire.Heartbeat(3, late.id, *numbers)]
    assert desk.channel.lost_since == float("inf")


def test_a_heartbeat_lists_what_is_not_over_and_its_number_rises() -> None:
    desk = ReceiverDesk.full()
    first = desk.offered()
    second = desk.get()
    third = desk.book.post(desk.channel, KEY)
    desk.hear(wire.Done(third.id, 0, 0, b"h"))
    desk.book.give_back(second)
    assert desk.beat() == wire.Heartbeat(2, 3, [first.id], [third.id], [second.id])
    desk.book.take(third)
    assert desk.beat() == wire.Heartbeat(3, 3, [first.id], [third.id], [second.id])
    desk.book.acknowledge(third)
    desk.hear(wire.Closed([second.id]))
    assert desk.beat() == wire.Heartbeat(4, 3, [first.id], [], [])


def test_what_was_asked_of_a_dead_sender_is_asked_of_the_next_with_memory_that_is_free() -> None:
    desk = ReceiverDesk()
    posted, returning = desk.get(), desk.get()
    desk.hear(wire.Ready(posted.id, 3, UNIT))
    desk.book.give_back(returning)
    desk.now = 7.0
    desk.book.fenced(desk.channel, EPOCH, desk.now)
    assert desk.clean
    assert returning.state is State.OVER
    assert posted.state is State.POSTED
    assert desk.channel.lost_since == 7.0
    assert not desk.channel.up
    desk.welcome(NEXT)
    assert desk.said() == [wire.Fetch(posted.id, KEY, 0, 0, FIRST_CAPACITY)]


def test_the_death_of_an_earlier_sender_frees_its_memory_and_touches_nothing_of_the_next_one() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    ghost = interest.extent
    desk.welcome(NEXT)
    assert desk.book.held() == {"posted": FIRST_CAPACITY, "arrived": 0, "leased": 0, "quarantined": FIRST_CAPACITY}
    assert ghost in desk.book.live_extents()
    assert desk.book.touched == 1
    desk.book.fenced(desk.channel, EPOCH, desk.now)
    assert desk.channel.up
    assert desk.book.live_extents() == [interest.extent]
    desk.book.fenced(desk.channel, EPOCH, desk.now)


def test_a_sender_that_has_nothing_under_way_leaves_no_ghosts() -> None:
    desk = ReceiverDesk.full()
    desk.offered()
    desk.welcome(NEXT)
    assert not desk.channel.ghosts


def test_after_a_farewell_only_what_is_still_written_to_is_held_back() -> None:
    desk = ReceiverDesk()
    arrived, stuck, posted = desk.arrived(), desk.get(), desk.get()
    desk.book.give_back(stuck)
    ghost = stuck.extent
    assert ghost is not None
    desk.hear(wire.Leaving([stuck.id, arrived.id, 99]))
    assert stuck.state is State.OVER
    assert posted.state is State.POSTED
    assert arrived.state is State.ARRIVED
    assert set(desk.book.live_extents()) == {ghost, arrived.extent}
    assert desk.book.quarantined == ghost.size
    desk.book.take(arrived)
    extent = desk.book.acknowledge(arrived)
    assert extent is not None
    assert not desk.said(), "there is nobody to tell"
    desk.book.release(extent)
    desk.book.fenced(desk.channel, EPOCH, desk.now)
    assert desk.clean


def test_a_channel_is_forgotten_when_its_sender_has_none_of_our_memory() -> None:
    desk = ReceiverDesk()
    interest = desk.get()
    with pytest.raises(InternalError, match="may still write"):
        desk.book.close_channel(desk.channel)
    desk.welcome(NEXT)
    desk.book.give_back(interest)
    desk.hear(wire.Closed([interest.id]))
    with pytest.raises(InternalError, match="may still write"):
        desk.book.close_channel(desk.channel)
    desk.book.fenced(desk.channel, EPOCH, desk.now)
    desk.book.close_channel(desk.channel)
    assert not desk.book.channels
    assert not desk.book.talking


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


# --- quarantine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["given back", "a sender before", "a stock sender"])
def test_when_too_much_is_held_back_nothing_more_is_asked_for(why: str) -> None:
    desk = ReceiverDesk(quarantine=16)
    stock = desk.pool.allocate(16 * UNIT, INBOUND)
    desk.book.expose(stock)
    interest = desk.get()
    desk.book.check_quarantine(KEY)
    if why == "given back":
        desk.book.give_back(interest)
        desk.book.check_quarantine(KEY)  # a sender that lives confirms that in a moment
        desk.beat()
        desk.book.check_quarantine(KEY)
        desk.beat()
    elif why == "a sender before":
        desk.book.give_back(interest)
        desk.welcome(NEXT)
    else:
        desk.book.doubt(stock, "stock")
    with pytest.raises(NoRoom, match="quarantine_fraction") as refusal:
        desk.get()
    assert refusal.value.quarantined == desk.book.quarantined == 16 * UNIT
    if why == "given back":
        desk.hear(wire.Closed([interest.id]))
    elif why == "a sender before":
        desk.book.fenced(desk.channel, EPOCH, desk.now)
    else:
        desk.book.settle(stock, lease=False)
    desk.get()


def test_what_was_given_back_a_moment_ago_refuses_nothing_either_while_the_link_is_changed() -> None:
    desk = ReceiverDesk(quarantine=16)
    interest = desk.get()
    desk.book.give_back(interest)
    desk.book.disconnected(desk.channel, desk.now)
    desk.book.check_quarantine(KEY)
    desk.book.heartbeat(desk.channel)
    desk.book.check_quarantine(KEY)
    desk.book.heartbeat(desk.channel)
    assert not desk.channel.outgoing
    with pytest.raises(NoRoom, match="quarantine_fraction"):
        desk.book.check_quarantine(KEY)


def test_memory_that_a_stock_sender_was_told_is_its_own_until_it_answers() -> None:
    desk = ReceiverDesk()
    first, second, third = (desk.occupy(1) for _ in range(3))
    for extent in (first, second, third):
        desk.book.expose(extent)
    assert desk.book.held()["posted"] == 3 * UNIT
    desk.book.settle(first, lease=True)
    desk.book.doubt(second, "stock")
    assert desk.book.held() == {"posted": UNIT, "arrived": 0, "leased": UNIT, "quarantined": UNIT}
    assert desk.book.touched == 2
    assert set(desk.book.live_extents()) == {first, second, third}
    desk.book.settle(second, lease=False)
    desk.book.settle(third, lease=False)
    desk.book.release(first)
    assert desk.clean
