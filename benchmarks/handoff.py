"""How long a get takes: ours, and one of the stock connector's shape, in one run.

Three processes: a sender of ours, a sender of the stock shape (see stock_shape.py), and the receiver, which measures.
Blocks of 50, of kinds in random order:

* *waiting*: our `get` waits; the clock runs from the start of `put` until `get` has returned;
* *present*: the payload was put before; the clock runs for our `get` alone;
* *two round trips*: a blocking REQ socket asks the stock-shaped sender for the size of what it has, then has it written
  into shared memory, and copies it out;
* *two round trips, our sender*: the same from our sender, by the vllm-omni dialect.

    python benchmarks/handoff.py [--size BYTES] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import trio
from stock_shape import StockShapedReceiver

import trio_mori

KINDS = ["waiting", "present", "two round trips", "two round trips, our sender"]
EDGE = ("0", "1")
POOL = 64 << 20
BLOCK = 50  # measurements of one kind in a row
PAUSE = 0.002  # seconds before each, as between the chunks of a stream


async def send(size: int) -> None:
    """The sending process: puts a block of payloads for each line of its standard input."""
    torch.set_num_threads(1)
    payload = torch.zeros(size, dtype=torch.uint8)
    config = {"role": "sender", "host": "127.0.0.1", "zmq_port": 0, "memory_pool_size": POOL, "stage_id": 0}
    async with trio_mori.open_connector(config) as connector:
        print(connector.get_connection_info()["zmq_port"], flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            block, pause = line.split()
            begun = []
            for number in range(BLOCK):
                await trio.sleep(float(pause))
                begun.append(time.monotonic_ns())
                await connector.put(*EDGE, f"{block}-{number}", payload)
            print(json.dumps(begun), flush=True)


def start(*arguments: object) -> subprocess.Popen[str]:
    """A process whose first line is its port."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


async def receive(
    sender: subprocess.Popen[str], port: int, stock_port: int, shared: Path, rounds: int
) -> dict[str, list[float]]:
    """All measurements, in microseconds."""
    torch.set_num_threads(1)
    assert sender.stdin is not None
    assert sender.stdout is not None
    config = {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port, "memory_pool_size": POOL}
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with (
        trio_mori.open_connector(config | {"stage_id": 1}) as connector,
        trio_mori.open_engine("shm", pool_size=POOL) as engine,
    ):
        descriptor, buffer = engine.descriptor, engine.region.buffer
        assert buffer is not None
        with shared.open("r+b") as file:
            pool = mmap.mmap(file.fileno(), 0)
        ours_by_stock = StockShapedReceiver(port, descriptor.engine, descriptor.memory, buffer)
        stock = StockShapedReceiver(stock_port, b"", b"", memoryview(pool))
        for number in range(rounds // BLOCK):
            for kind in random.sample(KINDS, len(KINDS)):
                block = f"{KINDS.index(kind)}-{number}"
                if kind == "waiting":
                    sender.stdin.write(f"{block} {PAUSE}\n")
                elif kind != "two round trips":
                    sender.stdin.write(f"{block} 0\n")
                    sender.stdout.readline()
                begun, ended = [], []
                for each in range(BLOCK):
                    key = f"{block}-{each}"
                    if kind != "waiting":
                        await trio.sleep(PAUSE)
                    begun.append(time.monotonic_ns())
                    if kind == "two round trips":
                        stock.get(key)
                    elif kind == "two round trips, our sender":
                        ours_by_stock.get(f"{key}@{EDGE[0]}_{EDGE[1]}")
                    else:
                        await connector.get(*EDGE, key)
                    ended.append(time.monotonic_ns())
                if kind == "waiting":
                    begun = json.loads(sender.stdout.readline())
                took[kind] += [(end - begin) / 1000 for begin, end in zip(begun, ended, strict=True)]
    return took


def main() -> None:
    """Run it and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64 << 10, help="bytes of a payload (64 KB)")
    parser.add_argument("--rounds", type=int, default=500, help="measurements of each kind")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    parser.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sender:
        trio.run(send, arguments.size)
        return
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        shared.truncate(POOL)
        here = Path(__file__)
        ours = start(here, "--sender", "--size", arguments.size)
        stock = start(here.with_name("stock_shape.py"), shared.name, arguments.size)
        try:
            assert ours.stdout is not None
            assert stock.stdout is not None
            ports = int(ours.stdout.readline()), int(stock.stdout.readline())
            took = trio.run(receive, ours, *ports, Path(shared.name), arguments.rounds)
        finally:
            ours.terminate()
            stock.terminate()
    if arguments.json:
        arguments.json.write_text(json.dumps(took))
    base = statistics.median(took["two round trips"])
    print(f"{arguments.size} bytes, {arguments.rounds} rounds, interleaved; microseconds")
    print(f"{'':30}{'p50':>9}{'p99':>9}{'of two round trips':>21}")
    for kind, values in took.items():
        p99 = sorted(values)[int(0.99 * len(values))]
        p50 = statistics.median(values)
        print(f"{kind:30}{p50:9.0f}{p99:9.0f}{p50 / base:21.2f}")


if __name__ == "__main__":
    main()
