"""A process that has no descriptors left for a while: what it was asked for comes when it has some again.

As a program (``python test_shortages.py FREE``) this is that process; with a name, it opens something without any.
"""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys

import pytest
import torch
import trio

from trio_mori import NoDescriptors, blocking, open_connector
from trio_mori._engines import open_engine
from trio_mori._zmq_dialler import open_dialler
from trio_mori._zmq_listener import open_listener

POOL = {"memory_pool_size": 4 << 20}


@pytest.mark.parametrize("free", [0, 1, 3, 5, 6, 9])
def test_a_get_that_begins_while_descriptors_are_short_is_answered_when_they_are_back(free: int) -> None:
    process = subprocess.run(
        [sys.executable, __file__, str(free)], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.stdout == "0.5 and again 0.5\n", process.stderr
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("what", ["connector", "blocking", "engine", "listener", "listener with two", "dialler"])
def test_what_cannot_be_opened_for_want_of_descriptors_names_the_limit_and_the_remedy(what: str) -> None:
    process = subprocess.run([sys.executable, __file__, what], capture_output=True, text=True, timeout=120, check=False)
    assert "NoDescriptors" in process.stdout, process.stderr
    assert "of the 200 of this process; raise the limit of this process (`ulimit -n`)" in process.stdout
    assert process.returncode == 0, process.stderr


def take_all_but(free: int) -> list[int]:
    """Leave this process only so many descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for _ in range(free):
        os.close(taken.pop())
    return taken


async def main(free: int) -> None:
    """Send something to itself."""
    sender = {"role": "sender", "host": "127.0.0.1", "zmq_port": 0, **POOL}
    async with open_connector(sender) as up:
        port = up.get_connection_info()["zmq_port"]
        receiver = {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port, **POOL}
        async with open_connector({**receiver, "heartbeat_interval": 0.2}) as down, trio.open_nursery() as nursery:
            taken = take_all_but(free)

            async def give_back() -> None:
                await trio.sleep(0.5)
                for each in taken:
                    os.close(each)

            nursery.start_soon(give_back)
            values = []
            with trio.fail_after(60):
                for key in ("a", "b"):
                    await up.put("0", "1", key, torch.full((1000,), 0.5))
                    value = await down.get("0", "1", key)
                    assert isinstance(value, torch.Tensor)
                    values.append(float(value.mean()))
            print(*values, sep=" and again ")


async def open_without(what: str) -> None:
    """Open something although no descriptors are left, and say what comes of it."""
    async with open_listener(["127.0.0.1"], 0) as listener:  # libzmq's own threads have theirs
        taken = take_all_but(2 if "two" in what else 0)  # with two libzmq would end the process
        try:
            if what == "connector":
                async with open_connector({"role": "receiver", **POOL}):
                    pass
            elif what == "blocking":
                blocking.open_connector({"role": "receiver", **POOL})
            elif what == "engine":
                async with open_engine("shm", pool_size=1 << 20):
                    pass
            elif what.startswith("listener"):
                async with open_listener(["127.0.0.1"], 0):
                    pass
            else:
                with trio.move_on_after(0.5):
                    async with open_dialler("127.0.0.1", listener.port):
                        await trio.sleep_forever()
        except NoDescriptors as error:
            print("NoDescriptors", error.limit, error)
        finally:
            for each in taken:
                os.close(each)


if __name__ == "__main__":
    torch.ones(1).sum()  # whatever torch opens
    if not sys.argv[1].isdigit():
        logging.basicConfig(stream=sys.stdout, format="%(exc_info)s %(args)r")  # where a dialler says it
        trio.run(open_without, sys.argv[1])
        sys.exit()
    trio.run(main, int(sys.argv[1]))
