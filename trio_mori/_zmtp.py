"""The first bytes of a ZMQ connection, by hand: what a socket says of itself before its program says anything.

libzmq does it in a thread of its own, so that a process answers even while it holds the GIL for seconds.
"""

from __future__ import annotations

import trio

# What the listening sockets of a trio_mori are called.
LISTENER = b"trio-mori"

# ZMTP 3.0: signature, version; mechanism, not a server, filler. Whoever has read the first part sends all of its own.
_FIRST = b"\xff" + bytes(8) + b"\x7f\x03\x00"
_REST = b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_GREETING = len(_FIRST + _REST)
_MECHANISM = slice(12, 32)
_COMMAND = 0x04  # of a frame with a length of one byte
_READY = b"\x05READY"
_NAME = b"\x08Identity"


async def fetch_mechanism(host: str, port: int) -> str:
    """How the socket that listens there knows its peers: ``CURVE``, ``NULL`` (not at all), or else. Empty: none does.

    Waits for as long as a program is silent; cancellable. No handshake is begun.
    """
    try:
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(_FIRST)
            greeting = await _receive(stream, _GREETING)
    except (OSError, trio.BrokenResourceError):
        return ""
    return mechanism_in(greeting)


def mechanism_in(greeting: bytes) -> str:
    """As `fetch_mechanism`, of what was received."""
    is_greeting = greeting[:1] == _FIRST[:1] and greeting[10:11] >= b"\x03"
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace") if is_greeting else ""


async def fetch_name(host: str, port: int) -> bytes:
    """How the socket that listens there is called. Empty: it has no name, wants keys, or is no ZMQ socket.

    Waits for as long as a program is silent; cancellable. The handshake is not completed.
    """
    try:
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(_FIRST + _REST)
            await _receive(stream, _GREETING)
            flags_and_length = await _receive(stream, 2)
            frame = await _receive(stream, flags_and_length[-1]) if len(flags_and_length) == 2 else b""
    except (OSError, trio.BrokenResourceError):
        return b""
    return name_in(flags_and_length, frame)


def name_in(flags_and_length: bytes, frame: bytes) -> bytes:
    """As `fetch_name`, of the frame after the greeting."""
    if flags_and_length[:1] != bytes([_COMMAND]) or not frame.startswith(_READY):
        return b""
    # Pairs of a name and a value, with one and four bytes of length.
    value = frame.partition(_NAME)[2]
    return value[4 : 4 + int.from_bytes(value[:4], "big")]


async def _receive(stream: trio.SocketStream, size: int) -> bytes:
    """So many bytes, or fewer at the end of the connection."""
    received = b""
    while len(received) < size:
        more = await stream.receive_some(size - len(received))
        if not more:
            break
        received += more
    return received
