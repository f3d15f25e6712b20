"""Every step that the tables list is taken by the books, and leads where it should; every other one is a bug."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from itertools import product

import pytest
from desks import EPOCH, KEY, UNIT, ReceiverDesk, SenderDesk

from trio_mori._errors import InternalError
from trio_mori._protocol import entries, wire
from trio_mori._protocol.entries import ENTRY_TABLE, WANT_TABLE, Event, Phase, Session, Step, Ticket, Want
from trio_mori._protocol.interests import INTEREST_TABLE, Cause, Interest, State

pytestmark = pytest.mark.deterministic

TABLES = ((ENTRY_TABLE, Phase, Event), (WANT_TABLE, Want, Step), (INTEREST_TABLE, State, Cause))


# --- the sender's book ------------------------------------------------------------------------------------


def staged() -> None:
    desk = SenderDesk()
    desk.book.unstage(desk.book.stage(KEY, desk.occupy(1)))


def cleaned() -> None:
    desk = SenderDesk()
    desk.book.cleanup([desk.put()])
    desk.fetch(desk.meet(), 1)


def delivered(*messages: wire.ToSender) -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.deliver(session, 1)
    desk.hear(session, *messages)


def delivered_and_cleaned() -> None:
    desk = SenderDesk()
    desk.book.cleanup([desk.deliver(desk.meet(), 1)])


def lapsed(*, asked_again: bool) -> None:
    """A `Done` that was not acknowledged in time; and then is."""
    desk = SenderDesk()
    session = desk.meet()
    desk.deliver(session, 1)
    desk.wait(31)
    if asked_again:
        desk.beat(session, 1, 1, open=[1])
    desk.hear(session, wire.Ack([1]))
    assert desk.clean


def offered(*, size: int = 100) -> tuple[SenderDesk, Session]:
    """A payload that waits for a destination."""
    desk = SenderDesk()
    session = desk.meet()
    desk.put(size=size)
    desk.fetch(session, 1, room=0)
    return desk, session


def offered_and_cancelled() -> None:
    desk, session = offered()
    desk.hear(session, wire.Cancel([1]))


def offered_and_replaced() -> None:
    desk, _ = offered()
    desk.put()


def offered_and_cleaned() -> None:
    desk, session = offered()
    desk.book.cleanup([e for e in [session.fetches[1].entry] if e])


def offered_and_placed(*, size: int) -> None:
    desk, session = offered(size=size)
    desk.fetch(session, 1, round=1)


def writing() -> tuple[SenderDesk, Session, Ticket]:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1)
    return desk, session, desk.begun()


def written_and_cleaned() -> None:
    desk, _, ticket = writing()
    desk.book.cleanup([ticket.entry])
    desk.end(ticket)


def written_and_cancelled() -> None:
    desk, session, ticket = writing()
    desk.hear(session, wire.Cancel([1]))
    desk.end(ticket)


def failed(*, settled: bool) -> None:
    desk, session, ticket = writing()
    desk.fail(ticket, settled=settled)
    desk.hear(session, wire.Cancel([1]))


# --- the receiver's book ----------------------------------------------------------------------------------


def wish(state: State, *, bound: bool = False) -> tuple[ReceiverDesk, Interest]:
    """An interest in a state."""
    desk = ReceiverDesk(units=32)
    desk.occupy(15)  # beside the first destination, of 16 units
    interest = desk.book.post(desk.channel, KEY, epoch=EPOCH if bound else None)
    if state is State.OFFERED:
        desk.hear(wire.Ready(interest.id, 1, 20 * UNIT))
    elif state in (State.ARRIVED, State.TAKEN):
        desk.hear(wire.Done(interest.id, 0, 100, b"h"))
    if state is State.TAKEN:
        desk.book.take(interest)
    elif state is State.RETURNING:
        desk.book.give_back(interest)
    assert interest.state is state
    return desk, interest


def told(state: State, message: Callable[[int], wire.ToReceiver]) -> None:
    desk, interest = wish(state)
    desk.hear(message(interest.id))


def given_back(state: State) -> None:
    desk, interest = wish(state)
    desk.book.give_back(interest)


def given_back_to_nobody(state: State) -> None:
    desk, interest = wish(state)
    desk.book.fenced(desk.channel, EPOCH, desk.now)
    desk.book.give_back(interest)


def placed() -> None:
    desk, _ = wish(State.OFFERED)
    desk.pool.free(*desk.pool)


def acknowledged() -> None:
    desk, interest = wish(State.TAKEN)
    desk.book.acknowledge(interest)


def bereft(state: State, *, bound: bool) -> None:
    desk, _ = wish(state, bound=bound)
    desk.hear(wire.Leaving([]))


def _ready(size: int, round: int = 1) -> Callable[[int], wire.ToReceiver]:
    return lambda number: wire.Ready(number, round, size)


def _done(size: int, round: int = 0) -> Callable[[int], wire.ToReceiver]:
    return lambda number: wire.Done(number, round, size, b"h")


def _failed(*, settled: bool) -> Callable[[int], wire.ToReceiver]:
    return lambda number: wire.Failed(number, wire.TRANSFER_FAILED, "", settled)


def _closed(number: int) -> wire.ToReceiver:
    return wire.Closed([number])


ROWS: dict[tuple[Enum, Enum], tuple[Enum, Callable[[], object]]] = {
    (Phase.STAGED, Event.PUBLISH): (Phase.PUBLISHED, lambda: SenderDesk().put()),
    (Phase.STAGED, Event.DROP): (Phase.FREED, staged),
    (Phase.PUBLISHED, Event.CLAIM): (Phase.CLAIMED, writing),
    (Phase.PUBLISHED, Event.ACKNOWLEDGE): (Phase.FREED, lambda: lapsed(asked_again=False)),
    (Phase.PUBLISHED, Event.DROP): (Phase.FREED, cleaned),
    (Phase.CLAIMED, Event.ACKNOWLEDGE): (Phase.FREED, lambda: lapsed(asked_again=True)),
    (Phase.CLAIMED, Event.COMPLETE): (Phase.DELIVERED, delivered),
    (Phase.CLAIMED, Event.RELEASE): (Phase.PUBLISHED, offered_and_cancelled),
    (Phase.CLAIMED, Event.DROP): (Phase.FREED, offered_and_cleaned),
    (Phase.DELIVERED, Event.ACKNOWLEDGE): (Phase.FREED, lambda: delivered(wire.Ack([1]))),
    (Phase.DELIVERED, Event.RELEASE): (Phase.PUBLISHED, lambda: delivered(wire.Cancel([1]))),
    (Phase.DELIVERED, Event.DROP): (Phase.FREED, delivered_and_cleaned),
    (Phase.DYING, Event.SETTLE): (Phase.FREED, written_and_cleaned),
    (Want.WAITING, Step.OFFER): (Want.OFFERED, offered),
    (Want.WAITING, Step.BEGIN): (Want.WRITING, writing),
    (Want.WAITING, Step.FAIL): (Want.FAILED, cleaned),
    (Want.OFFERED, Step.OFFER): (Want.OFFERED, lambda: offered_and_placed(size=2 * UNIT)),
    (Want.OFFERED, Step.BEGIN): (Want.WRITING, lambda: offered_and_placed(size=UNIT)),
    (Want.OFFERED, Step.REQUEUE): (Want.WAITING, offered_and_replaced),
    (Want.OFFERED, Step.FAIL): (Want.FAILED, offered_and_cleaned),
    (Want.WRITING, Step.DELIVER): (Want.DELIVERED, delivered),
    (Want.WRITING, Step.WITHDRAW): (Want.WITHDRAWN, written_and_cancelled),
    (Want.WRITING, Step.FAIL): (Want.FAILED, lambda: failed(settled=True)),
    (Want.DELIVERED, Step.LAPSE): (Want.LAPSED, lambda: lapsed(asked_again=False)),
    (Want.LAPSED, Step.REQUEUE): (Want.WAITING, lambda: lapsed(asked_again=True)),
    (Want.FAILED, Step.WITHDRAW): (Want.WITHDRAWN, lambda: failed(settled=False)),
    (State.POSTED, Cause.OFFER): (State.OFFERED, lambda: told(State.POSTED, _ready(20 * UNIT))),
    (State.POSTED, Cause.PLACE): (State.POSTED, lambda: told(State.POSTED, _ready(100))),
    (State.POSTED, Cause.ARRIVE): (State.ARRIVED, lambda: told(State.POSTED, _done(100))),
    (State.POSTED, Cause.GIVE_BACK): (State.RETURNING, lambda: given_back(State.POSTED)),
    (State.POSTED, Cause.FAIL): (State.OVER, lambda: told(State.POSTED, _failed(settled=True))),
    (State.POSTED, Cause.DOUBT): (State.RETURNING, lambda: told(State.POSTED, _failed(settled=False))),
    (State.POSTED, Cause.REPOST): (State.POSTED, lambda: bereft(State.POSTED, bound=False)),
    (State.POSTED, Cause.VANISH): (State.OVER, lambda: bereft(State.POSTED, bound=True)),
    (State.OFFERED, Cause.OFFER): (State.OFFERED, lambda: told(State.OFFERED, _ready(21 * UNIT, 2))),
    (State.OFFERED, Cause.PLACE): (State.POSTED, placed),
    (State.OFFERED, Cause.ARRIVE): (State.ARRIVED, lambda: told(State.OFFERED, _done(0, 1))),
    (State.OFFERED, Cause.GIVE_BACK): (State.RETURNING, lambda: given_back(State.OFFERED)),
    (State.OFFERED, Cause.FAIL): (State.OVER, lambda: told(State.OFFERED, _failed(settled=True))),
    (State.OFFERED, Cause.DOUBT): (State.RETURNING, lambda: told(State.OFFERED, _failed(settled=False))),
    (State.OFFERED, Cause.REPOST): (State.POSTED, lambda: bereft(State.OFFERED, bound=False)),
    (State.OFFERED, Cause.VANISH): (State.OVER, lambda: bereft(State.OFFERED, bound=True)),
    (State.ARRIVED, Cause.TAKE): (State.TAKEN, lambda: wish(State.TAKEN)),
    (State.ARRIVED, Cause.GIVE_BACK): (State.RETURNING, lambda: given_back(State.ARRIVED)),
    (State.ARRIVED, Cause.VANISH): (State.OVER, lambda: given_back_to_nobody(State.ARRIVED)),
    (State.TAKEN, Cause.ACKNOWLEDGE): (State.OVER, acknowledged),
    (State.TAKEN, Cause.GIVE_BACK): (State.RETURNING, lambda: given_back(State.TAKEN)),
    (State.TAKEN, Cause.VANISH): (State.OVER, lambda: given_back_to_nobody(State.TAKEN)),
    (State.RETURNING, Cause.ARRIVE): (State.RETURNING, lambda: told(State.RETURNING, _done(100))),
    (State.RETURNING, Cause.FAIL): (State.RETURNING, lambda: told(State.RETURNING, _failed(settled=True))),
    (State.RETURNING, Cause.DOUBT): (State.RETURNING, lambda: told(State.RETURNING, _failed(settled=False))),
    (State.RETURNING, Cause.CONFIRM): (State.OVER, lambda: told(State.RETURNING, _closed)),
    (State.RETURNING, Cause.VANISH): (State.OVER, lambda: bereft(State.RETURNING, bound=False)),
}


def name(row: tuple[Enum, Enum]) -> str:
    return f"{type(row[0]).__name__}.{row[0].name}-{row[1].name}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_books_take_each_step_that_is_listed(row: tuple[Enum, Enum], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[tuple[Enum, Enum], Enum] = {}
    plain = entries.step

    def recorded(table: dict[tuple[Enum, Enum], Enum], state: Enum, cause: Enum) -> Enum:
        taken[state, cause] = plain(table, state, cause)
        return taken[state, cause]

    for module in [m for name, m in sys.modules.items() if name.startswith("trio_mori._protocol.")]:
        if getattr(module, "step", None) is plain:
            monkeypatch.setattr(module, "step", recorded)
    target, scenario = ROWS[row]
    scenario()
    assert taken[row] is target


def test_no_step_is_left_out() -> None:
    assert ROWS.keys() == {row for table, _, _ in TABLES for row in table}


def test_every_step_that_is_not_listed_is_a_bug() -> None:
    for table, states, causes in TABLES:
        for row in set(product(states, causes)) - table.keys():
            with pytest.raises(InternalError, match=f"{row[0].name} has no {row[1].name}"):
                entries.step(table, *row)


def test_nothing_leads_out_of_the_end() -> None:
    assert not [row for row in ROWS if row[0] in (Phase.FREED, State.OVER)]
