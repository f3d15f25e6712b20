"""What a pool's allocator costs in one process: free a random extent and allocate one, with many live."""

from __future__ import annotations

import random
import time
from typing import Any

from ..half import Half, Ready
from ..turn import Turn

UNIT = 4096
LARGEST = 16  # units of an extent; sizes are random, up to this


class Ours(Half):
    """The allocator of trio_mori's pools."""

    def open(self, pool: int, other: Any) -> Any:
        return None

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        if self.role == "send":
            return {}
        from trio_mori._protocol.extents import OUTBOUND, Extents

        chance = random.Random(turn.streams)
        extents = Extents(2 * turn.streams * LARGEST * UNIT)
        live = [extents.allocate(chance.randint(1, LARGEST) * UNIT, OUTBOUND) for _ in range(2 * turn.streams)]
        for each in live[::2]:  # holes everywhere
            extents.free(each)
        live = live[1::2]
        took = []
        for _ in range(turn.chunks):
            index, size = chance.randrange(len(live)), chance.randint(1, LARGEST) * UNIT
            begin = time.perf_counter_ns()
            extents.free(live[index])
            live[index] = extents.allocate(size, OUTBOUND)
            took.append((time.perf_counter_ns() - begin) / 1000)
        return {"gets": took}

    def close(self) -> None:
        pass


class Stock(Ours):
    """The one of vllm-omni's connectors: a sorted list of free blocks, looked through from the front."""

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        if self.role == "send":
            return {}
        from vllm_omni.distributed.omni_connectors.utils.memory_pool import BufferAllocator

        chance = random.Random(turn.streams)
        sizes = [chance.randint(1, LARGEST) * UNIT for _ in range(2 * turn.streams)]
        allocator = BufferAllocator(2 * turn.streams * LARGEST * UNIT)
        blocks = [(allocator.alloc(size), size) for size in sizes]
        # Every second one is free, set as it is after so many frees: to do them takes minutes.
        allocator.free_blocks = sorted([*blocks[::2], *allocator.free_blocks])
        live = blocks[1::2]
        took = []
        for _ in range(max(turn.chunks // 100, 10)):
            index, size = chance.randrange(len(live)), chance.randint(1, LARGEST) * UNIT
            begin = time.perf_counter_ns()
            allocator.free(*live[index])
            live[index] = allocator.alloc(size), size
            took.append((time.perf_counter_ns() - begin) / 1000)
        return {"gets": took}
