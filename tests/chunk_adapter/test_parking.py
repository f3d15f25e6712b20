"""The queues before and after a schedule: order, limits, the window of active streams, and no zombies."""

from __future__ import annotations

import pytest
from chunk_fakes import Rig, Status, codes

pytestmark = pytest.mark.deterministic


def run_all(rig: Rig, *names: str) -> None:
    """Have requests running, each through its first chunk."""
    for name in names:
        rig.add(name)
    rig.tick()
    for name in names:
        rig.loop.deliver(name, codes(0))
    assert rig.tick() == list(names)


def test_requests_that_wait_keep_their_order_over_ticks() -> None:
    rig = Rig()
    for name in "abcd":
        rig.add(name)
    for _ in range(3):
        rig.tick()
        assert rig.names == list("abcd")
    rig.loop.deliver("c", codes(0))
    rig.begin()
    assert [request.request_id for request in rig.waiting] == ["c"]
    assert rig.end() == ["c"]
    assert [request.request_id for request in rig.waiting] == ["a", "b", "d"]


def test_while_the_scheduler_runs_nothing_that_waits_is_in_its_queues() -> None:
    rig = Rig()
    run_all(rig, "a", "b")
    rig.add("c")
    rig.loop.deliver("b", codes(1))
    rig.begin()
    assert list(rig.waiting) == []
    assert [request.request_id for request in rig.running] == ["b"]
    assert rig.desk.parking.owned() == {"a", "c"}


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_aborted_request_never_comes_back(when: str) -> None:
    rig = Rig()
    run_all(rig, "s")
    rig.add("r")
    rig.add("q")
    rig.tick()
    if when == "before":
        rig.abort("r")
        rig.abort("s")
    rig.begin()
    if when == "during":
        rig.abort("r")
        rig.abort("s")
    rig.end()
    if when == "after":
        rig.abort("r")
        rig.abort("s")
    dead = {each.external_id: each for each in rig.loop.dropped}
    assert dead.keys() == {"r", "s"}
    for tick in range(5):
        if tick == 2:
            for flow in dead.values():
                rig.loop.deliver_late(flow, codes(1))
        assert rig.tick() == []
        assert rig.names == ["q"]
    assert [name for name, _ in rig.ran] == ["s"], "its first chunk, and nothing after the abort"
    rig.loop.deliver("q", codes(2))
    assert rig.tick() == ["q"]
    rig.abort("q")
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("at", ["between", "parked"])
def test_a_request_that_was_freed_without_a_word_is_purged_with_all_that_is_known_of_it(at: str) -> None:
    rig = Rig()
    rig.add("r")
    rig.tick()
    if at == "parked":
        rig.begin()
    else:
        rig.waiting.clear()
        rig.desk.take_out(rig.waiting, rig.running, rig.requests)
        rig.waiting.add_request(rig.requests["r"])
        rig.begin()
    del rig.requests["r"]
    rig.end()
    assert rig.names == []
    rig.assert_nothing_is_left()


def test_an_abort_restores_the_status_that_the_queue_stands_for() -> None:
    rig = Rig()
    run_all(rig, "s")
    waiting = rig.add("r")
    running = rig.requests["s"]
    rig.begin()
    assert running.status is waiting.status is Status.WAITING_FOR_CHUNK
    rig.abort("r")
    rig.abort("s")
    assert (waiting.status, running.status) == (Status.WAITING, Status.RUNNING)


def test_an_abort_of_what_is_in_the_scheduler_s_queues_leaves_its_status() -> None:
    rig = Rig()
    request = rig.add("r")
    rig.tick()
    request.status = Status.PREEMPTED
    rig.abort("r")
    assert request.status is Status.PREEMPTED


def test_more_ready_requests_than_may_run_go_back_once_and_in_order() -> None:
    rig = Rig()
    run_all(rig, "a", "b", "c", "d")
    for name in "abcd":
        rig.loop.deliver(name, codes(1))
    rig.desk.parking._max_running = 2
    rig.begin()
    assert [request.request_id for request in rig.running] == ["a", "b"]
    assert [request.request_id for request in rig.waiting] == ["c", "d"]
    assert {request.status for request in rig.waiting} == {Status.PREEMPTED}
    assert rig.end() == ["c", "d", "a", "b"]
    assert sorted(rig.names) == list("abcd")
    rig.desk.parking._max_running = 8
    for name in "abcd":
        rig.loop.deliver(name, codes(2, finished=True))
    assert sorted(rig.tick()) == list("abcd")
    for name in "abcd":
        rig.abort(name)
    rig.assert_nothing_is_left()


def test_only_streams_of_the_window_are_received_and_the_next_one_enters_when_one_ends() -> None:
    rig = Rig(window=2)
    for name in "abc":
        rig.add(name)
    rig.tick()
    assert {flow.external_id for flow in rig.loop.receiving} == {"a", "b"}
    rig.loop.deliver("a", codes(0, finished=True))
    assert rig.tick() == ["a"]
    assert rig.names == ["b", "c", "a"]
    rig.abort("a")
    rig.tick()
    assert {flow.external_id for flow in rig.loop.receiving} == {"a", "b", "c"}


def test_running_requests_outside_of_the_window_are_held_and_given_back() -> None:
    rig = Rig()
    run_all(rig, "a", "b", "c")
    rig.desk.parking._window = 1
    for name in "abc":
        rig.loop.deliver(name, codes(1))
    rig.begin()
    assert [request.request_id for request in rig.running] == ["a"]
    assert [request.request_id for request in rig.desk.parking.held] == ["b", "c"]
    rig.abort("b")
    rig.end()
    assert rig.names == ["a", "c"]


def test_a_request_that_is_ready_but_was_not_scheduled_stays_ready() -> None:
    rig = Rig()
    request = rig.add("r")
    rig.tick()
    rig.loop.deliver("r", codes(1))
    rig.begin()
    rig.desk.put_back(rig.waiting, rig.running, rig.requests)
    rig.loop.deliver("r", codes(2))
    rig.begin()
    assert list(rig.waiting) == [request]
    assert request.prompt_token_ids == [1]
