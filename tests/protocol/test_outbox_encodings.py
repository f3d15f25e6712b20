"""The sender's book: what stock receivers have, and its memory while it is written or read."""

from __future__ import annotations

import pytest
from desks import KEY, REGION, UNIT, SenderDesk

from trio_mori._protocol import stock_wire
from trio_mori._protocol.entries import Entry, Phase
from trio_mori._protocol.extents import OUTBOUND

pytestmark = pytest.mark.deterministic


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
    assert desk.book.pulls.answers.pop() == (caller, stock_wire.TRANSFER_ERROR)
    desk.book.pulls.end_encoding(entry)
    assert entry.stock_size == 2 * UNIT
    desk.book.pull(caller, entry, destination=0, length=2 * UNIT, region_size=REGION)
    desk.written()
    assert desk.book.pulls.answers.pop() == (caller, stock_wire.TRANSFER_DONE)
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
