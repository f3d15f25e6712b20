"""A process that has no descriptors left for a while: what it was asked for comes when it has some again.

As a program (``python test_shortages.py FREE``) this is that process.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch
import trio

from trio_mori import open_connector

POOL = {"memory_pool_size": 4 << 20}


@pytest.mark.parametrize("free", [0, 1, 3, 5, 6, 9])
def test_a_get_that_begins_while_descriptors_are_short_is_answered_when_they_are_back(free: int) -> None:
    process = subprocess.run(
        [sys.executable, __file__, str(free)], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.stdout == "0.5 and again 0.5\n", process.stderr
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


if __name__ == "__main__":
    torch.ones(1).sum()  # whatever torch opens
    trio.run(main, int(sys.argv[1]))
