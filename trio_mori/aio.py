"""The connector for asyncio code.

```python
from trio_mori import aio

async with aio.open_connector({"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": 50051}) as conn:
    value = await asyncio.wait_for(conn.get("0", "1", "key"), 5)
```

Everything runs in one trio thread behind it, large copies in threads of that. However many calls wait, none of them
holds a thread of asyncio's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import attrs
import trio

from . import blocking
from ._arrival import Arrival, StockArrival
from ._config import ConnectorConfig
from ._held import Held, finish
from ._pool import INLINE_COPY
from ._statistics import ConnectorStatistics, Receipt
from .blocking import BlockingConnector

__all__ = ["AsyncioConnector", "open_connector"]

T = TypeVar("T")


@attrs.frozen(eq=False)
class _Copied:
    """A payload in memory of its own, which its sender keeps until whoever asked has it."""

    held: Held[Arrival | StockArrival]
    value: object


class AsyncioConnector:
    """A `trio_mori.Connector` for asyncio: what waits there is awaited here. Made by `open_connector`.

    Used from one asyncio loop. What does not wait is no coroutine, and takes the fraction of a millisecond that the
    trio thread needs to answer.

    Attributes:
        blocking: The same connector for other threads: it has leases and chunk streams, which are used in threads of
            their own.

    Raises, beside what the methods of `Connector` raise:
        ConnectorClosed: closed before or during the call; or what runs behind it has failed, and that is the cause.
    """

    def __init__(self, connector: BlockingConnector) -> None:
        """Does not take it over."""
        self.blocking = connector
        self._portal = connector._portal
        self._connector = connector._connector

    async def put(self, from_stage: str, to_stage: str, key: str, data: object) -> Receipt:
        """See `Connector.put`.

        Cancellation: at any time, and then nothing was put; but if it was put in that very moment, it stays.
        """
        put = partial(self._connector.put, from_stage, to_stage, key, data)
        return await self._await(put, f"put of {key!r}")

    def put_nowait(self, from_stage: str, to_stage: str, key: str, data: object) -> Receipt:
        """See `Connector.put_nowait`. A large payload is copied here."""
        return self.blocking.put_nowait(from_stage, to_stage, key, data)

    async def get(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> Any:
        """See `Connector.get`.

        Cancellation: at any time, and then the payload stays with the sender, also if it was here already.
        """
        copied = await self._await(partial(self._copy, from_stage, to_stage, key, metadata), f"get of {key!r}")
        with copied.held:
            self._portal.post(partial(finish, copied.held))
        return copied.value

    def get_nowait(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None = None
    ) -> Any:
        """See `Connector.get_nowait`. A large payload is copied here."""
        return self.blocking.get_nowait(from_stage, to_stage, key, metadata)

    async def drain(self) -> int:
        """See `Connector.drain`."""
        return await self._await(self._connector.drain, "drain")

    async def wait_listening(self) -> None:
        """See `Connector.wait_listening`."""
        await self._await(self._connector.wait_listening, "wait_listening")

    async def cleanup(self, key: str, from_stage: str | None = None, to_stage: str | None = None) -> int:
        """See `Connector.cleanup`."""
        return await self._await(partial(self._connector.cleanup, key, from_stage, to_stage), f"cleanup of {key!r}")

    def update_sender_info(self, host: str, port: int) -> None:
        """See `Connector.update_sender_info`."""
        self.blocking.update_sender_info(host, port)

    def get_connection_info(self) -> dict[str, Any]:
        """See `Connector.get_connection_info`."""
        return self.blocking.get_connection_info()

    def statistics(self) -> ConnectorStatistics:
        """See `Connector.statistics`. Of a closed connector: its last ones."""
        return self.blocking.statistics()

    def health(self) -> dict[str, Any]:
        """See `Connector.health`."""
        return self.blocking.health()

    async def _await(self, function: Callable[[], Awaitable[T]], what: str) -> T:
        """What an async function returns in the trio loop. Cancelled, it is cancelled there, its outcome dropped."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()

        def note() -> None:
            if not answered.done():
                answered.set_result(None)

        def tell() -> None:
            with suppress(RuntimeError):  # the asyncio loop has ended, and who waited there with it
                loop.call_soon_threadsafe(note)

        call = self._portal.submit(function, on_answer=tell, what=what)
        try:
            await answered
        except BaseException:
            call.abandon()
            raise
        return call.result()

    async def _copy(
        self, from_stage: str, to_stage: str, key: str, metadata: Mapping[str, object] | Receipt | None
    ) -> _Copied:
        """In the trio loop. What is left of it then takes no time: the payload is the caller's, or goes back."""
        arrival = await self._connector.take(from_stage, to_stage, key, metadata)
        held: Held[Arrival | StockArrival] = Held(self._portal, arrival, arrival.give_back)
        with held:
            if arrival.size <= INLINE_COPY:
                value = arrival.restore()
            else:
                with trio.CancelScope(shield=True):  # as any copy out of the pool
                    value = await trio.to_thread.run_sync(arrival.restore)
        return _Copied(held, value)


@asynccontextmanager
async def open_connector(
    config: ConnectorConfig | Mapping[str, object], *, payload_types: Iterable[type] = ()
) -> AsyncIterator[AsyncioConnector]:
    """Open a connector for the length of an ``async with`` block. See `trio_mori.open_connector`.

    Opening and closing each take a thread of asyncio's for as long as they last.
    """
    # Cancelled meanwhile, it is dropped when it is open, which closes it.
    connector = await asyncio.to_thread(blocking.open_connector, config, payload_types=payload_types)
    try:
        yield AsyncioConnector(connector)
    except BaseException:
        connector.break_off()
        raise
    finally:
        connector._portal.stop()  # first, for calls of other threads may hold all that asyncio has
        # Cancelled meanwhile, it goes on to close, and is not waited for.
        await asyncio.shield(asyncio.to_thread(connector.__exit__, *sys.exc_info()))
