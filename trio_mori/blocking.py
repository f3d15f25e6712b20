"""The connector for code without an event loop: plain threads, and asyncio by way of ``asyncio.to_thread``.

```python
from trio_mori import blocking

with blocking.open_connector({"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": 50051}) as conn:
    value = conn.get("0", "1", "key", timeout=5)
```

Everything runs in one trio thread behind it. All methods may be called from any number of threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from . import _connector
from ._chunks import ChunkReceiver, ChunkSender
from ._config import ConnectorConfig
from ._connector import Connector
from ._portal import Portal
from ._statistics import ConnectorStatistics, Receipt

__all__ = ["BlockingChunkReceiver", "BlockingChunkSender", "BlockingConnector", "Portal", "open_connector"]


T = TypeVar("T")


class BlockingChunkSender:
    """The sending end of a chunk stream. See `trio_mori.ChunkSender`."""

    def __init__(self, portal: Portal, sender: ChunkSender) -> None:
        self._portal = portal
        self._sender = sender

    def send(self, chunk: object, *, timeout: float | None = None) -> None:
        """Send the next chunk; waits for room.

        Raises:
            TimeoutError: there was no room in time; the chunk was not sent.
        """
        self._portal.call(self._sender.send, chunk, timeout=timeout)


class BlockingChunkReceiver:
    """The receiving end of a chunk stream, an iterator. See `trio_mori.ChunkReceiver`."""

    def __init__(self, portal: Portal, receiver: ChunkReceiver) -> None:
        self._portal = portal
        self._receiver = receiver

    def __iter__(self) -> BlockingChunkReceiver:
        return self

    def __next__(self) -> object:
        return self.receive()

    def receive(self, *, timeout: float | None = None) -> object:
        """The next chunk.

        Raises:
            StopIteration: after the terminal chunk.
            TimeoutError: it did not come in time; the next call waits for the same one.
        """
        try:
            return self._portal.call(self._receiver.__anext__, timeout=timeout)
        except StopAsyncIteration:
            raise StopIteration from None


class BlockingConnector:
    """A `trio_mori.Connector` whose methods block. Made by `open_connector`.

    `timeout` is in seconds, None for no limit. A call that timed out had no effect.
    """

    def __init__(self, portal: Portal, connector: Connector) -> None:
        self._portal = portal
        self._connector = connector

    def put(self, from_stage: str, to_stage: str, key: str, data: object, *, timeout: float | None = None) -> Receipt:
        """See `Connector.put`. Raises TimeoutError when there is no room in time."""
        return self._portal.call(self._connector.put, from_stage, to_stage, key, data, timeout=timeout)

    def put_nowait(self, from_stage: str, to_stage: str, key: str, data: object) -> Receipt:
        """See `Connector.put_nowait`."""
        return self._now(self._connector.put_nowait, from_stage, to_stage, key, data)

    def get(
        self,
        from_stage: str,
        to_stage: str,
        key: str,
        metadata: Mapping[str, object] | None = None,
        *,
        timeout: float | None = None,
    ) -> object:
        """See `Connector.get`. Raises TimeoutError when it does not come in time; it stays with the sender."""
        return self._portal.call(self._connector.get, from_stage, to_stage, key, metadata, timeout=timeout)

    def get_nowait(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | None = None
    ) -> object:
        """See `Connector.get_nowait`."""
        return self._now(self._connector.get_nowait, from_stage, to_stage, key, metadata)

    def cleanup(self, key: str, from_stage: str | None = None, to_stage: str | None = None) -> int:
        """See `Connector.cleanup`."""
        return self._portal.call(self._connector.cleanup, key, from_stage, to_stage)

    def update_sender_info(self, host: str, port: int) -> None:
        """See `Connector.update_sender_info`."""
        self._now(self._connector.update_sender_info, host, port)

    def get_connection_info(self) -> dict[str, Any]:
        """See `Connector.get_connection_info`."""
        return self._connector.get_connection_info()

    def statistics(self) -> ConnectorStatistics:
        """See `Connector.statistics`."""
        return self._now(self._connector.statistics)

    def health(self) -> dict[str, Any]:
        """See `Connector.health`."""
        return self._now(self._connector.health)

    @contextmanager
    def open_chunk_sender(
        self, request_id: str, to_stage: str, *, from_stage: str | None = None
    ) -> Iterator[BlockingChunkSender]:
        """See `Connector.open_chunk_sender`."""
        with self._portal.entered(
            lambda: self._connector.open_chunk_sender(request_id, to_stage, from_stage=from_stage)
        ) as sender:
            yield BlockingChunkSender(self._portal, sender)

    @contextmanager
    def open_chunk_receiver(
        self, request_id: str, from_stage: str, *, to_stage: str | None = None
    ) -> Iterator[BlockingChunkReceiver]:
        """See `Connector.open_chunk_receiver`."""
        with self._portal.entered(
            lambda: self._connector.open_chunk_receiver(request_id, from_stage, to_stage=to_stage)
        ) as receiver:
            yield BlockingChunkReceiver(self._portal, receiver)

    def _now(self, method: Callable[..., T], *args: object) -> T:
        async def run() -> T:
            return method(*args)

        return self._portal.call(run)


@contextmanager
def open_connector(
    config: ConnectorConfig | Mapping[str, object], *, payload_types: Iterable[type] = ()
) -> Iterator[BlockingConnector]:
    """Open a connector for the length of a ``with`` block. See `trio_mori.open_connector`.

    Leaving the block closes it in order; calls that other threads have in progress end with `ConnectorClosed`.
    """
    portal = Portal()
    try:
        with portal.entered(lambda: _connector.open_connector(config, payload_types=payload_types)) as connector:
            yield BlockingConnector(portal, connector)
    finally:
        portal.close()
