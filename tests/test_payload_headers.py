"""Struct types and headers: only listed types are made, and what no sender can have written is junk."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import msgspec
import payloads
import pytest
import torch
from payloads import (
    STRUCTS,
    Cell,
    Frozen,
    Pair,
    Record,
    bits,
    frame,
    guarded,
    packed,
    sent,
    tensor_of,
)

from trio_mori import ConfigError, RemoteProtocolError
from trio_mori._payload import plan, restore
from trio_mori._payload_format import INLINE_HEADER
from trio_mori._payload_scan import bound_items

deterministic = pytest.mark.deterministic

NOTHING = torch.empty(0, dtype=torch.uint8)


@deterministic
def test_a_type_that_is_not_listed_arrives_as_a_dict_and_is_named() -> None:
    data = [frame(Cell(1), "n"), Frozen(2), Record(3), Pair(4, 5)]
    arrived = sent(data, ())
    assert arrived.value == [
        {"codes": {"value": 1, "count": 3}, "note": "n"},
        {"x": 2, "y": 1},
        {"value": 3, "note": "none"},
        (4, 5),
    ]
    assert type(arrived.value[3]) is tuple  # type: ignore[index]
    assert arrived.unknown_types == tuple(f"payloads:{name}" for name in ("Cell", "Frame", "Frozen", "Pair", "Record"))
    assert sent(data, [Cell, Pair]).unknown_types == ("payloads:Frame", "payloads:Frozen", "payloads:Record")
    assert sent(data).unknown_types == ()


def header_of(flavour: int, name: str, fields: list[str], values: list[object]) -> bytes:
    row = [flavour, name, fields, fields, False, None, None]
    return b"\x01" + msgspec.msgpack.encode([[row], [15, 0, None, *values]])


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "wave:Wave_read", "builtins:eval", "", "a.b.c"])
@pytest.mark.parametrize("flavour", [0, 1, 2, 3])
def test_a_name_from_the_wire_is_neither_imported_nor_called(name: str, flavour: int) -> None:
    loaded = set(sys.modules)
    arrived = restore(header_of(flavour, name, ["command"], ["true"]), NOTHING, payload_types=STRUCTS)
    assert arrived.value == (("true",) if flavour == 3 else {"command": "true"})
    assert arrived.unknown_types == (name,)
    assert set(sys.modules) == loaded


@deterministic
@pytest.mark.parametrize(
    "header",
    [
        header_of(0, "payloads:Frame", ["codes"], [1]),
        header_of(0, "payloads:Frame", ["codes", "__class__"], [1, 2]),
        header_of(1, "payloads:Frame", ["codes", "note"], [1, 2]),
        header_of(2, "payloads:Record", ["value", "notes"], [1]),
        header_of(3, "payloads:Pair", ["first", "third"], [1, 2]),
    ],
)
def test_a_listed_type_with_other_fields_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        restore(header, NOTHING, payload_types=STRUCTS)


@deterministic
def test_fields_are_matched_by_name() -> None:
    arrived = restore(header_of(3, "payloads:Pair", ["second", "first"], [2, 1]), NOTHING, payload_types=[Pair])
    assert arrived.value == Pair(1, 2)


@deterministic
def test_a_listed_type_that_is_no_struct_is_a_mistake_of_this_side() -> None:
    with pytest.raises(ConfigError, match="remove it"):
        restore(header_of(0, "builtins:int", ["x"], [1]), NOTHING, payload_types=[int])


class Strict(msgspec.Struct):
    value: object = None

    def __post_init__(self) -> None:
        self.value = "changed"


@attrs.frozen(cache_hash=True)
class Hashed:
    value: object = attrs.field(validator=attrs.validators.instance_of(int))


@deterministic
def test_no_constructor_changes_what_was_sent() -> None:
    strict, hashed = Strict(), object.__new__(Hashed)
    strict.value = "sent"
    object.__setattr__(hashed, "value", "no int")
    arrived: Any = sent([strict, hashed], [Strict, Hashed]).value
    assert arrived[0].value == "sent"
    assert arrived[1].value == "no int"
    assert hash(arrived[1]) == hash(arrived[1])


@deterministic
def test_the_header_of_a_structure_is_these_bytes() -> None:
    data = {"a": [1, None], "t": torch.ones(2), "p": Frozen(b"x", (-1,))}
    row = b"\x97\x00" + b"\xafpayloads:Frozen" + b"\x92\xa1x\xa1y" * 2 + b"\xc2\xc0\xc0"
    skeleton = (
        *(b"\x83", b"\xa1a\x93\x00\x01\xc0", b"\xa1t\x94\x0b\xa7float32\x91\x02\x00"),
        b"\xa1p\x95\x0f\x00\xc0\xc4\x01x\x92\x01\xff",
    )
    header, body = packed(data)
    assert header == b"\x01\x92\x91" + row + b"".join(skeleton)
    assert body == b"\x00\x00\x80\x3f" * 2


@deterministic
def test_a_long_header_lies_in_the_pool() -> None:
    data = {"names": [f"name {index}" for index in range(5000)], "t": tensor_of(torch.int16, 33)}
    made = plan(data)
    assert len(made.header) < 20
    assert made.size > INLINE_HEADER
    assert bits(sent(data).value) == bits(data)
    assert bits(sent(["x" * INLINE_HEADER]).value) == bits(["x" * INLINE_HEADER])
    assert plan(["x" * (INLINE_HEADER // 2)]).size == 0


@deterministic
def test_a_header_that_points_at_another_pointer_is_junk() -> None:
    pointer = b"\x01\x92\x00\x04"
    with pytest.raises(RemoteProtocolError):
        restore(pointer, guarded(pointer, 0))


@pytest.mark.parametrize(
    "skeleton",
    [
        *([], [21], [-1], [True], ["list"], {1: 2}, [3, [0]], [2, 1], [2, [0], 1], [5, 1, 2], [6, 1, 2], [7, 1], [7]),
        *([8, 0, 1], [8, 0, -1], [8, -1, 0], [8, 1 << 63, 1], [8, 0], [9, 0, 1], [10, 0.0, 0], [8, "0", 0]),
        *([11, "float32", [1], 0], [11, "float33", [0], 0], [11, [], [0], 0], [11, "float32", [-1], 0]),
        *([11, "float32", [-1, -1], 0], [11, "float32", [1 << 62, 0, 1 << 62], 0], [11, "float32", [0] * 65, 0]),
        *([11, "float32", 0, 0], [11, "float32", [True], 0], [11, "qint8", [0], 0], [11, "float32", [0]]),
        *(
            [12, "<f4", [1], 0],
            [12, "O", [0], 0],
            [12, "<f4,<f4", [0], 0],
            [12, 4, [0], 0],
            [12, "|S999999999", [9], 0],
        ),
        *([13, "<f4", b"123"], [13, "<f4", "1234"], [13, "|S1", b""], [13, "<U1", b"\xff\xff\xff\xff"]),
        *([14, "RGB", 1, 1, 0], [14, "P", 1, 1, 0], [14, "L", 0, 1, 0], [14, "L", -1, -1, 0], [14, "L", 1 << 40, 1, 0]),
        # One key or item twice, also where two that differ are equal.
        *([2, 0, 1, 0, 2], [2, 1, 0, 1.0, 0], [19, "a", 0, "a", 0], [3, 5, 5], [3, 1, True], [4, "a", "a"]),
        *([15], [15, 0, None], [15, "0", None], [17, "nothing"], [17, 1], [18, "toaster"]),
        *(
            [18, "cuda:999999999"],
            [18, 0],
            [18, "cuda:-1"],
            [20, 1],
            [16, 1 << 63],
            [13, "<M8[0s]", b"12345678"],
            msgspec.msgpack.Ext(5, b"x"),
        ),
    ],
)
def test_a_skeleton_that_no_sender_makes_is_junk(skeleton: object) -> None:
    header = b"\x01" + msgspec.msgpack.encode([[], skeleton])
    with pytest.raises(RemoteProtocolError):
        restore(header, NOTHING)


@deterministic
def test_a_tensor_at_an_odd_offset_is_copied_but_is_no_view() -> None:
    header = b"\x01" + msgspec.msgpack.encode([[], [11, "int16", [2], 1]])
    area = guarded(bytes(range(5)), 0)
    assert bits(restore(header, area).value) == bits(torch.tensor([0x0201, 0x0403], dtype=torch.int16))
    with pytest.raises(RemoteProtocolError, match="offset 1"):
        restore(header, area, copy=False)


@deterministic
@pytest.mark.parametrize("header", [b"", b"\x01", b"\x02\x92\x90\x01", b"\x01\x92\x90", b"\x01\x91\x90", b"\x01\xc1"])
def test_a_header_of_another_version_or_cut_short_is_junk(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        restore(header, NOTHING)


@deterministic
def test_a_small_header_cannot_ask_for_much_memory() -> None:
    many = b"\x90" * (1 << 20) + b"\xc4\x00" * 2
    with pytest.raises(RemoteProtocolError, match="more than 1000 items"):
        bound_items(many, limit=1000)
    deep = b"\x01\x92\x90" + b"\x92\x00" * 500 + b"\x00"
    with pytest.raises(RemoteProtocolError):
        restore(deep, NOTHING)


@deterministic
@pytest.mark.parametrize(
    "part", [[11, "uint8", [600], 0], [8, 0, 600], [9, 0, 600], [12, "|u1", [600], 0], [14, "L", 600, 1, 0]]
)
@pytest.mark.parametrize("copy", [False, True])
def test_parts_that_add_up_to_more_than_what_came_are_junk(part: list[object], copy: bool) -> None:
    area = guarded(bytes(1000), 0)
    restore(b"\x01" + msgspec.msgpack.encode([[], [0, part]]), area, copy=copy)
    with pytest.raises(RemoteProtocolError, match="add up to more than the 1000 bytes"):
        restore(b"\x01" + msgspec.msgpack.encode([[], [0, part, part]]), area, copy=copy)


@deterministic
def test_what_a_caller_lists_by_name_is_restored_by_that_name() -> None:
    header = header_of(0, "old.module:Frozen", ["x", "y"], [1, 2])
    assert restore(header, NOTHING, payload_types={"old.module:Frozen": payloads.Frozen}).value == Frozen(1, 2)
