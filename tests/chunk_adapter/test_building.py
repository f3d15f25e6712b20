"""The worker's part: numbers, order, and when the input processors' books are cleared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trio_mori_vllm_omni.chunks._building import HELD, QUICK, Building, Built
from trio_mori_vllm_omni.chunks._flows import Outflow, Outgoing
from trio_mori_vllm_omni.chunks._mailbox import Mailbox

pytestmark = pytest.mark.deterministic


class Worker:
    """A worker whose loop is a list."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[object] = []
        self.posted: list[Callable[[], None]] = []
        self.building = Building(
            Mailbox(self.posted.append),
            lambda flow, built: self.log.append((flow.request_id, built)),
            lambda name: self.log.append(f"forget {name}"),
            lambda: self.now,
        )

    def run_loop(self) -> None:
        self.building.flush()
        posted, self.posted = self.posted, []
        for command in posted:
            command()

    def begin(self, flow: Outflow) -> None:
        self.building.begin(flow, lambda: self.log.append(f"begin {flow.request_id}"))


def number(number: int) -> object:
    return number


def test_what_was_built_reaches_the_loop_in_order_with_one_waking() -> None:
    worker, flow = Worker(), Outflow("id", "r")
    worker.begin(flow)
    for build in (number, lambda _: None, number):
        worker.building.build(flow, Outgoing(build, False))
    worker.building.flush()
    assert worker.log == []
    assert len(worker.posted) == 1
    worker.run_loop()
    assert worker.log == ["begin id", ("id", Built(0, False)), ("id", Built(1, False))]


def test_the_books_are_cleared_after_the_terminal_chunk_and_before_the_next_life() -> None:
    worker, old = Worker(), Outflow("old", "r")
    new = Outflow("new", "r", old)
    worker.begin(old)
    worker.building.build(old, Outgoing(number, True))
    worker.begin(new)
    worker.building.build(new, Outgoing(lambda at: worker.log.append("build new") or at, False))  # type: ignore[func-returns-value]
    assert worker.log == ["forget r", "build new"]


def test_what_is_queued_of_a_request_that_was_cut_is_not_built() -> None:
    worker, flow = Worker(), Outflow("id", "r")
    worker.begin(flow)
    flow.is_cut = True
    worker.building.build(flow, Outgoing(number, False))
    worker.building.cut(flow, lambda: worker.log.append("cut"))
    worker.building.cut(flow, lambda: worker.log.append("cut"))
    worker.run_loop()
    assert worker.log == ["forget r", "begin id", "cut", "cut"]


def test_after_a_failure_nothing_of_the_request_is_built() -> None:
    def raising(_: int) -> object:
        raise ValueError("no codes")

    worker, flow = Worker(), Outflow("id", "r")
    worker.begin(flow)
    worker.building.build(flow, Outgoing(raising, False))
    worker.building.build(flow, Outgoing(number, True))
    worker.run_loop()
    assert worker.log == ["forget r", "begin id", ("id", Built(None, False, "ValueError: no codes"))]


def test_what_is_built_while_more_is_queued_is_held_back_for_a_millisecond() -> None:
    worker, flow = Worker(), Outflow("id", "r")
    worker.begin(flow)
    worker.building.build(flow, Outgoing(number, False))
    worker.now = HELD / 2
    worker.building.build(flow, Outgoing(number, False))
    assert worker.posted == []
    worker.now = HELD
    worker.building.build(flow, Outgoing(number, False))
    assert len(worker.posted) == 1
    worker.run_loop()
    assert worker.log == ["begin id", *(("id", Built(at, False)) for at in range(3))]


def test_what_took_long_to_build_does_not_wait_for_the_next() -> None:
    def slow(at: int) -> object:
        worker.now += 2 * QUICK
        return at

    worker, flow = Worker(), Outflow("id", "r")
    worker.begin(flow)
    worker.building.build(flow, Outgoing(slow, False))
    assert len(worker.posted) == 1
    worker.posted.pop()()
    worker.building.build(flow, Outgoing(number, False))
    assert len(worker.posted) == 1
    worker.posted.pop()()
    for _ in range(10):
        worker.building.build(flow, Outgoing(number, False))
    worker.run_loop()
    worker.building.build(flow, Outgoing(number, False))
    assert worker.posted == []


def test_a_chunk_does_not_wait_for_steps_that_make_none() -> None:
    def nothing(_: int) -> None:
        worker.now += HELD

    worker, flow = Worker(), Outflow("id", "r")
    worker.begin(flow)
    worker.building.build(flow, Outgoing(number, False))
    assert worker.posted == []
    worker.building.build(flow, Outgoing(nothing, False))
    assert len(worker.posted) == 1
