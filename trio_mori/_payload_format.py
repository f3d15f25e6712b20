"""The header of a payload: what the bytes in the pool mean.

A header is one version byte and a msgpack array: ``[classes, skeleton]``, or ``[offset, nbytes]`` when that array was
too long for a control message and lies in the pool itself.

The skeleton has the shape of the payload. None, bool, float, str, ints of 64 bits and short bytes stand for
themselves; a map is a dict whose keys are all str; everything else is an array whose first item is a tag. What is
large (tensors, bytes, arrays, pixels) lies in the pool, and its array says where.

`classes` describes each struct type that occurs, once: by name, which is only ever compared, never imported, and with
what the encoding for stock peers needs (see `trio_mori._stock_payload`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import attrs
import msgspec
import torch

from ._errors import RemoteProtocolError, UnsupportedPayload
from ._payload_scan import bound_items

VERSION = 1

# A leaf starts at a multiple of this: a cache line, and what the vector loads of every torch kernel are content with.
ALIGNMENT = 64

# Longer headers lie in the pool (DESIGN: control messages stay small, so that none waits behind a long one).
INLINE_HEADER = 32 << 10

# The longest header of a single tensor: MAX_DIMS dimensions of nine bytes, its dtype and offset.
RAW_HEADER = 1024

# Deeper nesting than this was seen in no payload of vllm-omni; it stays far below every recursion limit.
MAX_DEPTH = 64

# A payload of this many values takes 0.3 s to describe; beyond it numbers belong into a tensor.
MAX_NODES = 1_000_000

# msgpack items that one value may cost in a header (a complex number: array, tag, two floats).
ITEMS_PER_NODE = 4

# Bytes up to this length stand in the skeleton: in the pool they would take up as much by alignment alone.
SHORT_BYTES = 64

# Dimensions of a tensor or array; numpy's own limit.
MAX_DIMS = 64

MAX_EXTENT = 1 << 63

LIST = 0
TUPLE = 1
PAIRS = 2  # a dict with other keys than str
SET = 3
FROZENSET = 4
SLICE = 5
COMPLEX = 6
BIG_INT = 7
BYTES = 8
BYTEARRAY = 9
VIEW = 10  # a memoryview; arrives as bytes
TENSOR = 11
ARRAY = 12
SCALAR = 13  # a numpy scalar
IMAGE = 14
STRUCT = 15
SIZE = 16
DTYPE = 17
DEVICE = 18
ORDERED = 19  # collections.OrderedDict
UNSET = 20

# How a struct type was made.
DATACLASS = 0
ATTRS = 1
MSGSPEC = 2
NAMEDTUPLE = 3

# What can be stored: the dtypes with whole bytes per element and no parameters beside (scale, zero point).
_STORED = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
EVERY_DTYPE: Mapping[str, torch.dtype] = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}
DTYPES: Mapping[str, torch.dtype] = {name: EVERY_DTYPE[name] for name in _STORED.split() if name in EVERY_DTYPE}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Refused(Exception):
    """A value that cannot travel, on its way up to the root, collecting the path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.labels: list[str] = []
        self.owners: list[int] = []

    def inside(self, label: str, owner: object = None) -> Refused:
        """Add the step from `owner` to what was refused."""
        self.labels.append(label)
        self.owners.append(id(owner))
        return self

    def unsupported(self) -> UnsupportedPayload:
        """The error for the caller. A structure too deep because it contains itself is named as that."""
        labels, owners = self.labels[::-1], self.owners[::-1]
        for index, owner in enumerate(owners):
            if len(owners) >= MAX_DEPTH and owner in owners[:index]:
                path = "payload" + "".join(labels[:index])
                first = "payload" + "".join(labels[: owners.index(owner)])
                return UnsupportedPayload(f"{path} is {first} again: a structure cannot contain itself", path=path)
        path = "payload" + "".join(labels)
        return UnsupportedPayload(f"{path} {self.reason}", path=path)


def shown(key: object) -> str:
    """A key or element as it stands in a path, cut to a readable length."""
    text = repr(key)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def junk(what: str) -> NoReturn:
    """Refuse a header that no `plan` can have made."""
    raise RemoteProtocolError(f"malformed payload header: {what}")


@attrs.frozen
class StructClass:
    """A struct type as it stands in a header.

    Attributes:
        flavour: `DATACLASS`, `ATTRS`, `MSGSPEC` or `NAMEDTUPLE`.
        name: ``module:qualname``.
        fields: Names of the fields as Python has them, in order.
        encoded: Their names in the stock encoding; None for one that it leaves out.
        array_like: The stock encoding is an array of the values.
        tag_field: Name under which the stock encoding carries `tag`; None: no tag.
        tag: What tells a type of a msgspec union from the others.
    """

    flavour: int
    name: str
    fields: Sequence[str]
    encoded: Sequence[str | None]
    array_like: bool = False
    tag_field: str | None = None
    tag: str | int | None = None


@attrs.frozen
class Header:
    """A decoded header: the struct types that occur, and the skeleton, which nobody has checked yet."""

    classes: Sequence[StructClass]
    skeleton: object


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def encode_header(classes: Sequence[StructClass], skeleton: object) -> bytes:
    """The header as it travels when it is short, and as it lies in the pool when it is not."""
    rows = [
        [each.flavour, each.name, each.fields, each.encoded, each.array_like, each.tag_field, each.tag]
        for each in classes
    ]
    return b"\x01" + _encode([rows, skeleton])


def encode_spilled(offset: int, nbytes: int) -> bytes:
    """The header that says where the real one lies."""
    return b"\x01" + _encode([offset, nbytes])


def open_header(header: bytes, fetch: Callable[[int, int], bytes]) -> Header:
    """Decode a header; of a spilled one `fetch` gets the bytes, given offset and length, which it checks.

    Raises:
        RemoteProtocolError: it is not a header, is of another version, or has too many items.
    """
    parts = _parts(header)
    if _is_spilled(parts):
        parts = _parts(fetch(*parts))
    return _header(parts)


def open_inline(header: bytes) -> Header | None:
    """As `open_header`; None if the real header lies among the bytes.

    Raises:
        RemoteProtocolError: as `open_header`.
    """
    parts = _parts(header)
    return None if _is_spilled(parts) else _header(parts)


def _is_spilled(parts: list[Any]) -> bool:
    return type(parts[0]) is int and type(parts[1]) is int


def _header(parts: list[Any]) -> Header:
    classes, skeleton = parts
    if type(classes) is not list:
        junk("no table of struct types")
    return Header([_struct_class(row) for row in classes] if classes else (), skeleton)


def _parts(header: bytes) -> list[Any]:
    if header[:1] != b"\x01":
        junk(f"it begins with {bytes(header[:1])!r}, where version {VERSION} is understood here")
    bound_items(header, at=1, limit=ITEMS_PER_NODE * MAX_NODES)
    try:
        parts = _decode(memoryview(header)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed payload header: {error}") from error
    if type(parts) is not list or len(parts) != 2:
        junk("not an array of two")
    return parts


def _struct_class(row: object) -> StructClass:
    if type(row) is not list or len(row) != 7:
        junk("a struct type is not an array of seven")
    flavour, name, fields, encoded, array_like, tag_field, tag = row
    if not (
        type(flavour) is int
        and DATACLASS <= flavour <= NAMEDTUPLE
        and type(name) is str
        and type(fields) is list
        and set(map(type, fields)) <= {str}
        and len(set(fields)) == len(fields)
        and type(encoded) is list
        and set(map(type, encoded)) <= {str, type(None)}
        and len(encoded) == len(fields)
        and type(array_like) is bool
        and type(tag_field) in (str, type(None))
        and type(tag) in (str, int, type(None))
    ):
        junk("a struct type with fields of the wrong kind")
    return StructClass(flavour, name, fields, encoded, array_like, tag_field, tag)


def nbytes_of(itemsize: int, shape: Sequence[int]) -> int:
    """Bytes of a tensor or array; -1 if its dimensions are out of all bounds (also where one of them is zero)."""
    if len(shape) > MAX_DIMS:
        return -1
    size = extent = itemsize
    for dim in shape:
        if dim < 0:
            return -1
        size *= dim
        extent *= dim or 1
        if extent >= MAX_EXTENT:
            return -1
    return size
