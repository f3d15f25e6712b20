"""A plain ZMQ socket by hand, byte by byte, and the memory that those it talks to take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

# What a plain ZMQ socket says before its first message, by hand: libzmq itself sends no message before its end.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READY_SENDER = READY.replace(b"DEALER", b"ROUTER")


def memory() -> int:
    """Bytes of its own that this process has. How much of its libraries is in memory is up to the kernel."""
    with open("/proc/self/status") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


class Lateness:
    """How late a run comes back to a task that has slept: it, or the whole process, was kept from going on.

    Attributes:
        most: Seconds.
    """

    def __init__(self) -> None:
        self.most = 0.0

    async def watch(self) -> None:
        """See, until cancelled."""
        while True:
            due = trio.current_time() + 0.005
            await trio.sleep_until(due)
            self.most = max(self.most, trio.current_time() - due)


@asynccontextmanager
async def open_plain(port: int) -> AsyncIterator[trio.SocketStream]:
    """A connection whose handshake is over."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await shake_hands(stream, READY)
        yield stream


async def shake_hands(stream: trio.SocketStream, ready: bytes) -> None:
    """Be a plain ZMQ socket up to its first message."""
    await stream.send_all(GREETING + b"\x04" + bytes([len(ready)]) + ready)
    heard = b""
    while b"Identity" not in heard:  # the end of its own READY; it does not talk to whoever does not wait for that
        heard += await stream.receive_some()
