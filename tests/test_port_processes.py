"""An address that goes to and fro: between trio runs, between processes, and ten times over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from contextlib import (
    AsyncExitStack,
)
from functools import partial

import pytest
import trio
import trio.testing
from port_site import (
    open_site,
    put,
    sender_at,
)
from ports import free_port
from rig import (
    LIMIT,
    begin,
    receiver_config,
    wait_until,
)

from trio_mori import (
    Connector,
    PortHeld,
    blocking,
    open_connector,
)

deterministic = pytest.mark.deterministic


@deterministic
async def test_ten_changes_of_hands_leave_no_descriptor_and_no_task() -> None:
    def tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living

    async def once() -> None:
        async with open_site() as site:
            first, second = await site.open(), await site.open()
            third = await site.open_elsewhere()
            await put(third, "k", b"x")
            await first.close()
            with pytest.raises(PortHeld):
                await put(second, "k", b"y")

    own = tasks()
    for _ in range(2):
        await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await once()
    await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    await wait_until(lambda: tasks() == own)


# --- two trio runs, two processes ---------------------------------------------------------------------------


def test_two_trio_runs_of_one_process_do_as_two_processes_do() -> None:
    config = {"role": "sender", "host": "127.0.0.1", "zmq_port": free_port(), "memory_pool_size": 1 << 20}
    with blocking.open_connector(config) as first, blocking.open_connector(config) as second:
        second.put("0", "1", "k", b"x", timeout=5)
        assert (first.health()["port"], second.health()["port"]) == ("passive", "held")
        with pytest.raises(PortHeld):
            first.put("0", "1", "k", b"y", timeout=5)
        with pytest.raises(PortHeld):
            first.wait_listening(timeout=5)


INSTANCE = """
    import json, sys, trio
    from trio_mori import PortHeld, open_connector

    async def main():
        async with open_connector(json.loads(sys.argv[1])) as conn:
            print(conn.health()["port"], flush=True)
            async for line in trio.wrap_file(sys.stdin):
                try:
                    await conn.put("0", "1", line.strip(), line.strip().encode())
                    print("put", flush=True)
                except PortHeld as error:
                    print("held by", error.pid, flush=True)

    trio.run(main)
"""


class Instance:
    """A sender in a process of its own that puts what it is told."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._seen = b""

    async def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        while b"\n" not in self._seen:
            self._seen += await self.process.stdout.receive_some()
        line, _, self._seen = self._seen.partition(b"\n")
        return line.decode()

    async def put(self, key: str) -> str:
        """Have it put; returns what came of it."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(f"{key}\n".encode())
        return await self.hear()


async def start_instance(nursery: trio.Nursery, config: dict[str, object]) -> Instance:
    """Start one."""
    command = [sys.executable, "-c", textwrap.dedent(INSTANCE), json.dumps(config)]
    run = partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
    return Instance(await nursery.start(run))


async def test_two_processes_of_one_stage_give_the_address_to_the_one_that_puts() -> None:
    config: dict[str, object] = {**sender_at(free_port()), "memory_pool_size": 1 << 20}
    with trio.fail_after(2 * LIMIT):
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            one = await start_instance(nursery, config)
            assert await one.hear() == "held"
            two = await start_instance(nursery, config)
            assert await two.hear() == "passive"
            port = config["zmq_port"]
            assert isinstance(port, int)
            receiver: Connector = await stack.enter_async_context(
                open_connector(receiver_config(port, memory_pool_size=1 << 20))
            )
            waiting = begin(nursery, receiver.get, "0", "1", "k")
            await wait_until(lambda: receiver.health()["peers"])
            assert await two.put("k") == "put"
            assert await waiting.wait() == b"k"
            assert await one.put("other") == f"held by {two.process.pid}"
            two.process.kill()
            await two.process.wait()
            assert await one.put("other") == "put"
            assert await receiver.get("0", "1", "other") == b"other"
            one.process.kill()
