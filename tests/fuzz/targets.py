"""What is fuzzed: functions of bytes that return or refuse, whatever these are."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import attrs
import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "protocol"))
from desks import ReceiverDesk, SenderDesk

from trio_mori import ConfigError, RemoteProtocolError, UnsupportedPayload
from trio_mori._deploy import load_deploy
from trio_mori._payload import restore
from trio_mori._payload_glance import glance, is_raw
from trio_mori._protocol import stock_wire, wire
from trio_mori._stock_payload import stock_decode, stock_encode, stock_size

from .places import (
    cuda_descriptor,
    halves,
    key_file,
    mori_descriptor,
    mori_key,
    shared_descriptors,
    shm_descriptor,
    unix_message,
    zmq_greeting,
)

CORPUS = Path(__file__).parent / "corpus"

# Bytes that may lie in the pool beside a header: what a header asks for has to be within them.
_POOL = 4096


def _refused(function: Callable[[bytes], bool | None]) -> Callable[[bytes], bool]:
    """It may refuse, by one of these, and by nothing else. Returns whether it understood what it was given."""

    @functools.wraps(function)
    def call(data: bytes) -> bool:
        try:
            return function(data) is not False
        except (RemoteProtocolError, UnsupportedPayload, ConfigError):
            return False

    return call


def from_receiver(data: bytes) -> None:
    """The native dialect, as a sender hears it; what is understood is said to a sender's book."""
    body = wire.decode_from_receiver([wire.MAGIC, data])
    assert wire.decode_from_receiver(wire.encode(body)) == body
    if isinstance(body, wire.Requests):
        desk = SenderDesk()
        desk.put("k@0_1")
        session = desk.meet()
        for message in body.messages:
            if isinstance(message, wire.Bye):
                desk.book.bye(session)
            else:
                desk.book.on_message(session, message, 0.0)
            for ticket in desk.book.starting:
                desk.book.watch(ticket, 0.0)
                assert ticket.destination + ticket.size <= session.region_size
                desk.end(ticket)
            desk.book.starting.clear()
        desk.pool.check()


def from_sender(data: bytes) -> None:
    """The native dialect, as a receiver hears it; what is understood is said to a receiver's book."""
    body = wire.decode_from_sender([wire.MAGIC, data])
    assert wire.decode_from_sender(wire.encode(body)) == body
    if isinstance(body, wire.Replies):
        desk = ReceiverDesk()
        for _ in range(3):
            desk.get("k@0_1")
        for message in body.messages:
            with suppress(RemoteProtocolError):
                desk.book.on_message(desk.channel, message, 0.0)
        desk.pool.check()
        assert sum(desk.book.held().values()) == desk.pool.size - desk.pool.free_bytes


def from_holder(data: bytes) -> None:
    """What another sender says of itself."""
    wire.decode_from_holder([wire.MAGIC, data])


def stock_request(data: bytes) -> None:
    """The vllm-omni dialect, as a sender hears it."""
    stock_wire.decode_request([b"", data])


def stock_answer(data: bytes) -> None:
    """The vllm-omni dialect, as a receiver hears it."""
    stock_wire.decode_answer([b"", data])


def payload_header(data: bytes) -> None:
    """What came in a pool, with the header that describes it."""
    header, content = halves(data)
    source = torch.frombuffer(bytearray(content[:_POOL] or b"\0"), dtype=torch.uint8)
    for function in (glance, is_raw):
        with suppress(RemoteProtocolError, UnsupportedPayload):
            function(header)
    restore(header, source)
    # What is a payload has a stock form, or is refused one; the header of a sender's own payload is never junk.
    size = stock_size(header, source)
    assert len(stock_encode(header, source)) == size


@dataclasses.dataclass
class Plain:
    a: object
    b: object = 1


@attrs.define
class Slotted:
    a: object
    _b: object = 1


@attrs.frozen(cache_hash=True)
class Hashed:
    a: object


class Struct(msgspec.Struct):
    a: object
    b: object = 1

    def __post_init__(self) -> None:
        if self.b == "refused":
            raise ValueError("it does not like that")


class Named(NamedTuple):
    a: object
    b: object


# By names that do not depend on how this module is imported: headers have them.
STRUCTS = {f"stage:{each.__name__}": each for each in (Plain, Slotted, Hashed, Struct, Named)}


def struct_header(data: bytes) -> bool:
    """As `payload_header`, by a receiver that restores types of its own."""
    header, content = halves(data)
    source = torch.frombuffer(bytearray(content[:_POOL] or b"\0"), dtype=torch.uint8)
    restored = restore(header, source, payload_types=STRUCTS).value
    return type(restored) in STRUCTS.values()


def stock_value(data: bytes) -> bool:
    """What the connector for vllm-omni delivers: the first byte says if its sender is a stock one."""
    from trio_mori_vllm_omni._values import StockCodec

    if data[:1] == b"\0":
        tree = stock_decode(data[1:])
    else:
        try:
            tree = msgspec.msgpack.decode(data[1:])
        except (msgspec.DecodeError, RecursionError):
            return False
    StockCodec().revived(tree)
    return True


def stock_payload(data: bytes) -> None:
    """A structure as a stock sender stores it."""
    stock_decode(data)


def deploy_file(data: bytes) -> None:
    """A deploy file."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        deploy = load_deploy(file.name)
        for stage in deploy.stages:
            with suppress(ConfigError):
                deploy.config_for_stage(stage)


TARGETS: dict[str, Callable[[bytes], bool]] = {
    function.__name__: _refused(function)
    for function in (
        from_receiver,
        from_sender,
        from_holder,
        stock_request,
        stock_answer,
        shm_descriptor,
        cuda_descriptor,
        mori_descriptor,
        mori_key,
        shared_descriptors,
        key_file,
        zmq_greeting,
        unix_message,
        payload_header,
        struct_header,
        stock_payload,
        deploy_file,
    )
}

if importlib.util.find_spec("vllm_omni") is not None:
    import vllm_omni.outputs  # noqa: F401 - takes ten seconds, for which an input would be blamed

    TARGETS["stock_value"] = _refused(stock_value)


def corpus_of(name: str) -> Sequence[bytes]:
    """What is kept for a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
