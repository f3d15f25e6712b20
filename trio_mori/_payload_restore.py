"""From a header and the bytes in the pool to the payload. Both came over the network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import msgspec
import torch

from ._errors import RemoteProtocolError, TrioMoriError
from ._gpu import current_stream, mark
from ._payload_copy import fill, host_view, new_tensor, read_bytes
from ._payload_foreign import array_address, image_nbytes, itemsize_of, new_array, new_image, new_scalar
from ._payload_format import (
    ARRAY,
    BIG_INT,
    BYTEARRAY,
    BYTES,
    COMPLEX,
    DEVICE,
    DTYPE,
    DTYPES,
    EVERY_DTYPE,
    FROZENSET,
    IMAGE,
    LIST,
    MAX_DEPTH,
    MAX_EXTENT,
    MAX_NODES,
    NAMEDTUPLE,
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
    junk,
    nbytes_of,
    open_header,
)
from ._payload_glance import PLAIN
from ._payload_structs import rebuild, type_name


@attrs.frozen
class Restored:
    """A payload that arrived.

    Attributes:
        value: It.
        unknown_types: Struct types that the receiver does not list; their instances arrived as dicts or tuples.
    """

    value: object
    unknown_types: tuple[str, ...]


def restore(
    header: bytes,
    source: torch.Tensor,
    *,
    payload_types: Mapping[str, type] | Iterable[type] = (),
    device: torch.device | str | None = None,
    copy: bool = True,
) -> Restored:
    """Make the payload of a header and its bytes.

    Args:
        source: The bytes, a 1-D uint8 tensor.
        payload_types: Struct types to restore, by ``module:qualname`` or as they are. Nothing else is made an
            instance of, and nothing is imported.
        device: Where tensors go; by default where `source` is.
        copy: Whether tensors own their memory, each its own. If not, they are views of `source`.

    Raises:
        RemoteProtocolError: the header is not one that a sender can have made, or goes past the bytes.
        UnsupportedPayload: numpy or PIL is needed and cannot be imported.
        ConfigError: a type in `payload_types` that arrived is no struct type.
    """
    listed = payload_types if isinstance(payload_types, Mapping) else {type_name(each): each for each in payload_types}
    place = None if device is None else torch.device(device)
    restorer = _Restorer(source, listed, place, copy=copy)
    opened = open_header(header, restorer.fetch)
    value = restorer.build(opened, opened.skeleton, 0)
    if copy and not source.is_cpu:
        # The copies were only queued, and whoever called may free the source now.
        mark(current_stream(source.device)).synchronize()
    return Restored(value, tuple(sorted(restorer.unknown)))


class _Restorer:
    """One walk over a skeleton."""

    def __init__(
        self, source: torch.Tensor, listed: Mapping[str, type], device: torch.device | None, *, copy: bool
    ) -> None:
        self.unknown: set[str] = set()
        self._source = source
        self._listed = listed
        self._device = device
        self._copy = copy
        self._limit = self._left = source.numel()
        self._base = source.data_ptr() if source.is_cpu else 0
        self._nodes = 0

    def build(self, header: Header, item: object, depth: int) -> Any:
        """The value of a skeleton."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            junk(f"more than {MAX_NODES} values")
        if type(item) is dict:
            self._check_depth(depth)
            for key in item:
                if type(key) is not str:
                    junk("a map with a key that is no str")
            return {key: self.build(header, value, depth + 1) for key, value in item.items()}
        if type(item) is not list:
            if type(item) not in PLAIN:
                junk(f"a {type(item).__name__}")
            return item
        self._check_depth(depth)
        if not item or type(item[0]) is not int or item[0] not in _BUILDERS:
            junk("an array without a known tag")
        try:
            return _BUILDERS[item[0]](self, header, item[1:], depth + 1)
        except TrioMoriError:
            raise
        except (TypeError, ValueError, OverflowError, IndexError) as error:
            # The builders unpack and convert without looking first; whatever does not fit ends here.
            raise RemoteProtocolError(f"malformed payload header: item with tag {item[0]}: {error}") from error

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            junk(f"nested more than {MAX_DEPTH} deep")

    def fetch(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the source, in host memory."""
        self._take(offset, nbytes)
        return self._read(offset, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._source.is_cpu:
            return read_bytes(self._base + offset, nbytes)
        host = self._source[offset : offset + nbytes].cpu()
        return read_bytes(host.data_ptr(), nbytes)

    def _take(self, offset: object, nbytes: object) -> None:
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            junk("an offset or length that is no natural number")
        if nbytes and offset + nbytes > self._limit:
            junk(f"{nbytes} bytes at {offset} are past the {self._limit} bytes that came")
        # No two parts of a sender share bytes. If they could, a short header would make many times what came.
        self._left -= nbytes
        if self._left < 0:
            junk(f"its parts add up to more than the {self._limit} bytes that came")

    # --- leaves -------------------------------------------------------------------------------------------

    def tensor(self, header: Header, parts: list[Any], depth: int) -> torch.Tensor:
        name, shape, offset = parts
        dtype = DTYPES.get(name)
        if dtype is None:
            junk(f"dtype {name!r}")
        nbytes = nbytes_of(dtype.itemsize, _lengths(shape))
        self._take(offset, nbytes)
        if nbytes and self._device is not None and self._device != self._source.device:
            elsewhere = self._source[offset : offset + nbytes].to(self._device, copy=True)
            return elsewhere.view(dtype).view(shape)
        if self._copy or not nbytes:
            result = self._own_tensor(dtype, shape, offset, nbytes)
        else:
            if (self._source.storage_offset() + offset) % dtype.itemsize:
                junk(f"a {name} tensor at offset {offset}")
            result = self._source[offset : offset + nbytes].view(dtype).view(shape)
        return result if self._device is None or result.device == self._device else result.to(self._device)

    def _own_tensor(self, dtype: torch.dtype, shape: list[int], offset: int, nbytes: int) -> torch.Tensor:
        if not self._source.is_cpu:
            return self._source[offset : offset + nbytes].clone().view(dtype).view(shape)
        result = new_tensor(dtype, shape, nbytes)
        if nbytes:
            fill(result.data_ptr(), self._base + offset, nbytes)
        return result

    def bytes(self, header: Header, parts: list[Any], depth: int) -> bytes:
        offset, nbytes = parts
        return self.fetch(offset, nbytes)

    def bytearray(self, header: Header, parts: list[Any], depth: int) -> bytearray:
        offset, nbytes = parts
        self._take(offset, nbytes)
        if self._source.is_cpu and nbytes:
            return bytearray(host_view(self._base + offset, nbytes))
        return bytearray(self._read(offset, nbytes))

    def array(self, header: Header, parts: list[Any], depth: int) -> object:
        dtype, shape, offset = parts
        itemsize = itemsize_of(dtype)
        nbytes = nbytes_of(itemsize, _lengths(shape))
        if not itemsize:
            junk(f"array dtype {dtype!r}")
        self._take(offset, nbytes)
        array = new_array(dtype, shape)
        if nbytes and self._source.is_cpu:
            fill(array_address(array), self._base + offset, nbytes)
        elif nbytes:
            data = self._read(offset, nbytes)
            fill(array_address(array), data, nbytes)
        return array

    def scalar(self, header: Header, parts: list[Any], depth: int) -> object:
        dtype, data = parts
        if type(data) is not bytes or not data or itemsize_of(dtype) != len(data):
            junk(f"a scalar of dtype {dtype!r}")
        return new_scalar(dtype, data)

    def image(self, header: Header, parts: list[Any], depth: int) -> object:
        mode, width, height, offset = parts
        if type(mode) is not str or type(width) is not int or type(height) is not int:
            junk("an image without mode and size")
        nbytes = image_nbytes(mode, width, height)
        return new_image(mode, width, height, self.fetch(offset, nbytes))

    # --- containers ---------------------------------------------------------------------------------------

    def items(self, header: Header, parts: list[Any], depth: int) -> list[Any]:
        if set(map(type, parts)) <= PLAIN:
            self._nodes += len(parts)
            return parts
        return [self.build(header, part, depth) for part in parts]

    def mapping(self, kind: type[dict[Any, Any]], header: Header, parts: list[Any], depth: int) -> dict[Any, Any]:
        items = self.items(header, parts, depth)
        if len(items) % 2:
            junk("a dict with a key that has no value")
        result = kind(zip(items[::2], items[1::2], strict=True))
        if 2 * len(result) != len(items):
            junk("a dict with a key that it has already")
        return result

    def unique(self, kind: Callable[[list[Any]], Any], header: Header, parts: list[Any], depth: int) -> Any:
        items = self.items(header, parts, depth)
        result = kind(items)
        if len(result) != len(items):
            junk("a set with an item that it has already")
        return result

    def struct(self, header: Header, parts: list[Any], depth: int) -> object:
        index, _order, *values = parts
        if type(index) is not int or not 0 <= index < len(header.classes):
            junk("a struct of no type")
        described = header.classes[index]
        if len(values) != len(described.fields):
            junk(f"{described.name} with {len(values)} of {len(described.fields)} fields")
        built = self.items(header, values, depth)
        listed = self._listed.get(described.name)
        if listed is not None:
            return rebuild(listed, described, built)
        self.unknown.add(described.name)
        if described.flavour == NAMEDTUPLE:
            return tuple(built)
        return dict(zip(described.fields, built, strict=True))


def _lengths(shape: Any) -> list[int]:
    if type(shape) is not list or not set(map(type, shape)) <= {int}:
        junk("a shape that is no array of integers")
    return shape


def _size(parts: list[Any]) -> torch.Size:
    if max(_lengths(parts), default=0) >= MAX_EXTENT:
        junk("a size that no tensor has")
    return torch.Size(parts)


def _big_int(parts: list[Any]) -> int:
    (data,) = parts
    if type(data) is not bytes:
        junk("a large integer that is no bytes")
    return int.from_bytes(data, "big", signed=True)


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    if type(real) is not float or type(imaginary) is not float:
        junk("a complex number without parts")
    return complex(real, imaginary)


def _dtype(parts: list[Any]) -> torch.dtype:
    (name,) = parts
    if type(name) is not str or name not in EVERY_DTYPE:
        junk(f"dtype {name!r}")
    return EVERY_DTYPE[name]


def _device(parts: list[Any]) -> torch.device:
    (name,) = parts
    if type(name) is not str:
        junk(f"device {name!r}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RemoteProtocolError(f"malformed payload header: device {name!r}: {error}") from error
    if str(device) != name:
        junk(f"device {name!r}")  # torch wraps an index that is too large
    return device


def _unset(parts: list[Any]) -> object:
    () = parts
    return msgspec.UNSET


def _slice(parts: list[Any]) -> slice:
    start, stop, step = parts
    return slice(start, stop, step)


_Builder = Callable[[_Restorer, Header, list[Any], int], Any]
_BUILDERS: dict[int, _Builder] = {
    LIST: _Restorer.items,
    TUPLE: lambda restorer, header, parts, depth: tuple(restorer.items(header, parts, depth)),
    PAIRS: lambda restorer, header, parts, depth: restorer.mapping(dict, header, parts, depth),
    ORDERED: lambda restorer, header, parts, depth: restorer.mapping(OrderedDict, header, parts, depth),
    SET: lambda restorer, header, parts, depth: restorer.unique(set, header, parts, depth),
    FROZENSET: lambda restorer, header, parts, depth: restorer.unique(frozenset, header, parts, depth),
    SLICE: lambda restorer, header, parts, depth: _slice(restorer.items(header, parts, depth)),
    COMPLEX: lambda restorer, header, parts, depth: _complex(parts),
    BIG_INT: lambda restorer, header, parts, depth: _big_int(parts),
    BYTES: _Restorer.bytes,
    VIEW: _Restorer.bytes,
    BYTEARRAY: _Restorer.bytearray,
    TENSOR: _Restorer.tensor,
    ARRAY: _Restorer.array,
    SCALAR: _Restorer.scalar,
    IMAGE: _Restorer.image,
    STRUCT: _Restorer.struct,
    SIZE: lambda restorer, header, parts, depth: _size(parts),
    DTYPE: lambda restorer, header, parts, depth: _dtype(parts),
    DEVICE: lambda restorer, header, parts, depth: _device(parts),
    UNSET: lambda restorer, header, parts, depth: _unset(parts),
}
