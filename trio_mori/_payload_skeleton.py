"""From a payload to its skeleton, and to the parts that lie in the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from ._payload_copy import Leaf
from ._payload_foreign import array_dtype, check_image, imported
from ._payload_format import (
    ALIGNMENT,
    ARRAY,
    BIG_INT,
    BYTEARRAY,
    BYTES,
    COMPLEX,
    DEVICE,
    DTYPE,
    DTYPE_NAMES,
    FROZENSET,
    IMAGE,
    LIST,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_EXTENT,
    MAX_NODES,
    ORDERED,
    PAIRS,
    SCALAR,
    SET,
    SHORT_BYTES,
    SIZE,
    SLICE,
    STRUCT,
    TENSOR,
    TUPLE,
    UNSET,
    VIEW,
    Refused,
    StructClass,
    shown,
)
from ._payload_gpu import Streams
from ._payload_structs import stock_order, struct_type, values_of

# What msgpack holds as an integer.
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1

_BYTES_LIKE: Mapping[type, int] = {bytes: BYTES, bytearray: BYTEARRAY, memoryview: VIEW}


class Planner:
    """One walk over a payload."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.classes: list[StructClass] = []
        self.size = 0
        self.streams: Streams | None = None
        self._class_index: dict[type, int] = {}
        self._nodes = 0

    def add(self, tag: int, source: Any, nbytes: int) -> int:
        """Give a leaf its place; returns the offset."""
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        if nbytes:
            if tag == TENSOR:
                if source.is_cuda and self.streams is None:
                    self.streams = Streams()
                self.leaves.append(tensor_leaf(source, offset, nbytes, self.streams))
            else:
                self.leaves.append(Leaf(tag, offset, nbytes, source))
            self.size = offset + nbytes
        return offset

    def describe(self, value: object, depth: int) -> object:
        """The skeleton of a value."""
        self._count()
        kind = type(value)
        if kind in _THEMSELVES:
            return value
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return simple(value)
        if depth >= MAX_DEPTH:
            raise Refused(f"is nested more than {MAX_DEPTH} deep: flatten the structure")
        container = _CONTAINERS.get(kind)
        if container is not None:
            return container(self, value, depth + 1)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, depth)
        return self._other(value, depth + 1)

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise Refused(f"brings the payload to more than {MAX_NODES} values: send numbers as a tensor")

    def tensor(self, value: torch.Tensor, depth: int) -> list[object]:
        """A tensor. A Parameter arrives as a plain one, without gradient."""
        name = dtype_name(value)
        return [TENSOR, name, list(value.shape), self.add(TENSOR, value, value.nbytes)]

    def bytes_like(self, value: Any) -> list[object]:
        """Bytes, a bytearray or a memoryview, in the pool."""
        tag = _BYTES_LIKE[type(value)]
        try:
            # A view of its own, which stays when the caller releases theirs.
            value = memoryview(value) if tag == VIEW else value
            size = value.nbytes if tag == VIEW else len(value)
        except ValueError as error:
            raise Refused(f"is a memoryview that cannot be read: {error}") from error
        return [tag, self.add(tag, value, size), size]

    def bytes(self, value: bytes, depth: int) -> object:
        return value if len(value) <= SHORT_BYTES else self.bytes_like(value)

    def buffer(self, value: bytearray | memoryview, depth: int) -> object:
        return self.bytes_like(value)

    def sequence(self, tag: int, values: Any, depth: int) -> list[object]:
        # Token ids and scores are not looked at one by one: 30 ns each instead of 150.
        if _stand_for_themselves(values) and self._nodes + len(values) <= MAX_NODES:
            self._nodes += len(values)
            return [tag, *values]
        result: list[object] = [tag]
        for index, value in enumerate(values):
            try:
                result.append(self.describe(value, depth))
            except Refused as refusal:
                raise refusal.inside(f"[{index}]", values) from None
        return result

    def unordered(self, tag: int, values: Any, depth: int) -> list[object]:
        result: list[object] = [tag]
        for value in values:
            try:
                result.append(self._key(value, depth))
            except Refused as refusal:
                raise refusal.inside(f"{{{shown(value)}}}", values) from None
        return result

    def mapping(self, value: dict[object, object], depth: int) -> object:
        described: dict[str, object] = {}
        if not set(map(type, value)) <= {str}:
            return self.pairs(PAIRS, value, depth)
        try:
            for key, item in value.items():
                described[_text(key)] = self.describe(item, depth)  # type: ignore[arg-type]
        except Refused as refusal:
            raise refusal.inside(f"[{shown(key)}]", value) from None
        return described

    def pairs(self, tag: int, value: Mapping[object, object], depth: int) -> list[object]:
        result: list[object] = [tag]
        for key, item in value.items():
            try:
                result.append(self._key(key, depth))
                result.append(self.describe(item, depth))
            except Refused as refusal:
                raise refusal.inside(f"[{shown(key)}]", value) from None
        return result

    def _key(self, key: object, depth: int) -> object:
        self._count()
        if type(key) is tuple:
            if depth >= MAX_DEPTH:
                raise Refused(f"is or has a key nested more than {MAX_DEPTH} deep: flatten it")
            return [TUPLE, *(self._key(each, depth + 1) for each in key)]
        if type(key) is bytes or type(key) in _THEMSELVES:
            return key
        simple = _SIMPLE.get(type(key))
        if simple is None:
            raise Refused(
                f"is the key or member of a set {shown(key)} of type {type(key).__name__}: keys and members are str, "
                "int, float, bool, None, bytes, or tuples of these"
            )
        return simple(key)

    def slice(self, value: slice, depth: int) -> list[object]:
        return self.sequence(SLICE, (value.start, value.stop, value.step), depth)

    def _other(self, value: object, depth: int) -> object:
        numpy, images = imported("numpy"), imported("PIL.Image")
        if numpy is not None and type(value) is numpy.ndarray:
            array: Any = value
            dtype = array_dtype(array)
            return [ARRAY, dtype, list(array.shape), self.add(ARRAY, array, array.nbytes)]
        if numpy is not None and isinstance(value, numpy.generic):
            scalar: Any = value
            return [SCALAR, array_dtype(scalar), scalar.tobytes()]
        if images is not None and isinstance(value, images.Image):
            image: Any = value
            nbytes = check_image(image)
            return [IMAGE, image.mode, *image.size, self.add(IMAGE, image, nbytes)]
        return self._struct(value, depth)

    def _struct(self, value: object, depth: int) -> list[object]:
        cls = type(value)
        kind = struct_type(cls) if not isinstance(value, type) else None
        if kind is None:
            raise Refused(
                f"is a {cls.__module__}.{cls.__qualname__}, which cannot travel: send tensors, bytes, numbers, "
                "str, dict, list, tuple, set, numpy arrays, PIL images, or dataclasses, attrs classes and msgspec "
                "structs of them"
            )
        index = self._class_index.get(cls)
        if index is None:
            index = self._class_index[cls] = len(self.classes)
            self.classes.append(kind.described)
        values = values_of(value, kind)
        result: list[object] = [STRUCT, index, stock_order(value, kind, values)]
        for name, item in zip(kind.described.fields, values, strict=True):
            try:
                result.append(self.describe(item, depth))
            except Refused as refusal:
                raise refusal.inside(f".{name}", value) from None
        return result


def dtype_name(tensor: torch.Tensor) -> str:
    """How the dtype of a tensor that can travel is called in headers."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Refused(
            f"is a {type(tensor).__name__}, a subclass of tensor that would arrive as a plain one: convert it"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        raise Refused(f"is a tensor of layout {tensor.layout}, which has no single block of bytes: use .to_dense()")
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise Refused(f"is a tensor of dtype {tensor.dtype}, which cannot travel bit for bit: dequantize or convert it")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise Refused(f"is a tensor on {tensor.device}, where no engine reads: move it to cpu or cuda")
    if tensor.dim() > MAX_DIMS:
        raise Refused(f"is a tensor of {tensor.dim()} dimensions, more than {MAX_DIMS}: reshape it")
    return name


def tensor_leaf(tensor: torch.Tensor, offset: int, nbytes: int, streams: Streams | None) -> Leaf:
    on_gpu = tensor.is_cuda
    if on_gpu and streams is not None:
        streams.note(tensor.device)
    # A tensor object of its own: the caller's may be given another shape or storage while `put` waits for room.
    # Not `detach`, which gives the interpreter away for its 0.3 us, and may have it back 5 ms later.
    return Leaf(TENSOR, offset, nbytes, tensor.data, on_gpu)


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refused(f"is or has the text {shown(value)}, which is no valid Unicode: send it as bytes") from None
    return value


def _stand_for_themselves(values: Any) -> bool:
    kinds = set(map(type, values))
    return kinds == {float} or (kinds == {int} and min(values) >= _INT_MIN and max(values) <= _INT_MAX)


def _size(value: torch.Size) -> object:
    if not all(-MAX_EXTENT <= length < MAX_EXTENT for length in value):
        raise Refused(f"is a torch.Size of {tuple(value)}, which no tensor can have: send it as a tuple")
    return [SIZE, *value]


def _integer(value: int) -> object:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    return [BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)]


_THEMSELVES = frozenset({type(None), bool, float})
_SIMPLE: dict[type, Callable[[Any], object]] = {
    str: _text,
    int: _integer,
    complex: lambda value: [COMPLEX, value.real, value.imag],
    torch.Size: _size,
    torch.dtype: lambda value: [DTYPE, str(value).removeprefix("torch.")],
    torch.device: lambda value: [DEVICE, str(value)],
    type(msgspec.UNSET): lambda value: [UNSET],
}
_CONTAINERS: dict[type, Callable[[Planner, Any, int], object]] = {
    torch.Tensor: Planner.tensor,
    dict: Planner.mapping,
    list: lambda planner, value, depth: planner.sequence(LIST, value, depth),
    tuple: lambda planner, value, depth: planner.sequence(TUPLE, value, depth),
    bytes: Planner.bytes,
    bytearray: Planner.buffer,
    memoryview: Planner.buffer,
    set: lambda planner, value, depth: planner.unordered(SET, value, depth),
    frozenset: lambda planner, value, depth: planner.unordered(FROZENSET, value, depth),
    OrderedDict: lambda planner, value, depth: planner.pairs(ORDERED, value, depth),
    slice: Planner.slice,
}
