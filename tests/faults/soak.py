"""Sixteen streams between two processes, payloads of 1 B to 64 MB, for minutes: memory and descriptors have to stay.

`python -m tests.faults.soak --minutes 5`, or `--chunks 1000000`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch
import trio

from trio_mori import Connector, open_connector

from .lane import context, free_port

STREAMS = 16
POOL = 256 << 20

# Of each hundred payloads: most are codec frames and hidden states, one is as large as they get.
SIZES = (1, 100, 1_000, 4_096, 10_000, 65_536, 100_000, 1 << 20)
LARGEST = 64_000_000

# Samples of resident memory that the slope is taken from, after the first third: there pools and arenas still fill.
SAMPLES = 60


@attrs.frozen
class Sample:
    """A process at one moment.

    Attributes:
        resident: Bytes of its own memory and of pools. How much of its libraries is there is up to the kernel.
    """

    seconds: float
    resident: int
    descriptors: int


@attrs.frozen(kw_only=True)
class Outcome:
    """What a side has to tell.

    Attributes:
        chunks, size: What it sent or received.
        samples: Taken over the time.
        put, got, free: Of its statistics in the end: payloads and bytes, and whether the pool was wholly free.
    """

    chunks: int
    size: int
    samples: Sequence[Sample]
    put: tuple[int, int]
    got: tuple[int, int]
    free: bool


def size_of(stream: int, number: int) -> int:
    """Bytes of a payload."""
    if number % 100 == 50 + stream:
        return LARGEST
    return SIZES[(stream * 7 + number * 13) % len(SIZES)] + (stream + number) % 5


def _look(seconds: float) -> Sample:
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return Sample(seconds, resident, len(os.listdir("/proc/self/fd")))


class _Side:
    """Counts, and samples its process."""

    def __init__(self, connector: Connector, seconds: float) -> None:
        self.connector = connector
        self.chunks = 0
        self.size = 0
        self.samples: list[Sample] = []
        self._every = seconds / SAMPLES

    async def sample_forever(self) -> None:
        started = trio.current_time()
        while True:
            await trio.sleep(self._every)
            self.samples.append(_look(trio.current_time() - started))

    async def outcome(self) -> Outcome:
        with trio.move_on_after(10):
            while self.connector.statistics().pool.free < POOL:  # noqa: ASYNC110 - no event tells
                await trio.sleep(0.02)
        now = self.connector.statistics()
        put, got = now.put.get("0_1"), now.got.get("0_1")
        return Outcome(
            chunks=self.chunks,
            size=self.size,
            samples=self.samples,
            put=(0, 0) if put is None else (put.payloads, put.bytes),
            got=(0, 0) if got is None else (got.payloads, got.bytes),
            free=now.pool.free == now.pool.largest_free == POOL,
        )


async def _send(pipe: Connection, port: int, seconds: float, chunks: int) -> None:
    config = {"role": "sender", "host": "127.0.0.1", "zmq_port": port, "memory_pool_size": POOL, "stage_id": 0}
    async with open_connector(config) as connector, trio.open_nursery() as nursery:
        side = _Side(connector, seconds)
        nursery.start_soon(side.sample_forever)
        until = time.monotonic() + seconds
        area = torch.arange(LARGEST + 10, dtype=torch.int32).to(torch.uint8)

        async def stream(number: int) -> None:
            async with connector.open_chunk_sender(f"soak-{number}", to_stage="1") as out:
                while time.monotonic() < until and out.sent * STREAMS < chunks:
                    size = size_of(number, out.sent)
                    await out.send(area[out.sent % 7 : out.sent % 7 + size])
                    side.chunks += 1
                    side.size += size

        async with trio.open_nursery() as streams:
            for number in range(STREAMS):
                streams.start_soon(stream, number)
        pipe.send(await side.outcome())
        await trio.to_thread.run_sync(pipe.recv)  # that the other one has done, too
        nursery.cancel_scope.cancel()


async def _receive(pipe: Connection, port: int, seconds: float, chunks: int) -> None:
    address = {"sender_host": "127.0.0.1", "sender_zmq_port": port}
    async with (
        open_connector({"role": "receiver", "memory_pool_size": POOL, "stage_id": 1, **address}) as connector,
        trio.open_nursery() as nursery,
    ):
        side = _Side(connector, seconds)
        nursery.start_soon(side.sample_forever)
        area = torch.arange(LARGEST + 10, dtype=torch.int32).to(torch.uint8)

        async def stream(number: int) -> None:
            async with connector.open_chunk_receiver(f"soak-{number}", from_stage="0") as incoming:
                count = 0
                async for chunk in incoming:
                    assert isinstance(chunk, torch.Tensor)
                    size = size_of(number, count)
                    assert torch.equal(chunk, area[count % 7 : count % 7 + size]), (number, count)
                    count += 1
                    side.chunks += 1
                    side.size += size

        async with trio.open_nursery() as streams:
            for number in range(STREAMS):
                streams.start_soon(stream, number)
        pipe.send(await side.outcome())
        await trio.to_thread.run_sync(pipe.recv)
        nursery.cancel_scope.cancel()


def _run(side: Any, *arguments: Any) -> None:
    trio.run(side, *arguments)


def soak(seconds: float, chunks: int) -> tuple[Outcome, Outcome]:
    """Run it for so long, or for so many chunks; returns what both sides tell."""
    port = free_port()
    pipes, processes = [], []
    for side in (_send, _receive):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(side, theirs, port, seconds, chunks), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    sent, received = (pipe.recv() for pipe in pipes)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("over")
        process.join(30)
        assert process.exitcode == 0, process
    return sent, received


def slope(samples: Sequence[Sample]) -> float:
    """Bytes of resident memory gained in a second, by least squares."""
    xs, ys = [s.seconds for s in samples], [s.resident for s in samples]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


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
        later = side.samples[len(side.samples) // 3 :]
        if len(later) > 10:
            spread = max(s.resident for s in later) - min(s.resident for s in later)
            grown = slope(later) * (later[-1].seconds - later[0].seconds)
            # Within noise: what comes and goes with the largest payloads is more than what was gained over the time.
            if grown > max(spread / 2, 2 * LARGEST):
                yield f"the {name} grew by {grown / 1e6:.1f} MB, with a spread of {spread / 1e6:.1f} MB"
            if later[-1].descriptors > later[0].descriptors + 2:
                yield f"the {name} had {later[0].descriptors} descriptors, then {later[-1].descriptors}"


def describe(seconds: float, sent: Outcome, received: Outcome) -> str:
    """What was done, in a line for each side."""
    lines = [f"{sent.chunks} chunks, {sent.size / 1e9:.2f} GB in {seconds:.0f} s"]
    for name, side in (("sender", sent), ("receiver", received)):
        later = side.samples[len(side.samples) // 3 :]
        if len(later) > 2:
            lines.append(
                f"{name}: {slope(later) / 1e3:+.1f} kB/s of resident memory ({later[-1].resident / 1e6:.0f} MB), "
                f"{later[0].descriptors} descriptors, then {later[-1].descriptors}"
            )
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
