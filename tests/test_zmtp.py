"""What a listening socket says of itself, whoever it belongs to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import LIMIT

from trio_mori._keys import Keys
from trio_mori._zmq_listener import open_listener
from trio_mori._zmq_socket import new_key_pair
from trio_mori._zmtp import LISTENER, fetch_mechanism, fetch_name

pytestmark = pytest.mark.deterministic

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity"


@asynccontextmanager
async def open_speaker(words: bytes) -> AsyncIterator[int]:
    """Somebody who says this to whoever connects, and hangs up; yields the port."""

    async def speak(stream: trio.SocketStream) -> None:
        await stream.send_all(words)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, speak, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "secured"])
async def test_a_listener_of_ours_is_known_by_its_mechanism_and_if_it_wants_no_keys_by_its_name(secured: bool) -> None:
    public, secret = new_key_pair()
    keys = Keys(public=public, secret=secret, sender=public, allowed={public: "stage"}) if secured else None
    with trio.fail_after(LIMIT):
        async with open_listener(["127.0.0.1"], 0, keys=keys) as listener:
            assert await fetch_mechanism("127.0.0.1", listener.port) == ("CURVE" if secured else "NULL")
            assert await fetch_name("127.0.0.1", listener.port) == (b"" if secured else LISTENER)


@settings(max_examples=50)
@given(
    words=st.one_of(
        st.binary(max_size=400),
        st.binary(max_size=300).map(lambda tail: GREETING + tail),
        st.binary(max_size=300).map(lambda tail: GREETING + READY + tail),
    )
)
async def test_whatever_listens_there_has_a_name_and_a_mechanism_or_none(words: bytes) -> None:
    with trio.fail_after(LIMIT):
        async with open_speaker(words) as port:
            assert len(await fetch_name("127.0.0.1", port)) < 256
            assert len(await fetch_mechanism("127.0.0.1", port)) <= 20
