"""The loop's half: order, ends that are not overtaken, cuts, failures, and a close after which nothing runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from chunk_fakes import codes
from trio_mori_vllm_omni.chunks._building import Built
from trio_mori_vllm_omni.chunks._flows import AHEAD, Arrived, Broken, Ended, Event, Inflow, Outflow, Outgoing
from trio_mori_vllm_omni.chunks._marks import failure_of, is_last
from trio_mori_vllm_omni.chunks._receiving import PAUSE, RECLAIM
from trio_mori_vllm_omni.chunks._sending import AT_ONCE, STALL, TERMINAL_GRACE, Sending
from wires import MemoryWire, Names, chunk, next_events, open_courier

from trio_mori import ConnectorClosed, Expired, Gone, KeyBusy, TooBig, TransferFailed

pytestmark = pytest.mark.deterministic


@pytest.fixture
def wire() -> MemoryWire:
    return MemoryWire()


# --- sending ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [{"x": 19}, {}])
async def test_twenty_chunks_arrive_in_order_and_the_end_after_them(wire: MemoryWire, last: Any) -> None:
    flow, forgotten = Outflow("id", "r"), Names()
    async with open_courier(wire, forgotten) as courier:
        courier.begin(flow)
        for number in range(19):
            courier.send(flow, chunk({"x": number}))
        courier.send(flow, chunk(last, terminal=True))
        courier.flush()
        assert await next_events(courier, 1) == [Ended(flow)]
        await forgotten.wait(1)
    assert wire.sent("r") == [{"x": number} for number in range(19)] + [last]
    assert forgotten == ["r"]


async def test_an_end_that_is_made_while_the_last_data_is_still_queued_comes_after_it(wire: MemoryWire) -> None:
    flow, forgotten = Outflow("id", "r"), Names()
    wire.room = 18
    async with open_courier(wire, forgotten) as courier:
        courier.begin(flow)
        for number in range(19):
            courier.send(flow, chunk(number))
        courier.flush()
        await wire.wait_refused()
        courier.send(flow, chunk("end", terminal=True))
        courier.flush()
        assert wire.sent("r") == list(range(18))
        wire.room = None
        wire.change()
        assert await next_events(courier, 1) == [Ended(flow)]
        await forgotten.wait(1)
    assert wire.sent("r") == [*range(19), "end"]


async def test_a_queue_is_put_without_a_turn_for_each_chunk_but_others_have_theirs(
    wire: MemoryWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = dict.fromkeys(("r", "s"), 0)
    put = wire.put

    async def count(external_id: str, number: int, planned: Any) -> None:
        turns[external_id] += 1
        if external_id == "r":
            most.append(len(wire.sent("r")) - sum(most))
        await put(external_id, number, planned)

    monkeypatch.setattr(wire, "put", count)
    most, events = list[int](), list[Event]()
    flows = [Outflow("id", "r"), Outflow("other", "s")]
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, events.append)
        for flow in flows:
            sending.begin(flow)
            for number in range(3 * AT_ONCE):
                sending.send(flow, Built(number, False))
            sending.send(flow, Built("end", True))
    assert {each.flow for each in events if isinstance(each, Ended)} == set(flows)
    assert wire.sent("r") == wire.sent("s") == [*range(3 * AT_ONCE), "end"]
    assert turns == {"r": 3, "s": 3}
    assert max(most) <= AT_ONCE + 1


async def test_a_step_that_makes_no_payload_takes_no_number(wire: MemoryWire) -> None:
    flow, numbers = Outflow("id", "r"), list[int]()

    def build(payload: object) -> Callable[[int], object]:
        def run(number: int) -> object:
            numbers.append(number)
            return payload

        return run

    async with open_courier(wire) as courier:
        courier.begin(flow)
        for payload in (None, "a", None, "b"):
            courier.send(flow, Outgoing(build(payload), False))
        courier.send(flow, Outgoing(build("end"), True))
        courier.flush()
        await next_events(courier, 1)
    assert wire.sent("r") == ["a", "b", "end"]
    assert numbers == [0, 0, 1, 1, 2]


async def test_processors_run_one_at_a_time_and_never_in_the_loop(wire: MemoryWire) -> None:
    loop, running, most = threading.get_ident(), 0, 0

    def build(number: int) -> object:
        nonlocal running, most
        assert threading.get_ident() != loop
        running += 1
        most = max(most, running)
        running -= 1
        return number

    flows = [Outflow(f"id{at}", f"r{at}") for at in range(8)]
    async with open_courier(wire) as courier:
        for flow in flows:
            courier.begin(flow)
            for _ in range(4):
                courier.send(flow, Outgoing(build, False))
            courier.send(flow, Outgoing(build, True))
        courier.flush()
        assert len(await next_events(courier, 8)) == 8
    assert most == 1
    assert all(wire.sent(flow.external_id) == [0, 1, 2, 3, 4] for flow in flows)


async def test_a_request_without_room_does_not_delay_the_processing_of_another(wire: MemoryWire) -> None:
    first, second = Outflow("id1", "r"), Outflow("id2", "q")
    built = Names()
    wire.room = 0

    def build(name: str, number: int) -> object:
        built.note(name)
        return name

    async with open_courier(wire) as courier:
        for flow in (first, second):
            courier.begin(flow)
            courier.send(flow, Outgoing(partial(build, flow.external_id), True))
        courier.flush()
        await built.wait(2)
        wire.room = 2
        wire.change()
        assert len(await next_events(courier, 2)) == 2


async def test_a_cut_drops_what_is_queued_and_what_nobody_has_fetched(wire: MemoryWire) -> None:
    flow, forgotten = Outflow("id", "r"), Names()
    wire.chunks["r1", 0] = "of another"
    async with open_courier(wire, forgotten) as courier:
        courier.begin(flow)
        for number in range(3):
            courier.send(flow, chunk(number))
        courier.flush()
        with trio.fail_after(10):
            await wire.wait_for(lambda: len(wire.chunks) == 4)
        courier.send(flow, chunk(3))
        courier.cut(flow, None)
        courier.flush()
        assert await next_events(courier, 1) == [Ended(flow)]
    assert wire.chunks == {("r1", 0): "of another"}


async def test_a_cut_while_a_processor_runs_leaves_nothing_of_it(wire: MemoryWire) -> None:
    flow, forgotten = Outflow("id", "r"), Names()
    began, may_end = threading.Event(), threading.Event()

    def build(number: int) -> object:
        began.set()
        assert may_end.wait(10)
        assert not forgotten
        return number

    async with open_courier(wire, forgotten) as courier:
        courier.begin(flow)
        courier.send(flow, Outgoing(build, False))
        courier.flush()
        await trio.to_thread.run_sync(began.wait)
        courier.cut(flow, None)
        courier.flush()
        may_end.set()
        assert await next_events(courier, 1) == [Ended(flow)]
        await forgotten.wait(1)
    assert not wire.chunks


async def test_a_cut_does_not_wait_for_a_processor_with_what_was_put(wire: MemoryWire) -> None:
    flow, again = Outflow("id", "r"), Outflow("id", "r")
    began, may_end = threading.Event(), threading.Event()

    def build(number: int) -> object:
        began.set()
        assert may_end.wait(10)
        return number

    async with open_courier(wire) as courier:
        courier.begin(flow)
        courier.send(flow, chunk("old"))
        courier.flush()
        with trio.fail_after(10):
            await wire.wait_for(lambda: bool(wire.chunks))
        courier.send(flow, Outgoing(build, False))
        courier.flush()
        await trio.to_thread.run_sync(began.wait)
        courier.cut(flow, None)
        courier.flush()
        assert not wire.chunks
        assert await next_events(courier, 1) == [Ended(flow)]
        courier.begin(again)
        courier.send(again, chunk("new"))
        courier.flush()
        may_end.set()
        with trio.fail_after(10):
            await wire.wait_for(lambda: bool(wire.chunks))
        assert wire.sent("r") == ["new"]


async def test_a_life_that_was_cut_before_it_began_in_the_loop_puts_nothing(wire: MemoryWire) -> None:
    flow, events = Outflow("id", "r", is_cut=True), list[Event]()
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, events.append)
        sending.cut(flow, None)
        sending.begin(flow)
        sending.send(flow, Built("built before", False))
        await trio.testing.wait_all_tasks_blocked()
        sending.send(flow, Built("and this one, too", False))
        assert not wire.chunks
        sending.cut(flow, None)
    assert events == [Ended(flow)]


async def test_a_life_that_is_cut_as_a_chunk_of_it_could_not_be_built_tells_the_next_stage_nothing(
    wire: MemoryWire,
) -> None:
    flow, events = Outflow("id", "r"), list[Event]()
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, events.append)
        sending.begin(flow)
        await trio.testing.wait_all_tasks_blocked()
        sending.send(flow, Built(None, False, "no codes"))
        sending.cut(flow, None)
    assert events == [Ended(flow)]
    assert not wire.chunks


@pytest.mark.parametrize("room", [True, False], ids=["comes", "does not come"])
async def test_a_life_that_is_cut_while_its_failure_waits_for_room_leaves_nothing(
    wire: MemoryWire, clock: trio.testing.MockClock, room: bool
) -> None:
    flow, events = Outflow("id", "r"), list[Event]()
    wire.room = 0
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, events.append)
        sending.begin(flow)
        sending.send(flow, Built(None, False, "no codes"))
        await wire.wait_refused()
        sending.cut(flow, None)
        if room:
            wire.room = None
            wire.change()
    assert [event.flow for event in events if isinstance(event, Ended)] == [flow]
    assert not wire.chunks
    assert not wire.lost


async def test_an_abort_after_a_failure_was_told_takes_that_back(wire: MemoryWire) -> None:
    flow, events = Outflow("id", "r"), list[Event]()
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, events.append)
        sending.begin(flow)
        sending.send(flow, Built(None, False, "no codes"))
        await trio.testing.wait_all_tasks_blocked()
        assert events == [Ended(flow, "no codes")]
        (told,) = wire.sent("r")
        assert failure_of(told) == "no codes"
        sending.cut(flow, None)
        assert not wire.chunks


async def test_a_life_that_is_cut_before_it_began_in_the_loop_leaves_the_one_before_alone(wire: MemoryWire) -> None:
    first = Outflow("id", "r")
    second = Outflow("id", "r", first)
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, lambda event: None)
        sending.begin(first)
        sending.send(first, Built("old", False))
        await trio.testing.wait_all_tasks_blocked()
        sending.cut(second, None)
        assert wire.sent("r") == ["old"]
        sending.cut(first, None)


async def test_a_cut_with_a_failure_tells_the_next_stage_after_what_was_sent(wire: MemoryWire) -> None:
    flow = Outflow("id", "r")
    async with open_courier(wire) as courier:
        courier.begin(flow)
        courier.send(flow, chunk({"x": 0}))
        courier.flush()
        with trio.fail_after(10):
            await wire.wait_for(lambda: bool(wire.chunks))
        courier.cut(flow, "stage 0: it is gone")
        courier.flush()
        await next_events(courier, 1)
    first, last = wire.sent("r")
    assert first == {"x": 0}
    assert is_last(last)
    assert failure_of(last) == "stage 0: it is gone"


async def test_a_new_life_waits_for_the_end_of_the_one_before_and_clears_what_that_left(wire: MemoryWire) -> None:
    first = Outflow("id1", "r")
    second = Outflow("id2", "r", first)
    wire.room = 1
    async with open_courier(wire) as courier:
        courier.begin(first)
        courier.send(first, chunk("old 0"))
        courier.send(first, chunk("old 1", terminal=True))
        courier.begin(second)
        courier.send(second, chunk("new 0", terminal=True))
        courier.flush()
        with trio.fail_after(10):
            await wire.wait_for(lambda: bool(wire.chunks))
        await wire.wait_refused()
        assert wire.sent("r") == ["old 0"]
        wire.room = 2
        wire.change()
        assert await next_events(courier, 2) == [Ended(first), Ended(second)]
    assert wire.sent("r") == ["new 0"]


async def test_a_life_for_which_nobody_makes_room_keeps_the_next_one_waiting_for_a_while_only(
    wire: MemoryWire, clock: trio.testing.MockClock
) -> None:
    first = Outflow("id1", "r")
    second = Outflow("id2", "r", first)
    third = Outflow("id3", "r", second)
    events = list[Event]()
    wire.room = 2
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, events.append)
        sending.begin(first)
        for number in range(4):
            sending.send(first, Built(number, number == 3))
        sending.begin(second)
        sending.send(second, Built("second", True))
        sending.begin(third)
        sending.send(third, Built("third", True))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(0.9 * STALL)
        await trio.testing.wait_all_tasks_blocked()
        wire.room = 1  # it gets on, so that it has as long again
        wire.change()
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(1.05 * STALL)
        await trio.testing.wait_all_tasks_blocked()
        assert wire.sent("r") == [0, 1, 2]
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(STALL)
        await trio.testing.wait_all_tasks_blocked()
        assert events == [Ended(first)]
        assert not wire.chunks
        wire.room = None
        wire.change()
    assert events == [Ended(first), Ended(second), Ended(third)]
    assert wire.sent("r") == ["third"]


async def test_a_life_whose_processor_takes_long_is_waited_for(wire: MemoryWire, clock: trio.testing.MockClock) -> None:
    first = Outflow("id1", "r")
    second = Outflow("id2", "r", first)
    events = list[Event]()
    async with trio.open_nursery() as nursery:
        sending = Sending(wire, nursery, events.append)
        sending.begin(first)
        sending.begin(second)
        sending.send(second, Built("second", True))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(5 * STALL)
        await trio.testing.wait_all_tasks_blocked()
        sending.send(first, Built("first", True))
    assert events == [Ended(first), Ended(second)]


async def test_a_life_that_was_cut_before_its_turn_leaves_the_one_before_alone(wire: MemoryWire) -> None:
    first = Outflow("id1", "r")
    second = Outflow("id2", "r", first)
    wire.room = 0
    async with open_courier(wire) as courier:
        courier.begin(first)
        courier.send(first, chunk("old", terminal=True))
        courier.begin(second)
        courier.send(second, chunk("new"))
        courier.cut(second, None)
        courier.flush()
        await wire.wait_refused()
        wire.room = None
        wire.change()
        assert await next_events(courier, 2) == [Ended(first), Ended(second)]
    assert "new" not in wire.chunks.values()


@pytest.mark.parametrize("error", [KeyBusy("busy"), TransferFailed("hm")])
async def test_a_put_that_may_pass_is_tried_again_and_the_end_comes_once(wire: MemoryWire, error: Exception) -> None:
    flow, forgotten = Outflow("id", "r"), Names()
    wire.failures = [error, error]
    async with open_courier(wire, forgotten) as courier:
        courier.begin(flow)
        courier.send(flow, chunk("end", terminal=True))
        courier.flush()
        assert await next_events(courier, 1) == [Ended(flow)]
        await forgotten.wait(1)
    assert wire.failures == []
    assert wire.sent("r") == ["end"]
    assert forgotten == ["r"], "what was kept for it is given up"


@pytest.mark.parametrize("where", ["processor", "put"])
async def test_a_chunk_that_cannot_be_sent_fails_its_request_here_and_in_the_next_stage(
    wire: MemoryWire, where: str
) -> None:
    def build(number: int) -> object:
        if number == 1 and where == "processor":
            raise ValueError("no codes")
        return {"x": number}

    if where == "put":
        wire.refusals[1] = TooBig("too big", size=2, limit=1)

    flow, other = Outflow("id", "r"), Outflow("id2", "q")
    async with open_courier(wire) as courier:
        courier.begin(flow)
        for _ in range(3):
            courier.send(flow, Outgoing(build, False))
        courier.flush()
        (event,) = await next_events(courier, 1)
        courier.send(flow, chunk("late", terminal=True))
        courier.begin(other)
        courier.send(other, chunk("end", terminal=True))
        courier.flush()
        assert await next_events(courier, 1) == [Ended(other)]
    assert isinstance(event, Ended)
    assert event.failure is not None
    assert ("ValueError: no codes" if where == "processor" else "TooBig: too big") in event.failure
    first, last = wire.sent("r")
    assert first == {"x": 0}
    assert failure_of(last) == event.failure


async def test_a_failure_for_which_there_is_no_room_is_told_without_its_reason(
    wire: MemoryWire, clock: trio.testing.MockClock
) -> None:
    flow = Outflow("id", "r")
    async with open_courier(wire) as courier:
        wire.room = 0
        courier.begin(flow)
        courier.cut(flow, "stage 0: it is gone")
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(TERMINAL_GRACE)
        assert await next_events(courier, 1) == [Ended(flow)]
    assert wire.lost == {("r", 0)}


async def test_a_close_still_sends_what_is_queued_up_to_a_terminal_chunk(wire: MemoryWire) -> None:
    ending, going = Outflow("id1", "r"), Outflow("id2", "q")
    wire.room = 0
    async with open_courier(wire) as courier:
        for flow in (ending, going):
            courier.begin(flow)
            courier.send(flow, chunk("data"))
        courier.send(ending, chunk("end", terminal=True))
        courier.flush()
        await wire.wait_refused(2)
        wire.room = 3
    assert wire.sent("r") == ["data", "end"]
    assert wire.sent("q") == []


async def test_a_close_gives_up_on_an_end_for_which_there_is_no_room(
    wire: MemoryWire, clock: trio.testing.MockClock
) -> None:
    flow, forgotten = Outflow("id", "r"), Names()
    wire.room = 0

    async def jump() -> None:
        await trio.testing.wait_all_tasks_blocked(0.05)
        clock.jump(TERMINAL_GRACE)

    async with trio.open_nursery() as nursery:
        async with open_courier(wire, forgotten) as courier:
            courier.begin(flow)
            courier.send(flow, chunk("end", terminal=True))
            courier.flush()
            await wire.wait_refused()
            nursery.start_soon(jump)
    assert not wire.chunks
    assert courier.events() == []


async def test_what_is_said_after_the_close_is_dropped(wire: MemoryWire) -> None:
    async with open_courier(wire) as courier:
        pass
    courier.begin(Outflow("id", "r"))
    courier.receive(Inflow("id", "r"))
    courier.flush()
    assert courier.events() == []


# --- receiving --------------------------------------------------------------------------------------------


async def test_chunks_are_handed_over_in_order_ahead_of_what_was_taken_but_not_far(wire: MemoryWire) -> None:
    flow = Inflow("id", "r")
    for number in range(AHEAD + 3):
        wire.chunks["r", number] = codes(number)
    async with open_courier(wire) as courier:
        courier.receive(flow)
        courier.flush()
        first = await next_events(courier, AHEAD)
        await trio.testing.wait_all_tasks_blocked()
        assert courier.events() == []
        courier.credit(flow, 2)
        courier.flush()
        more = await next_events(courier, 2)
        assert courier.events() == []
    assert [event.payload for event in first + more if isinstance(event, Arrived)] == [
        codes(number) for number in range(AHEAD + 2)
    ]


async def test_nothing_is_asked_for_after_the_end(wire: MemoryWire) -> None:
    flow = Inflow("id", "r")
    wire.chunks["r", 0] = codes(1, finished=True)
    async with open_courier(wire) as courier:
        courier.receive(flow)
        courier.flush()
        assert len(await next_events(courier, 1)) == 1
        assert wire.waiting == 0


async def test_a_chunk_wakes_its_request_only(wire: MemoryWire) -> None:
    async with open_courier(wire) as courier:
        for at in range(200):
            courier.receive(Inflow(f"id{at}", f"r{at}"))
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        assert wire.waiting == 200
        wire.chunks["r7", 0] = codes(7)
        wire.change()
        (event,) = await next_events(courier, 1)
        assert event.flow.request_id == "id7"


async def test_the_rest_of_a_request_that_is_dropped_under_way_is_fetched_and_dropped(wire: MemoryWire) -> None:
    flow = Inflow("id", "r")
    wire.chunks["r", 0] = codes(0)
    async with open_courier(wire) as courier:
        courier.receive(flow)
        courier.flush()
        await next_events(courier, 1)
        courier.drop(flow)
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        wire.chunks |= {("r", 1): codes(1), ("r", 2): codes(2, finished=True)}
        wire.change()
        await trio.testing.wait_all_tasks_blocked()
        assert (wire.chunks, wire.waiting) == ({}, 0)
        assert courier.events() == []


async def test_it_is_not_fetched_when_a_new_request_of_its_name_comes_with_the_drop(wire: MemoryWire) -> None:
    old, new = Inflow("id", "r"), Inflow("id", "r")
    wire.chunks["r", 0] = codes(0)
    async with open_courier(wire) as courier:
        courier.receive(old)
        courier.flush()
        await next_events(courier, 1)
        courier.drop(old)
        courier.receive(new)
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        wire.chunks["r", 1] = codes(1)
        wire.change()
        await trio.testing.wait_all_tasks_blocked()
        assert wire.chunks == {("r", 1): codes(1)}, "a chunk of the new request was taken for one of the old"
        wire.chunks["r", 0] = codes(0)
        wire.change()
        assert [event.flow for event in await next_events(courier, 2)] == [new, new]


async def test_that_ends_for_a_new_request_of_its_name_and_after_a_while(
    wire: MemoryWire, clock: trio.testing.MockClock
) -> None:
    old, new = Inflow("id", "r"), Inflow("id", "r")
    wire.chunks["r", 0] = codes(0)
    async with open_courier(wire) as courier:
        for flow in (old, new):
            courier.receive(flow)
            courier.flush()
            await trio.testing.wait_all_tasks_blocked()
            assert wire.waiting == 1
            wire.chunks["r", 0] = codes(7)
            wire.change()
            await next_events(courier, 1)
            courier.drop(flow)
            courier.flush()
            await trio.testing.wait_all_tasks_blocked()
            assert wire.waiting == 1
        clock.jump(RECLAIM)
        await trio.testing.wait_all_tasks_blocked()
        assert wire.waiting == 0


async def test_a_request_that_is_dropped_leaves_its_first_chunk_with_the_sender(wire: MemoryWire) -> None:
    flow = Inflow("id", "r")
    async with open_courier(wire) as courier:
        courier.receive(flow)
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        courier.drop(flow)
        courier.drop(flow)
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        wire.chunks["r", 0] = codes(1)
        wire.change()
        await trio.testing.wait_all_tasks_blocked()
        assert courier.events() == []
    assert wire.chunks == {("r", 0): codes(1)}


@pytest.mark.parametrize(
    "error", [Expired("it expired", key="r_0_0"), ConnectorClosed("closed"), RuntimeError("what is this")]
)
async def test_what_cannot_be_had_is_told_with_its_reason_and_touches_no_other(
    wire: MemoryWire, error: Exception
) -> None:
    flow, other = Inflow("id", "r"), Inflow("id2", "q")
    wire.chunks["r", 0] = codes(0)
    async with open_courier(wire) as courier:
        courier.receive(flow)
        courier.flush()
        await next_events(courier, 1)
        wire.failures.append(error)
        wire.lost.add(("r", 1))
        wire.change()
        (event,) = await next_events(courier, 1)
        assert isinstance(event, Broken)
        assert event.flow is flow
        wire.failures.clear()
        courier.receive(other)
        courier.flush()
        wire.chunks["q", 0] = codes(5)
        wire.change()
        (event,) = await next_events(courier, 1)
        assert event == Arrived(other, codes(5))


async def test_a_notice_of_an_earlier_request_of_this_name_is_not_taken_for_one_of_this(wire: MemoryWire) -> None:
    flow = Inflow("id", "r")
    wire.failures.append(Gone("cleaned up", key="r_0_0"))
    async with open_courier(wire) as courier:
        courier.receive(flow)
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        wire.chunks["r", 0] = codes(1)
        wire.change()
        assert await next_events(courier, 1) == [Arrived(flow, codes(1))]


async def test_what_was_told_to_a_take_that_was_cancelled_is_not_told_to_the_next_life(
    wire: MemoryWire, clock: trio.testing.MockClock
) -> None:
    old, new = Inflow("id", "r"), Inflow("id", "r")
    wire.chunks["r", 0] = codes(0)
    async with open_courier(wire) as courier:
        courier.receive(old)
        courier.flush()
        await next_events(courier, 1)
        courier.drop(old)
        wire.told["r", 1] = Gone("nothing comes", key="r")
        courier.receive(new)
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
        wire.chunks.update({("r", number): codes(number, finished=number == 1) for number in range(2)})
        wire.change()
        assert all(isinstance(event, Arrived) for event in await next_events(courier, 2))


async def test_a_transfer_that_failed_is_asked_for_again(wire: MemoryWire, clock: trio.testing.MockClock) -> None:
    flow = Inflow("id", "r")
    wire.failures += [TransferFailed("once"), TransferFailed("twice")]
    wire.chunks["r", 0] = codes(1)
    async with open_courier(wire) as courier:
        courier.receive(flow)
        courier.flush()
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(PAUSE)
        assert await next_events(courier, 1) == [Arrived(flow, codes(1))]


async def test_a_close_ends_what_waits_and_tells_nothing(wire: MemoryWire) -> None:
    async with open_courier(wire) as courier:
        courier.receive(Inflow("id", "r"))
        courier.flush()
        await trio.testing.wait_all_tasks_blocked()
    assert wire.waiting == 0
    assert courier.events() == []
