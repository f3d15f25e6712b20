"""The machine of the books finds what it is there to find: each test plants a bug, and the alarm must come.

The examples are the same in every run with the same Hypothesis. Of ten examples with the trouble that brings it out one
to eight find a bug, as far as these are concerned; so that three hundred leave nothing to chance. What was said to or
by another sender than the present one is too rare for that: it is brought about step by step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis.stateful import run_state_machine_as_test
from model import KEYS
from msgspec import structs
from network import World
from test_books_machine import Books

from trio_mori._errors import InternalError
from trio_mori._protocol import wire
from trio_mori._protocol.answers import Answers
from trio_mori._protocol.entries import ENTRY_TABLE, Course, Entry, Event, Phase, Session, Ticket, Want
from trio_mori._protocol.fetches import Fetches
from trio_mori._protocol.interests import Channel, Interest
from trio_mori._protocol.returns import Returns
from trio_mori._protocol.roster import Roster
from trio_mori._protocol.senders import Senders
from trio_mori._protocol.shelf import Shelf
from trio_mori._protocol.writes import Writes

Said = wire.Welcome | wire.Stale | wire.Mismatch | wire.Replies
Plant = Callable[[pytest.MonkeyPatch], None]


def a_write_that_takes_too_long_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Writes._tell_failed

    def tell_failed(self: Writes, ticket: Ticket, course: Course, why: str) -> None:
        plain(self, ticket, course, why)
        ticket.entry.pins -= course is Course.OVERDUE

    monkeypatch.setattr(Writes, "_tell_failed", tell_failed)


def what_is_given_back_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Returns.give_back

    def give_back(self: Returns, interest: Interest) -> None:
        self._placement.free(interest)
        plain(self, interest)

    monkeypatch.setattr(Returns, "give_back", give_back)


def another_sender_proves_the_last_one_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Senders._succeed

    def succeed(self: Senders, channel: Channel) -> None:
        epoch = channel.epoch
        plain(self, channel)
        for extent in channel.ghosts.pop(epoch or b"", ()):
            self._extents.free(extent)

    monkeypatch.setattr(Senders, "_succeed", succeed)


def a_fetch_starts_as_often_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "may_start", lambda self, fetch_id: True)


def a_cancel_counts_as_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Fetches.on_cancel

    def on_cancel(self: Fetches, session: Session, fetch_id: int) -> None:
        self.on_ack(session, fetch_id)
        plain(self, session, fetch_id)

    monkeypatch.setattr(Fetches, "on_cancel", on_cancel)


def silence_counts_as_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Fetches.lapse

    def lapse(self: Fetches, session: Session) -> None:
        for fetch in [f for f in session.fetches.values() if f.state is Want.DELIVERED]:
            self._acknowledge(fetch)
        plain(self, session)

    monkeypatch.setattr(Fetches, "lapse", lapse)


def what_was_delivered_is_never_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENTRY_TABLE, (Phase.DELIVERED, Event.RELEASE), Phase.DELIVERED)


def what_expires_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Shelf.expired

    def expired(self: Shelf, now: float) -> list[Entry]:
        for entry in plain(self, now):
            del self._filed[entry]
            self._unfile(entry)
        return []

    monkeypatch.setattr(Shelf, "expired", expired)


def what_was_said_last_needs_no_other_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Senders.heartbeat

    def heartbeat(self: Senders, channel: Channel) -> None:
        channel.is_steady = True
        plain(self, channel)

    monkeypatch.setattr(Senders, "heartbeat", heartbeat)


def words_of_an_old_connection_count_for_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Roster.speaker

    def speaker(self: Roster, requests: wire.Requests, epoch: bytes) -> Session | None:
        session = self.sessions.get(requests.session)
        generation = requests.generation if session is None else session.generation
        return plain(self, structs.replace(requests, generation=generation), epoch)

    monkeypatch.setattr(Roster, "speaker", speaker)


def words_to_another_sender_count_for_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Roster.speaker

    def speaker(self: Roster, requests: wire.Requests, epoch: bytes) -> Session | None:
        return plain(self, structs.replace(requests, epoch=epoch), epoch)

    monkeypatch.setattr(Roster, "speaker", speaker)


def words_of_an_old_connection_count_for_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Answers.concerns

    def concerns(self: Answers, channel: Channel, body: Said) -> bool:
        return plain(self, channel, structs.replace(body, generation=channel.generation))

    monkeypatch.setattr(Answers, "concerns", concerns)


def words_of_any_sender_count_for_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    def concerns(self: Answers, channel: Channel, body: Said) -> bool:
        return (body.session, body.generation) == (channel.token, channel.generation)

    monkeypatch.setattr(Answers, "concerns", concerns)


def what_is_written_expires_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelf, "expired", lambda self, now: [e for e in self._filed if e.expires_at <= now])


# Each bug, and the trouble that brings it out.
PLANTS: dict[Plant, set[str]] = {
    a_write_that_takes_too_long_counts_as_ended: {"slow writes", "time"},
    what_is_given_back_is_free_at_once: {"slow writes"},
    another_sender_proves_the_last_one_dead: {"slow writes", "sending processes"},
    a_fetch_starts_as_often_as_it_comes: {"held messages"},
    a_cancel_counts_as_an_acknowledgement: {"held messages"},
    silence_counts_as_an_acknowledgement: {"time"},
    what_was_delivered_is_never_published_again: {"held messages"},
    what_expires_keeps_its_memory: {"time"},
    what_was_said_last_needs_no_other_heartbeat: {"held messages"},
    words_of_an_old_connection_count_for_a_sender: {"held messages", "broken links"},
    words_of_an_old_connection_count_for_a_receiver: {"held messages", "broken links"},
    what_is_written_expires_with_the_rest: {"slow writes", "time"},
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_alarm_comes_when(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(Books, "focus", PLANTS[plant])
    quick = settings(
        max_examples=300,
        stateful_step_count=64,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Stage.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, InternalError)):
        run_state_machine_as_test(Books, settings=quick)


def words_to_the_sender_before() -> None:
    """Said on a connection that another process takes over, behind a hello that this one answers."""
    world = World()
    receiver = world.receivers[0]
    world.held.add((0, "up"))
    receiver.hello()
    receiver.get(KEYS[0])
    world.pump()
    world.replace_sender("goes on beside", noticed=False, seamless=True)
    world.held.clear()
    world.pump()


def words_of_the_sender_before() -> None:
    """They arrive when another process, which took its connection over, has welcomed the receiver."""
    world = World()
    receiver = world.receivers[0]
    world.held.add((0, "down"))
    receiver.beat()
    world.pump()
    world.replace_sender("goes on beside", noticed=False, seamless=True)
    receiver.hello()
    world.pump()
    connection = receiver.connection
    assert connection is not None
    for letter in connection.down[::-1]:
        connection.deliver("down", letter)


@pytest.mark.parametrize(
    ("plant", "scene"),
    [
        (words_to_another_sender_count_for_a_sender, words_to_the_sender_before),
        (words_of_any_sender_count_for_a_receiver, words_of_the_sender_before),
    ],
)
def test_the_alarm_comes_in_a_scene_with_two_senders_and_only_then(
    plant: Plant, scene: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene()
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="another process"):
        scene()
