"""Connectors that many threads use at once."""

from __future__ import annotations

import itertools
import os
import threading
import time

import attrs
import torch
from sync_pair import LIMIT, eventually, is_whole, open_pair, refusals
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from trio_mori_vllm_omni._sync import SyncConnector


@attrs.frozen
class Got:
    """What a get returned, and when."""

    key: int
    value: object
    asked: int
    answered: int


class History:
    """Which puts of each key succeeded, and when, to say whether gets returned what they may."""

    def __init__(self, keys: int) -> None:
        self._puts: list[dict[int, tuple[int, int]]] = [{} for _ in range(keys)]  # version -> begin and end
        self._numbers = itertools.count(1)

    @staticmethod
    def value(key: int, version: int) -> dict[str, object]:
        """A payload that no other put has, of a length of its own."""
        return {"key": key, "v": torch.arange(version, version + (version * 7919 + key) % 3000 + 1)}

    def put(self, connector: SyncConnector, key: int) -> None:
        version, begun = next(self._numbers), time.monotonic_ns()
        done, _, _ = connector.put("0", "1", f"k{key}_0_0", self.value(key, version))
        if done:
            self._puts[key][version] = begun, time.monotonic_ns()

    def check(self, gets: list[Got]) -> None:
        """Each payload byte for byte, once, and the latest of its key at some time since it was asked for.

        A get is asked for when the payload before it is taken, at the earliest. What has arrived is delivered also if
        its key is put again before it is taken: then the next get has the new one.
        """
        seen: set[int] = set()
        taken: dict[int, list[Got]] = {}
        for got in sorted(gets, key=lambda each: each.asked):
            assert isinstance(got.value, dict)
            version, puts = int(got.value["v"][0]), self._puts[got.key]
            expected = self.value(got.key, version)["v"]
            assert got.value["key"] == got.key
            assert isinstance(expected, torch.Tensor)
            assert torch.equal(got.value["v"], expected)
            assert version not in seen, "delivered twice"
            seen.add(version)
            begun, ended = puts[version]
            assert begun < got.answered
            earlier = taken.setdefault(got.key, [])
            since = max((g.asked for g in earlier if g.answered < got.asked), default=0)
            earlier.append(got)
            replaced = [other for other, (start, end) in puts.items() if ended < start and end < since]
            assert not replaced, f"version {version} of k{got.key} came after {replaced}"


def test_sixteen_threads_get_the_latest_put_or_nothing_and_leave_both_pools_free() -> None:
    """For longer: TRIO_MORI_STRESS_SECONDS=60, as the gate does."""
    keys, threads = 200, 16
    with open_pair(memory_pool_size=8 << 20) as (up, down):
        stop = time.monotonic() + float(os.environ.get("TRIO_MORI_STRESS_SECONDS", "2"))
        errors: list[BaseException] = []
        history = History(keys)
        gets: list[Got] = []

        def act(state: int) -> None:
            key, kind = state % keys, (state >> 8) % 12
            name = f"k{key}_0_0"
            if kind < 4:
                history.put(up, key)
            elif kind < 9:
                asked = time.monotonic_ns()
                result = down.get("0", "1", name)
                if result is not None:
                    gets.append(Got(key, result[0], asked, time.monotonic_ns()))
            elif kind == 9:
                up.cleanup(name)
            elif kind == 10:
                up.forget_request(f"k{key}")
            else:
                assert {down.health()["status"], up.health()["status"]} <= {"healthy", "degraded"}
                down.abandon_get(name)

        def run(state: int) -> None:
            try:
                while time.monotonic() < stop:
                    state = (1103515245 * state + 12345) % (1 << 31)
                    act(state)
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        running = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(2 * LIMIT + 60)
        assert errors == []
        assert gets
        history.check(gets)
        assert set(refusals(up)) <= {"put: KeyBusy", "put: NoRoom"}
        assert set(refusals(down)) <= {"get: Gone"}
        for key in range(keys):
            up.cleanup(f"k{key}_0_0")
            down.abandon_get(f"k{key}_0_0")
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")
