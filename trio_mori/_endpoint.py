"""Addresses of the control plane: what to listen on, what to publish, and which port belongs to whom."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

import attrs

from ._allowed import Check, Choice, Integer, NotAllowed, show
from ._errors import ConfigError

Purpose = Literal["request_forwarding", "kv_transfer", "orchestrator"]

LOOPBACK = "127.0.0.1"
AUTO = "auto"
WILDCARDS = ("*", "0.0.0.0", "::")

# The arithmetic of vllm-omni 0.30: both ends of an edge compute the port, and one of them may be its own code.
_OFFSETS: dict[Purpose, int] = {"request_forwarding": 0, "kv_transfer": 100, "orchestrator": 200}
_REPLICA_STRIDE = 1024
_RANK_STRIDE = 16

# Distinct (purpose, replica, rank, stage) get distinct ports as long as a deployment keeps to ranks 0-5 (all offsets
# within 100), or to stages 0-3 (the offsets are 0, 4 and 8 modulo 16) and ranks 0-50 (below the next replica's 1024).
# Deployments of at most eight stages may mix both. A test counts them all.
_RANKS_OF_ALL_STAGES = 100 // _RANK_STRIDE
_STAGES_OF_ALL_RANKS = 100 % _RANK_STRIDE
_RANKS = (_REPLICA_STRIDE - _OFFSETS["orchestrator"]) // _RANK_STRIDE

# Addresses that are reserved for documentation: connecting a UDP socket to one sends nothing, but makes the kernel
# choose the source address that it would use towards the outside.
_OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@attrs.frozen
class Endpoint:
    """Where a peer listens."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """As a link dials it: ``tcp://127.0.0.1:50051``."""
        return format_endpoint(self.host, self.port)


@attrs.frozen
class ResolvedHost:
    """What `host` means on this machine.

    Attributes:
        bind: The addresses to listen on, all with the same port.
        advertise: The one that peers are told.
    """

    bind: tuple[str, ...]
    advertise: str


def format_endpoint(host: str, port: int) -> str:
    """``tcp://host:port``, with an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolve_host(host: str, *, advertise: str | None = None) -> ResolvedHost:
    """Find the addresses to listen on for a configured `host`, and the one to publish.

    "auto" is loopback and the address that this machine uses towards the outside; a name is looked up, which may block
    for as long as the resolver does.

    Args:
        advertise: What to publish instead of what was found (`advertise_host`).

    Raises:
        ConfigError: the name has no address.
    """
    if host == AUTO:
        detected = _detected_address()
        return ResolvedHost(tuple(dict.fromkeys((LOOPBACK, detected))), advertise or detected)
    if host in WILDCARDS:
        return ResolvedHost(("0.0.0.0" if host == "*" else host,), advertise or _detected_address())
    return ResolvedHost((_literal(host),), advertise or host)


def dialled_host(host: str) -> str:
    """The address to dial for a sender's configured `host`: one that says nothing in particular means this machine."""
    if host == "::":
        return "::1"
    return LOOPBACK if host == AUTO or host in WILDCARDS else host


def port_for(base: int, *, purpose: Purpose = "request_forwarding", stage: int, rank: int = 0, replica: int = 0) -> int:
    """The port on which a stage's sender listens. Sender and receiver both compute it from the same base.

    Raises:
        ConfigError: a part is out of range, the port would be above 65535, or another stage or purpose of the same
            deployment would get the same one. Names all parts.
    """
    parts = f"zmq_port {show(base)}, purpose {show(purpose)}, stage {show(stage)}, rank {show(rank)}, " + (
        f"replica {show(replica)}"
    )
    _part("zmq_port", base, Integer(1, 65535), parts)
    _part("purpose", purpose, Choice(tuple(_OFFSETS)), parts)
    _part("stage_id", stage, Integer(0, _RANK_STRIDE - 1), parts)
    ranks = _RANKS if stage < _STAGES_OF_ALL_RANKS else _RANKS_OF_ALL_STAGES
    note = f" for stage {stage}: further ports belong to other stages and purposes"
    _part("rank", rank, Integer(0, ranks - 1, note=note), parts)
    _part("replica", replica, Integer(0, 65535 // _REPLICA_STRIDE), parts)
    port = base + _OFFSETS[purpose] + replica * _REPLICA_STRIDE + rank * _RANK_STRIDE + stage
    if port > 65535:
        raise ConfigError(
            f"{parts}: the port would be {port}, above 65535; give a zmq_port of at most {65535 - (port - base)}",
            key="zmq_port",
            value=base,
        )
    return port


def _part(key: str, value: object, check: Check[object], parts: str) -> None:
    try:
        check(value)
    except NotAllowed:
        raise ConfigError(f"{parts}: {key} has to be {check.allowed}", key=key, value=value) from None


def _detected_address() -> str:
    for family, outside in _OUTSIDE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, 9))
                return str(probe.getsockname()[0])
        except OSError:  # no route, or no such family: this machine is alone
            continue
    return LOOPBACK


def _literal(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return host
    try:
        # A listening ZMQ socket takes addresses only. IPv4 first: a receiver that knows a name dials that first too.
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host: {host!r} has no address on this machine ({error}); give the address of an interface, or auto",
            key="host",
            value=host,
        ) from error
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
