"""The stock form of a payload is, byte for byte, what a stock serializer makes of it; and what comes back from one."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import torch
from payloads import bits, bytes_of, guarded, layouts, packed, tensor_of
from PIL import Image

from trio_mori import RemoteProtocolError, UnsupportedPayload
from trio_mori._payload_format import DTYPES, MAX_DEPTH
from trio_mori._stock_payload import stock_decode, stock_encode, stock_size

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
deterministic = pytest.mark.deterministic


def as_map(value: Any) -> object:
    """What the stock serializer makes of what msgpack does not know."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {"__tensor__": True, "dtype": name, "shape": list(value.shape), "data": bytes_of(value)}
    if isinstance(value, np.ndarray):
        return {"__ndarray__": True, "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, Image.Image):
        pixels = np.asarray(value, dtype=np.uint8)
        return {"__pil_image__": True, "mode": value.mode, "shape": list(pixels.shape), "data": pixels.tobytes()}
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    raise TypeError(type(value))


def stock_form(data: object) -> bytes:
    """The stock form of a payload, of which the size was known before."""
    header, body = packed(data)
    source = guarded(body, 0xEE)
    encoded = stock_encode(header, source)
    assert stock_size(header, source) == len(encoded)
    if len(header) > 20:
        assert stock_size(header) == len(encoded), "without the bytes"
    return encoded


def refusal(data: object) -> UnsupportedPayload:
    header, body = packed(data)
    with pytest.raises(UnsupportedPayload) as caught:
        stock_encode(header, guarded(body, 0))
    with pytest.raises(UnsupportedPayload) as early:
        stock_size(header)
    assert str(early.value) == str(caught.value)
    return caught.value


@dataclasses.dataclass
class Plain:
    b: object
    a: object = 1
    _hidden: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    z: object
    a: object = 2


@attrs.define
class Cell:
    z: object
    a: object = 1
    _hidden: object = 2


@attrs.define
class SubCell(Cell):
    m: object = 3


@attrs.define(slots=False)
class Loose:
    z: object
    a: object = 1


class Renamed(msgspec.Struct, rename="camel"):
    first_value: object
    second_value: object = None


class Omitting(msgspec.Struct, omit_defaults=True):
    a: object
    b: int = 1
    c: list[object] = msgspec.field(default_factory=list)
    d: object = None
    e: object = msgspec.UNSET


class Tagged(msgspec.Struct, tag="kind-a", tag_field="kind"):
    a: object


class Numbered(msgspec.Struct, tag=7, array_like=True):
    a: object
    b: object = None


class Row(msgspec.Struct, array_like=True, omit_defaults=True):
    a: object
    b: object = None


Pair = namedtuple("Pair", ["first", "second"])

PAYLOADS: list[object] = [
    *([], {}, (), set(), frozenset(), None, False, 0, 0.0, "", [b""], [bytearray()], {"a": {}}),
    *([1, -1, 127, 128, -33, 1 << 16, 1 << 63, (1 << 64) - 1, -(1 << 63)], [1.5, float("nan"), float("-inf")]),
    *("text", "ü" * 40, {"k" * 300: "v" * 70000}, {"n": None, "t": True, "l": [[[]]]}),
    *({1: 2, "a": 3, b"x": 4, 2.5: 5, None: 6}, {(1, "a"): (2,)}, OrderedDict(b=1, a=2), {"__tensor__": False}),
    *((1, (2, [3])), {5}, frozenset({"a"}), [slice(1, None, 2)], slice(None), [torch.Size([2, 3])]),
    *([{torch.Size([2, 3]): 1, (torch.Size([]), "a"): 2}],),
    *(bytearray(b"z"), bytearray(), memoryview(b"y" * 300)),
    *([b"x" * 10, bytearray(b"y" * 300), memoryview(b"z" * 70000)], {"data": b"w" * 256}),
    *([np.arange(6, dtype=">i4").reshape(2, 3).T], np.float32([[1]]), [np.zeros((0, 3), "<U3"), np.array(2.0)]),
    *([Image.new(mode, (5, 3), 7) for mode in ("L", "RGB", "RGBA", "CMYK", "LA")], Image.new("L", (1, 1))),
    *(Plain(1), Plain([Plain(torch.ones(2))], _hidden=4), Slots(1), Slots(b"x" * 100, (1,)), Pair(1, Pair(2, 3))),
    *(Cell(1), [SubCell(torch.ones(3), 2)], Loose(Cell(2)), {"a": Loose((1,), 5)}),
    *(Renamed(1), Renamed(torch.ones(1), 2), Omitting(1), Omitting(1, 2, [3], 4, 5), Omitting(None, 1, [], 0)),
    *(Tagged(1), [Tagged(Numbered(1)), Numbered(torch.ones(1), 2)], Row(1), Row(Row(1, 2), 3)),
    *([torch.ones(2), torch.empty(0)], {"last": torch.empty(3, 0)}, [torch.empty(0), b"x" * 99, np.empty(0)]),
    {"spilled": [f"name {index}" for index in range(5000)], "t": torch.arange(9)},
]


@pytest.mark.parametrize("index", range(len(PAYLOADS)))
def test_the_form_is_that_of_a_stock_serializer(index: int) -> None:
    data = PAYLOADS[index]
    assert stock_form(data) == msgspec.msgpack.Encoder(enc_hook=as_map).encode(data)


@deterministic
@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_and_layout_have_it(name: str) -> None:
    tensors = dict(layouts(DTYPES[name]))
    encoded = stock_form(tensors)
    assert encoded == msgspec.msgpack.Encoder(enc_hook=as_map).encode(tensors)
    decoded: Any = stock_decode(encoded)
    assert {key: bits(value) for key, value in decoded.items()} == {key: bits(each) for key, each in tensors.items()}


@pytest.mark.parametrize("size", [1, 255, 256, 65535, 65536])
def test_lengths_of_every_width_are_counted(size: int) -> None:
    data = [b"a" * size, {"t": torch.zeros(size, dtype=torch.uint8)}]
    assert stock_form(data) == msgspec.msgpack.Encoder(enc_hook=as_map).encode(data)


@deterministic
@pytest.mark.parametrize("data", [b"x", b"y" * 1000, tensor_of(torch.bfloat16, 3)])
def test_a_raw_payload_is_its_bytes(data: Any) -> None:
    assert stock_form(data) == (bytes_of(data) if isinstance(data, torch.Tensor) else bytes(data))


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ([1j], "payload[0]"),
        ({"a": (1 << 64,)}, "payload['a'][0]"),
        ({"d": torch.float16}, "payload['d']"),
        ([0, torch.device("cpu")], "payload[1]"),
        (Plain(np.float32(1)), "payload.b"),
        ([[Image.new("1", (2, 2))]], "payload[0][0]"),
        ({1: Image.new("I", (2, 2))}, "payload[1]"),
        ([Tagged(Image.new("F", (2, 2)))], "payload[0].a"),
        ([msgspec.UNSET], "payload[0]"),
    ],
)
def test_what_a_stock_peer_cannot_be_given_is_refused_by_its_path(data: object, path: str) -> None:
    assert refusal(data).path == path


@deterministic
def test_a_part_longer_than_msgpack_has_lengths_is_refused_by_its_path() -> None:
    header = b"\x01" + msgspec.msgpack.encode([[], {"a": [0, [8, 0, 1 << 32]]}])
    with pytest.raises(UnsupportedPayload) as caught:
        stock_size(header)
    assert caught.value.path == "payload['a'][0]"
    raw = b"\x01" + msgspec.msgpack.encode([[], [8, 0, 1 << 32]])
    assert stock_size(raw) == 1 << 32


@deterministic
def test_what_a_stock_peer_sends_is_restored_and_owns_its_memory() -> None:
    data = {
        "t": [tensor_of(torch.bfloat16, 2, 3), torch.tensor(5)],
        "a": np.arange(6, dtype=">i2").reshape(2, 3),
        "i": Image.new("RGB", (3, 2), (1, 2, 3)),
        "n": [None, {"x": b"y"}],
    }
    encoded = bytearray(msgspec.msgpack.Encoder(enc_hook=as_map).encode(data))
    decoded = stock_decode(memoryview(encoded))
    encoded[:] = bytes(len(encoded))
    assert bits(decoded) == bits(data)


def tensor_map(**changes: object) -> dict[str, object]:
    return {"__tensor__": True, "dtype": "float32", "shape": [1], "data": b"1234"} | changes


def array_map(**changes: object) -> dict[str, object]:
    return {"__ndarray__": True, "dtype": "<f4", "shape": [1], "data": b"1234"} | changes


def image_map(**changes: object) -> dict[str, object]:
    return {"__pil_image__": True, "mode": "RGB", "shape": [1, 1, 3], "data": b"123"} | changes


@pytest.mark.parametrize(
    "item",
    [
        *({"__tensor__": True}, {"__ndarray__": 1}, {"__pil_image__": "yes"}),
        *(tensor_map(dtype="float33"), tensor_map(dtype=[]), tensor_map(shape=[2]), tensor_map(shape=[-1, -1])),
        *(tensor_map(shape="1"), tensor_map(shape=[1.0]), tensor_map(data="1234"), tensor_map(data=b"123")),
        *(tensor_map(shape=[1 << 62, 4]), tensor_map(shape=[0, 1 << 62, 1 << 62], data=b""), tensor_map(shape=None)),
        *(
            array_map(dtype="O"),
            array_map(dtype=3),
            array_map(dtype="<f4,<f4"),
            array_map(shape=[0]),
            array_map(dtype="|S0"),
        ),
        *(image_map(mode="P"), image_map(mode=1), image_map(shape=[3]), image_map(shape=[1, 3]), image_map(shape=[])),
        *(image_map(shape=[0, 1, 3], data=b""), image_map(data=b"1234"), image_map(mode="RGBA"), image_map(mode=[])),
    ],
)
def test_junk_of_a_stock_peer_is_refused(item: object) -> None:
    with pytest.raises(RemoteProtocolError):
        stock_decode(msgspec.msgpack.encode([{"a": item}]))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x92\x01", b"\x81\x80\x01", b"\x91" * (MAX_DEPTH + 5) + b"\x01", b"\x91" * 5000 + b"\x01"]
)
def test_bytes_that_are_no_stock_payload_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        stock_decode(data)
