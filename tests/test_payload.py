"""A payload arrives bit for bit, in type, structure and order, and shares memory with nothing."""

from __future__ import annotations

import _ctypes
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import product
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from payloads import (
    EVERY_LAYOUT,
    WRAPPERS,
    Cell,
    Frozen,
    Pair,
    Record,
    bits,
    frame,
    guarded,
    layouts,
    packed,
    refusal,
    sent,
    tensor_of,
)
from PIL import Image

from trio_mori import UnsupportedPayload, _payload_copy
from trio_mori._payload import plan, restore
from trio_mori._payload_copy import KEEPS_GIL, memmove, new_tensor
from trio_mori._payload_format import ALIGNMENT, DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
deterministic = pytest.mark.deterministic


def often(values: Sequence[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """The values as parameters, of which only some are run a thousand times: each kind, but not with each other."""
    return [pytest.param(*value, marks=[deterministic] if chosen(value) else []) for value in values]


@pytest.mark.parametrize(
    ("name", "layout"), often(EVERY_LAYOUT, lambda each: each[0] == "complex64" or each[1] == "transposed")
)
def test_a_tensor_arrives_alone_or_is_refused_as_empty(name: str, layout: str) -> None:
    tensor = dict(layouts(DTYPES[name]))[layout]
    if not tensor.numel():
        assert refusal(tensor).path == "payload"
        assert "empty" in str(refusal(tensor))
        return
    assert plan(tensor).is_raw
    assert plan(tensor).size == tensor.numel() * tensor.itemsize
    arrived = sent(tensor).value
    assert bits(arrived) == bits(tensor)
    assert type(arrived) is torch.Tensor
    assert not arrived.requires_grad
    assert arrived.is_contiguous()


@pytest.mark.parametrize(
    ("name", "wrapper"),
    often(list(product(DTYPES, WRAPPERS)), lambda each: each[0] == "complex64" or each[1] == "attrs"),
)
def test_a_tensor_arrives_inside_a_structure(name: str, wrapper: str) -> None:
    for layout, tensor in layouts(DTYPES[name]):
        data = WRAPPERS[wrapper](tensor)
        assert bits(sent(data).value) == bits(data), layout


@deterministic
def test_a_large_transposed_tensor_is_copied_in_pieces() -> None:
    tensor = tensor_of(torch.bfloat16, 300, 5, 400).permute(2, 1, 0)
    assert bits(sent(tensor).value) == bits(tensor)


class Tagged(torch.Tensor):
    """A tensor with a meaning of its own."""


@deterministic
@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.empty(3, device="meta"), "on meta"),
        (torch.ones(2).as_subclass(Tagged), "Tagged"),
        (torch.empty(2, dtype=torch.uint8).view(torch.bits8), "bits8"),
        (torch.ones((1,) * 65), "65 dimensions"),
    ],
)
def test_a_tensor_that_cannot_arrive_bit_for_bit_is_refused(tensor: torch.Tensor, reason: str) -> None:
    assert reason in str(refusal(tensor))
    assert refusal({"a": [0, tensor]}).path == "payload['a'][1]"


@deterministic
def test_storage_freed_after_planning_is_refused_and_not_read() -> None:
    tensor = torch.ones(1000)
    made = plan([tensor])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedPayload, match="lost its memory"):
        made.copy_into(torch.empty(made.size, dtype=torch.uint8))


@deterministic
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.resize_(2, 2),
        lambda tensor: tensor.set_(torch.zeros(1, dtype=torch.int32)),
        lambda tensor: setattr(tensor, "data", torch.zeros(9, dtype=torch.int32)),
    ],
    ids=["transposed", "resized", "set", "data"],
)
@pytest.mark.parametrize("permuted", [False, True])
def test_a_tensor_arrives_in_the_shape_in_which_it_was_planned(
    change: Callable[[torch.Tensor], object], permuted: bool
) -> None:
    tensor = tensor_of(torch.int32, 40, 50)
    tensor = tensor.t() if permuted else tensor
    before = bits(tensor)
    made = plan([tensor])
    change(tensor)
    area = torch.empty(made.size, dtype=torch.uint8)
    made.copy_into(area)
    (arrived,) = restore(made.header, area).value  # type: ignore[misc]
    assert bits(arrived) == before


@deterministic
def test_an_image_made_smaller_after_planning_is_refused_and_not_read() -> None:
    image = Image.new("RGB", (100, 100))
    made = plan([image])
    image.thumbnail((10, 10))
    with pytest.raises(UnsupportedPayload, match="leave its size alone"):
        made.copy_into(torch.empty(made.size, dtype=torch.uint8))


@deterministic
@pytest.mark.parametrize("size", [99, 101])
def test_a_bytearray_that_changed_its_length_after_planning_is_refused_and_not_read(size: int) -> None:
    data = bytearray(100)
    made = plan(data)
    data[:] = bytes(size)
    with pytest.raises(UnsupportedPayload, match="leave its length alone"):
        made.copy_into(torch.empty(made.size, dtype=torch.uint8))


@deterministic
def test_a_complex_half_arrives_without_a_warning_of_torch() -> None:
    header, body = packed([tensor_of(torch.complex32, 3)])
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (arrived,) = restore(header, guarded(body, 0)).value  # type: ignore[misc]
    finally:
        torch.set_warn_always(always)
    assert bits(arrived) == bits(tensor_of(torch.complex32, 3))


@deterministic
def test_the_source_may_change_once_it_was_copied() -> None:
    tensor, array, buffer = tensor_of(torch.int32, 9), np.arange(9), bytearray(b"x" * 99)
    data = {"t": tensor, "a": array, "b": buffer, "l": [1]}
    before = bits(data)
    header, body = packed(data)
    tensor.zero_(), array.fill(0), buffer.clear(), data["l"].append(2)  # type: ignore[attr-defined]
    assert bits(restore(header, guarded(body, 0)).value) == before


@deterministic
def test_what_arrived_shares_memory_neither_with_the_source_nor_with_each_other() -> None:
    shared = tensor_of(torch.float32, 8)
    data = [shared, shared, shared[2:], np.arange(8), bytearray(100), b"y" * 100, tensor_of(torch.uint8, 1 << 20)]
    header, body = packed(data)
    area = guarded(body, 0)
    arrived: Any = restore(header, area).value
    for changed in (0, 3, 4):
        expected = [bits(each) for each in arrived]
        arrived[changed][:] = arrived[changed][::-1] if changed else 0
        for index, each in enumerate(arrived):
            assert index == changed or bits(each) == expected[index]
    assert bytes(area.numpy()) == body
    assert arrived[0].untyped_storage().nbytes() == 32, "a small tensor does not keep a large one"


@deterministic
def test_without_copying_tensors_are_views_of_the_bytes() -> None:
    header, body = packed({"a": tensor_of(torch.bfloat16, 5), "b": [tensor_of(torch.complex128, 2, 2)], "c": b"1" * 70})
    area = guarded(body, 0)
    value: Any = restore(header, area, copy=False).value
    for each in (value["a"], value["b"][0]):
        assert area.data_ptr() <= each.data_ptr() < area.data_ptr() + area.numel()
    assert bits(value["a"]) == bits(tensor_of(torch.bfloat16, 5))
    assert bits(value["b"][0]) == bits(tensor_of(torch.complex128, 2, 2))
    area.fill_(0)
    assert not value["a"].any()
    assert value["c"] == b"1" * 70


@deterministic
def test_large_parts_lie_aligned_and_short_bytes_need_no_pool() -> None:
    made = plan([b"a" * 65, torch.ones(3), bytearray(1), {"x": torch.ones(2)}])
    assert [leaf.offset % ALIGNMENT for leaf in made._leaves] == [0, 0, 0, 0]
    assert not made.is_raw
    assert plan([b"a" * 64, "b" * 1000, 1]).size == 0


NAN = np.uint64(0x7FF4_0000_DEAD_BEEF).view(np.float64).item()

VALUES: list[object] = [
    *(
        None,
        False,
        True,
        0,
        0.0,
        -0.0,
        "",
        [],
        (),
        {},
        set(),
        frozenset(),
        OrderedDict(),
        slice(None),
        0j,
        torch.Size(),
    ),
    *([b""], [bytearray()], [memoryview(b"").tobytes()], [[]], ((),), {"": {}}, [np.float32(0)], [np.zeros(0)]),
    *(1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 1 << 4000, -(1 << 4000), -128, -129),
    *(float("inf"), float("-inf"), NAN, -NAN, 5e-324, complex(NAN, -0.0), complex("inf")),
    *("ünï", "\0", "\U0010ffff", "a" * 70000, "\ud7ff\ue000"),
    *(b"\0" * 3, b"\xff" * 64, b"\0" * 65, bytearray(b"\0\1"), bytearray(300), b"z" * 70000),
    {1: "a", (2, (3, "b")): b"c", b"\0": 1, None: 2, 1.5: 4, 1 << 70: 5, NAN: 6, 2j: 7},
    *([(1 << 64) - 1, -(1 << 63)], (1 << 64, 1), [-(1 << 63) - 1, 2], [1, True], [NAN, -0.0, 1.0], [0, 0.0], [None, 1]),
    {"b": 1, "a": 2, "c": {"z": 0, "y": 1}},
    OrderedDict([("b", 1), ("a", [OrderedDict()]), (3, 4)]),
    {1, "a", None, (1, 2), b"x", 2.5, 1 << 80},
    frozenset({(), (b"",), ((),)}),
    *(slice(1, 1 << 70, -2), slice("a", None, (1,)), [slice(torch.ones(1), 2.5)]),
    *(torch.Size([2, 0, 3]), torch.bfloat16, torch.qint8, torch.device("cpu"), torch.device("cuda:3"), msgspec.UNSET),
    {"__tensor__": True, "dtype": "float32"},
    *(Pair(1, Pair([], ())), Frozen([Cell(1)], Record(2, "a")), frame({"x": Frozen(1)}, "")),
]


@deterministic
@pytest.mark.parametrize("index", range(len(VALUES)))
def test_a_value_arrives_as_it_was(index: int) -> None:
    value = VALUES[index]
    assert plan(value).is_raw == (type(value) is bytes)
    assert bits(sent(value).value) == bits(value)
    assert bits(sent([value, {"a": (value,)}]).value) == bits([value, {"a": (value,)}])


@deterministic
def test_numbers_that_are_equal_keep_their_kind() -> None:
    value = [0, False, 0.0, -0.0, 1, True, 1.0, np.int8(1), np.bool_(True)]
    assert bits(sent(value).value) == bits(value)


@deterministic
@pytest.mark.parametrize("data", [b"", torch.empty(0), torch.empty(3, 0, dtype=torch.int8)])
def test_an_empty_payload_is_refused_as_a_whole_and_travels_inside(data: object) -> None:
    assert "empty" in str(refusal(data))
    assert len(sent([data]).value[0]) == len(data)  # type: ignore[arg-type,index]


@deterministic
@pytest.mark.parametrize("data", [bytearray(), memoryview(b"")])
def test_other_buffers_are_structures_and_may_be_empty(data: bytearray | memoryview) -> None:
    assert not plan(data).is_raw
    assert sent(data).value == data


@deterministic
@pytest.mark.parametrize(
    "view",
    [
        memoryview(b"abc" * 50),
        memoryview(bytearray(b"abc" * 50))[3:],
        memoryview(b"abc" * 50)[::-2],
        memoryview(np.arange(12, dtype=">u2").reshape(3, 4)),
        memoryview(np.asfortranarray(np.arange(12.0).reshape(3, 4))),
    ],
)
def test_a_memoryview_arrives_as_its_bytes(view: memoryview) -> None:
    assert sent(view).value == view.tobytes()
    assert sent({"a": [view]}).value == {"a": [view.tobytes()]}


@deterministic
def test_a_memoryview_may_be_released_once_it_was_planned_and_not_before() -> None:
    view = memoryview(b"abc" * 50)
    made = plan([view])
    view.release()
    area = torch.empty(made.size, dtype=torch.uint8)
    made.copy_into(area)
    assert restore(made.header, area).value == [b"abc" * 50]
    assert refusal([view]).path == "payload[0]"


ARRAY_DTYPES = (
    *("?", "i1", "u1", "<i2", ">i2", "<u4", ">u4", "<i8", ">i8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "g", "G"),
    *("<c8", ">c8", "<c16", ">c16", "<M8[ns]", ">M8[D]", "<M8[25s]", "<m8[us]", "M8", "S3", "<U2", ">U2", "V5"),
)


@deterministic
@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
def test_a_numpy_array_arrives_with_its_byte_order(dtype: str) -> None:
    kind = np.dtype(dtype)
    raw = np.arange(24 * kind.itemsize).astype(np.uint8) % (2 if kind.kind in "b" else 100)
    base = np.frombuffer(raw.tobytes(), kind).reshape(4, 6) if kind.kind != "U" else np.full((4, 6), "é\0", kind)
    for array in (base, base.T, base[::2, ::-1], np.asfortranarray(base), base[1, 2, ...], base[:0], base[:, 3:3]):
        arrived: Any = sent({"a": array}).value["a"]  # type: ignore[index]
        assert bits(arrived) == bits(array)
        assert arrived.flags.writeable
        assert arrived.flags.owndata
    scalar = base[1, 2]
    assert bits(sent([scalar]).value) == bits([scalar])
    assert bits(sent(base).value) == bits(base)


@deterministic
@pytest.mark.parametrize(
    "scalar", [np.bytes_(b"a\0"), np.str_("a\0b\0\0"), np.str_("é"), np.float64(NAN), np.void(b"a\0")]
)
def test_a_numpy_scalar_keeps_its_zeros(scalar: np.generic) -> None:
    arrived: Any = sent([scalar]).value[0]  # type: ignore[index]
    assert bits(arrived) == bits(scalar)
    assert len(arrived.tobytes()) == len(scalar.tobytes())


@deterministic
@pytest.mark.parametrize(
    "array",
    [
        np.array([object()], dtype=object),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
        np.ma.masked_array([1, 2], [True, False]),
        np.str_(""),
        np.zeros(1, dtype=[("a", "i4")])[0],
    ],
)
def test_a_numpy_array_of_more_than_plain_bytes_is_refused(array: object) -> None:
    assert refusal((1, array)).path == "payload[1]"


IMAGE_MODES = "1 L LA La RGB YCbCr LAB HSV RGBA RGBa RGBX CMYK I F I;16".split()  # noqa: SIM905


@deterministic
@pytest.mark.parametrize("mode", IMAGE_MODES)
def test_an_image_arrives_with_its_pixels(mode: str) -> None:
    pixels = bytes(range(7, 7 + 11 * 4 * 4))
    size = len(Image.new(mode, (11, 4)).tobytes())
    image = Image.frombytes(mode, (11, 4), pixels[:size])
    assert bits(sent({"image": image}).value) == bits({"image": image})
    assert bits(sent(image).value) == bits(image)


@deterministic
@pytest.mark.parametrize("image", [Image.new("P", (2, 2)), Image.new("PA", (2, 2)), Image.new("L", (0, 3))])
def test_an_image_that_is_more_or_less_than_its_pixels_is_refused(image: Image.Image) -> None:
    assert refusal({"a": [image]}).path == "payload['a'][0]"
    assert image.mode in str(refusal(image))


@deterministic
@pytest.mark.parametrize(
    ("library", "data", "package"),
    [
        ("numpy", np.arange(3), "pip install numpy"),
        ("numpy", np.float32(3), "pip install numpy"),
        ("PIL.Image", Image.new("L", (2, 2)), "pip install pillow"),
    ],
)
def test_a_missing_library_is_named_where_its_object_arrives(
    monkeypatch: pytest.MonkeyPatch, library: str, data: object, package: str
) -> None:
    header, body = packed([data])
    area = guarded(body, 0)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnsupportedPayload, match=package):
        restore(header, area)


@deterministic
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24).view(4, 6),
        lambda: torch.arange(24).view(4, 6).t(),
        lambda: {"a": torch.arange(5)[::2], "b": bytes(2000), "c": bytearray(b"xyz"), "d": np.arange(7), "n": None},
        lambda: {"nothing": [1, 2]},
    ],
)
def test_a_plan_of_its_own_stays_as_it_was_made(make: Callable[[], Any]) -> None:
    data = make()
    own = plan(data).own()
    for part in data.values() if isinstance(data, dict) else [data]:
        if isinstance(part, torch.Tensor):
            part.zero_()
        elif isinstance(part, np.ndarray | bytearray):
            part[:] = bytes(len(part)) if isinstance(part, bytearray) else 0
    target = torch.zeros(own.size, dtype=torch.uint8)
    own.copy_into(target)
    assert bits(restore(own.header, target).value) == bits(make())


@pytest.mark.parametrize(("nbytes", "keeps"), [(1, True), (KEEPS_GIL, True), (KEEPS_GIL + 1, False)])
def test_a_chunk_is_copied_without_giving_the_interpreter_away_and_more_is_not(nbytes: int, keeps: bool) -> None:
    def copied() -> bool:
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        memmove(target.data_ptr(), source.data_ptr(), nbytes)
        return target.equal(source)

    assert copied()
    with pytest.MonkeyPatch.context() as patch:
        # Called as a part of Python: else ctypes gives the interpreter away around it.
        assert type(_payload_copy._memmove_with_gil)._flags_ & _ctypes.FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]
        patch.setattr(_payload_copy, "_memmove_with_gil", lambda *_: None)
        assert copied() is not keeps


@pytest.mark.parametrize("lacks", [None, "_dispatch_keys", "DispatchKeySet", "DispatchKey"])
def test_bytes_that_are_negated_when_they_are_read_are_known_by_any_release_of_torch(
    monkeypatch: pytest.MonkeyPatch, lacks: str | None
) -> None:
    if lacks:
        monkeypatch.delattr(torch._C, lacks)
    bits_told = _payload_copy._lazy_bits()
    assert (bits_told is None) == (lacks is not None)
    monkeypatch.setattr(_payload_copy, "_LAZY_BITS", bits_told)
    tensor = torch.tensor([1 + 2j])
    for each in (tensor, tensor.imag, tensor.conj().resolve_conj()):
        assert _payload_copy.is_plain(each)
    for each in (tensor.conj(), tensor.conj().imag, torch.ones(2, 3).t()):
        assert not _payload_copy.is_plain(each)


@deterministic
def test_a_small_tensor_is_made_by_what_keeps_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch.empty gives the interpreter away")

    monkeypatch.setattr(torch, "empty", refuse)
    for shape in ([], [3], [2, 1, 4]):
        assert list(new_tensor(torch.int64, shape, 8).shape) == shape


@deterministic
@pytest.mark.parametrize("kind", ["of another release", "half imported", "none"])
def test_tensors_are_made_without_a_numpy_that_suits_torch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Numpy is not available")

    other = ModuleType("numpy")
    if kind == "of another release":
        monkeypatch.setattr(other, "empty", refuse, raising=False)
    monkeypatch.setitem(sys.modules, "numpy", other)
    if kind == "none":
        monkeypatch.delitem(sys.modules, "numpy")
    tensor = new_tensor(torch.int64, [2, 3], 48)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, (2, 3))
