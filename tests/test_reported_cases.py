"""Cases of docs/reliability.md that no other module has."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from statistics import median

import pytest
import torch
import trio
from ports import free_port
from rig import FAST, POOL, SOON, assert_free, filled, open_pair, receiver_config, sender_config, start_stage

from trio_mori import Connector, EngineUnavailable, NotReady, open_connector
from trio_mori.testing import MemoryFabric


@pytest.mark.deterministic
async def test_two_thousand_aborted_requests_leave_nothing() -> None:
    async with open_pair() as pair:
        assert pair.sender._sender is not None
        book = pair.sender._sender.book
        for number in range(2000):
            for chunk in range(3):
                pair.sender.put_nowait("0", "1", f"req-{number}_0_{chunk}", filled(10))
            pair.sender.put_nowait("0", "1", f"req-{number}_extra", filled(10))
            assert pair.sender.cleanup_nowait(f"req-{number}") == 3
            assert pair.sender.cleanup_nowait(f"req-{number}") == 0
            assert pair.sender.cleanup_nowait(f"req-{number}_extra") == 1
        assert not book.shelf.everything()
        assert not book.shelf._by_name
        await pair.assert_whole()


@pytest.mark.deterministic
async def test_fifteen_of_sixteen_are_delivered_while_one_sender_is_silent() -> None:
    fabric = MemoryFabric()
    port = free_port()
    silent = {"source_host": "127.0.0.1", "source_port": port}
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(fabric.open(pool_size=POOL)) for _ in range(2)]
            sender = await stack.enter_async_context(open_connector(sender_config(), engine=engines[0]))
            config = {**receiver_config(sender), **FAST, "peer_timeout": 30}
            receiver = await stack.enter_async_context(open_connector(config, engine=engines[1]))
            with socket.create_server(("127.0.0.1", port)):
                took = []
                for attempt in range(5):
                    for number in range(1, 16):
                        await sender.put("0", "1", f"{attempt}k{number}", filled(100, number))
                    took.append(await poll_all(receiver, silent, attempt))
                    if took[-1] < 1:
                        break
                assert min(took) < 1
                with trio.move_on_after(0.02):  # its limit is its caller's
                    await receiver.get("0", "1", "0k0", silent)
                    raise AssertionError("nobody has put it")
            stage = await start_stage(nursery, fabric, zmq_port=port)
            await stage.connector.put("0", "1", "0k0", filled(100, 77))
            value = await receiver.get("0", "1", "0k0", silent)
            assert isinstance(value, torch.Tensor)
            assert torch.equal(value, filled(100, 77))
            await assert_free(sender, receiver, stage.connector)
            await stage.close()


async def poll_all(receiver: Connector, silent: dict[str, object], attempt: int) -> float:
    """All of sixteen in turn, one look after the other, until fifteen are there; returns how long that took.

    A look for the sixteenth takes 10 ms at most: half of the looks do, since each of them may be halted by the machine.
    """
    missing, looks = set(range(1, 16)), []
    begun = time.monotonic()
    with trio.fail_after(SOON):
        while missing:
            for number in (0, *sorted(missing)):
                looked = time.monotonic()
                try:
                    value = receiver.get_nowait("0", "1", f"{attempt}k{number}", None if number else silent)
                except NotReady:
                    if not number:
                        looks.append(time.monotonic() - looked)
                    continue
                assert number, "nobody has put it"
                assert isinstance(value, torch.Tensor)
                assert torch.equal(value, filled(100, number))
                missing.discard(number)
            await trio.sleep(0.001)
    took = time.monotonic() - begun
    assert median(looks) < 0.01
    return took


@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs leave to mount",
)
def test_a_share_directory_that_is_full_is_named_and_leaves_nothing() -> None:
    """A tmpfs that has room for its own root and no socket."""
    script = f"mount -t tmpfs -o size=4k,nr_inodes=1,mode=700 none /mnt && exec {sys.executable} {__file__} /mnt"
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "0\n", run.stderr
    assert "no socket can be made in share_directory /mnt: [Errno 28] No space left on device" in run.stderr


async def _open_in(directory: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    try:
        async with open_connector(sender_config(share_directory=directory, memory_pool_size=1 << 20)):
            raise AssertionError("it opened")
    except EngineUnavailable as error:
        print(error, file=sys.stderr)
    gc.collect()
    print(len(os.listdir("/proc/self/fd")) - before)


if __name__ == "__main__":
    trio.run(_open_in, sys.argv[1])
