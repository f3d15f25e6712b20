"""trio_mori, awaited: the API for stage code on trio. And its blocking facade."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import torch
import trio

import trio_mori
from trio_mori import blocking

from ..half import GIVE_UP, PAUSE, Half, Ready, measured, memory_kb, pace
from ..payload import Payload, check
from ..turn import Pipe, Turn
from .blocking_calls import BlockingHalf

EDGE = ("0", "1")


def configuration(role: str, pool: int, link: str, other: Any) -> dict[str, Any]:
    config = {"host": "127.0.0.1", "memory_pool_size": pool, "same_host_link": "auto" if link == "unix" else "off"}
    if role == "send":
        return config | {"role": "sender", "zmq_port": 0, "stage_id": 0}
    host, port = other
    return config | {"role": "receiver", "sender_host": host, "sender_zmq_port": port, "stage_id": 1}


class Async(Half):
    """trio_mori, awaited.

    Args:
        link: ``zmq`` or ``unix``.
        leased: By `lease`, and a payload counts as got when its block is entered.
        awake: The receiver's `busy_poll_us`.
    """

    def __init__(self, role: str, link: str, leased: bool = False, awake: int = 0) -> None:
        super().__init__(role)
        self._awake = awake
        self._link = link
        self._leased = leased
        self._stack = AsyncExitStack()

    def serve(self, pipe: Pipe) -> None:
        torch.set_num_threads(1)
        trio.run(self._serve, pipe)

    def open(self, pool: int, other: Any) -> Any:
        raise NotImplementedError("awaited: see _open")

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        raise NotImplementedError("awaited: see _turn")

    def close(self) -> None:
        raise NotImplementedError("awaited: see _serve")

    async def _serve(self, pipe: Pipe) -> None:
        base = memory_kb("VmRSS")
        async with self._stack:
            while True:
                await trio.lowlevel.wait_readable(pipe.fileno())
                order = pipe.receive()
                answer: dict[str, Any] = {}
                try:
                    if order["do"] == "open":
                        answer = {"other": await self._open(order["pool"], order["other"])}
                    elif order["do"] == "turn":
                        with measured(order["turn"], base) as answer:
                            answer |= await self._turn(Turn(**order["turn"]), lambda: pipe.send({"ready": True}))
                    elif order["do"] == "close":
                        await self._stack.aclose()
                except Exception:  # noqa: BLE001 - carried over to the controlling process
                    answer = {"error": traceback.format_exc()}
                pipe.send(answer)
                if order["do"] == "close":
                    return

    async def _open(self, pool: int, other: Any) -> Any:
        config = configuration(self.role, pool, self._link, other)
        if self._awake and self.role == "receive":
            config["busy_poll_us"] = self._awake
        self._connector = await self._stack.enter_async_context(trio_mori.open_connector(config))
        if self.role == "receive":
            return None
        info = self._connector.get_connection_info()
        return info["host"], info["zmq_port"]

    async def _turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        doing: Callable[[Turn, Ready], Awaitable[dict[str, Any]]] = {
            ("streams", "send"): self._send_streams,
            ("streams", "receive"): self._receive_streams,
            ("present", "send"): self._put_all,
            ("present", "receive"): self._get_all,
            ("parked", "send"): self._idle,
            ("parked", "receive"): self._park,
        }[turn.scenario, self.role]
        return await doing(turn, ready)

    async def _send_streams(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        payload = Payload(turn)
        starts = [[0] * turn.chunks for _ in range(turn.streams)]
        begin = time.monotonic()
        for chunk in range(turn.chunks):
            if (left := pace(begin, turn, chunk + 1)) > 0:
                await trio.sleep(left)
            for stream in range(turn.streams):
                payload.mark(turn.number(stream, chunk))
                starts[stream][chunk] = time.monotonic_ns()
                await self._connector_of(stream).put(*EDGE, turn.key(stream, chunk), payload.value)
        return {"starts": starts}

    async def _receive_streams(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        ends = [[0] * turn.chunks for _ in range(turn.streams)]

        async def follow(stream: int) -> None:
            for chunk in range(turn.chunks):
                ends[stream][chunk] = await self._get(turn, stream, chunk)

        with trio.fail_after(GIVE_UP):
            async with trio.open_nursery() as nursery:
                for stream in range(turn.streams):
                    nursery.start_soon(follow, stream)
                await trio.sleep(0.01)  # until all of them have asked
                ready()
        return {"ends": ends}

    def _connector_of(self, stream: int) -> trio_mori.Connector:
        return self._connector

    def _source_of(self, stream: int) -> dict[str, Any] | None:
        """Where its chunks come from, if that is not what the connector was configured with."""
        return None

    async def _get(self, turn: Turn, stream: int, chunk: int) -> int:
        """Get it, owned or leased; when it was there."""
        key, number = turn.key(stream, chunk), turn.number(stream, chunk)
        if not self._leased:
            value = await self._connector_of(stream).get(*EDGE, key, self._source_of(stream))
            end = time.monotonic_ns()
            check(value, turn, number)
            return end
        async with self._connector.lease(*EDGE, key) as lease:
            value = lease.value()
            end = time.monotonic_ns()
            check(value, turn, number)
            del value
        return end

    async def _put_all(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        payload = Payload(turn)
        took = []
        for chunk in range(turn.chunks):
            payload.mark(turn.number(0, chunk))
            await trio.sleep(PAUSE)
            begin = time.monotonic_ns()
            await self._connector.put(*EDGE, turn.key(0, chunk), payload.value)
            took.append((time.monotonic_ns() - begin) / 1000)
        return {"puts": took}

    async def _get_all(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        took = []
        for chunk in range(turn.chunks):
            await trio.sleep(PAUSE)
            begin = time.monotonic_ns()
            with trio.fail_after(GIVE_UP):
                end = await self._get(turn, 0, chunk)
            took.append((end - begin) / 1000)
        return {"gets": took}

    async def _idle(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        return await watch(turn)

    async def _park(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        async with trio.open_nursery() as nursery:
            for stream in range(turn.streams):
                nursery.start_soon(self._connector.get, *EDGE, turn.key(stream, 0))
            await trio.sleep(1)  # until all of them have asked and nothing moves
            ready()
            result = await watch(turn)
            nursery.cancel_scope.cancel()
        return result


class Fan(Async):
    """``streams`` between one connector and many, all of which are in one process and take turns with the streams.

    Args:
        many: The role that has them.
        count: How many.
    """

    def __init__(self, role: str, link: str, many: str, count: int) -> None:
        super().__init__(role, link)
        self._count = count if role == many else 1
        self._connectors: list[trio_mori.Connector] = []
        self._sources: list[Any] = []

    async def _open(self, pool: int, other: Any) -> Any:
        if self.role == "receive":
            self._sources = other
        for _ in range(self._count):
            await super()._open(pool, self._sources[0] if self.role == "receive" else None)
            self._connectors.append(self._connector)
        infos = [connector.get_connection_info() for connector in self._connectors]
        return [[info["host"], info["zmq_port"]] for info in infos] if self.role == "send" else None

    def _connector_of(self, stream: int) -> trio_mori.Connector:
        return self._connectors[stream % self._count]

    def _source_of(self, stream: int) -> dict[str, Any] | None:
        host, port = self._sources[stream % len(self._sources)]
        return {"source_host": host, "source_port": port}


async def watch(turn: Turn) -> dict[str, Any]:
    """What this process uses while nothing happens."""
    before = time.process_time_ns()
    await trio.sleep(turn.seconds)
    return {"idle_us": (time.process_time_ns() - before) / 1000}


class Blocking(BlockingHalf):
    """`trio_mori.blocking`: plain threads in front, the same connector behind."""

    def open(self, pool: int, other: Any) -> Any:
        torch.set_num_threads(1)
        self._opened = blocking.open_connector(configuration(self.role, pool, "unix", other))
        self._connector = self._opened.__enter__()
        if self.role == "receive":
            return None
        info = self._connector.get_connection_info()
        return info["host"], info["zmq_port"]

    def close(self) -> None:
        self._opened.__exit__(None, None, None)

    def put(self, key: str, value: Any) -> None:
        self._connector.put(*EDGE, key, value)

    def poll(self, key: str) -> Any:
        raise NotImplementedError("a get waits")

    def wait(self, key: str) -> Any:
        return self._connector.get(*EDGE, key, timeout=GIVE_UP)
