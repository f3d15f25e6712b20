"""What cannot arrive as it is, is refused where it is put, by its path."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch
from payloads import (
    WRAPPERS,
    Cell,
    Frame,
    Pair,
    bits,
    frame,
    refusal,
    sent,
)

from trio_mori._payload import plan
from trio_mori._payload_format import MAX_DEPTH

pytestmark = pytest.mark.deterministic


class Text(str):
    __slots__ = ()


class Names(list):  # type: ignore[type-arg]
    pass


class Color(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"a": ["\ud800"]}, "payload['a'][0]"),
        ({"a\udfff": 1}, r"payload['a\udfff']"),
        ({1: {"x", "\ud800"}}, r"payload[1]{'\ud800'}"),
        ([defaultdict(int)], "payload[0]"),
        ({"c": Counter("a")}, "payload['c']"),
        ([Text("a")], "payload[0]"),
        ([0, Names()], "payload[1]"),
        ((Color.RED,), "payload[0]"),
        ({"f": print}, "payload['f']"),
        ([Frame], "payload[0]"),
        ([Cell(SimpleNamespace())], "payload[0].value"),
        ([Pair(1, object())], "payload[0].second"),
        (frame({(1, 2): object()}), "payload.codes[(1, 2)]"),
        ({Color.RED: 1}, "payload[<Color.RED: 1>]"),
        ({frozenset()}, "payload{frozenset()}"),
        (OrderedDict([((1, Text("k")), 1)]), "payload[(1, 'k')]"),
        (object.__new__(Frame), "payload.codes"),
        (slice(0, object()), "payload[1]"),
        ([torch.Size([1 << 63])], "payload[0]"),
        ({"a": torch.Size([-(1 << 63) - 1])}, "payload['a']"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_path(data: object, path: str) -> None:
    assert refusal(data).path == path


def test_an_instance_with_content_beside_its_fields_is_refused() -> None:
    made = frame(1)
    made.extra = 2  # type: ignore[attr-defined]
    assert refusal([made]).path == "payload[0].extra"


def test_a_structure_that_contains_itself_is_named_as_that() -> None:
    inner: dict[str, object] = {}
    inner["again"] = [inner]
    error = refusal({"top": inner})
    assert error.path == "payload['top']['again'][0]"
    assert "payload['top'] again" in str(error)
    cell = Cell(None)
    cell.value = cell
    assert refusal(cell).path == "payload.value"


def nested(depth: int, wrap: Callable[[object], object]) -> object:
    value: object = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_structure_may_be_so_deep_and_no_deeper(wrapper: str) -> None:
    deepest = nested(MAX_DEPTH, WRAPPERS[wrapper])
    assert bits(sent(deepest).value) == bits(deepest)
    error = refusal(nested(MAX_DEPTH + 1, WRAPPERS[wrapper]))
    assert f"more than {MAX_DEPTH} deep" in str(error)


def test_a_key_that_is_too_deep_is_refused() -> None:
    key = nested(MAX_DEPTH + 1, lambda value: (value,))
    assert "deep" in str(refusal({key: 1}))
    assert "deep" in str(refusal([{key}]))


def test_a_dict_with_keys_of_several_kinds_sends_each_part_once() -> None:
    assert plan({"a": torch.ones(1000), 1: None}).size == 4000


def test_a_description_that_no_receiver_accepts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mori._payload_plan.MAX_NODES", 10_000)
    monkeypatch.setattr("trio_mori._payload_scan._UNCOUNTED", 0)
    tensor = torch.ones((1,) * 64)
    assert "fewer and larger" in str(refusal([tensor] * 1000))


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mori._payload_skeleton.MAX_NODES", 100)
    assert plan([0] * 99).size == 0
    assert refusal([0] * 100).path == "payload[99]"
    assert plan(set(range(99))).size == 0
    assert "100 values" in str(refusal(set(range(100))))
    assert "100 values" in str(refusal({1: 0, tuple(range(100)): 0}))
