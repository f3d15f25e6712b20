"""What a hand-off takes, in calls of Python functions. After a pause each of them takes 1 to 2 us, being cold.

To pass a limit is no error in itself. It asks whether what was added has to be done for every payload.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import trio
import trio.testing

from trio_mori import Connector, open_connector

pytestmark = pytest.mark.deterministic

# From the start of a put to the return of the get that waits for it, both in one process and over its unix socket:
# 168 for a tensor, 186 for a structure with one.
LONE = 168
STRUCTURE = 192

# Whose calls count: not trio's, which differ between its releases.
COUNTED = ("trio_mori.", "<attrs generated methods trio_mori.", "sortedcontainers.", "torch.")


class Calls:
    """Counts calls of Python functions, by name, between `begin` and `end`."""

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__", frame.f_code.co_filename)  # what attrs generates is in no module
        if event == "call" and module.startswith(COUNTED):
            self.by_name[f"{module}:{frame.f_code.co_name}"] += 1

    @property
    def total(self) -> int:
        return sum(self.by_name.values())


async def calls_of_a_hand_off(payload: object) -> Calls:
    """The fewest of some: now and then a heartbeat comes between, and half of the puts go on before their get does."""
    found = []
    sender_config = {"role": "sender", "host": "127.0.0.1", "zmq_port": 0, "memory_pool_size": 1 << 22}
    async with open_connector(sender_config) as sender:
        port = sender.get_connection_info()["zmq_port"]
        receiver_config = {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port}
        async with open_connector({**receiver_config, "memory_pool_size": 1 << 22}) as receiver:
            for number in range(40):
                found.append(await hand_off(sender, receiver, f"r_0_{number}", payload))
    return min(found, key=lambda calls: calls.total)


async def hand_off(sender: Connector, receiver: Connector, key: str, payload: object) -> Calls:
    calls = Calls()

    async def get() -> None:
        await receiver.get("0", "1", key)
        calls.end()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get)
            await trio.testing.wait_all_tasks_blocked(0.002)
            calls.begin()
            await sender.put("0", "1", key, payload)
    finally:
        calls.end()
    return calls


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda: torch.zeros(65536, dtype=torch.uint8), LONE),
        (lambda: {"codes": torch.zeros(8192, dtype=torch.int64), "finished": False}, STRUCTURE),
    ],
)
async def test_a_hand_off_takes_few_calls(make: Callable[[], object], limit: int) -> None:
    calls = await calls_of_a_hand_off(make())
    assert calls.total <= limit, calls.by_name.most_common(40)
