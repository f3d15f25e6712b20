"""Messages of the vllm-omni dialect, which stock connectors speak, and their encoding.

One request in flight per connection, two frames (an empty delimiter and a payload), answered in kind. Requests and
answers are msgpack maps or one of four fixed byte strings. Decoding trusts as little as that of the native dialect.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .._errors import RemoteProtocolError
from .wire import MAX_BODY, Blob, Key, Uint

QUERY = b"query_info"
NOT_FOUND = b"info_not_found"
TRANSFER_DONE = b"trans_done"
TRANSFER_ERROR = b"trans_error"


class Query(msgspec.Struct, frozen=True):
    """How large is the payload of this key?"""

    request_id: Key


class Pull(msgspec.Struct, frozen=True):
    """Write the payload of this key to this place in my region."""

    request_id: Key
    engine_desc_packed: Blob
    mem_desc_packed: Blob
    dst_offset: Uint
    length: Uint


class Found(msgspec.Struct, frozen=True):
    """Answer to a query."""

    request_id: Key
    data_size: Uint
    is_fast_path: bool


_encoder = msgspec.msgpack.Encoder()
_query = msgspec.msgpack.Decoder(Query)
_pull = msgspec.msgpack.Decoder(Pull)
_found = msgspec.msgpack.Decoder(Found)


def decode_request(frames: Sequence[bytes]) -> Query | Pull:
    """Decode what a stock receiver's REQ socket sent (the routing frame already taken off).

    Raises:
        RemoteProtocolError: neither a query nor a pull.
    """
    if len(frames) != 2 or frames[0] != b"" or len(frames[1]) > MAX_BODY:
        raise RemoteProtocolError(f"neither a native nor a vllm-omni request: {len(frames)} frames")
    payload = frames[1]
    try:
        if payload.startswith(QUERY):
            return _query.decode(memoryview(payload)[len(QUERY) :])
        return _pull.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed vllm-omni request: {error}") from error


def encode_request(request: Query | Pull) -> list[bytes]:
    """The frames of a request to a stock sender, as a REQ socket would send them."""
    prefix = QUERY if isinstance(request, Query) else b""
    return [b"", prefix + _encoder.encode(request)]


def encode_answer(answer: bytes | Found) -> list[bytes]:
    """The frames of an answer to a stock receiver."""
    return [b"", answer if isinstance(answer, bytes) else _encoder.encode(answer)]


def decode_answer(frames: Sequence[bytes]) -> bytes | Found:
    """Decode a stock sender's answer: one of the four fixed strings, or `Found`.

    Raises:
        RemoteProtocolError: none of these.
    """
    if len(frames) != 2 or frames[0] != b"":
        raise RemoteProtocolError(f"not an answer of a vllm-omni sender: {len(frames)} frames")
    payload = frames[1]
    if payload in (NOT_FOUND, TRANSFER_DONE, TRANSFER_ERROR):
        return payload
    if len(payload) > MAX_BODY:
        raise RemoteProtocolError(f"answer of {len(payload)} bytes refused: over {MAX_BODY}")
    try:
        return _found.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed answer of a vllm-omni sender: {error}") from error
