"""What is polled for, with a clock in the test's hand."""

from __future__ import annotations

import pytest
from trio_mori_vllm_omni._interests import PATIENCE, PAUSE, Interests, State, next_of

pytestmark = pytest.mark.deterministic

NAME = ("r_0_0@0_1", "127.0.0.1", 50051)
OTHER = ("s_0_0@0_1", "127.0.0.1", 50051)


def test_a_payload_is_asked_for_once_and_handed_out_once() -> None:
    interests: Interests[str] = Interests()
    interest, ask = interests.poll(NAME, 0.0)
    assert ask
    assert interests.poll(NAME, 0.1) == (interest, False)
    assert interest.arrival is None
    assert interests.arrive(interest, "payload")
    again, ask = interests.poll(NAME, 0.2)
    assert (again.arrival, ask) == ("payload", False)
    assert len(interests) == 0
    fresh, ask = interests.poll(NAME, 0.3)
    assert (fresh.arrival, ask) == (None, True)


def test_what_nobody_polls_for_is_given_up_and_what_came_is_given_back() -> None:
    interests: Interests[str] = Interests()
    waiting, _ = interests.poll(NAME, 0.0)
    arrived, _ = interests.poll(OTHER, 1.0)
    interests.arrive(arrived, "payload")
    assert interests.next_deadline() == PATIENCE
    assert interests.drop_unpolled(PATIENCE - 0.1) == []
    assert interests.drop_unpolled(PATIENCE) == [waiting]
    assert interests.drop_unpolled(PATIENCE + 1.0) == [arrived]
    assert arrived.arrival == "payload"
    assert not interests.arrive(waiting, "late")
    assert interests.next_deadline() is None


def test_polling_keeps_an_interest() -> None:
    interests: Interests[str] = Interests()
    for tenth in range(100):
        interests.poll(NAME, tenth / 10)
        assert interests.drop_unpolled(tenth / 10) == []
    assert interests.next_deadline() == 9.9 + PATIENCE


def test_a_failure_is_asked_for_again_after_its_pause() -> None:
    interests: Interests[str] = Interests()
    interest, _ = interests.poll(NAME, 0.0)
    interests.fail(interest, 0.5 + PAUSE)
    assert interests.poll(NAME, 0.6) == (interest, False)
    assert interest.state is State.FAILED
    assert interests.poll(NAME, 0.5 + PAUSE) == (interest, True)
    assert interests.arrive(interest, "payload")


def test_what_is_dropped_cannot_fail_or_arrive_any_more() -> None:
    interests: Interests[str] = Interests()
    interest, _ = interests.poll(NAME, 0.0)
    assert interests.drop(lambda key: key == OTHER[0]) == []
    assert interests.drop(lambda key: key == NAME[0]) == [interest]
    interests.fail(interest, 1.0)
    assert interest.state is State.OVER
    assert not interests.arrive(interest, "late")


@pytest.mark.parametrize(
    ("key", "expected"), [("r_0_9", "r_0_10"), ("r_1_9", None), ("r_0_x", None), ("r_0_²", None), ("r", None)]
)
def test_only_a_key_that_ends_in_its_stage_and_a_number_has_a_next_one(key: str, expected: str | None) -> None:
    assert next_of(key, "0") == expected
