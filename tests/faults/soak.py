"""Sixteen streams between two processes, payloads of 1 B to 64 MB, for minutes: memory and descriptors have to stay.

`python -m tests.faults.soak --minutes 5`, or `--chunks 1000000`.

Every few seconds the streams rest: the sender waits until all that it sent was taken, both processes are looked at, and
it goes on. What they hold then is not what happens to be under way.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch
import trio

from trio_mori import Connector, open_connector

from . import holdings
from .holdings import Look
from .lane import context, free_port

STREAMS = 16
POOL = 256 << 20

# Of each hundred payloads: most are codec frames and hidden states, one is as large as they get.
SIZES = (1, 100, 1_000, 4_096, 10_000, 65_536, 100_000, 1 << 20)
LARGEST = 64_000_000

# Seconds of work between two looks at most, and how many looks there are: at least, unless it ends by count; and in a
# short run about. Until all is taken that a look waits for, a busy machine needs seconds.
EVERY = 2.0
ENOUGH, LOOKS = 12, 60


@attrs.frozen(kw_only=True)
class Outcome:
    """What a side has to tell.

    Attributes:
        chunks, size: What it sent or received.
        looks: At its process, over the time.
        put, got, free: Of its statistics in the end: payloads and bytes, and whether the pool was wholly free.
    """

    chunks: int
    size: int
    looks: Sequence[Look]
    put: tuple[int, int]
    got: tuple[int, int]
    free: bool


def size_of(stream: int, number: int) -> int:
    """Bytes of a payload."""
    if number % 100 == 50 + stream:
        return LARGEST
    return SIZES[(stream * 7 + number * 13) % len(SIZES)] + (stream + number) % 5


async def _leak_memory() -> None:
    """A megabyte in a second."""
    kept = []
    while True:
        kept.append(b"leak" * 25_000)
        await trio.sleep(0.1)


class _Side:
    """Counts, and looks at its process."""

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self.chunks = 0
        self.size = 0
        self.looks: list[Look] = []
        self._started = trio.current_time()

    def look(self) -> None:
        self.looks.append(holdings.look(trio.current_time() - self._started))

    async def all_was_taken(self) -> None:
        while self.connector.statistics().pool.free < POOL:  # noqa: ASYNC110 - no event tells
            await trio.sleep(0.01)

    async def outcome(self) -> Outcome:
        with trio.move_on_after(30):
            await self.all_was_taken()
        self.look()
        now = self.connector.statistics()
        put, got = now.put.get("0_1"), now.got.get("0_1")
        return Outcome(
            chunks=self.chunks,
            size=self.size,
            looks=self.looks,
            put=(0, 0) if put is None else (put.payloads, put.bytes),
            got=(0, 0) if got is None else (got.payloads, got.bytes),
            free=now.pool.free == now.pool.largest_free == POOL,
        )


async def _send(pipe: Connection, port: int, seconds: float, chunks: int, *, leak: bool) -> None:
    config = {"role": "sender", "host": "127.0.0.1", "zmq_port": port, "memory_pool_size": POOL, "stage_id": 0}
    async with open_connector(config) as connector:
        side = _Side(connector)
        going = trio.Event()
        going.set()

        async def rest_now_and_then() -> None:
            nonlocal going
            while True:
                await trio.sleep(min(EVERY, seconds / LOOKS))
                going = trio.Event()
                await side.all_was_taken()
                side.look()
                pipe.send("rests")
                await trio.to_thread.run_sync(pipe.recv)  # that the other one was looked at
                going.set()

        until = time.monotonic() + seconds
        area = torch.arange(LARGEST + 10, dtype=torch.int32).to(torch.uint8)

        async def stream(number: int) -> None:
            async with connector.open_chunk_sender(f"soak-{number}", to_stage="1") as out:
                while out.sent * STREAMS < chunks and (time.monotonic() < until or len(side.looks) < ENOUGH):
                    await going.wait()
                    size = size_of(number, out.sent)
                    await out.send(area[out.sent % 7 : out.sent % 7 + size])
                    side.chunks += 1
                    side.size += size

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rest_now_and_then)
            async with trio.open_nursery() as streams:
                for number in range(STREAMS):
                    streams.start_soon(stream, number)
            nursery.cancel_scope.cancel()
        if leak:
            os.open(os.devnull, os.O_RDONLY)
        pipe.send(await side.outcome())
        await trio.to_thread.run_sync(pipe.recv)  # that the other one has done, too


async def _receive(pipe: Connection, port: int, *, leak: bool) -> None:
    address = {"sender_host": "127.0.0.1", "sender_zmq_port": port}
    async with (
        open_connector({"role": "receiver", "memory_pool_size": POOL, "stage_id": 1, **address}) as connector,
        trio.open_nursery() as nursery,
    ):
        side = _Side(connector)
        if leak:
            nursery.start_soon(_leak_memory)
        area = torch.arange(LARGEST + 10, dtype=torch.int32).to(torch.uint8)

        async def stream(number: int) -> None:
            async with connector.open_chunk_receiver(f"soak-{number}", from_stage="0") as incoming:
                count = 0
                async for chunk in incoming:
                    assert isinstance(chunk, torch.Tensor)
                    size = size_of(number, count)
                    assert torch.equal(chunk, area[count % 7 : count % 7 + size]), (number, count)
                    del chunk  # the next one may be long in coming
                    count += 1
                    side.chunks += 1
                    side.size += size

        async def work() -> None:
            async with trio.open_nursery() as streams:
                for number in range(STREAMS):
                    streams.start_soon(stream, number)
            pipe.send(await side.outcome())

        nursery.start_soon(work)
        while True:
            await trio.lowlevel.wait_readable(pipe.fileno())
            if pipe.recv() == "over":
                break
            side.look()
            pipe.send("was looked at")
        nursery.cancel_scope.cancel()


def _run(side: Any, *arguments: Any, leak: bool) -> None:
    gc.freeze()  # modules, at which nobody has to look again
    trio.run(partial(side, *arguments, leak=leak))


def soak(seconds: float, chunks: int, *, leak: bool = False) -> tuple[Outcome, Outcome]:
    """Run it for so long, or for so many chunks; returns what both sides tell.

    Args:
        leak: Whether the sender is to lose a descriptor and the receiver memory, to see that it is found.
    """
    port = free_port()
    pipes, processes = [], []
    for side, *arguments in ((_send, port, seconds, chunks), (_receive, port)):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(side, theirs, *arguments), kwargs={"leak": leak}, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    sender, receiver = pipes
    outcomes: dict[Any, Outcome] = {}
    while len(outcomes) < 2:
        for pipe in wait(pipes):
            said = pipe.recv()  # type: ignore[union-attr]
            if isinstance(said, Outcome):
                outcomes[pipe] = said
            else:
                (receiver if pipe is sender else sender).send(said)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("over")
        process.join(30)
        assert process.exitcode == 0, process
    return outcomes[sender], outcomes[receiver]


def complaints(sent: Outcome, received: Outcome) -> Iterator[str]:
    """What is not as it has to be."""
    if (sent.chunks, sent.size) != (received.chunks, received.size):
        yield f"sent {sent.chunks} chunks of {sent.size} bytes, received {received.chunks} of {received.size}"
    # Each stream has one chunk more, its end, which takes no byte of the pool.
    if sent.put != (sent.chunks + STREAMS, sent.size) or received.got != (received.chunks + STREAMS, received.size):
        yield f"statistics say {sent.put} and {received.got}, of {sent.chunks} chunks and {sent.size} bytes"
    for name, side in (("sender", sent), ("receiver", received)):
        if not side.free:
            yield f"the {name}'s pool is not free"
        for found in holdings.complaints(side.looks):
            yield f"the {name} {found}"


def describe(seconds: float, sent: Outcome, received: Outcome) -> str:
    """What was done, in a line for each side."""
    lines = [f"{sent.chunks} chunks, {sent.size / 1e9:.2f} GB in {seconds:.0f} s"]
    lines += [f"{name}: {holdings.describe(side.looks)}" for name, side in (("sender", sent), ("receiver", received))]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="Hold load for long.")
    parser.add_argument("--minutes", type=float, default=5.0, help="at most")
    parser.add_argument("--chunks", type=int, default=1 << 62, help="at most so many, over all streams")
    arguments = parser.parse_args()
    minutes = arguments.minutes if arguments.chunks == 1 << 62 else max(arguments.minutes, 24 * 60.0)
    started = time.monotonic()
    sent, received = soak(60 * minutes, arguments.chunks)
    print(describe(time.monotonic() - started, sent, received))
    found = list(complaints(sent, received))
    print("\n".join(found) or "nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
