"""What counts as growth: of looks that are made up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from .holdings import Look, complaints


def looks(count: int, memory: Callable[[int], float]) -> list[Look]:
    """One every two seconds."""
    return [Look(2.0 * number, int(memory(number)), Counter(socket=9)) for number in range(count)]


def test_memory_that_comes_and_goes_is_no_growth() -> None:
    chance = random.Random(6)
    flat = looks(150, lambda number: 500e6 + chance.choice((0, 0, 64e6)) + chance.uniform(0, 1e6))
    assert list(complaints(flat)) == []


def test_memory_that_fills_in_the_first_third_is_no_growth() -> None:
    assert list(complaints(looks(30, lambda number: 500e6 + 20e6 * min(number, 10)))) == []


@pytest.mark.parametrize(("count", "rate"), [(30, 0.5e6), (150, 0.05e6), (20_000, 500.0)])
def test_a_leak_is_found_however_slow_it_is_once_the_run_is_long_enough(count: int, rate: float) -> None:
    chance = random.Random(6)
    leaking = looks(count, lambda number: 500e6 + 2 * rate * number + chance.uniform(0, 1e6))
    (found,) = complaints(leaking)
    assert found.startswith("grew by ")


def test_too_few_looks_and_too_much_unrest_say_nothing_and_say_so() -> None:
    (few,) = complaints(looks(10, lambda number: 500e6))
    assert few.startswith("was looked at 10 times: too few")
    chance = random.Random(6)
    unrest, *_ = complaints(looks(15, lambda number: 500e6 + chance.uniform(0, 200e6)))
    assert unrest.startswith("has memory too unsteady")


def test_one_descriptor_more_is_found_though_another_kind_has_become_fewer() -> None:
    some = looks(12, lambda number: 500e6)
    some[-1].descriptors.update({"/dev/null": 1, "socket": -2})
    assert list(complaints(some)) == ["has more descriptors than before: {'/dev/null': 1}"]
