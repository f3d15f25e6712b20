"""What was said by or to a former session, a former connection of one or a former incarnation of a sender counts for
nothing, at either end.
"""

from __future__ import annotations

import pytest
from desks import EPOCH, KEY, ReceiverDesk, SenderDesk
from msgspec import structs

from trio_mori._protocol import wire

pytestmark = pytest.mark.deterministic

DEPLOYMENT = wire.Deployment("a test", 0, 0, 0, "")
OTHER = b"o" * 16

# One for each thing that can be former, and what a connection beyond the present one would be.
NOT_PRESENT = [
    pytest.param({"session": OTHER}, id="another session"),
    pytest.param({"generation": 1}, id="an old generation"),
    pytest.param({"generation": 3}, id="a generation that is yet to come"),
]
OTHER_EPOCH = pytest.param({"epoch": OTHER}, id="another epoch")


@pytest.mark.parametrize("change", [*NOT_PRESENT, OTHER_EPOCH])
def test_a_sender_knows_nobody_who_says_what_is_not_of_the_present(change: dict[str, object]) -> None:
    desk = SenderDesk()
    desk.meet()
    session = desk.meet(generation=2)
    present = wire.Requests(session.token, 2, EPOCH, [])
    assert desk.book.speaker(present, EPOCH) is session
    assert desk.book.speaker(structs.replace(present, **change), EPOCH) is None


def test_a_sender_knows_nobody_who_has_said_goodbye() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.book.bye(session)
    assert desk.book.speaker(wire.Requests(session.token, 1, EPOCH, []), EPOCH) is None


def bodies(desk: ReceiverDesk) -> list[wire.Welcome | wire.Stale | wire.Mismatch | wire.Replies]:
    """One of each kind, to the present generation."""
    token, generation = desk.channel.token, desk.channel.generation
    return [
        wire.Welcome(1, token, generation, OTHER, 1, "shm", "", [], DEPLOYMENT),
        wire.Stale(token, generation, OTHER),
        wire.Mismatch(token, generation, [], ""),
        wire.Replies(token, generation, EPOCH, []),
    ]


@pytest.mark.parametrize("kind", range(4), ids=["welcome", "stale", "mismatch", "replies"])
@pytest.mark.parametrize("change", NOT_PRESENT)
def test_nothing_concerns_a_receiver_that_is_not_said_to_its_present_generation(
    kind: int, change: dict[str, object]
) -> None:
    desk = ReceiverDesk()
    desk.welcome()
    body = bodies(desk)[kind]
    assert desk.book.concerns(desk.channel, body)
    assert not desk.book.concerns(desk.channel, structs.replace(body, **change))


def test_replies_of_another_incarnation_concern_no_receiver_nor_does_any_reply_when_none_is_known() -> None:
    desk = ReceiverDesk()
    replies = bodies(desk)[3]
    assert not desk.book.concerns(desk.channel, structs.replace(replies, epoch=OTHER))
    desk.book.fenced(desk.channel, EPOCH, desk.now)
    assert not desk.book.concerns(desk.channel, replies)


def test_an_old_hello_opens_nothing_and_leaves_the_session_as_it_is() -> None:
    desk = SenderDesk()
    desk.meet()
    session = desk.meet(generation=3)
    desk.fetch(session, 1)
    assert desk.book.open_session(session.token, 2, region_size=1, handle="other", now=desk.now) is None
    assert (session.generation, session.handle) == (3, None)
    assert desk.book.next_fetch(KEY) is session.fetches[1]
