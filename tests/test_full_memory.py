"""Shared memory that is full for the kernel, not for a fake: a tmpfs of a few pages, in a namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trio

from trio_mori import EngineUnavailable, open_connector
from trio_mori._engines import _syscalls

MOUNT = "/dev/shm"


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs leave to mount",
)
def test_a_pool_for_which_the_kernel_has_no_room_is_named_and_leaves_nothing() -> None:
    script = f"mount -t tmpfs -o size=1m,mode=700 none {MOUNT} && exec {sys.executable} {__file__}"
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    refused, left = run.stdout.splitlines() or pytest.fail(run.stderr)
    assert refused.startswith("shm: memory ran out at 0 of the pool's 4194304 bytes (No space left on device); lower")
    assert left == "0 descriptors, 0 blocks"


async def _open_there() -> None:
    """Have pools be files of that mount: a memfd is of a mount that has no limit."""
    _syscalls.memfd_create = lambda name: os.open(MOUNT, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    before = len(os.listdir("/proc/self/fd"))
    config = {"role": "sender", "host": "127.0.0.1", "zmq_port": 0, "memory_pool_size": 4 << 20}
    try:
        async with open_connector(config):
            raise AssertionError("it opened")
    except EngineUnavailable as error:
        print(error)
    status = os.statvfs(MOUNT)
    print(f"{len(os.listdir('/proc/self/fd')) - before} descriptors, {status.f_blocks - status.f_bfree} blocks")


if __name__ == "__main__":
    trio.run(_open_there)
