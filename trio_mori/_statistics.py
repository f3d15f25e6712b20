"""What a connector tells about a put and about itself."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs

from . import _stock_payload
from ._config import Endpoint
from ._pool import PoolStatistics
from ._quarantine import Quarantined
from ._traffic import EdgeTraffic


@attrs.frozen(eq=False)
class Receipt:
    """What `put` tells: the payload is published, and the source may be overwritten.

    Attributes:
        size: Bytes that it takes in the pool.
        is_raw: Whether it is one tensor or bytes; anything else is a structure.
        endpoint: Where its sender listens.
    """

    size: int
    is_raw: bool
    _header: bytes = attrs.field(repr=False)
    endpoint: Endpoint = attrs.field(repr=lambda endpoint: endpoint.address)

    @property
    def metadata(self) -> dict[str, Any]:
        """What vllm-omni passes from put to get: ``source_host``, ``source_port``, ``data_size``, ``is_fast_path``.

        ``data_size`` is the exact length of what a stock receiver would be given.

        Raises:
            UnsupportedPayload: the vllm-omni dialect cannot carry this structure; native receivers get it.
        """
        return {
            "source_host": self.endpoint.host,
            "source_port": self.endpoint.port,
            "data_size": self.size if self.is_raw else _stock_payload.stock_size(self._header),
            "is_fast_path": self.is_raw,
        }


class SenderStanding(Enum):
    """How a receiver stands with a sender."""

    IDLE = "idle"  # nothing was asked of it yet, so that it is not dialled
    DIALLING = "dialling"  # it is not there, or has not answered
    CONNECTED = "connected"
    REFUSED = "refused"  # it is there, and cannot be used: the log says why, and so does each get


@attrs.frozen
class KnownSender:
    """A sender that a receiver dials, or would.

    Attributes:
        address: Where.
        standing: ``idle``, ``dialling``, ``connected`` or ``refused``.
        seconds: While it is dialled: for how long. Otherwise 0.
        waiting: Gets and interests that wait for it.
    """

    address: str
    standing: str
    seconds: float
    waiting: int


@attrs.frozen
class ConnectorStatistics:
    """A connector at one moment. Sizes in bytes.

    Attributes:
        pid: The process.
        engine: What moves the bytes; with several, in order of preference.
        ways: By which of them each peer is reached, and if it is not the first, why.
        pool: Room.
        held: The pool by state: free, staged, published, claimed, pinned, delivered, dying, posted, arrived, leased,
            quarantined. They sum to the pool.
        put, got: By edge, ``{from}_{to}``.
        events: Everything else that was counted.
        in_flight: Writes that the engine has not ended.
        parked: Gets and interests that wait.
        waiting_puts: Puts that wait for room in the pool.
        peers: Established receivers and senders.
        quarantine: What is out of use because somebody may still touch it, the oldest first.
        senders: Where this connector gets from, and whether anybody is there.
    """

    pid: int
    engine: str
    ways: Mapping[str, str]
    pool: PoolStatistics
    held: Mapping[str, int]
    put: Mapping[str, EdgeTraffic]
    got: Mapping[str, EdgeTraffic]
    events: Mapping[str, int]
    in_flight: int
    parked: int
    peers: int
    quarantine: tuple[Quarantined, ...] = ()
    senders: tuple[KnownSender, ...] = ()
    waiting_puts: int = 0
