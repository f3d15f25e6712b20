"""What a connector tells of itself: figures of all its parts, put together when somebody asks."""

from __future__ import annotations

import os
from typing import Any

import attrs

from ._config import Endpoint
from ._offers import names_of
from ._pool import Pool
from ._port import Port
from ._receiver import Receiver
from ._reception import NativePeer
from ._sender import Sender
from ._statistics import ConnectorStatistics, KnownSender, SenderStanding
from .abc import Engine

# Pieces in quarantine that `health` names, the oldest; all of them are in `statistics`.
NAMED = 16


class Figures:
    """Looks at the parts of one connector, and changes nothing."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine: Engine,
        pool: Pool,
        sender: Sender | None,
        receiver: Receiver,
        port: Port | None,
    ) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._pool = pool
        self._sender = sender
        self._receiver = receiver
        self._port = port

    def statistics(self, now: float, source: Endpoint | None) -> ConnectorStatistics:
        """Counts and sizes at a moment.

        Args:
            source: Where it gets from, if that is known.
        """
        receiver, sender = self._receiver, self._sender
        held = dict(receiver.book.held())
        events = {f"in_{k}": v for k, v in attrs.asdict(receiver.book.counters).items()}
        events |= {"malformed_in": receiver.malformed, "timeouts": receiver.timeouts}
        if sender is not None:
            held |= sender.book.shelf.held()
            events |= {f"out_{k}": v for k, v in attrs.asdict(sender.book.counters).items()}
            events["refused_receivers"] = sender.reception.refused
            events["malformed_out"] = sender.reception.malformed + sender.reception.stock.malformed
        pool = self._pool.statistics()
        held["free"] = pool.free
        events["refused_senders"] = receiver.refusals
        events["refused_peers"] = 0 if self._port is None else self._port.refused
        events["cut_off_peers"] = receiver.cut_off + (0 if self._port is None else self._port.cut_off)
        return ConnectorStatistics(
            pid=os.getpid(),
            engine=", ".join(names_of(self._engine)),
            ways=self._ways(),
            pool=pool,
            held=held,
            put={} if sender is None else {k: attrs.evolve(v) for k, v in sender.traffic.edges.items()},
            got={k: attrs.evolve(v) for k, v in receiver.traffic.edges.items()},
            events=events,
            in_flight=0 if sender is None else len(sender.book.tickets),
            parked=sum(len(c.interests) for c in receiver.book.channels),
            peers=(0 if sender is None else sum(s.connected for s in sender.book.sessions.values()))
            + sum(u.established for u in receiver.upstreams.values()),
            quarantine=receiver.quarantine(now) + (() if sender is None else sender.quarantine(now)),
            senders=self._senders(now, source),
            waiting_puts=0 if sender is None else len(sender.room),
        )

    def health(self, now: float, source: Endpoint | None, *, is_closed: bool, errors: int) -> dict[str, Any]:
        """The same in the words of the stock connectors, see `Connector.health`."""
        found = self.statistics(now, source)
        status = "unhealthy" if is_closed else "degraded" if found.quarantine else "healthy"
        puts = sum(t.payloads for t in found.put.values())
        gets = sum(t.payloads for t in found.got.values())
        return {
            "status": status,
            "host": self._endpoint.host,
            "pool_device": self._pool.region.device,
            "pool_size": self._pool.extents.size,
            "engine_key": self._engine.key,
            "puts": puts,
            "gets": gets,
            "bytes_transferred": sum(t.bytes for t in (*found.put.values(), *found.got.values())),
            "errors": errors + found.events.get("out_failed_writes", 0),
            "timeouts": found.events["timeouts"] + found.events.get("out_overdue_writes", 0),
            "pool": dict(found.held),
            "in_flight": found.in_flight,
            "quarantined": found.held.get("quarantined", 0),
            "quarantine": [attrs.asdict(each) for each in found.quarantine[:NAMED]],
            "parked": found.parked,
            "waiting_puts": found.waiting_puts,
            "peers": found.peers,
            "port": None if self._port is None else self._port.standing.value,
            "senders": [attrs.asdict(each) for each in found.senders],
        }

    def _senders(self, now: float, source: Endpoint | None) -> tuple[KnownSender, ...]:
        upstreams = self._receiver.upstreams
        found = [upstream.tell(now) for upstream in upstreams.values()]
        if source is not None and source not in upstreams:
            found.append(KnownSender(source.address, SenderStanding.IDLE.value, 0.0, 0))
        return tuple(found)

    def _ways(self) -> dict[str, str]:
        ways = {f"from {u.endpoint.address}": u.way for u in self._receiver.upstreams.values() if u.way}
        for session in () if self._sender is None else self._sender.book.sessions.values():
            if isinstance(session.handle, NativePeer):
                way = session.handle.way
                ways[f"to {session.token.hex()[:8]}"] = f"{way.name} ({way.reason})" if way.reason else way.name
        return ways
