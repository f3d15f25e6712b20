"""What comes for a request, when it is committed, and what becomes of it if the request has ended."""

from __future__ import annotations

import pytest
from chunk_fakes import Rig, Status, codes
from trio_mori_vllm_omni.chunks._flows import AHEAD, CREDIT_STEP
from trio_mori_vllm_omni.chunks._marks import failed_terminal

pytestmark = pytest.mark.deterministic


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_request_waits_until_its_chunk_is_there_and_runs_once_for_each(rig: Rig) -> None:
    request = rig.add("r")
    assert rig.tick() == []
    assert request.status is Status.WAITING_FOR_CHUNK
    rig.loop.deliver("r", codes(1, 2))
    assert rig.tick() == ["r"]
    assert request.prompt_token_ids == [1, 2]
    assert rig.tick() == []
    rig.loop.deliver("r", codes(3))
    assert rig.tick() == ["r"]
    assert request.prompt_token_ids == [3]


def test_chunks_that_came_early_are_committed_in_order_one_a_step(rig: Rig) -> None:
    request = rig.add("r")
    rig.tick()
    for number in range(3):
        rig.loop.deliver("r", codes(number))
    seen = []
    for _ in range(3):
        assert rig.tick() == ["r"]
        seen.append(request.prompt_token_ids)
    assert seen == [[0], [1], [2]]


def test_a_chunk_that_came_early_waits_while_a_step_of_its_request_is_in_flight(rig: Rig) -> None:
    request = rig.add("r")
    rig.tick()
    rig.loop.deliver("r", codes(0))
    rig.loop.deliver("r", codes(1))
    assert rig.tick() == ["r"]
    request.num_in_flight_tokens = 1
    assert rig.tick() == []
    assert request.prompt_token_ids == [0]
    request.num_in_flight_tokens = 0
    assert rig.tick() == ["r"]
    assert request.prompt_token_ids == [1]


def test_the_loop_is_credited_before_it_runs_out(rig: Rig) -> None:
    rig.add("r")
    rig.tick()
    flow = rig.loop.flow_of("r")
    for number in range(20):
        assert number - rig.loop.receiving[flow] < AHEAD
        rig.loop.deliver("r", codes(number))
        rig.tick()
    assert rig.loop.receiving[flow] >= 20 - CREDIT_STEP


def test_an_empty_chunk_that_ends_nothing_is_passed_over(rig: Rig) -> None:
    rig.add("r")
    rig.tick()
    rig.loop.deliver("r", codes())
    assert rig.tick() == []
    rig.loop.deliver("r", codes(1))
    assert rig.tick() == ["r"]


@pytest.mark.parametrize("marks", [{"finished": True}, {"segment": True}])
def test_an_empty_chunk_that_ends_something_is_scheduled_and_no_more_is_waited_for(
    rig: Rig, marks: dict[str, bool]
) -> None:
    request = rig.add("r", resumable=True)
    rig.tick()
    rig.loop.deliver("r", codes(**marks))
    assert rig.tick() == ["r"]
    assert request.resumable is not bool(marks.get("finished"))
    assert rig.tick() == []
    assert request.status is Status.RUNNING
    assert rig.names == ["r"]


def test_the_next_segment_is_waited_for_when_the_scheduler_resumes_it(rig: Rig) -> None:
    rig.add("r", resumable=True)
    rig.tick()
    rig.loop.deliver("r", codes(1, segment=True))
    rig.tick()
    rig.loop.deliver("r", codes(2))
    assert rig.tick() == []
    from trio_mori_vllm_omni.chunks._records import Flag

    rig.desk.flag_set(Flag.SEGMENT_ENDED).discard("r")
    assert rig.tick() == ["r"]


def test_a_chunk_that_comes_after_its_request_was_aborted_is_reclaimed(rig: Rig) -> None:
    rig.add("r")
    rig.tick()
    rig.loop.deliver("r", codes(1))
    rig.abort("r")
    assert rig.tick() == []
    assert rig.desk.reading.reclaimed == 1
    assert len(rig.loop.dropped) == 1
    rig.assert_nothing_is_left()


def test_a_chunk_of_an_earlier_life_is_not_given_to_the_next_one(rig: Rig) -> None:
    rig.add("r")
    rig.tick()
    rig.loop.deliver("r", codes(1))
    rig.abort("r")
    request = rig.add("r")
    assert rig.tick() == []
    rig.loop.deliver("r", codes(2))
    assert rig.tick() == ["r"]
    assert request.prompt_token_ids == [2]


def test_a_failure_is_told_in_its_turn_after_the_chunks_before_it(rig: Rig) -> None:
    rig.add("r")
    rig.tick()
    rig.loop.deliver("r", codes(1))
    rig.loop.break_off("r", "PeerLost: gone")
    assert rig.tick() == ["r"]
    assert rig.desk.reading.take_failures() == {}
    rig.begin()
    assert rig.desk.reading.take_failures() == {"r": "PeerLost: gone"}
    assert rig.desk.reading.take_failures() == {}


def test_a_failed_terminal_fails_the_request_with_the_reason_of_the_stage_before(rig: Rig) -> None:
    request = rig.add("r")
    rig.tick()
    rig.loop.deliver("r", failed_terminal("stage 0: out of memory"))
    rig.begin()
    assert rig.desk.reading.take_failures() == {"r": "stage 0: out of memory"}
    assert request.status is Status.WAITING_FOR_CHUNK


def test_the_stall_clock_starts_with_each_wait_and_stops_with_each_chunk(rig: Rig) -> None:
    rig.add("r")
    rig.add("q")
    for at in range(5):
        rig.now = float(at)
        rig.tick()
        rig.loop.deliver("q", codes(at))
    assert rig.desk.reading.take_stalled(4.5) == set()
    rig.now = 4.6
    assert rig.desk.reading.take_stalled(0) == set()
    assert rig.desk.reading.take_stalled(4.5) == {"r"}
    assert rig.desk.reading.take_stalled(4.5) == set()
    late = rig.loop.flow_of("r")
    rig.abort("r", failed=True)
    assert "no chunk came for 4.5 s" in str(list(rig.loop.cuts.values()))
    assert rig.tick() == ["q"]
    rig.loop.deliver_late(late, codes(1))
    assert rig.tick() == []
    assert rig.names == ["q"], "it does not come back to life"
    assert rig.loop.dropped == [late]
    rig.abort("q")
    rig.assert_nothing_is_left()


def test_where_the_orchestrator_says_the_sender_is_goes_along(rig: Rig) -> None:
    rig.add("r", external_req_id="ext", payload_sender_info={"host": "10.0.0.1", "zmq_port": 50051})
    rig.add("q", payload_sender_info={"host": "", "zmq_port": 50051})
    rig.tick()
    assert rig.loop.flow_of("ext").source == {"source_host": "10.0.0.1", "source_port": 50051}
    assert rig.loop.flow_of("q").source is None
