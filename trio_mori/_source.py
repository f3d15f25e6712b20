"""Where a get finds its sender."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import attrs

from ._allowed import Integer, NotAllowed
from ._config import HOSTS, ConnectorConfig, Endpoint
from ._endpoint import dialled_host
from ._errors import ConfigError, NoEndpoint, WrongRole
from ._statistics import Receipt


class Source:
    """The sender that metadata names, or else the one that its connector was told of.

    Attributes:
        endpoint: Where the latter is, if that is known.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        self.endpoint = config.sender_endpoint
        self._config = config

    def update(self, host: str, port: int) -> None:
        """It is there from now on.

        Raises:
            ConfigError: not an address and a port from 1 to 65535.
        """
        self.endpoint = attrs.evolve(self._config, sender_host=host, sender_zmq_port=port).sender_endpoint

    def find(self, key: str, metadata: Mapping[str, object] | Receipt | None) -> tuple[Endpoint, Mapping[str, object]]:
        """Where to get a key from, and what else is known of the payload.

        Raises:
            ConfigError: the metadata names nobody that can be there.
            WrongRole: a sender cannot get.
            NoEndpoint: it is not known.
        """
        known: Mapping[str, object] = {}
        if isinstance(metadata, Receipt):  # of a native sender, which says the rest itself
            known = {"source_host": metadata.endpoint.host, "source_port": metadata.endpoint.port}
        elif metadata is not None:
            known = metadata
        host, port = known.get("source_host"), known.get("source_port")
        if host is not None or port is not None:
            endpoint = _named(host, port) if isinstance(host, str) and type(port) is int else None
            if endpoint is None:
                raise ConfigError(
                    f"get of {key!r}: metadata names the sender {host!r}:{port!r}; source_host has to be an address "
                    "and source_port a number from 1 to 65535",
                    key="source_port",
                    value=port,
                )
            return endpoint, known
        if self.endpoint is not None:
            return self.endpoint, known
        if self._config.role == "sender":
            raise WrongRole(
                f"get of {key!r} on a connector of role sender; a stage that receives has role receiver or both"
            )
        raise NoEndpoint(
            f"get of {key!r}: it is not known where the sender listens; set sender_host and sender_zmq_port, call "
            "update_sender_info(host, port), or pass metadata with source_host and source_port"
        )


@lru_cache(maxsize=256)
def _named(host: str, port: int) -> Endpoint | None:
    """Where metadata says that a sender is; None if nobody can be there."""
    try:
        return Endpoint(dialled_host(HOSTS(host)), Integer(1, 65535)(port))
    except NotAllowed:
        return None
