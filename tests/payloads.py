"""Payloads to send, the way through a pool, and what it takes for two of them to be the same bit for bit."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from trio_mori import UnsupportedPayload
from trio_mori._payload import Restored, plan, restore
from trio_mori._payload_format import DTYPES

# Wider than any element: a read past the bytes meets it.
GUARD = 64


@dataclasses.dataclass
class Frame:
    """A dataclass whose constructor says so."""

    codes: object
    note: str = "none"

    def __post_init__(self) -> None:
        raise AssertionError("a restored payload runs no constructor")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    y: object = 1


@attrs.define
class Cell:
    value: object
    count: int = attrs.field(default=3, converter=int)


class Record(msgspec.Struct):
    value: object
    note: str = "none"


Pair = namedtuple("Pair", ["first", "second"])

STRUCTS = (Frame, Frozen, Cell, Record, Pair)


def frame(codes: object, note: str = "none") -> Frame:
    """A Frame, past its constructor."""
    made = object.__new__(Frame)
    made.codes, made.note = codes, note
    return made


WRAPPERS: Mapping[str, Callable[[object], object]] = {
    "list": lambda value: [value],
    "tuple": lambda value: (value, None),
    "dict": lambda value: {"a": value},
    "dict with other keys": lambda value: {1: value, b"x": 0},
    "OrderedDict": lambda value: OrderedDict(a=value),
    "dataclass": frame,
    "frozen dataclass": Frozen,
    "attrs": Cell,
    "msgspec": Record,
    "namedtuple": lambda value: Pair(value, 0),
}


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes are all different as far as they can be; among floats there are NaNs."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.arange(7, 7 + count).mul(37).remainder(2 if dtype is torch.bool else 251).to(torch.uint8)
    return data.view(dtype).view(shape) if count else data.view(dtype).reshape(shape)


def layouts(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of that dtype in every layout that torch can give it."""
    base = tensor_of(dtype, 6, 4)
    yield "contiguous", base
    yield "transposed", base.t()
    yield "strided slice", base[::2, 1:4:2]
    yield "offset", base[2:]
    yield "0-dim", base[2, 3]
    yield "shape (0,)", tensor_of(dtype, 0)
    yield "shape (3, 0)", tensor_of(dtype, 3, 0)
    yield "expanded", base[0].expand(3, 4)
    yield "permuted", tensor_of(dtype, 2, 3, 4).permute(2, 0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        yield "requires_grad", base.detach().requires_grad_()
        yield "parameter", torch.nn.Parameter(base.detach())
    if dtype.is_complex:
        yield "conjugated", base.conj()
        yield "conjugated and transposed", base.mH
        yield "negated", base.conj().imag


EVERY_LAYOUT = [(name, each) for name in DTYPES for each, _ in layouts(DTYPES[name])]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its elements in order, read by numpy from the storage."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    size = tensor.dtype.itemsize
    elements = np.ndarray(
        tuple(tensor.shape),
        f"V{size}",
        storage.numpy(),
        tensor.storage_offset() * size,
        tuple(stride * size for stride in tensor.stride()),
    )
    return elements.tobytes()


def bits(value: Any) -> object:
    """Something that is equal for two values exactly if they are the same in type, structure, order and every bit."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, tuple(value.shape), bytes_of(value)
    if kind in (np.ndarray, Image.Image) or isinstance(value, np.generic):
        shape = (value.mode, value.size) if kind is Image.Image else (value.dtype.str, value.shape)
        return kind, shape, value.tobytes()
    if kind is bytearray:
        return kind, bytes(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in (dict, OrderedDict):
        return kind, [(bits(key), bits(item)) for key, item in value.items()]
    if kind in (set, frozenset):
        return kind, frozenset(map(bits, value))
    if kind is slice:
        return kind, [bits(each) for each in (value.start, value.stop, value.step)]
    if isinstance(value, tuple):
        return kind, tuple(map(bits, value))
    if kind is list:
        return kind, list(map(bits, value))
    if kind in STRUCTS:
        return kind, [(name, bits(getattr(value, name))) for name in fields_of(value)]
    return kind, value


def fields_of(value: Any) -> Iterable[str]:
    """Names of a struct's fields."""
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    return [each.name for each in (attrs.fields(type(value)) if attrs.has(type(value)) else dataclasses.fields(value))]


def refusal(data: object) -> UnsupportedPayload:
    """The error with which a payload is refused; its message begins with the path."""
    with pytest.raises(UnsupportedPayload) as caught:
        plan(data)
    assert str(caught.value).startswith(caught.value.path)
    return caught.value


def guarded(body: bytes, guard: int) -> torch.Tensor:
    """A source of exactly these bytes, aligned, with other bytes before and after it."""
    around = torch.full((GUARD + len(body) + GUARD,), guard, dtype=torch.uint8)
    area = around[GUARD : GUARD + len(body)]
    if body:
        area.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    return area


def packed(data: object) -> tuple[bytes, bytes]:
    """Header and bytes of a payload; nothing beside the bytes was written."""
    made = plan(data)
    around = torch.full((GUARD + made.size + GUARD,), 0xA5, dtype=torch.uint8)
    made.copy_into(around[GUARD : GUARD + made.size])
    everything = around.numpy().tobytes()
    assert everything[:GUARD] == everything[-GUARD:] == b"\xa5" * GUARD
    return made.header, everything[GUARD : GUARD + made.size]


def sent(data: object, payload_types: Iterable[type] = STRUCTS) -> Restored:
    """A payload as it arrives, after its place in the pool has been used again."""
    header, body = packed(data)
    area = guarded(body, 0x5A)
    arrived = restore(header, area, payload_types=payload_types)
    area.fill_(0xEE)
    return arrived
