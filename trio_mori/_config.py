"""What one connector is told: every key, its default, what it may be, and why.

Keys that vllm-omni's Mori connector knows keep their names and defaults; they are the `extra` of a connector in a
deploy file. The table in docs/configuration.md is made of what stands here.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from ._allowed import AbsolutePath, Choice, Device, Host, Integer, Number, OrNull, Text, near, show
from ._allowed import checked as _key
from ._endpoint import (
    AUTO,
    LOOPBACK,
    WILDCARDS,
    Endpoint,
    Purpose,
    ResolvedHost,
    dialled_host,
    format_endpoint,
    port_for,
    resolve_host,
)
from ._errors import ConfigError

__all__ = [
    "ConnectorConfig",
    "Endpoint",
    "Purpose",
    "ResolvedHost",
    "format_endpoint",
    "port_for",
    "resolve_host",
]

_logger = logging.getLogger("trio_mori.config")

# Regions and extents begin at multiples of this, the page size that the stock allocator assumes too.
PAGE = 4096
# The stock connector's step: it counts "100 MB" in binary megabytes.
_HUNDRED_MB = 100 * 1024 * 1024
# What an int in Mori's and the operating system's interfaces holds.
_INT = 2**31 - 1

# Keys of `extra` that are read by others: two by trio_mori_vllm_omni, and vllm-omni's own of Qwen3-Omni's deploy file.
_OF_OTHERS = ("chunk_adapter", "replace_stock", "initial_codec_chunk_frames")

# What may be given for a host.
HOSTS = Host((AUTO, *WILDCARDS))
_SECONDS = Number("a finite number of seconds", above=0)
_COUNT = Integer(1, _INT)
_BACKENDS = Choice(
    ("shm", "rdma", "xgmi", "cuda_ipc", "auto"),
    {
        "memory": "an in-process engine is handed to open_connector, not configured",
        "nixl": "nixl is not part of this release; rdma goes across hosts, too",
    },
)


def _read_only(mapping: Mapping[str, object]) -> Mapping[str, object]:
    return MappingProxyType(dict(mapping))


@attrs.frozen(kw_only=True)
class ConnectorConfig:
    """The configuration of one connector, checked when it is made.

    Raises:
        ConfigError: a value, or a combination of values, is not allowed.
    """

    # --- control plane ---
    role: str = _key(
        Choice(("sender", "receiver", "both")),
        "sender",
        "A sender listens and puts, a receiver dials and gets, a middle stage does both.",
    )
    host: str = _key(
        HOSTS,
        LOOPBACK,
        "Where a sender listens. `auto` is loopback and the address that this machine uses towards the outside.",
    )
    zmq_port: int = _key(
        Integer(0, 65535, note=" (0: any free one, published in metadata and get_connection_info)"),
        50051,
        "Where a sender listens. In a deploy file it is the base from which each stage's port follows.",
    )
    advertise_host: str | None = _key(
        OrNull(Host(), "what host was found to be", word=AUTO),
        None,
        "The address that peers are told, where it differs from the one listened on.",
    )
    sender_host: str | None = _key(
        OrNull(HOSTS, "until update_sender_info"), None, "Where a receiver dials. `auto` is this machine's loopback."
    )
    sender_zmq_port: int | None = _key(
        OrNull(Integer(1, 65535), "until update_sender_info"), None, "Where a receiver dials."
    )

    same_host_link: str = _key(
        Choice(("auto", "off")),
        "auto",
        "Go over to a unix socket with peers of the same host and user. The ZMQ port stays the way to find each other.",
    )

    # --- who may connect ---
    curve_secret_key: str = _key(
        AbsolutePath("the absolute path of a file that only its owner can read"),
        "",
        "This side's secret key (trio-mori keygen). With one, peers without a key are refused; empty: all may connect.",
    )
    curve_sender_key: str = _key(
        AbsolutePath("the absolute path of a .public file"),
        "",
        "The key that the senders which a receiver dials must have. Empty: that of this side's own pair.",
    )
    curve_allowed_keys: str = _key(
        AbsolutePath("the absolute path of a file of public keys"),
        "",
        "Who may connect to a sender, beside those with its own pair.",
    )

    # --- data plane ---
    backend_type: str = _key(
        _BACKENDS, "shm", "The engine that moves the bytes. `auto` takes the first that both peers can use."
    )
    fallback: str = _key(
        Choice(("none", "host")),
        "none",
        "cuda_ipc, xgmi: how to reach a peer that the GPU has no access to. `host` takes the pool's size there, too.",
    )
    share_directory: str = _key(
        AbsolutePath("the absolute path of a directory of mode 700"),
        "",
        "shm: where peers of other pid namespaces (containers) pass their pools on; mount one directory into all.",
    )
    device_name: str = _key(
        Text("names of RDMA devices, separated by commas"),
        "",
        "RDMA devices to use. Empty: those in $MORI_RDMA_DEVICES, or all. Ignored with a warning for xgmi.",
    )
    memory_pool_size: int = _key(
        Integer(PAGE, 2**48, note=f" bytes, rounded up to {PAGE}", multiple=PAGE, in_bytes=True),
        1024**3,
        "Bytes of the one block of memory through which everything passes.",
    )
    memory_pool_device: str = _key(Device(), "cpu", "Where that memory is. `cpu` is pinned where CUDA or ROCm exists.")
    payload_device: str = _key(
        Device(also=("pool",)),
        "pool",
        "Where the tensors that get returns are: on the pool's device, or copied to another. Leases stay in the pool.",
    )
    qp_per_transfer: int = _key(_COUNT, 1, "Mori, rdma: queue pairs that one transfer uses.")
    post_batch_size: int = _key(Integer(1, _INT, also=(-1,)), -1, "Mori, rdma: requests per post; -1 lets Mori choose.")
    num_worker_threads: int = _key(_COUNT, 1, "Mori, rdma: threads that post transfers.")
    poll_cq_mode: str = _key(
        Choice(("polling", "event")),
        "polling",
        "Mori, rdma: how it waits for NICs; polling uses a core.",
    )
    chunk_bytes: int = _key(Integer(0, _INT), 0, "Mori, rdma: cut transfers into chunks of so many bytes; 0: do not.")
    num_nics_per_transfer: int = _key(_COUNT, 1, "Mori, rdma: NICs that one transfer is spread over.")
    xgmi_num_streams: int = _key(Integer(1, 4096), 64, "Mori, xgmi: streams that copies are spread over.")
    xgmi_num_events: int = _key(Integer(1, 65536), 64, "Mori, xgmi: events that tell when copies have ended.")

    # --- place in the deployment ---
    stage_id: int = _key(Integer(0, _INT, also=(-1,)), -1, "The stage that this connector serves; -1: not told.")
    from_stage: int | None = _key(OrNull(Integer(0, _INT), "not told"), None, "The stage that the edge comes from.")
    to_stage: int | None = _key(OrNull(Integer(0, _INT), "not told"), None, "The stage that the edge leads to.")
    replica: int = _key(Integer(0, _INT), 0, "Which copy of the stage this is; part of its port.")
    rank: int = _key(Integer(0, _INT), 0, "The tensor-parallel rank within the stage; part of its port.")
    codec_chunk_frames: int = _key(
        _COUNT, 25, "For stage code: codec frames in a chunk. The default is Qwen3-Omni's; others read `extra`."
    )
    codec_left_context_frames: int = _key(
        Integer(0, _INT), 25, "For stage code: frames repeated before a chunk. The default is Qwen3-Omni's."
    )

    # --- times ---
    buffer_ttl_seconds: float | None = _key(
        OrNull(_SECONDS, "no limit", word="never"),
        300.0,
        "A payload that nobody fetched for so long expires. The default is the stock connector's.",
    )
    transfer_timeout_base: float = _key(
        _SECONDS, 30.0, "A transfer that takes longer is given up: the stock connector's limit, for any size."
    )
    transfer_timeout_per_100mb: float = _key(
        Number("a finite number of seconds", at_least=0),
        5.0,
        "Added for each full 100 MB (of 1024 * 1024 bytes): 20 MB/s, a slow disk's pace. Stock, too.",
    )
    peer_timeout: float = _key(
        _SECONDS, 30.0, "How long a lost peer may take to come back: a stage restarts in less, a dead one is noticed."
    )
    heartbeat_interval: float = _key(
        _SECONDS,
        5.0,
        "How often an established session says that it lives: six times within peer_timeout, three if nothing happens.",
    )
    acknowledge_timeout: float = _key(
        _SECONDS,
        30.0,
        "A delivered payload not acknowledged for so long goes to the next fetch. Six heartbeats say it again before.",
    )
    close_grace: float = _key(
        Number("a finite number of seconds", at_least=0),
        5.0,
        "How long closing waits for writes in flight; half of the ten seconds that supervisors allow before SIGKILL.",
    )
    stock_pull_limit: float = _key(
        Number("a finite number of seconds", above=0, below=30),
        20.0,
        "An older pull of a stock receiver is refused: it frees its destination at 30, and a write may take a while.",
    )
    stock_keep: float = _key(
        _SECONDS,
        5.0,
        "How long a payload outlives its delivery to a stock receiver, which never acknowledges: its query time-out.",
    )
    busy_poll_us: int = _key(
        Integer(0, 100_000, note=" microseconds"),
        0,
        "A get that waits keeps its core awake for so long, and returns earlier for that CPU time. 0: never.",
    )

    # --- limits ---
    prepost_fraction: float = _key(
        Number("a number", above=0, below=1),
        0.25,
        "Share of the pool that may wait as destinations of fetches ahead of their data; three quarters stay for data.",
    )
    guaranteed_fraction: float = _key(
        Number("a number", above=0, at_most=0.5),
        0.25,
        "Share of the pool kept for each direction in role both. Up to it, stages that feed each other never block.",
    )
    quarantine_fraction: float = _key(
        Number("a number", above=0, below=1),
        0.5,
        "Share of the pool that lost peers may hold back before gets are refused; half still does useful work.",
    )
    max_fetches_per_peer: int = _key(
        Integer(1, 32768),
        4096,
        "Fetches that one peer may have open: 256 requests with 16 chunks each. All of 32768 fit into one heartbeat.",
    )
    max_peers: int = _key(
        Integer(1, 65536),
        1024,
        "Sessions that a sender keeps: 16 replicas with 64 ranks. A bound on what strangers can make it remember.",
    )

    extra: Mapping[str, object] = attrs.field(factory=dict, converter=_read_only, eq=False, repr=False)
    """The whole mapping that `from_dict` was given, read-only, for stage code that reads keys of its own."""

    def __new__(cls, **values: object) -> ConnectorConfig:
        """As any class, but for keys that it does not know: a TypeError would suggest nothing."""
        for key in values:
            if key not in KEYS and key != "extra":
                remedy = near(key, KEYS) or "keys of others go into a mapping, for from_dict"
                raise ConfigError(f"{key}: it is no key of a connector; {remedy}", key=key, value=values[key])
        return super().__new__(cls)

    def __attrs_post_init__(self) -> None:
        device, backend = self.memory_pool_device, self.backend_type
        if backend in ("xgmi", "cuda_ipc") and device == "cpu":
            raise _refused(
                "memory_pool_device", device, f"with backend_type {backend}; give cuda or cuda:N, or use shm"
            )
        if backend == "shm" and device != "cpu":
            raise _refused("memory_pool_device", device, "with backend_type shm; give cpu, or use xgmi or cuda_ipc")
        others = {"curve_sender_key": self.curve_sender_key, "curve_allowed_keys": self.curve_allowed_keys}
        for key, path in others.items():
            if path and not self.curve_secret_key:
                raise _refused(key, path, "without curve_secret_key; give this side a pair of its own")
        if self.role == "both" and self.memory_pool_size < 2 * PAGE:
            why = f"with role both; give at least {2 * PAGE}: each direction keeps a page"
            raise _refused("memory_pool_size", self.memory_pool_size, why)
        if 2 * self.heartbeat_interval > self.peer_timeout:
            why = f"with peer_timeout {self.peer_timeout:g}; give at most half of it: one late answer is no loss"
            raise _refused("heartbeat_interval", self.heartbeat_interval, why)
        if self.fallback == "host" and backend == "rdma":
            why = f"with backend_type {backend}, which has no other way; drop it, or set backend_type auto"
            raise _refused("fallback", "host", why)
        if self.fallback == "host" and backend == "shm":
            warn_once("fallback", "fallback: 'host' is ignored; shm moves all bytes by host memory, drop it")
        if backend == "xgmi" and self.device_name:
            warn_once("device_name", f"device_name: {show(self.device_name)} is ignored; xgmi uses no RDMA device")

    @classmethod
    def from_dict(
        cls,
        mapping: Mapping[str, object],
        *,
        source: str | None = None,
        where: str | None = None,
        line_of: Callable[[str], int] | None = None,
    ) -> ConnectorConfig:
        """Check the `extra` of a connector. Keys that are not ours stay in `extra`; each is warned of once.

        Args:
            source: The file that it stands in, for messages.
            where: The path to it within that file, for messages.
            line_of: The line of a key there, likewise.

        Raises:
            ConfigError: names key and value, and what is allowed.
        """
        try:
            if not isinstance(mapping, Mapping):
                raise ConfigError(f"{show(mapping)} is not allowed; give a mapping of keys", key="extra", value=mapping)
            for key in mapping:
                if not isinstance(key, str):
                    raise ConfigError(
                        f"{show(key)} is no key; keys are strings", key=str(show(key)), value=mapping[key]
                    )
                if key not in KEYS and key not in _OF_OTHERS:
                    remedy = near(key, (*KEYS, *_OF_OTHERS))
                    text = f"{show(key)} is no key of a connector; it stays in extra{remedy and ': ' + remedy}"
                    place = placed("", source, line_of and line_of(key), where)
                    if place:
                        warn_once(place + key, place + text)
                        _warned.add(key)  # the same one again, where its file is not at hand
                    warn_once(key, text)
            known: dict[str, Any] = {key: value for key, value in mapping.items() if key in KEYS}
            return cls(**known, extra=mapping)
        except ConfigError as error:
            raise located(error, source, line_of and line_of(error.key), where) from None

    @property
    def ttl(self) -> float:
        """`buffer_ttl_seconds` to calculate with: infinite for never."""
        return math.inf if self.buffer_ttl_seconds is None else self.buffer_ttl_seconds

    @property
    def sender_endpoint(self) -> Endpoint | None:
        """Where a receiver dials; None until both halves are known."""
        if self.sender_host is None or self.sender_zmq_port is None:
            return None
        return Endpoint(dialled_host(self.sender_host), self.sender_zmq_port)

    @property
    def rdma_devices(self) -> str:
        """The RDMA devices to use, from `device_name` or else the environment; empty for all, and for xgmi."""
        if self.backend_type == "xgmi":
            return ""
        return self.device_name or os.environ.get("MORI_RDMA_DEVICES", "")

    @property
    def digest(self) -> str:
        """Equal for two instances made of one configuration, in whatever process. Nothing detected is in it."""
        return hashlib.sha256(json.dumps(_values(self), sort_keys=True).encode()).hexdigest()[:16]

    def transfer_timeout(self, size: int) -> float:
        """Seconds that a transfer of so many bytes may take."""
        return self.transfer_timeout_base + (size // _HUNDRED_MB) * self.transfer_timeout_per_100mb

    def __reduce__(self) -> tuple[object, ...]:
        # A read-only mapping cannot be pickled, and configurations go to stage processes.
        return _rebuild, (_values(self), dict(self.extra))


KEYS = tuple(field.name for field in attrs.fields(ConnectorConfig) if "allowed" in field.metadata)


def located(error: ConfigError, source: str | None, line: int | None, where: str | None) -> ConfigError:
    """The same error, saying where the value stands."""
    return ConfigError(placed(str(error), source, line, where), key=error.key, value=error.value, source=source)


def placed(text: str, source: str | None, line: int | None, where: str | None) -> str:
    """A text that says where in a file what it is about stands."""
    place = ", ".join(part for part in (source, line and f"line {line}") if part)
    path = f"{where}: " if where else ""
    return f"{place}: {path}{text}" if place else f"{path}{text}"


def _refused(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{key}: {show(value)} is not allowed {why}", key=key, value=value)


def _values(config: ConnectorConfig) -> dict[str, Any]:
    return attrs.asdict(config, recurse=False, filter=lambda field, value: field.name in KEYS)


def _rebuild(values: dict[str, Any], extra: dict[str, object]) -> ConnectorConfig:
    return ConnectorConfig(**values, extra=extra)


# What was warned of already in this process; a stage makes its configuration several times.
_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Log a warning unless it was logged in this process."""
    if key not in _warned:
        _warned.add(key)
        _logger.warning("%s", message)


def warn_if_exposed(config: ConnectorConfig, hosts: ResolvedHost) -> None:
    """Say once if a word for `host` lets other machines connect, and no key is asked for."""
    outside = [host for host in hosts.bind if not _is_loopback(host)]
    if outside and config.host in (AUTO, *WILDCARDS):
        warn_once(
            "host",
            f"host: {show(config.host)} listens on {', '.join(outside)}, where other machines can connect and are not "
            "asked for a key; set curve_secret_key (docs/security.md), or host: 127.0.0.1 for stages of one machine",
        )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
