"""A process that owns a shm pool: prints its descriptor, then shows a byte for each line that it is sent.

Takes the environment's SHARE_DIRECTORY and POOL_SIZE, and becomes the user OWNER_UID, where they are set.
"""

import os
import sys

import trio

from trio_mori._engines._shm import open_shm  # all imports now: another user may have no access to the files


async def main() -> None:
    options = {"share_directory": os.environ["SHARE_DIRECTORY"]} if "SHARE_DIRECTORY" in os.environ else {}
    size = int(os.environ.get("POOL_SIZE", 1 << 20))
    async with open_shm(pool_size=size, device="cpu", options=options) as engine:
        print(engine.descriptor.engine.hex(), engine.descriptor.memory.hex(), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            print(int(engine.region.tensor[int(line)]), flush=True)


if "OWNER_UID" in os.environ:
    os.setuid(int(os.environ["OWNER_UID"]))
trio.run(main)
