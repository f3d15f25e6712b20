"""ZMQ links over loopback, and plain sockets that talk to them."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ParamSpec

import pytest
import trio
import trio.testing
import zmq

from trio_mori._zmq_dialler import DiallingLink, open_dialler
from trio_mori._zmq_listener import ListeningLink, open_listener
from trio_mori.abc import Arrived, Connected, Link, LinkEvent

V4, V6 = "127.0.0.1", "::1"

Peer = zmq.Socket[bytes]


def _has_ipv6() -> bool:
    try:
        with socket.create_server((V6, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no ::1")

P = ParamSpec("P")


def bounded(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Fail a test that hangs. None of these starts a process."""

    @pytest.mark.deterministic
    @functools.wraps(test)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with trio.fail_after(20):
            await test(*args, **kwargs)

    return run


class Inbox:
    """Takes single events out of a link's batches."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.events: list[LinkEvent] = []

    async def next(self) -> LinkEvent:
        while not self.events:
            self.events += await self.link.receive()
        return self.events.pop(0)

    async def message(self) -> Arrived:
        event = await self.next()
        assert isinstance(event, Arrived), event
        return event


@contextmanager
def plain_socket(kind: int, port: int) -> Iterator[Peer]:
    """A blocking ZMQ socket of somebody else, connected to a port of ours."""
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.linger = 0
        peer.rcvtimeo = 10_000
        peer.connect(f"tcp://{V4}:{port}")
        yield peer


@asynccontextmanager
async def connected_pair() -> AsyncIterator[tuple[DiallingLink, ListeningLink]]:
    async with open_listener([V4], 0) as listener, open_dialler(V4, listener.port) as dialler:
        assert await dialler.receive() == [Connected()]
        yield dialler, listener


def run_script(script: str) -> str:
    """Run a script in a process of its own, which has to end by itself; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
