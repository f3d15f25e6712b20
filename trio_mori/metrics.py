"""Connectors as Prometheus sees them. Needs prometheus-client, the extra ``metrics``.

```python
collector = trio_mori.metrics.ConnectorCollector()
prometheus_client.REGISTRY.register(collector)
prometheus_client.start_http_server(9400)

async with trio_mori.open_connector(config) as connector:
    with collector.watching(connector, "thinker"):
        ...
```

Nothing is counted for it: when Prometheus asks, it is told what `statistics` says. docs/grafana.json shows all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import trio

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("trio_mori.metrics needs prometheus-client: pip install prometheus-client") from error

from ._connector import Connector
from ._errors import ConnectorClosed, Misuse
from ._portal_calls import ask
from ._statistics import ConnectorStatistics, SenderStanding
from .blocking import BlockingConnector

__all__ = ["ConnectorCollector"]

# Seconds that an answer may take; Prometheus waits for 10 s by default, and there may be several connectors.
TIMEOUT = 1.0


@attrs.frozen(eq=False)
class _Watched:
    """A connector, and the way into the loop that it lives in."""

    statistics: Callable[[], ConnectorStatistics]
    post: Callable[[Callable[[], object]], object]
    is_here: Callable[[], bool]

    def ask(self) -> ConnectorStatistics | None:
        """What it says of itself; None if it does not in time, or any more."""
        try:
            return self.statistics() if self.is_here() else ask(self.post, self.statistics, TIMEOUT)
        except (ConnectorClosed, Misuse, trio.RunFinishedError):
            return None


class ConnectorCollector(Collector):
    """Tells of all connectors that are being watched. Registered by its user, once.

    A scrape may come in any thread. A connector whose loop does not answer within a second, or is over, is
    ``trio_mori_up 0``; it delays nobody else.
    """

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    @contextmanager
    def watching(self, connector: Connector | BlockingConnector, name: str) -> Iterator[None]:
        """Tell of a connector for the length of a ``with`` block.

        Args:
            name: The value of the label ``connector``; unique within the collector.

        Raises:
            ValueError: another one has this name.
            Misuse: a `Connector` outside of the trio run that opened it.
        """
        if name in self._watched:
            raise ValueError(f"a connector named {name!r} is watched already; give each a name of its own")
        self._watched[name] = _watch(connector)
        try:
            yield
        finally:
            del self._watched[name]

    def collect(self) -> Iterator[Metric]:
        """The metrics, as prometheus_client asks for them."""
        answers = {name: watched.ask() for name, watched in self._watched.copy().items()}
        families = _Families()
        for name, now in answers.items():
            families.up.add_metric([name], float(now is not None))
            if now is not None:
                families.add(name, now)
        return iter(families.all())


def _watch(connector: Connector | BlockingConnector) -> _Watched:
    if isinstance(connector, BlockingConnector):
        portal = connector._portal
        return _Watched(connector._connector.statistics, portal.post, lambda: portal.in_portal)
    if not trio.lowlevel.in_trio_run():
        raise Misuse("a connector was to be watched from outside of its trio run; call watching where it was opened")
    token = trio.lowlevel.current_trio_token()

    def is_here() -> bool:
        return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is token

    return _Watched(connector.statistics, token.run_sync_soon, is_here)


class _Families:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"trio_mori_{name}", text, labels=["connector", *labels])

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"trio_mori_{name}", text, labels=["connector", *labels])

        self.up = gauge("up", "Whether the connector answered.")
        self.degraded = gauge("degraded", "Whether memory is in quarantine or a write is stuck.")
        self.pool = gauge("pool_bytes", "The pool by what it is held for; sums to its size.", "state")
        self.oldest = gauge("quarantine_seconds", "How long the oldest piece in quarantine has been there.")
        self.quarantine = gauge("quarantine_bytes", "Memory in quarantine.", "peer", "reason")
        self.in_flight = gauge("writes_in_flight", "Writes that the engine has not ended.")
        self.parked = gauge("waiting_gets", "Gets that wait.")
        self.waiting_puts = gauge("waiting_puts", "Puts that wait for room in the pool.")
        self.senders = gauge("sender_connected", "Whether a sender that this connector gets from is there.", "peer")
        self.peers = gauge("peers", "Established receivers and senders.")
        self.payloads = counter("payloads", "Payloads moved.", "direction", "edge")
        self.bytes = counter("bytes", "Bytes moved.", "direction", "edge")
        self.events = counter(
            "events", "What else was counted; all of them are in docs/operations.md, Metrics.", "event"
        )

    def all(self) -> list[Metric]:
        return list(vars(self).values())

    def add(self, name: str, now: ConnectorStatistics) -> None:
        self.degraded.add_metric([name], float(bool(now.quarantine)))
        for state, size in now.held.items():
            self.pool.add_metric([name, state], size)
        self.oldest.add_metric([name], max((each.seconds for each in now.quarantine), default=0.0))
        sizes: dict[tuple[str, str], int] = {}
        for each in now.quarantine:
            sizes[each.peer, each.reason] = sizes.get((each.peer, each.reason), 0) + each.size
        for (peer, reason), size in sizes.items():
            self.quarantine.add_metric([name, peer, reason], size)
        self.in_flight.add_metric([name], now.in_flight)
        self.parked.add_metric([name], now.parked)
        self.waiting_puts.add_metric([name], now.waiting_puts)
        for sender in now.senders:
            if sender.standing == SenderStanding.IDLE.value:
                continue  # it is not dialled, and missed by nobody
            self.senders.add_metric([name, sender.address], float(sender.standing == SenderStanding.CONNECTED.value))
        self.peers.add_metric([name], now.peers)
        for direction, edges in (("put", now.put), ("got", now.got)):
            for edge, traffic in edges.items():
                self.payloads.add_metric([name, direction, edge], traffic.payloads)
                self.bytes.add_metric([name, direction, edge], traffic.bytes)
        for event, count in now.events.items():
            self.events.add_metric([name, event], count)
