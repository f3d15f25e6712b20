"""Who is measured, in which environment, and what stands for them in tables."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from .environments import Environment
from .turn import Pipe, Turn

TURN_LIMIT = 90.0  # seconds: one turn takes two at most, and whoever hangs is to be named
OPEN_LIMIT = 180.0  # all peers of a group at once, on a machine that does much else
CLOSE_LIMIT = 15.0


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to hand chunks over.

    Attributes:
        name: As `--peer` takes it, and as the JSON has it.
        title: As tables have it.
        environment: Of `environments.KINDS`.
        half: ``module:Class``.
        options: Of the half, beside its role.
        is_ours: Whether it is trio_mori.
    """

    name: str
    title: str
    environment: str
    half: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_ours: bool = False


def _leased(link: str) -> dict[str, Any]:
    return {"link": link, "leased": True}


_AWAKE = {"link": "unix", "awake": 10_000}  # longer than any pause between the chunks of one stream up to 1 MB
_STOCK_MEMORY = {"connector": "SharedMemoryConnector"}
_STOCK_MORI = {"connector": "MoriTransferEngineConnector"}
_SHIM = {"connector": "TrioMoriConnector"}


def _fans() -> Iterator[Peer]:
    for many, role in (("senders", "send"), ("receivers", "receive")):
        for link in ("zmq", "unix"):
            for count in (1, 4, 16):
                title = f"trio_mori async, {link} link, {count} {many[: None if count > 1 else -1]}"
                options = {"link": link, "many": role, "count": count}
                yield Peer(f"{many}-{count}-{link}", title, "project", "ours:Fan", options, True)


_OUR_ADAPTER = {**_SHIM, "ours": True}

PEERS = {
    peer.name: peer
    for peer in (
        Peer("async-unix", "trio_mori async, unix link", "project", "ours:Async", {"link": "unix"}, True),
        Peer("async-zmq", "trio_mori async, zmq link", "project", "ours:Async", {"link": "zmq"}, True),
        Peer("leased-unix", "trio_mori async, unix link, leased", "project", "ours:Async", _leased("unix"), True),
        Peer("leased-zmq", "trio_mori async, zmq link, leased", "project", "ours:Async", _leased("zmq"), True),
        Peer("awake-unix", "trio_mori async, unix link, busy_poll_us", "project", "ours:Async", _AWAKE, True),
        Peer("blocking", "trio_mori.blocking", "project", "ours:Blocking", {}, True),
        Peer("shim", "trio_mori in vllm-omni, bare", "vllm", "vllm:Bare", _SHIM, True),
        Peer("shim+our-adapter", "trio_mori, its chunk adapter", "vllm", "adapter:Stage", _OUR_ADAPTER, True),
        Peer("shim+stock-adapter", "trio_mori, stock chunk adapter", "vllm", "adapter:Stage", _SHIM, True),
        Peer("memory+stock-adapter", "stock SharedMemory, its adapter", "vllm", "adapter:Stage", _STOCK_MEMORY),
        Peer("mori+stock-adapter", "stock Mori (stand-in), its adapter", "vllm", "adapter:Stage", _STOCK_MORI),
        Peer("memory", "stock SharedMemory, bare, tight loop", "vllm", "vllm:Bare", _STOCK_MEMORY),
        Peer("mori", "stock Mori (stand-in), bare, tight loop", "vllm", "vllm:Bare", _STOCK_MORI),
        Peer("nixl", "NIXL, bare engine, polled", "engines", "engines:Nixl"),
        Peer("mooncake", "Mooncake tcp, bare engine", "engines", "engines:Mooncake"),
        Peer("wake-up", "floor: wake-up by a unix socket", "project", "floors:Socket"),
        Peer("round-trip", "floor: blocking pyzmq round trip", "project", "floors:Echo"),
        Peer("memcpy", "floor: memmove", "project", "floors:Copy"),
        Peer("extents", "trio_mori's allocator", "project", "allocators:Ours", {}, True),
        Peer("stock-extents", "stock allocator", "vllm", "allocators:Stock"),
        *_fans(),
    )
}  # fmt: skip


class PeerFailed(Exception):
    """One of the two halves failed, hung or died; says which, in what, and what it said."""


_ports = itertools.count(random.randrange(20000, 28000, 2), 2)


def free_port() -> int:
    """A port that is free, as is the one behind it; below those that the kernel gives to connections."""
    for port in _ports:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("0.0.0.0", port))
            second.bind(("0.0.0.0", port + 1))
            return port
    raise AssertionError("unreachable: the count has no end, and bind refuses ports above 65535 with OverflowError")


class Pair:
    """The two halves of a peer, each a process.

    Attributes:
        processes: Their ids, by role.
    """

    def __init__(self, peer: Peer, environment: Environment) -> None:
        self.peer = peer
        self._pipes: dict[str, Pipe] = {}
        self.processes: dict[str, int] = {}
        self._port = free_port()
        for role in ("send", "receive"):
            self._pipes[role], self.processes[role] = environment.fork(peer.half, {**peer.options, "role": role})

    def open(self, pool: int) -> None:
        """Raises PeerFailed."""
        self._order("send", {"do": "open", "pool": pool, "other": self._port})
        sender = self._answer("send", OPEN_LIMIT)["other"]
        self._order("receive", {"do": "open", "pool": pool, "other": sender})
        receiver = self._answer("receive", OPEN_LIMIT)["other"]
        self._order("send", {"do": "meet", "other": receiver})
        self._answer("send", OPEN_LIMIT)

    def turn(self, turn: Turn) -> dict[str, dict[str, Any]]:
        """Do it, and return what both halves measured. Raises PeerFailed."""
        self.begin(turn)
        return self.end()

    def begin(self, turn: Turn) -> None:
        """Set it going."""
        order = {"do": "turn", "turn": dataclasses.asdict(turn)}
        self._early: dict[str, Any] = {}
        if turn.scenario in ("streams", "parked"):
            self._order("receive", order)
            if "ready" not in self._answer("receive", TURN_LIMIT):
                raise PeerFailed(f"{self.peer.name}, receive: knows no {turn.scenario!r}: it did not say that it waits")
            self._order("send", order)
            return
        self._order("send", order)
        self._early = {"send": self._answer("send", TURN_LIMIT)}
        self._order("receive", order)

    def end(self) -> dict[str, dict[str, Any]]:
        """Wait for it. Whichever half answers first may have failed, and then the other one waits for ever."""
        found = dict(self._early)
        until = time.monotonic() + TURN_LIMIT
        while missing := [role for role in self._pipes if role not in found]:
            descriptors = {self._pipes[role].fileno(): role for role in missing}
            answered = wait(descriptors, max(until - time.monotonic(), 0))
            for descriptor, role in descriptors.items():
                if descriptor in answered or not answered:
                    found[role] = self._answer(role, 0)
        return found

    def close(self) -> None:
        """In order if they can, else by a signal."""
        try:
            for role in ("receive", "send"):
                self._order(role, {"do": "close"})
            for role in ("receive", "send"):
                self._answer(role, CLOSE_LIMIT)
        except PeerFailed:
            self.kill()
        for pipe in self._pipes.values():
            pipe.close()

    def kill(self) -> None:
        """End both processes at once."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _order(self, role: str, order: dict[str, Any]) -> None:
        try:
            self._pipes[role].send(order)
        except OSError as error:
            raise PeerFailed(f"{self.peer.name}, {role}: its process has gone") from error

    def _answer(self, role: str, limit: float) -> dict[str, Any]:
        try:
            answer = self._pipes[role].receive(limit)
        except (TimeoutError, EOFError, OSError) as error:
            raise PeerFailed(f"{self.peer.name}, {role}: {error or 'its process has gone'}") from error
        if "error" in answer:
            raise PeerFailed(f"{self.peer.name}, {role}: {answer['error']}")
        return answer
