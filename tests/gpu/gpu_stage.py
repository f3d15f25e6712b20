"""A stage process of the tests of this folder, and how tests start it.

    gpu_stage.py source DEVICE      gets ready, says so; then for a line "PORT NAME FIRST COUNT SIZE...": listens there,
                                    says its port, and puts payloads NAME-FIRST and on, of these sizes in turn
    gpu_stage.py sink DEVICE        as above; gets them, says "1" for each that is right, "0" for one that is not

COUNT 0 is for ever. In the end it says what memory it had after a tenth of them, and then. Input that ends ends it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import torch
import trio

from trio_mori import Connector, ConnectorConfig, open_connector

# Tasks that get, or put, at one time.
TASKS = 8

POOL = 512 << 20


def config(role: str, device: str, port: int) -> ConnectorConfig:
    """Of a connector whose pool is on a GPU."""
    at = {"zmq_port": port} if role == "sender" else {"sender_host": "127.0.0.1", "sender_zmq_port": port}
    gpu = {"backend_type": "cuda_ipc", "memory_pool_device": device, "memory_pool_size": POOL}
    return ConnectorConfig.from_dict({"role": role, "host": "127.0.0.1", **gpu, **at})


def pattern(number: int, size: int, device: str) -> dict[str, object]:
    """A payload with a checksum, both made on a GPU."""
    places = torch.arange(size, dtype=torch.int32, device=device)
    data = ((places * (2 * (number % 1000) + 1) + number) >> 3).to(torch.uint8)
    return {"number": number, "data": data, "sum": checksum(data)}


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Of bytes, on their GPU; another order gives another sum."""
    weights = torch.arange(data.numel(), dtype=torch.int64, device=data.device) % 65521 + 1
    return (data.to(torch.int64) * weights).sum()


def is_right(payload: object, number: int, size: int) -> bool:
    """Whether a payload is the one of that number, by its checksum and by the pattern itself."""
    assert isinstance(payload, Mapping)
    data = payload["data"]
    return (
        payload["number"] == number
        and data.numel() == size
        and bool(checksum(data) == payload["sum"])
        and torch.equal(data, pattern(number, size, str(data.device))["data"])  # type: ignore[arg-type]
    )


def memory(device: str) -> list[int]:
    """What this process takes: bytes that torch has of the GPU, all that is taken of it, and the host's."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return [torch.cuda.memory_reserved(device), total - free, resident]


@attrs.define
class Work:
    """What a stage does: payloads of these sizes in turn."""

    connector: Connector
    device: str
    name: str
    first: int
    count: int
    sizes: list[int]
    memory: list[int] = attrs.field(factory=list)

    async def put(self) -> None:
        """Put them."""
        await self._share(self._put)

    async def get(self, report: Callable[[bool], None]) -> None:
        """Get them, and report of each whether it was right."""

        async def get_one(number: int) -> None:
            report(is_right(await self.connector.get("0", "1", f"{self.name}-{number}"), number, self._size(number)))

        await self._share(get_one)

    async def _put(self, number: int) -> None:
        payload = pattern(number, self._size(number), self.device)
        await self.connector.put("0", "1", f"{self.name}-{number}", payload)

    def _size(self, number: int) -> int:
        return self.sizes[number % len(self.sizes)]

    async def _share(self, function: Callable[[int], Awaitable[None]]) -> None:
        async def some(start: int) -> None:
            number = self.first + start
            while not self.count or number < self.first + self.count:
                await function(number)
                if self.count and number == self.first + self.count // 10:
                    self.memory = memory(self.device)
                number += TASKS

        async with trio.open_nursery() as nursery:
            for start in range(TASKS):
                nursery.start_soon(some, start)


class Stage:
    """A stage process, from outside."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._received = b""

    async def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        while b"\n" not in self._received:
            some = await self.process.stdout.receive_some()
            assert some, "the process ended"
            self._received += some
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    async def say(self, *words: object) -> None:
        """Tell it a line."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(" ".join(map(str, words)).encode() + b"\n")

    async def kill(self) -> None:
        """Kill it by SIGKILL, and wait until it is gone."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def open_stages(role: str, device: str, count: int = 1) -> AsyncIterator[list[Stage]]:
    """So many processes, all ready; killed in the end."""
    command = [sys.executable, __file__, role, device]
    async with trio.open_nursery() as nursery:
        stages = []
        for _ in range(count):
            run = partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
            stages.append(Stage(await nursery.start(run)))
        for stage in stages:
            assert await stage.hear() == "ready"
        yield stages
        for stage in stages:
            stage.process.kill()


def say(*words: object) -> None:
    print(*words, flush=True)


async def main(role: str, device: str) -> None:
    torch.zeros(1, device=device)
    say("ready")
    line = (await trio.to_thread.run_sync(sys.stdin.readline)).split()
    if not line:
        return
    port, name, first, count, *sizes = line
    kind = "sender" if role == "source" else "receiver"
    async with open_connector(config(kind, device, int(port))) as connector:
        say(connector.get_connection_info()["zmq_port"])
        work = Work(connector, device, name, int(first), int(count), list(map(int, sizes)))
        if role == "source":
            await work.put()
        else:
            await work.get(lambda right: say(int(right)))
        await trio.to_thread.run_sync(sys.stdin.readline)
        say(*work.memory, *memory(device))


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
