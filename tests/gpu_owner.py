"""A process that owns a cuda_ipc pool: prints its descriptor, then shows a byte for each line that it is sent.

Its GPUs are fakes, unless FAKE_GPUS is 0; DEVICE says which it takes. A line "exit" ends it, with everything closed.
"""

import os
import sys

import trio

from trio_mori import open_engine
from trio_mori._engines import _cuda_library
from trio_mori.testing import FakeGpus


async def main() -> None:
    if os.environ.get("FAKE_GPUS") != "0":
        gpus = FakeGpus()
        _cuda_library.load = lambda: gpus
    size = int(os.environ.get("POOL", 1 << 20))
    async with open_engine("cuda_ipc", pool_size=size, device=os.environ.get("DEVICE", "cuda:0")) as engine:
        engine.region.tensor.zero_()
        print(engine.descriptor.engine.hex(), engine.descriptor.memory.hex(), flush=True)
        while (line := await trio.to_thread.run_sync(sys.stdin.readline)).strip() not in ("", "exit"):
            print(int(engine.region.tensor[int(line)]), flush=True)


if __name__ == "__main__":
    trio.run(main)
