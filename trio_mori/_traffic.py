"""What went over each edge, counted where it happens."""

from __future__ import annotations

import attrs


@attrs.define
class EdgeTraffic:
    """One edge, ``{from}_{to}``.

    Attributes:
        payloads: How many were put, or got.
        bytes: Their bytes in the pool.
    """

    payloads: int = 0
    bytes: int = 0


@attrs.define
class Traffic:
    """All edges of one direction."""

    edges: dict[str, EdgeTraffic] = attrs.field(factory=dict)

    def count(self, edge: str, size: int) -> None:
        """One more payload of that many bytes."""
        traffic = self.edges.get(edge)
        if traffic is None:
            traffic = self.edges[edge] = EdgeTraffic()
        traffic.payloads += 1
        traffic.bytes += size

    @property
    def payloads(self) -> int:
        """On all edges."""
        return sum(t.payloads for t in self.edges.values())

    @property
    def bytes(self) -> int:
        """On all edges."""
        return sum(t.bytes for t in self.edges.values())
