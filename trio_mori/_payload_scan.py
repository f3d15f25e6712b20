"""How many items a msgpack document has, found before a decoder makes an object of each.

A decoder turns one byte (an empty array) into up to 72 bytes of memory. Up to 1 MiB that is harmless; a longer
document is counted first.
"""

from __future__ import annotations

from ._errors import RemoteProtocolError

# Below this a decoder can use 75 MB at most, which is not worth 0.1 us per item.
_UNCOUNTED = 1 << 20


def _width(first: int) -> int:
    if 0xA0 <= first <= 0xBF:
        return 1 + (first & 0x1F)
    return _WIDTHS.get(first, 1)


# Bytes of an item by its first byte; with a length that follows, up to where the body of that length begins.
_WIDTHS = {
    0xC4: 2,
    0xC5: 3,
    0xC6: 5,  # bin
    0xC7: 3,
    0xC8: 4,
    0xC9: 6,  # ext, with its type
    0xCA: 5,
    0xCB: 9,  # float
    0xCC: 2,
    0xCD: 3,
    0xCE: 5,
    0xCF: 9,
    0xD0: 2,
    0xD1: 3,
    0xD2: 5,
    0xD3: 9,  # int
    0xD4: 3,
    0xD5: 4,
    0xD6: 6,
    0xD7: 10,
    0xD8: 18,  # ext of a fixed length
    0xD9: 2,
    0xDA: 3,
    0xDB: 5,  # str
    0xDC: 3,
    0xDD: 5,
    0xDE: 3,
    0xDF: 5,  # array, map
}
# Bytes of the length.
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_STEPS = [_width(first) for first in range(256)]


def bound_items(data: bytes | memoryview, *, at: int = 0, limit: int) -> None:
    """Refuse a document of more than `limit` items. It may be malformed: that is for the decoder to say.

    Raises:
        RemoteProtocolError: it has more.
    """
    end = len(data)
    if end <= _UNCOUNTED:
        return
    steps, lengths = _STEPS, _LENGTHS
    items = 0
    while at < end:
        first = data[at]
        step = steps[first]
        if first in lengths:
            step += int.from_bytes(data[at + 1 : at + 1 + lengths[first]], "big")
        at += step
        items += 1
        if items > limit:
            raise RemoteProtocolError(f"a payload of more than {limit} items in {end} bytes is refused")
