"""The form in which stock peers send and read payloads: msgpack, with tensors, arrays and images as marked maps.

| value | encoding |
|---|---|
| tensor | ``{"__tensor__": True, "dtype": "bfloat16", "shape": [...], "data": bin}`` |
| numpy array | ``{"__ndarray__": True, "dtype": "<f4", "shape": [...], "data": bin}`` |
| PIL image | ``{"__pil_image__": True, "mode": "RGB", "shape": [...], "data": bin}`` |

A raw payload (one tensor, or bytes) is its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from ._errors import RemoteProtocolError, UnsupportedPayload
from ._payload_copy import fill, new_tensor, read_bytes
from ._payload_foreign import BAND_MODES, array_address, image_nbytes, itemsize_of, new_array, new_image
from ._payload_format import (
    ARRAY,
    BIG_INT,
    BYTEARRAY,
    BYTES,
    COMPLEX,
    DEVICE,
    DTYPE,
    DTYPES,
    FROZENSET,
    IMAGE,
    ITEMS_PER_NODE,
    LIST,
    MAX_DEPTH,
    MAX_NODES,
    ORDERED,
    PAIRS,
    SCALAR,
    SET,
    SIZE,
    SLICE,
    STRUCT,
    TENSOR,
    TUPLE,
    UNSET,
    VIEW,
    Header,
    Refused,
    nbytes_of,
    open_header,
    shown,
)
from ._payload_scan import bound_items

# The longest bin that msgpack has.
_MAX_PART = (1 << 32) - 1

_TENSOR, _ARRAY, _IMAGE = "__tensor__", "__ndarray__", "__pil_image__"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

# Longer headers are of lists of numbers or of texts, and come once.
_REMEMBERED = 1024

# What stands in the tree where a large part's bytes go.
_Fetch = Callable[[int, int], bytes]


def stock_size(header: bytes, source: torch.Tensor | None = None) -> int:
    """Exactly how many bytes `stock_encode` would return, without reading or copying any large part.

    Args:
        header: As `plan` made it.
        source: The bytes in the pool; only needed if the header lies there, too.

    Raises:
        UnsupportedPayload: the stock form has no place for something in it; only native peers can be given it.
    """
    return _size_of(header) if source is None and len(header) <= _REMEMBERED else _measured(header, source)


# Most payloads of an edge have the same few forms, and to measure one takes as long as the rest of its put.
@lru_cache(maxsize=256)
def _size_of(header: bytes) -> int:
    return _measured(header, None)


def _measured(header: bytes, source: torch.Tensor | None) -> int:
    left_out: list[int] = []

    def measure(offset: int, nbytes: int) -> bytes:
        left_out.append(nbytes)
        return b""

    encoded = _stock_form(header, source, measure)
    if encoded is None:
        return sum(left_out)
    # An empty bin took two bytes; a long one has a longer length.
    return len(encoded) + sum(each + (0 if each < 1 << 8 else 1 if each < 1 << 16 else 3) for each in left_out)


def stock_encode(header: bytes, source: torch.Tensor) -> bytes:
    """The stock form of a payload.

    Raises:
        UnsupportedPayload: as `stock_size`.
    """
    fetched: list[bytes] = []

    def fetch(offset: int, nbytes: int) -> bytes:
        data = _fetch(source, offset, nbytes)
        fetched.append(data)
        return data

    encoded = _stock_form(header, source, fetch)
    return fetched[0] if encoded is None else encoded


def _fetch(source: torch.Tensor | None, offset: int, nbytes: int) -> bytes:
    if not nbytes:
        return b""  # an empty part at the end has its place after the last byte
    if source is None or offset + nbytes > source.numel():
        raise RemoteProtocolError(f"malformed payload header: {nbytes} bytes at {offset} are not there")
    host = source[offset : offset + nbytes].cpu()
    return read_bytes(host.data_ptr(), nbytes)


def _stock_form(header: bytes, source: torch.Tensor | None, fetch: _Fetch) -> bytes | None:
    """The encoded tree; None if the payload is raw, and then `fetch` was called for its bytes."""
    opened = open_header(header, lambda offset, nbytes: _fetch(source, offset, nbytes))
    skeleton = opened.skeleton
    if type(skeleton) is list and skeleton[0] in (TENSOR, BYTES):
        _RAW[skeleton[0]](skeleton, fetch)
        return None

    def fetch_part(offset: int, nbytes: int) -> bytes:
        if nbytes > _MAX_PART:
            raise Refused(f"has {nbytes} bytes, where the stock form has room for {_MAX_PART}: send it in parts")
        return fetch(offset, nbytes)

    try:
        tree = _Former(opened, fetch_part).form(skeleton)
    except Refused as refusal:
        raise refusal.unsupported() from None
    try:
        return _encode(tree)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedPayload(f"payload has no form that stock peers can read: {error}", path="payload") from error


_RAW: dict[int, Callable[[Any, _Fetch], bytes]] = {
    TENSOR: lambda parts, fetch: fetch(parts[3], nbytes_of(DTYPES[parts[1]].itemsize, parts[2])),
    BYTES: lambda parts, fetch: fetch(parts[1], parts[2]),
    BYTEARRAY: lambda parts, fetch: fetch(parts[1], parts[2]),
    VIEW: lambda parts, fetch: fetch(parts[1], parts[2]),
}


class _Former:
    """Turns a skeleton of our own making into what msgpack encodes as stock peers expect it."""

    def __init__(self, header: Header, fetch: _Fetch) -> None:
        self._header = header
        self._fetch = fetch

    def form(self, item: Any) -> object:
        """The stock form of a skeleton."""
        if type(item) is dict:
            return {key: self._inside(value, f"[{shown(key)}]") for key, value in item.items()}
        if type(item) is not list:
            return item
        tag, *parts = item
        if tag in (LIST, TUPLE, SET, FROZENSET, SLICE):
            return [self._inside(part, f"[{index}]") for index, part in enumerate(parts)]
        if tag in (PAIRS, ORDERED):
            return {
                self._key(key): self._inside(value, f"[{shown(key)}]")
                for key, value in zip(parts[::2], parts[1::2], strict=True)
            }
        if tag == SIZE:
            return parts
        if tag in _RAW and tag != TENSOR:
            return _RAW[tag](item, self._fetch)
        if tag == STRUCT:
            return self._struct(parts)
        return self._leaf(tag, parts, item)

    def _inside(self, item: object, label: str) -> object:
        try:
            return self.form(item)
        except Refused as refusal:
            raise refusal.inside(label) from None

    def _key(self, key: Any) -> Any:
        if type(key) is not list:
            return key
        if key[0] in (TUPLE, SIZE):
            return tuple(self._key(each) for each in key[1:])
        form = self.form(key)
        if isinstance(form, list | dict):
            raise Refused(
                "has a structure as a key, for which the stock serializer has no form: only native peers can get it"
            )
        return form

    def _leaf(self, tag: int, parts: list[Any], item: Any) -> object:
        if tag == TENSOR:
            dtype, shape, _ = parts
            return {_TENSOR: True, "dtype": dtype, "shape": shape, "data": _RAW[TENSOR](item, self._fetch)}
        if tag == ARRAY:
            dtype, shape, offset = parts
            data = self._fetch(offset, nbytes_of(itemsize_of(dtype), shape))
            return {_ARRAY: True, "dtype": dtype, "shape": shape, "data": data}
        if tag == IMAGE:
            mode, width, height, offset = parts
            if mode not in BAND_MODES:
                raise Refused(
                    f"is a PIL image of mode {mode}, which the stock serializer changes: convert it to RGB or L"
                )
            bands = BAND_MODES[mode]
            shape = [height, width] if bands == 1 else [height, width, bands]
            data = self._fetch(offset, image_nbytes(mode, width, height))
            return {_IMAGE: True, "mode": mode, "shape": shape, "data": data}
        raise Refused(f"is a {_NAMES[tag]}, for which the stock serializer has no form: only native peers can get it")

    def _struct(self, parts: list[Any]) -> object:
        index, order, *values = parts
        kind = self._header.classes[index]
        if kind.array_like:
            formed = [self._inside(value, f".{name}") for name, value in zip(kind.fields, values, strict=True)]
            return formed if kind.tag_field is None else [kind.tag, *formed]
        result: dict[object, object] = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        for at in range(len(values)) if order is None else order:
            if kind.encoded[at] is not None:
                result[kind.encoded[at]] = self._inside(values[at], f".{kind.fields[at]}")
        return result


_NAMES = {
    BIG_INT: "integer of more than 64 bits",
    COMPLEX: "complex number",
    DEVICE: "torch.device",
    DTYPE: "torch.dtype",
    SCALAR: "numpy scalar",
    UNSET: "msgspec.UNSET",
}


def stock_decode(data: bytes | memoryview) -> object:
    """What a stock sender encoded. Tensors and arrays own their memory. Request outputs stay dicts.

    Raises:
        RemoteProtocolError: it is not what a stock serializer can have made.
    """
    bound_items(data, limit=ITEMS_PER_NODE * MAX_NODES)
    try:
        return _revive(_decode(data), 0)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed payload of a stock sender: {error}") from error


def _revive(item: Any, depth: int) -> Any:
    if type(item) is list:
        _check_depth(depth)
        return [_revive(each, depth + 1) for each in item]
    if type(item) is not dict:
        return item
    _check_depth(depth)
    for marker, make in _REVIVERS.items():
        if item.get(marker):
            try:
                return make(item)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise RemoteProtocolError(f"malformed payload of a stock sender: {marker}: {error!r}") from error
    return {key: _revive(value, depth + 1) for key, value in item.items()}


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RemoteProtocolError(f"payload of a stock sender nested more than {MAX_DEPTH} deep")


def _content(item: dict[str, Any], itemsize: int) -> tuple[list[int], bytes]:
    shape, data = item["shape"], item["data"]
    if type(shape) is not list or not set(map(type, shape)) <= {int} or type(data) is not bytes:
        raise ValueError("shape or data of the wrong kind")
    if not itemsize or nbytes_of(itemsize, shape) != len(data):
        raise ValueError(f"{len(data)} bytes for shape {shape[:8]} with {itemsize} bytes per element")
    return shape, data


def _tensor(item: dict[str, Any]) -> torch.Tensor:
    dtype = DTYPES.get(item["dtype"])
    shape, data = _content(item, 0 if dtype is None else dtype.itemsize)
    tensor = new_tensor(DTYPES[item["dtype"]], shape, len(data))
    if data:
        fill(tensor.data_ptr(), data, len(data))
    return tensor


def _array(item: dict[str, Any]) -> object:
    shape, data = _content(item, itemsize_of(item["dtype"]))
    array = new_array(item["dtype"], shape)
    if data:
        fill(array_address(array), data, len(data))
    return array


def _image(item: dict[str, Any]) -> object:
    mode: str = item["mode"]
    shape, data = _content(item, 1 if mode in BAND_MODES else 0)
    height, width = _image_size(mode, shape)
    return new_image(mode, width, height, data)


def _image_size(mode: str, shape: Sequence[int]) -> tuple[int, int]:
    height, width, *bands = shape
    if bands != ([] if BAND_MODES[mode] == 1 else [BAND_MODES[mode]]) or height < 1 or width < 1:
        raise ValueError(f"an image of mode {mode} and shape {list(shape)}")
    return height, width


_REVIVERS: dict[str, Callable[[dict[str, Any]], object]] = {_TENSOR: _tensor, _ARRAY: _array, _IMAGE: _image}
