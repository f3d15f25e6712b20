"""What two connectors cost while nothing happens: processor time, counted by the system for a process of each.

As a program (``python test_idle.py ROLE [PORT]``) this is one of the two: it says when it is ready, measures when told
to, and says what it has used.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from subprocess import PIPE

import pytest
import trio

from trio_mori import Connector, open_connector

GETS = 1000
IDLE = 10.0  # seconds: two heartbeats of the default interval

# Seconds of processor time that each may use in that time. On a quiet machine it is 5 ms, on a busy one 10.
LIMIT = 0.020

POOL = {"memory_pool_size": 1 << 24}


@pytest.mark.slow
async def test_two_connectors_with_a_thousand_gets_parked_use_hardly_any_processor_time() -> None:
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            sender = await start(nursery, "sender")
            port = await say(sender)
            receiver = await start(nursery, "receiver", port)
            assert [await say(receiver), await say(sender)] == ["parked", "parked"]
            used = {}
            for process in (sender, receiver):
                await tell(process)
            for name, process in (("sender", sender), ("receiver", receiver)):
                used[name] = float(await say(process))
            for process in (receiver, sender):
                await tell(process)
                assert await process.wait() == 0
    assert max(used.values()) < LIMIT, used


async def start(nursery: trio.Nursery, *arguments: str) -> trio.Process:
    """One of the two, as a process."""
    command = [sys.executable, __file__, *arguments]
    process: trio.Process = await nursery.start(
        partial(trio.run_process, command, stdin=PIPE, stdout=PIPE, check=False)
    )
    return process


async def say(process: trio.Process) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        part = await process.stdout.receive_some(1)
        assert part, "it ended"
        line += part
    return line.decode().strip()


async def tell(process: trio.Process) -> None:
    """Let it go on."""
    assert process.stdin is not None
    await process.stdin.send_all(b".")


# --- the program -------------------------------------------------------------------------------------------


async def be_told() -> None:
    """Wait for the test, without a thread."""
    await trio.lowlevel.wait_readable(sys.stdin)
    os.read(sys.stdin.fileno(), 1)


async def measure() -> None:
    """Say what this process uses while it is idle, then stay until told."""
    await be_told()
    before = time.process_time()
    await trio.sleep(IDLE)
    print(time.process_time() - before, flush=True)
    await be_told()


async def send() -> None:
    """Know of a thousand fetches, and have nothing for them."""
    async with open_connector({"role": "sender", "host": "127.0.0.1", "zmq_port": 0, **POOL}) as conn:
        print(conn.get_connection_info()["zmq_port"], flush=True)
        while fetches_of(conn) < GETS:  # noqa: ASYNC110 - no event tells, and it is before the measurement
            await trio.sleep(0.01)
        print("parked", flush=True)
        await measure()


def fetches_of(conn: Connector) -> int:
    """What receivers have asked for."""
    assert conn._sender is not None
    return sum(len(session.fetches) for session in conn._sender.book.sessions.values())


async def receive(port: int) -> None:
    """Wait in a thousand gets."""
    config = {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port, **POOL}
    async with open_connector(config) as conn, trio.open_nursery() as nursery:
        for number in range(GETS):
            nursery.start_soon(conn.get, "0", "1", f"key-{number}")
        while conn.statistics().parked < GETS:  # noqa: ASYNC110 - as above
            await trio.sleep(0.01)
        print("parked", flush=True)
        await measure()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    if sys.argv[1] == "sender":
        trio.run(send)
    else:
        trio.run(receive, int(sys.argv[2]))
