"""Payloads of any shape arrive bit for bit, and headers of any bytes are read within bounds or refused."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from payloads import STRUCTS, Cell, Frozen, Pair, Record, bits, frame, guarded, packed, sent

from trio_mori import RemoteProtocolError, UnsupportedPayload
from trio_mori._payload import glance, restore
from trio_mori._payload_format import DTYPES
from trio_mori._stock_payload import stock_decode, stock_encode, stock_size

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ARRAY_DTYPES = ("|b1", "|i1", ">u2", "<f4", ">f8", "<c16", "<M8[ns]", "|S3", "<U2")
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and shape, its dimensions in any order, its bytes any."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(SHAPES)
    size = int(np.prod(shape)) * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    if dtype is torch.bool:
        data %= 2
    tensor = data.view(dtype).view(shape) if size else data.view(dtype).reshape(shape)
    return tensor.permute(draw(st.permutations(range(len(shape)))))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """An array of any dtype, its bytes any."""
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = draw(SHAPES)
    if dtype.kind == "U":
        return np.full(shape, draw(st.text(st.characters(codec="utf-8"), max_size=2)), dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (data % 2 if dtype.kind == "b" else data).view(dtype).reshape(shape)


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBERS = st.none() | st.booleans() | st.integers() | st.integers(-(1 << 70), 1 << 70) | st.floats()
KEYS = st.recursive(
    NUMBERS | TEXT | st.binary(max_size=80) | st.complex_numbers(),
    lambda keys: st.lists(keys, max_size=3).map(tuple),
    max_leaves=4,
)
LEAVES = (
    KEYS
    | tensors()
    | arrays()
    | st.binary(max_size=200)
    | st.binary(max_size=100).map(bytearray)
    | st.floats(width=32).map(np.float32)
    | st.sampled_from([torch.Size([1, 2]), torch.float16, torch.device("cuda:1"), slice(1, None, 2)])
    | st.sets(KEYS, max_size=3)
    | st.frozensets(KEYS, max_size=3)
)


def inside(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Structures of such values."""
    return st.one_of(
        st.lists(values, max_size=4),
        st.lists(values, max_size=4).map(tuple),
        st.dictionaries(TEXT, values, max_size=4),
        st.dictionaries(KEYS, values, max_size=4),
        st.dictionaries(TEXT, values, max_size=3).map(OrderedDict),
        st.builds(frame, values, TEXT),
        st.builds(Frozen, values, values),
        st.builds(Cell, values, st.integers(0, 9)),
        st.builds(Record, values, TEXT),
        st.builds(Pair, values, values),
    )


STRUCTURES = inside(st.recursive(LEAVES, inside, max_leaves=12))

# What one byte of a header may turn into: tags, lengths, and the first bytes of every kind of msgpack item.
EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "drop"]), st.integers(0, 400), st.integers(0, 255)), max_size=6
)


def outcome(header: bytes, body: bytes, guard: int, *, copy: bool) -> object:
    """What becomes of a header and these bytes, when there are others around them."""
    try:
        arrived = restore(header, guarded(body, guard), payload_types=STRUCTS, copy=copy)
    except (RemoteProtocolError, UnsupportedPayload) as error:
        return type(error)
    return bits(arrived.value), arrived.unknown_types


@given(STRUCTURES)
def test_a_structure_arrives_bit_for_bit(data: object) -> None:
    arrived = sent(data)
    assert bits(arrived.value) == bits(data)
    assert arrived.unknown_types == ()


@given(STRUCTURES)
def test_the_size_of_the_stock_form_is_that_of_its_bytes(data: object) -> None:
    header, body = packed(data)
    try:
        encoded = stock_encode(header, guarded(body, 0))
    except UnsupportedPayload:
        with pytest.raises(UnsupportedPayload, match="payload"):
            stock_size(header, guarded(body, 0))
        return
    assert len(encoded) == stock_size(header, guarded(body, 0))
    stock_decode(encoded)


@given(STRUCTURES, EDITS, st.integers(0, 8), st.booleans())
@settings(max_examples=200)
def test_a_changed_header_is_refused_or_reads_only_what_came(
    data: object, edits: list[tuple[str, int, int]], missing: int, copy: bool
) -> None:
    header, body = packed(data)
    body = body[: max(0, len(body) - missing)]
    changed = bytearray(header)
    for kind, at, byte in edits:
        at = 1 + at % max(1, len(changed) - 1)
        changed[at : at + (kind != "insert")] = b"" if kind == "drop" else bytes([byte])
    assert outcome(bytes(changed), body, 0x00, copy=copy) == outcome(bytes(changed), body, 0xFF, copy=copy)


@given(STRUCTURES | st.lists(tensors()) | st.dictionaries(TEXT, tensors() | TEXT | st.lists(st.integers(0, 9))), EDITS)
@settings(max_examples=200)
def test_what_is_made_at_a_glance_is_what_a_whole_look_makes(data: object, edits: list[tuple[str, int, int]]) -> None:
    header, body = packed(data)
    changed, source = bytearray(header), guarded(body, 0)
    for kind, at, byte in edits:
        at = 1 + at % max(1, len(changed) - 1)
        changed[at : at + (kind != "insert")] = b"" if kind == "drop" else bytes([byte])
    recipe = None
    with suppress(RemoteProtocolError):
        recipe = glance(bytes(changed)).recipe
    if recipe is not None and recipe.size <= len(body):
        address = source.data_ptr()
        made = [recipe.made_of(address), recipe.made_by(lambda part: part.made_of(address))]
        assert bits(made[0]) == bits(made[1]) == bits(restore(bytes(changed), source).value)


def test_what_is_made_twice_at_a_glance_shares_nothing() -> None:
    header, body = packed({"a": [1, 2], "b": [{}, (3, [])], "c": torch.ones(2), "d": torch.tensor(True)})
    recipe, source = glance(header).recipe, guarded(body, 0)
    assert recipe is not None
    first: Any = recipe.made_of(source.data_ptr())
    first["a"].append(3)
    first["b"][0]["x"] = first["b"][1][1].append(4)
    first["c"].zero_()
    first["d"].logical_not_()
    assert bits(recipe.made_of(source.data_ptr())) == bits(restore(header, source).value)


@given(st.binary(max_size=60), st.binary(max_size=40))
@settings(max_examples=500)
def test_a_header_of_any_bytes_is_refused_or_reads_only_what_came(junk: bytes, body: bytes) -> None:
    for header in (junk, b"\x01\x92\x90" + junk):
        assert outcome(header, body, 0x00, copy=True) == outcome(header, body, 0xFF, copy=True)


@given(STRUCTURES, EDITS)
def test_a_changed_stock_payload_is_decoded_or_refused(data: object, edits: list[tuple[str, int, int]]) -> None:
    header, body = packed(data)
    try:
        changed = bytearray(stock_encode(header, guarded(body, 0)))
    except UnsupportedPayload:
        changed = bytearray(header)
    for kind, at, byte in edits:
        at %= max(1, len(changed))
        changed[at : at + (kind != "insert")] = b"" if kind == "drop" else bytes([byte])
    with suppress(RemoteProtocolError, UnsupportedPayload):
        stock_decode(bytes(changed))


@given(st.binary(max_size=100))
@settings(max_examples=300)
def test_any_bytes_of_a_stock_peer_are_decoded_or_refused(junk: bytes) -> None:
    with suppress(RemoteProtocolError, UnsupportedPayload):
        stock_decode(junk)
