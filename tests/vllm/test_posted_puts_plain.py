"""Small puts that have returned already: what becomes of them when the loop comes to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked
from trio_mori_vllm_omni._posted_puts import MAX_POSTED, PostedPuts, Put
from trio_mori_vllm_omni._reasons import Reasons

from trio_mori import Connector, ConnectorClosed, KeyBusy, NoRoom, NotReady, plan_payload

pytestmark = pytest.mark.deterministic


class FakeCore:
    """A sender whose room the test decides about."""

    def __init__(self) -> None:
        self.has_room = True
        self.refusal: Exception = NoRoom("no piece is large enough", size=1, free=0)
        self.room = trio.Event()
        self.kept: list[str] = []

    def has_place(self, from_stage: str, to_stage: str, key: str, size: int) -> bool:
        return self.has_room and key not in self.kept

    def put_nowait(self, put: Put) -> None:
        if not self.room.is_set():
            raise self.refusal
        self.kept.append(put.key)

    async def put(self, from_stage: str, to_stage: str, key: str, plan: object) -> None:
        await self.room.wait()
        self.kept.append(key)

    def cleanup_nowait(self, name: str, from_stage: str, to_stage: str) -> None:
        with suppress(ValueError):
            self.kept.remove(name)


class Desk:
    """Posted puts, and the loop that comes to them when the test says so."""

    def __init__(self, nursery: trio.Nursery, put_nowait: Callable[[Put], object] | None = None) -> None:
        self.core = FakeCore()
        self.reasons = Reasons(0)
        self.puts = PostedPuts(put_nowait or self.core.put_nowait, nursery, self.reasons)
        self._posted: list[Callable[[], Any]] = []

    def post(self, key: str) -> bool:
        return self.puts.post(self._posted.append, cast(Connector, self.core), put_of(key))

    def come(self) -> None:
        """The loop comes to what was posted."""
        posted, self._posted = self._posted, []
        for each in posted:
            each()

    @property
    def wakes(self) -> int:
        """How often the loop was woken since it came last."""
        return len(self._posted)


def put_of(key: str) -> Put:
    return Put("0", "1", key, plan_payload({"t": torch.arange(3)}), None)


async def test_a_burst_wakes_the_loop_once_and_is_put_in_order() -> None:
    async with trio.open_nursery() as nursery:
        desk = Desk(nursery)
        desk.core.room.set()
        assert all(desk.post(key) for key in "abc")
        assert desk.wakes == 1
        desk.come()
        assert desk.core.kept == ["a", "b", "c"]


async def test_what_may_be_refused_is_not_taken() -> None:
    async with trio.open_nursery() as nursery:
        desk = Desk(nursery)
        assert desk.post("a")
        assert not desk.post("a"), "its key is another's"
        desk.core.has_room = False
        assert not desk.post("b")
        desk.core.has_room = True
        assert all(desk.post(f"c{number}") for number in range(MAX_POSTED - 1))
        assert not desk.post("d"), "the loop is behind"
        desk.core.room.set()
        desk.come()
        assert desk.post("b")
        assert not desk.post("a"), "it lies there"


@pytest.mark.parametrize("refusal", [NoRoom("no piece is large enough", size=1, free=0), NotReady("no address")])
async def test_one_without_room_or_address_waits_and_keeps_its_key(refusal: Exception) -> None:
    async with trio.open_nursery() as nursery:
        desk = Desk(nursery)
        desk.core.refusal = refusal
        assert desk.post("a")
        desk.come()
        with pytest.raises(KeyBusy, match="'a' refused: the payload that was put before waits for room"):
            desk.puts.check_free(put_of("a"))
        desk.puts.check_free(put_of("b"))
        await wait_all_tasks_blocked()
        desk.core.room.set()
        await wait_all_tasks_blocked()
        assert desk.core.kept == ["a"]
        desk.puts.check_free(put_of("a"))


@pytest.mark.parametrize("has_come", [False, True])
async def test_one_that_waits_for_room_is_given_up_with_its_request(has_come: bool) -> None:
    async with trio.open_nursery() as nursery:
        desk = Desk(nursery)
        assert desk.post("r_0_1")
        desk.come()
        await wait_all_tasks_blocked()
        if has_come:
            desk.core.room.set()
        desk.puts.drop("other", None)
        desk.puts.drop("r", ("0", "1"))
        await wait_all_tasks_blocked()
        assert desk.core.kept == []
        assert desk.post("r_0_1")
        desk.core.room.set()
        desk.come()
        assert desk.core.kept == ["r_0_1"]


@pytest.mark.parametrize("error", [ConnectorClosed("closed meanwhile"), ZeroDivisionError()])
async def test_one_that_failed_is_told_and_does_not_keep_its_key(error: Exception) -> None:
    def fail(put: Put) -> None:
        raise error

    async with trio.open_nursery() as nursery:
        desk = Desk(nursery, fail)
        assert desk.post("a")
        with suppress(ZeroDivisionError):  # the loop logs it
            desk.come()
        assert desk.post("a")
        told = [] if isinstance(error, ZeroDivisionError) else ["put: ConnectorClosed"]
        assert list(desk.reasons.as_dict()) == told
