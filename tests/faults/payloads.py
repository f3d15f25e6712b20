"""Payloads that say who they are, and whether they are whole."""

from __future__ import annotations

import random
import struct
import zlib
from math import log

import attrs
import torch

# Stream, number, incarnation of the source, and the checksum of all that and of the bytes that follow.
_HEAD = struct.Struct("<IIII")


@attrs.frozen
class Read:
    """What a payload says.

    Attributes:
        number: Its number in its stream.
        incarnation: Of the source that made it.
        fault: What is wrong with it; empty if nothing is.
        lost: It stands for one that is gone, for this reason.
        end: It ends its stream, and is no payload.
    """

    number: int = -1
    incarnation: int = -1
    size: int = 0
    fault: str = ""
    lost: str = ""
    end: bool = False


def make(seed: str, stream: int, number: int, incarnation: int, largest: int) -> object:
    """A payload of 1 to `largest` bytes, as a lone tensor or a structure; always the same one for these arguments."""
    chance = random.Random(f"{seed}.{stream}.{number}.{incarnation}")
    size = int(2 ** chance.uniform(0, log(largest, 2)))
    body = chance.randbytes(size)
    head = _HEAD.pack(stream, number, incarnation, _checksum(stream, number, incarnation, body))
    if chance.random() < 0.5:
        return torch.frombuffer(bytearray(head + body), dtype=torch.uint8)
    tensor = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return {"head": head, "parts": [tensor[: size // 2], tensor[size // 2 :]], "text": "x" * chance.randrange(100)}


def make_end(number: int) -> object:
    """What ends a stream of so many payloads."""
    return {"end": number}


def make_lost(number: int, reason: str) -> object:
    """What a middle stage sends on in the place of a payload that it did not get."""
    return {"lost": reason, "number": number}


def read(stream: int, value: object) -> Read:
    """What came under some key of a stream."""
    if isinstance(value, dict) and "end" in value:
        return Read(value["end"], end=True)
    if isinstance(value, dict) and "lost" in value:
        return Read(value["number"], lost=value["lost"])
    try:
        if isinstance(value, torch.Tensor):
            whole = value.numpy().tobytes()
            head, body = whole[: _HEAD.size], whole[_HEAD.size :]
        else:
            assert isinstance(value, dict)
            head, body = value["head"], b"".join(part.numpy().tobytes() for part in value["parts"])
        of, number, incarnation, checksum = _HEAD.unpack(head)
    except (AssertionError, KeyError, struct.error) as error:
        return Read(fault=f"what came is no payload of this lane: {error!r}")
    if checksum != _checksum(of, number, incarnation, body):
        return Read(number, incarnation, fault=f"its {len(body)} bytes are not those that it was made of")
    if of != stream:
        return Read(number, incarnation, fault=f"it belongs to stream {of}")
    return Read(number, incarnation, len(body))


def _checksum(stream: int, number: int, incarnation: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<III", stream, number, incarnation)))
