"""A process of the tests of this folder: it has a pool and tells of it, or it writes and ends in some way.

mori_process.py own SIZE DEVICE     prints its descriptor; then answers "get OFFSET SIZE" until its input ends
mori_process.py write HOW           reads a descriptor, begins eight writes, and ends: see `write`
"""

from __future__ import annotations

import signal
import sys

import mori_lane
import trio
import trio.testing

from trio_mori._errors import TransferFailed
from trio_mori.abc import Descriptor, Write

if mori_lane.moriemu is not None:
    mori_lane.moriemu.install()


async def own(size: int, device: str) -> None:
    async with mori_lane.open_xgmi(size, device) as engine:
        engine.region.tensor.zero_()
        print(engine.descriptor.engine.hex(), engine.descriptor.memory.hex(), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            _, offset, length = line.split()
            part = engine.region.tensor[int(offset) : int(offset) + int(length)]
            print(bytes(part.cpu().tolist()).hex(), flush=True)


async def write(how: str) -> None:
    """Begin eight writes, and end while they are under way: `wait` for them, `abandon` them, `raise`, or `interrupt`.

    The last is Ctrl-C at the moment at which Mori has taken a write and nobody waits for it yet.
    """
    line = await trio.to_thread.run_sync(sys.stdin.readline)
    peer_descriptor = Descriptor(*map(bytes.fromhex, line.split()))

    async def try_write(number: int) -> None:
        try:
            await engine.write(peer, Write(number * 1024, number * 1024, 1024))
        except TransferFailed as error:
            if how == "wait" or error.settled:
                raise

    async with mori_lane.open_xgmi(1 << 20) as engine:
        peer = engine.add_peer(peer_descriptor)
        engine.region.tensor.fill_(7)
        await engine.write(peer, Write(0, 0, 1024))
        mori_lane.control("copy_delay_us", 400_000)
        if how == "interrupt":
            engine._transfers._ends_soon = interrupted
            await engine.write(peer, Write(0, 0, 1024))
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(try_write, number)
            await trio.testing.wait_all_tasks_blocked()
            if how != "wait":
                engine.abandon()
        if how == "raise":
            raise SystemExit(3)


def interrupted(status: object, size: int) -> bool:
    signal.raise_signal(signal.SIGINT)
    return False


def run(role: str, *arguments: str) -> None:
    if role == "own":
        trio.run(own, int(arguments[0]), arguments[1])
    else:
        trio.run(write, arguments[0])


if __name__ == "__main__":
    run(*sys.argv[1:])
