"""What is fuzzed: functions of bytes that return or refuse, whatever these are."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "protocol"))
from desks import ReceiverDesk, SenderDesk

from trio_mori import ConfigError, RemoteProtocolError, UnsupportedPayload
from trio_mori._deploy import load_deploy
from trio_mori._engines import _cuda_owner, _shm_owner
from trio_mori._engines._mori_identity import process_of
from trio_mori._payload import restore
from trio_mori._payload_glance import glance, is_raw
from trio_mori._protocol import stock_wire, wire
from trio_mori._stock_payload import stock_decode, stock_encode, stock_size
from trio_mori._unix_transport import _unpack
from trio_mori.abc import Descriptor

CORPUS = Path(__file__).parent / "corpus"

# Bytes that may lie in the pool beside a header: what a header asks for has to be within them.
_POOL = 4096


def _refused(function: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """It may refuse, by one of these, and by nothing else."""

    @functools.wraps(function)
    def call(data: bytes) -> None:
        with suppress(RemoteProtocolError, UnsupportedPayload, ConfigError):
            function(data)

    return call


def _halves(data: bytes) -> tuple[bytes, bytes]:
    """Two pieces: the first two bytes say where they meet."""
    at = int.from_bytes(data[:2], "big")
    return data[2 : 2 + at], data[2 + at :]


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


def shm_descriptor(data: bytes) -> None:
    """Who has a pool, and where it is; nothing is opened that is not checked."""
    owner, memory = _shm_owner.decode(Descriptor(*_halves(data)))
    ours = _shm_owner.describe_self(shared=False)
    descriptor = Descriptor(*_halves(data))
    if _shm_owner.choose_way(ours, owner) is _shm_owner.Way.PROC:
        os.close(_shm_owner.open_memory(owner, memory, descriptor))
        raise AssertionError("a pool was opened that nobody has")


def cuda_descriptor(data: bytes) -> None:
    """The same of a GPU's pool."""
    _cuda_owner.decode(Descriptor(*_halves(data)))


def mori_key(data: bytes) -> None:
    """Which process an engine of Mori belongs to, by its key."""
    process_of(data.decode("utf-8", "replace"))


def unix_message(data: bytes) -> None:
    """The frames of a message of the unix link."""
    frames = _unpack(data, 8)
    assert frames is None or (0 < len(frames) <= 8 and sum(map(len, frames)) <= len(data))


def payload_header(data: bytes) -> None:
    """What came in a pool, with the header that describes it."""
    header, content = _halves(data)
    source = torch.frombuffer(bytearray(content[:_POOL] or b"\0"), dtype=torch.uint8)
    for function in (glance, is_raw):
        with suppress(RemoteProtocolError, UnsupportedPayload):
            function(header)
    restore(header, source)
    # What is a payload has a stock form, or is refused one; the header of a sender's own payload is never junk.
    size = stock_size(header, source)
    assert len(stock_encode(header, source)) == size


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


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: _refused(function)
    for function in (
        from_receiver,
        from_sender,
        from_holder,
        stock_request,
        stock_answer,
        shm_descriptor,
        cuda_descriptor,
        mori_key,
        unix_message,
        payload_header,
        stock_payload,
        deploy_file,
    )
}


def corpus_of(name: str) -> Sequence[bytes]:
    """What is kept for a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
