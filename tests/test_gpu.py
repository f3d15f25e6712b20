"""Waiting for a moment of a GPU: soon noticed, beside other tasks, and cancellable."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import trio
from trio.testing import MockClock, assert_checkpoints

from trio_mori import EngineUnavailable, _gpu, open_connector
from trio_mori._gpu import Mark, check_device, is_over_soon, take_side_stream, wait_over

pytestmark = pytest.mark.deterministic


class Questions:
    """A moment that has come when it was asked after so often."""

    def __init__(self, count: float) -> None:
        self.asked = 0
        self._count = count

    def query(self) -> bool:
        self.asked += 1
        return self.asked >= self._count


async def test_what_is_over_is_asked_after_once_and_waiting_for_it_is_a_checkpoint() -> None:
    moment = Questions(1)
    with assert_checkpoints():
        await wait_over(moment)
    assert moment.asked == 1


async def test_others_run_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    microseconds = itertools.count()  # however long a question takes here
    monkeypatch.setattr(_gpu, "time", SimpleNamespace(perf_counter=lambda: next(microseconds) * 1e-6))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await wait_over(Questions(200))
        nursery.cancel_scope.cancel()
    assert turns > 10


async def test_what_takes_long_is_asked_after_by_a_timer(autojump_clock: MockClock) -> None:
    moment = Questions(float("inf"))
    with trio.move_on_after(10) as scope:
        await wait_over(moment)
    assert scope.cancelled_caught
    assert moment.asked < 100_000  # ten seconds without a pause are millions


async def test_a_wait_in_a_cancelled_scope_does_not_even_begin() -> None:
    moment = Questions(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await wait_over(moment)
    assert scope.cancelled_caught
    assert not moment.asked


async def test_a_gpu_that_has_failed_says_so() -> None:
    class Failed:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        await wait_over(Failed())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        is_over_soon(Failed())


def test_a_moment_is_looked_for_in_place_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    microseconds = itertools.count()
    monkeypatch.setattr(_gpu, "time", SimpleNamespace(perf_counter=lambda: next(microseconds) * 1e-6))
    assert is_over_soon(Questions(20))
    never = Questions(float("inf"))
    assert not is_over_soon(never)
    assert never.asked < 40  # SPIN


def test_an_event_serves_for_another_moment_when_its_own_has_come_and_once() -> None:
    event, spare = Questions(3), []
    moment = Mark(event, spare)  # type: ignore[arg-type]
    assert not moment.query()
    assert not moment.query()
    assert spare == []
    assert moment.query()
    assert spare == [event]
    assert moment.query()
    assert spare == [event]
    assert event.asked == 3


def test_what_has_a_stream_of_its_own_is_not_put_behind_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        is_idle = True

        def __init__(self, device: torch.device) -> None:
            self.device = device

    device = torch.device("cuda:63")
    monkeypatch.setattr(_gpu, "SideStream", Stream)
    try:
        first = take_side_stream(device)
        assert take_side_stream(device) is first
        first.is_idle = False  # type: ignore[misc]
        second = take_side_stream(device)
        assert second is not first
        assert take_side_stream(device) is second
        streams = {first}
        for _ in range(100):
            stream = take_side_stream(device)
            stream.is_idle = False  # type: ignore[misc]
            streams.add(stream)
        assert len(streams) == 32
    finally:
        _gpu._side_streams.cache_clear()


async def test_a_gpu_for_payloads_that_is_not_there_keeps_a_receiver_from_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device("cuda:0")
    config = {"zmq_port": 0, "memory_pool_size": 1 << 20, "payload_device": "cuda:1"}
    with pytest.raises(
        EngineUnavailable, match=r"payload_device: cuda:1 is not there: .* sees 1 GPUs .*give pool or cpu"
    ):
        async with open_connector({**config, "role": "receiver"}):
            raise AssertionError
    async with open_connector({**config, "role": "sender"}):
        pass
