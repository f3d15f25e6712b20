"""Traffic that goes on beside what a test does to a port, and messages that are nearly understood.

How long the traffic takes meanwhile is measured and printed (`-s`), and is no part of what is asserted: the machine may
be busy.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median

import torch
import trio
from hypothesis import strategies as st
from rig import SOON, Pair, filled

from trio_mori._protocol import wire
from trio_mori.abc import Arrived, Link

REMOTE = {"same_host_link": "off"}

DEPLOYMENT = wire.Deployment("h", 1, 0, 0, "")
HELLO = wire.Hello(1, 1, b"s" * 16, 1, 5.0, [wire.Offer("shm", b"e", b"m")], DEPLOYMENT)


@st.composite
def mangled(draw: st.DrawFn, messages: Sequence[Sequence[bytes]]) -> list[bytes]:
    """One of them with bytes changed, cut off or added: nearer to being understood than random bytes."""
    frames = list(draw(st.sampled_from(messages)))
    frame = bytearray(frames[-1])
    for _ in range(draw(st.integers(0, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    frames[-1] = bytes(frame[: draw(st.integers(1, len(frame)))]) + draw(st.binary(max_size=8))
    return frames


class Traffic:
    """Payloads from the sender to the receiver, one after the other."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.seconds: list[float] = []

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self.one()

    async def one(self) -> None:
        """One payload."""
        key = f"live{len(self.seconds)}"
        started = time.perf_counter()
        with trio.fail_after(SOON):
            await self._pair.put(key, filled(1000))
            value = await self._pair.get(key)
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, filled(1000))
        self.seconds.append(time.perf_counter() - started)


@asynccontextmanager
async def beside_traffic(pair: Pair, what: str, *, payloads: int = 50) -> AsyncIterator[Traffic]:
    """Payloads go across while the body does its worst; afterwards all is as it was.

    Args:
        payloads: How many go across before.
    """
    traffic = Traffic(pair)
    for _ in range(payloads):
        await traffic.one()
    before = median(traffic.seconds)
    traffic.seconds.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(traffic.run)
        yield traffic
        nursery.cancel_scope.cancel()
    if traffic.seconds:
        print(f"{what}: {1e3 * before:.2f} ms a payload before, {1e3 * median(traffic.seconds):.2f} ms beside it")
    for key in range(len(traffic.seconds) + 1):  # the last one was cut off
        await pair.sender.cleanup(f"live{key}")
    await pair.assert_whole()


def malformed(pair: Pair) -> int:
    return pair.sender.statistics().events["malformed_out"]


async def answers_to(link: Link, *, pause: float = 0.05) -> list[list[bytes]]:
    """What comes until nothing comes any more."""
    answers: list[list[bytes]] = []
    while True:
        with trio.move_on_after(pause) as scope:
            answers += [event.frames for event in await link.receive() if isinstance(event, Arrived)]
        if scope.cancelled_caught:
            return answers
