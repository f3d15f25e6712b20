"""Which chunks go out, in which life of a request, and what its end does to those that are queued."""

from __future__ import annotations

import pytest
from chunk_fakes import FakeLoop
from trio_mori_vllm_omni.chunks._flows import Outflow, Outgoing
from trio_mori_vllm_omni.chunks._records import Watermarks
from trio_mori_vllm_omni.chunks._writing import Offer, Verdict, Writing

pytestmark = pytest.mark.deterministic


class Desk:
    """Offers chunks of requests."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.writing = Writing(self.loop)
        self.tokens = 0

    def offer(
        self,
        name: str = "r",
        *,
        confirmed: int | None = None,
        segment: int = 0,
        counts: bool = False,
        terminal: bool = False,
        ends: bool = False,
    ) -> Verdict:
        self.tokens += 1
        at = self.tokens if confirmed is None else confirmed
        chunk = Outgoing(lambda number: None, terminal)
        return self.writing.offer(Offer(f"id-{name}", name, at, segment, counts, terminal, ends), chunk)

    @property
    def flows(self) -> list[Outflow]:
        return list(self.loop.sending)

    def end(self, flow: Outflow, failure: str | None = None) -> None:
        self.loop.end(flow, failure)
        for event in self.loop.events():
            self.writing.sort(event)  # type: ignore[arg-type]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_chunks_of_one_life_go_into_one_flow_in_order(desk: Desk) -> None:
    assert [desk.offer(), desk.offer(), desk.offer(terminal=True)] == [Verdict.SEND] * 3
    assert [chunk.is_terminal for chunk in desk.loop.sending[desk.flows[0]]] == [False, False, True]
    assert desk.writing.is_sending("r")
    desk.end(desk.flows[0])
    assert not desk.writing.is_sending("r")
    assert not desk.writing.records


def test_tokens_that_are_computed_again_are_not_sent_again(desk: Desk) -> None:
    desk.offer(confirmed=5)
    assert desk.offer(confirmed=4) is Verdict.SENT_BEFORE
    assert desk.offer(confirmed=4, ends=True) is Verdict.SEND
    assert desk.offer(confirmed=1) is Verdict.SEND


def test_the_scheduler_can_reset_the_watermark_of_a_replaced_prompt(desk: Desk) -> None:
    marks = Watermarks(desk.writing.records)
    desk.offer(confirmed=5)
    assert (marks["r"], dict(marks), marks.get("q", 0)) == (5, {"r": 5}, 0)
    assert marks.pop("r", None) == 5
    assert marks.pop("q", None) is None
    assert desk.offer(confirmed=1) is Verdict.SEND


def test_a_late_frame_of_a_segment_that_was_ended_is_not_sent(desk: Desk) -> None:
    desk.offer(segment=3, ends=True, counts=True)
    assert desk.offer(segment=3) is Verdict.LATE_SEGMENT
    assert desk.offer(segment=4) is Verdict.SEND


def test_a_request_that_does_not_count_its_segments_goes_on_after_one(desk: Desk) -> None:
    desk.offer(ends=True)
    assert desk.offer() is Verdict.SEND


def test_nothing_follows_a_terminal_chunk(desk: Desk) -> None:
    desk.offer(terminal=True)
    assert desk.offer() is Verdict.AFTER_END
    assert len(desk.loop.sending[desk.flows[0]]) == 1


def test_clean_up_after_a_terminal_chunk_was_queued_cuts_nothing_off(desk: Desk) -> None:
    desk.offer()
    desk.offer(terminal=True)
    desk.writing.forget("r")
    assert not desk.loop.cuts
    assert not desk.writing.is_sending("r")


def test_an_abort_cuts_the_flow_once(desk: Desk) -> None:
    desk.offer()
    desk.writing.forget("r")
    desk.writing.forget("r")
    assert desk.loop.cuts == {desk.flows[0]: None}
    desk.end(desk.flows[0])
    assert not desk.writing._leaving


def test_a_new_life_comes_after_one_that_has_not_ended_and_not_after_one_that_has(desk: Desk) -> None:
    desk.offer(terminal=True)
    desk.writing.forget("r")
    desk.offer()
    first, second = desk.flows
    assert second.after is first
    desk.writing.forget("r")
    desk.end(first)
    desk.offer()
    assert desk.flows[2].after is second
    desk.end(second)
    desk.writing.forget("r")
    desk.end(desk.flows[2])
    desk.offer()
    assert desk.flows[3].after is None


def test_what_an_earlier_life_has_to_tell_does_not_touch_the_present_one(desk: Desk) -> None:
    desk.offer(terminal=True)
    desk.writing.forget("r")
    desk.offer()
    desk.end(desk.flows[0], "it failed")
    assert desk.writing.is_sending("r")
    assert desk.offer() is Verdict.SEND
    assert desk.writing.take_failures() == {"id-r": "it failed"}


def test_a_request_that_cannot_be_sent_is_told_once_and_its_later_chunks_are_dropped(desk: Desk) -> None:
    desk.offer()
    desk.end(desk.flows[0], "TooBig: it")
    assert desk.writing.take_failures() == {"id-r": "TooBig: it"}
    assert desk.offer() is Verdict.FAILED
    assert desk.offer(terminal=True) is Verdict.FAILED
    assert desk.writing.take_failures() == {}
    assert not desk.writing.records
    assert len(desk.flows) == 1
    assert desk.loop.cuts == {desk.flows[0]: "TooBig: it"}, "what the next stage was told would be taken back"


def test_an_abort_of_a_request_that_failed_takes_back_what_the_next_stage_was_told(desk: Desk) -> None:
    desk.offer()
    desk.end(desk.flows[0], "TooBig: it")
    desk.writing.forget("r")
    assert desk.loop.cuts == {desk.flows[0]: None}


def test_the_failure_of_a_request_of_which_nothing_was_sent_is_told(desk: Desk) -> None:
    desk.writing.tell("id-r", "r", "stage 0 is gone")
    assert desk.loop.cuts == {desk.flows[0]: "stage 0 is gone"}
    desk.end(desk.flows[0])
    assert not desk.writing._leaving
