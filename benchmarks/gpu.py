"""From GPU to GPU between two processes: how long from the start of `put` until a get that waits has it.

The receiver is this process, the sender another one; both have their pools on the GPUs that --devices names. The clock
is the host's, which both share. Every size is measured in blocks of all kinds in turn; each number is a median. Before
each put both processes sleep for 3 ms; with --busy the sender never sleeps, as a stage that has other work, and the
receiver has busy_poll_us.

* *bare copy*: one copy of that size on a stream, from the call until the host knows that it is over; across, of a
  tensor into the receiver's mapped pool, and within the sender's GPU, as a pool's first copy is;
* *raw, lease* and *raw, get*: one tensor, until the lease is entered (two copies: into the pool, and across), and until
  get has returned (a third one: out of the pool);
* *in the pool*: the same of a buffer that lies in the sender's pool already, as a stage that passes it on has it;
* *structured*: a dict of two tensors and a number, of that size together;
* *by the host*: raw, get; with pools in host memory (shm), from the sender's GPU and to the receiver's;
* *torch's IPC*: a tensor that is passed on as torch.multiprocessing does, mapped on its owner's GPU, and copied there;
* *stock*: vllm-omni's SharedMemoryConnector, put and get of the dict one after the other, and the copy to the GPU.
  Given --stock, the folder of site-packages that has vllm_omni.

    python benchmarks/gpu.py [--devices cuda:0,cuda:1] [--busy] [--sizes BYTES,...] [--rounds N] [--stock FOLDER]
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.multiprocessing
import trio
from stock_shared_memory import stock_connector

import trio_mori
from trio_mori._engines._cuda_peer import CudaPeer
from trio_mori.abc import Descriptor, Write

EDGE = ("0", "1")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
KINDS = ("raw, lease", "raw, get", "in the pool", "structured, lease", "structured, get", "by the host")
POOL = 1 << 30
PAUSE = 0.003  # seconds before each put: until the get has been asked for
GPU = {"backend_type": "cuda_ipc", "memory_pool_size": POOL, "host": "127.0.0.1"}
HOST = {"backend_type": "shm", "memory_pool_size": POOL, "host": "127.0.0.1"}


def structure(size: int, device: str) -> dict[str, object]:
    """Two tensors of so many bytes together, with something around them."""
    half = torch.ones(size // 4, dtype=torch.bfloat16, device=device)
    return {"codes": {"audio": half, "hidden": half + 1}, "meta": {"finished": False, "step": 3}}


def median_us(call: Callable[[], object], rounds: int) -> float:
    """Of a call that has ended when it returns, after some that warm it up."""
    took = []
    for number in range(rounds + 3):
        begun = time.perf_counter_ns()
        call()
        if number >= 3:
            took.append(time.perf_counter_ns() - begun)
    return statistics.median(took) / 1000


# --- the sending process ----------------------------------------------------------------------------------


@attrs.define
class Sender:
    """What the sending process has open."""

    device: str
    gpu: trio_mori.Connector
    host: trio_mori.Connector
    feeder: trio_mori.Connector
    passed_on: list[torch.Tensor] = attrs.field(factory=list)

    async def block(self, kind: str, size: int, name: str, count: int) -> list[int]:
        """Put so many payloads; returns when each began."""
        connector = self.host if kind == "by the host" else self.gpu
        payload: object = torch.ones(size, dtype=torch.uint8, device=self.device)
        if kind.startswith("structured"):
            payload = structure(size, self.device)
        begun = []
        for number in range(count):
            data = await self._in_pool(payload, f"{name}-{number}") if kind == "in the pool" else payload
            torch.cuda.synchronize(self.device)
            await trio.sleep(PAUSE)
            begun.append(time.monotonic_ns())
            await connector.put(*EDGE, f"{name}-{number}", data)
        return begun

    async def _in_pool(self, payload: object, key: str) -> trio_mori.ManagedBuffer:
        await self.feeder.put("00", "0", key, payload)
        arrival = await self.gpu.take("00", "0", key)
        return arrival.keep().buffer

    async def bare(self, size: int, descriptor: Descriptor, rounds: int) -> dict[str, float]:
        """Copies into another process's pool, and beside the source."""
        async with trio_mori.open_engine("cuda_ipc", pool_size=size, device=self.device) as engine:
            peer = engine.add_peer(descriptor)
            await engine.write(peer, Write(0, 0, size))  # maps it
            assert isinstance(peer, CudaPeer)
            assert peer.pool is not None
            source, across = engine.region.tensor, peer.pool[:size]
            within = torch.empty_like(source)
            stream = torch.cuda.Stream(self.device)

            def copy(target: torch.Tensor) -> None:
                target.copy_(source, non_blocking=True)
                stream.synchronize()

            with torch.cuda.stream(stream):
                return {
                    "bare copy across": median_us(lambda: copy(across), rounds),
                    "bare copy within": median_us(lambda: copy(within), rounds),
                }

    def pass_on(self, size: int) -> tuple[int, str]:
        """A tensor as torch passes it to other processes, and when that began."""
        self.passed_on = [torch.ones(size, dtype=torch.uint8, device=self.device)]
        torch.cuda.synchronize(self.device)
        begun = time.monotonic_ns()
        return begun, base64.b64encode(bytes(ForkingPickler.dumps(self.passed_on[0]))).decode()


async def never_sleep() -> None:
    """Other work, which lets others have their turns."""
    while True:
        await trio.lowlevel.checkpoint()


async def send(device: str, stock_site: Path | None, *, busy: bool) -> None:
    """Answer each line of standard input with one."""
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    stock = stock_connector(stock_site) if stock_site else None
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        if busy:
            nursery.start_soon(never_sleep)

        async def opened(config: dict[str, object]) -> trio_mori.Connector:
            return await stack.enter_async_context(trio_mori.open_connector(config))

        feeder = await opened({**GPU, "memory_pool_device": device, "role": "sender", "zmq_port": 0, "stage_id": 7})
        source = {"sender_host": "127.0.0.1", "sender_zmq_port": feeder.get_connection_info()["zmq_port"]}
        gpu = await opened({**GPU, "memory_pool_device": device, "role": "both", "zmq_port": 0, **source})
        host = await opened({**HOST, "role": "sender", "zmq_port": 0})
        sender = Sender(device, gpu, host, feeder)
        print(json.dumps([each.get_connection_info()["zmq_port"] for each in (gpu, host)]), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            command, *rest = json.loads(line)
            answer: Any
            if command == "block":
                answer = await sender.block(*rest)
            elif command == "bare":
                size, engine, memory, rounds = rest
                descriptor = Descriptor(bytes.fromhex(engine), bytes.fromhex(memory))
                answer = await sender.bare(size, descriptor, rounds)
            elif command == "torch":
                answer = sender.pass_on(*rest)
            else:
                (key, size) = rest
                payload = structure(size, device)
                torch.cuda.synchronize(device)
                begun = time.monotonic_ns()
                _, _, metadata = stock.put(*EDGE, key, payload)
                answer = [time.monotonic_ns() - begun, metadata]
            print(json.dumps(answer), flush=True)
        nursery.cancel_scope.cancel()


# --- the receiving process --------------------------------------------------------------------------------


class Receiver:
    """What this process has open, and the sender that it commands."""

    def __init__(self, process: trio.Process, device: str, rounds: int) -> None:
        self.device = device
        self.rounds = rounds
        self._process = process
        self._received = b""
        self._blocks = 0

    async def tell(self, *command: object) -> None:
        """Send the sender a line."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps(command).encode() + b"\n")

    async def hear(self) -> Any:
        """The sender's next line."""
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            some = await self._process.stdout.receive_some()
            assert some, "the sender ended"
            self._received += some
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    async def block(self, kind: str, size: int, count: int, get: Callable[[str], Awaitable[int]]) -> list[float]:
        """So many payloads of a kind, each waited for; returns how long each took, in microseconds.

        Args:
            get: Waits for a payload, and says when it had it.
        """
        self._blocks += 1
        name = str(self._blocks)
        await self.tell("block", kind, size, name, count)
        ended = []
        for number in range(count):
            ended.append(await get(f"{name}-{number}"))
        return [(end - begin) / 1000 for begin, end in zip(await self.hear(), ended, strict=True)]

    async def by_torch(self, size: int) -> float:
        """One tensor by torch's IPC; in microseconds."""
        await self.tell("torch", size)
        begun, pickled = await self.hear()
        tensor = pickle.loads(base64.b64decode(pickled)).to(self.device, copy=True)
        torch.cuda.synchronize(self.device)
        took = (time.monotonic_ns() - begun) / 1000
        del tensor
        return took

    async def by_stock(self, connector: Any, key: str, size: int) -> float:
        """One dict by the stock connector, the way between put and get not counted; in microseconds."""
        await self.tell("stock", key, size)
        put, metadata = await self.hear()
        begun = time.monotonic_ns()
        got, _ = connector.get(*EDGE, key, metadata)
        moved = [tensor.to(self.device) for tensor in got["codes"].values()]
        torch.cuda.synchronize(self.device)
        assert all(each.is_cuda for each in moved)
        return float(put + time.monotonic_ns() - begun) / 1000


async def measure(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Medians in microseconds, by size and kind."""
    torch.set_num_threads(1)
    there, here = options.devices
    torch.cuda.set_device(here)
    stock = stock_connector(options.stock) if options.stock else None
    command = [sys.executable, __file__, "--sender", there, *(["--stock", str(options.stock)] if options.stock else [])]
    command += ["--busy"] if options.busy else []
    results: dict[int, dict[str, float]] = {}
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
        process = await nursery.start(run)
        receiver = Receiver(process, here, options.rounds)
        gpu_port, host_port = await receiver.hear()
        to: dict[str, object] = {"role": "receiver", "sender_host": "127.0.0.1"}
        to["busy_poll_us"] = 100_000 if options.busy else 0
        async with (
            trio_mori.open_connector({**GPU, "memory_pool_device": here, "sender_zmq_port": gpu_port, **to}) as gpu,
            trio_mori.open_connector({**HOST, "payload_device": here, "sender_zmq_port": host_port, **to}) as host,
            trio_mori.open_engine("cuda_ipc", pool_size=max(options.sizes), device=here) as bare,
        ):

            async def lease(key: str) -> int:
                async with gpu.lease(*EDGE, key):
                    return time.monotonic_ns()

            async def get(key: str) -> int:
                await gpu.get(*EDGE, key)
                return time.monotonic_ns()

            async def get_by_host(key: str) -> int:
                await host.get(*EDGE, key)
                return time.monotonic_ns()

            ways = {"by the host": get_by_host, "raw, get": get, "structured, get": get}
            for size in options.sizes:
                rounds = options.rounds if size < 64 << 20 else max(options.rounds // 4, 10)
                took: dict[str, list[float]] = {}
                for _ in range(3):
                    for kind in KINDS:
                        count = rounds // 3 if kind != "by the host" else max(rounds // 12, 5)
                        each = await receiver.block(kind, size, count, ways.get(kind, lease))
                        took.setdefault(kind, []).extend(each[1:])
                    took.setdefault("torch's IPC", []).extend(
                        [await receiver.by_torch(size) for _ in range(max(rounds // 12, 5))][1:]
                    )
                    for number in range(max(rounds // 12, 5) if stock else 0):
                        key = f"gpu-{time.monotonic_ns()}-{number}"
                        took.setdefault("stock", []).append(await receiver.by_stock(stock, key, size))
                descriptor = bare.descriptor
                await receiver.tell("bare", size, descriptor.engine.hex(), descriptor.memory.hex(), rounds)
                results[size] = {**await receiver.hear(), **{k: statistics.median(v) for k, v in took.items()}}
        process.kill()
    return results


# --- the table --------------------------------------------------------------------------------------------


def table(results: dict[int, dict[str, float]], devices: list[str]) -> str:
    """Microseconds, and what they are of the bare copies."""
    sizes = list(results)
    lines = [f"{' -> '.join(devices)}; medians in microseconds, from the start of put until the receiver has it"]
    lines.append(f"{'':22}" + "".join(f"{label(size):>12}" for size in sizes))
    for kind in results[sizes[0]]:
        lines.append(f"{kind:22}" + "".join(f"{results[size][kind]:12.1f}" for size in sizes))
    lines.append("of the bare copies that it takes (time of those copies / time)")
    for kind, copies in (("raw, lease", 2), ("raw, get", 3), ("in the pool", 1), ("structured, lease", 2)):
        shares = [bare(results[size], copies) / results[size][kind] for size in sizes]
        lines.append(f"{kind:22}" + "".join(f"{share:12.0%}" for share in shares))
    lines.append("GB/s, all bytes that are copied counted / GB/s of the bare copy across")
    for kind, copies in (("raw, lease", 2), ("in the pool", 1)):
        shares = [copies * results[size]["bare copy across"] / results[size][kind] for size in sizes]
        rates = [copies * size / results[size][kind] / 1000 for size in sizes]
        cells = (f"{rate:.0f} {share:.0%}" for rate, share in zip(rates, shares, strict=True))
        lines.append(f"{kind:22}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def bare(result: dict[str, float], copies: int) -> float:
    """What so many copies take by themselves, of which one goes across."""
    return result["bare copy across"] + (copies - 1) * result["bare copy within"]


def label(size: int) -> str:
    """A size for people."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def main() -> None:
    """Run it and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), default=["cuda:0", "cuda:0"])
    parser.add_argument("--sizes", type=lambda text: [int(each) for each in text.split(",")], default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=120, help="measurements of each kind")
    parser.add_argument("--stock", type=Path, help="the folder that has vllm_omni, 0.30.0")
    parser.add_argument("--busy", action="store_true", help="let the processes sleep as little as may be")
    parser.add_argument("--json", type=Path, help="write the medians there")
    parser.add_argument("--sender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sender:
        trio.run(partial(send, options.sender, options.stock, busy=options.busy))
        return
    results = trio.run(measure, options)
    if options.json:
        options.json.write_text(json.dumps(results))
    print(f"{'busy' if options.busy else 'paced'}: {table(results, options.devices)}")


if __name__ == "__main__":
    main()
