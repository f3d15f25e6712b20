"""A process that owns a shm pool: prints its descriptor, then shows a byte for each line that it is sent."""

import sys

import trio

from trio_mori import open_engine


async def main() -> None:
    async with open_engine("shm", pool_size=1 << 20) as engine:
        print(engine.descriptor.engine.hex(), engine.descriptor.memory.hex(), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            print(int(engine.region.tensor[int(line)]), flush=True)


trio.run(main)
