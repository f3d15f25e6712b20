from __future__ import annotations

import pytest
from desks import KEY, REGION, UNIT, SenderDesk

from trio_mori._protocol import stock_wire
from trio_mori._protocol.entries import Entry, Phase, StockCaller, Ticket
from trio_mori._protocol.extents import OUTBOUND

pytestmark = pytest.mark.deterministic


class StockDesk(SenderDesk):
    """A sender's book with stock receivers around it."""

    def ask(self, key: str = KEY, route: bytes = b"a") -> tuple[StockCaller, Entry | None]:
        return self.book.pulls.begin(route, key)

    def pull(self, length: int = 100, *, route: bytes = b"a", destination: int = 0) -> StockCaller:
        caller, entry = self.ask(route=route)
        assert entry is not None
        self.book.pull(caller, entry, destination=destination, length=length, region_size=REGION)
        return caller

    def encode(self, entry: Entry, size: int) -> None:
        self.book.pulls.begin_encoding(entry, self.pool.allocate(size, OUTBOUND), size)
        self.book.pulls.end_encoding(entry)

    def answers(self) -> list[bytes]:
        """What the callers have been answered since this was last asked."""
        answers = [answer for _, answer in self.book.pulls.answers]
        self.book.pulls.answers.clear()
        return answers


def test_a_pull_writes_the_payload_and_is_answered_when_that_has_ended() -> None:
    desk = StockDesk()
    entry = desk.put()
    desk.pull(destination=3 * UNIT)
    ticket = desk.begun()
    assert (ticket.source, ticket.destination, ticket.size) == (entry.extent.offset, 3 * UNIT, 100)
    assert not desk.answers()
    desk.end(ticket)
    assert desk.answers() == [stock_wire.TRANSFER_DONE]
    assert entry.phase is Phase.DELIVERED
    assert desk.book.counters.stock_delivered == 1


def test_what_was_pulled_is_kept_until_the_caller_asks_for_something_else() -> None:
    desk = StockDesk()
    entry = desk.put()
    desk.pull()
    desk.written()
    caller, again = desk.ask()
    assert again is entry, "the answer was lost"
    desk.book.pull(caller, entry, destination=0, length=100, region_size=REGION)
    desk.written()
    assert desk.answers() == [stock_wire.TRANSFER_DONE, stock_wire.TRANSFER_DONE]
    desk.ask("another@0_1")
    assert desk.clean


def test_what_was_pulled_is_kept_for_a_while_if_the_caller_never_asks_again() -> None:
    desk = StockDesk(stock_keep=5.0)
    desk.put()
    desk.pull()
    desk.written()
    desk.wait(4)
    assert not desk.clean
    assert desk.book.next_deadline() == 5.0
    desk.wait(1)
    assert desk.clean


def test_what_one_caller_has_or_is_written_another_does_not_get() -> None:
    desk = StockDesk()
    desk.put()
    desk.pull()
    assert desk.ask(route=b"b")[1] is None
    desk.written()
    assert desk.ask(route=b"b")[1] is None
    desk.ask("another@0_1", route=b"b")
    assert not desk.clean, "that another caller goes on says nothing about this one"


@pytest.mark.parametrize(("length", "destination"), [(99, 0), (101, 0), (0, 0), (100, REGION - 99)])
def test_a_pull_of_another_length_or_past_the_region_is_refused_and_the_payload_stays(
    length: int, destination: int
) -> None:
    desk = StockDesk()
    entry = desk.put()
    desk.pull(length, destination=destination)
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]
    assert not desk.book.starting
    assert entry.phase is Phase.PUBLISHED
    assert desk.book.counters.refused_pulls == 1


def test_a_structure_is_pulled_in_its_stock_encoding_and_not_without() -> None:
    desk = StockDesk()
    entry = desk.put(size=100, raw=False)
    desk.pull(100)
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]
    desk.encode(entry, 300)
    desk.pull(100)
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]
    desk.pull(300)
    ticket = desk.begun()
    assert entry.encoding is not None
    assert (ticket.source, ticket.size) == (entry.encoding.extent.offset, 300)
    desk.end(ticket)
    desk.ask("another@0_1")
    assert desk.clean


def test_a_second_pull_of_a_caller_whose_first_is_under_way_is_refused() -> None:
    desk = StockDesk()
    desk.put()
    caller = desk.pull()
    ticket = desk.begun()
    other = desk.put("another@0_1")
    again, entry = desk.ask("another@0_1")
    assert again is caller
    assert entry is other
    desk.book.pull(caller, other, destination=0, length=100, region_size=REGION)
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]
    desk.end(ticket)
    assert desk.answers() == [stock_wire.TRANSFER_DONE]


def test_nothing_is_pulled_from_a_sender_that_closes() -> None:
    desk = StockDesk()
    desk.put()
    desk.book.stop()
    desk.pull()
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]


def test_a_pull_that_fails_leaves_the_payload_for_whoever_waits() -> None:
    desk = StockDesk()
    desk.put()
    desk.pull()
    ticket = desk.begun()
    session = desk.meet()
    desk.fetch(session, 1)
    assert not desk.book.starting
    desk.fail(ticket, settled=True)
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]
    assert desk.begun().holder is session.fetches[1]


def pulled_late(desk: StockDesk, how: str) -> Ticket:
    """A pull that is answered with an error while its write may still go on."""
    desk.pull()
    ticket = desk.begun()
    if how == "overdue":
        desk.wait(21)
    else:
        desk.fail(ticket, settled=False)
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]
    return ticket


@pytest.mark.parametrize("how", ["overdue", "unsettled"])
def test_a_write_that_was_given_up_pins_its_source_until_it_ends_and_is_not_answered_twice(how: str) -> None:
    desk = StockDesk()
    entry = desk.put()
    ticket = pulled_late(desk, how)
    assert entry.phase is Phase.PUBLISHED
    assert entry.pins == 1
    desk.book.cleanup([entry])
    assert entry.phase is Phase.DYING
    assert desk.book.shelf.held()["pinned"] == UNIT == sum(desk.book.shelf.held().values())
    desk.end(ticket)
    assert not desk.answers()
    assert desk.clean


@pytest.mark.parametrize("ends", ["before", "during", "after"])
@pytest.mark.parametrize("how", ["overdue", "unsettled"])
def test_a_caller_whose_write_was_given_up_gets_the_payload_when_it_asks_again(how: str, ends: str) -> None:
    desk = StockDesk()
    entry = desk.put()
    late = pulled_late(desk, how)
    if ends == "before":
        desk.end(late)
    desk.pull()
    ticket = desk.begun()
    if ends == "during":
        desk.end(late)
        assert not desk.answers()
        assert entry.phase is Phase.CLAIMED
    desk.end(ticket)
    assert desk.answers() == [stock_wire.TRANSFER_DONE]
    assert desk.ask()[1] is entry, "it may have lost the answer"
    desk.pull()
    desk.written()
    if ends == "after":
        desk.end(late)
    desk.ask("another@0_1")
    assert desk.clean


def test_a_payload_that_is_cleaned_up_during_its_pull_is_not_delivered() -> None:
    desk = StockDesk()
    entry = desk.put()
    desk.pull()
    ticket = desk.begun()
    desk.book.cleanup([entry])
    desk.end(ticket)
    assert desk.answers() == [stock_wire.TRANSFER_ERROR]
    assert desk.clean


def test_what_expired_while_its_stock_form_was_written_is_dropped_when_that_has_ended() -> None:
    desk = StockDesk()
    entry = desk.put(raw=False)
    desk.book.pulls.begin_encoding(entry, desk.occupy(1), UNIT)
    desk.wait(301)
    assert entry.phase is Phase.PUBLISHED
    desk.book.pulls.end_encoding(entry)
    assert desk.book.alarm <= desk.now, "who sleeps until the deadline before is woken"
    desk.wait(0)
    assert desk.clean
