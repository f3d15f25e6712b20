"""What is done in one turn, as it travels to the two processes of a peer. Standard library: some have no more."""

from __future__ import annotations

import dataclasses
import json
from multiprocessing.connection import Connection
from typing import Any


@dataclasses.dataclass(frozen=True)
class Turn:
    """One measurement of one peer.

    Attributes:
        scenario: ``streams``, ``present``, ``parked`` or ``allocator``; see `cases`.
        tag: Part of every key, so that no two turns share one.
        streams: Streams, threads, parked gets or live extents.
        chunks: Of each stream.
        size: Bytes of a chunk.
        structured: The chunk is a dict with a tensor in it, and not a tensor of bytes.
        interval: Seconds from one chunk of a stream to the next; 0: no pause.
        busy: The share of the time that another thread of the receiving process runs Python.
        seconds: How long parked gets are watched.
    """

    scenario: str
    tag: str = ""
    streams: int = 1
    chunks: int = 1
    size: int = 1 << 16
    structured: bool = False
    interval: float = 0.0
    busy: float = 0.0
    seconds: float = 0.0

    def key(self, stream: int, chunk: int) -> str:
        """The key of a chunk, in the form of vllm-omni's: request, stage, number."""
        return f"{self.tag}s{stream}_0_{chunk}"

    def number(self, stream: int, chunk: int) -> int:
        """What stands in the first eight bytes of a chunk."""
        return stream << 32 | chunk

    @property
    def total(self) -> int:
        """Chunks of all streams."""
        return self.streams * self.chunks


class Pipe:
    """Messages of JSON between the controlling process and a half."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Raises TimeoutError, and EOFError or OSError when the other end has gone."""
        if not self._connection.poll(timeout):
            raise TimeoutError("no answer in time")
        message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return message

    def close(self) -> None:
        self._connection.close()
