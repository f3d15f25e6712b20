"""What Mori is told when an engine is made."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs

from .._errors import ConfigError
from ._mori_library import IOEngine, Library

# Where Mori reads which NICs to use, and nowhere else.
_DEVICES = "MORI_RDMA_DEVICES"

# Of rdma, what releases before 1.2 do not know; they are told of it only if it is asked for.
_NEWER = ("enable_transfer_chunking", "chunk_bytes", "max_chunks_per_transfer", "num_nics_per_transfer")

# What an int of Mori holds.
_INT = 2**31 - 1

# Mori makes all streams and events of a peer when it is first written to. The most that there may be take it 30 ms
# (emulated); from two billion it never comes back.
MOST_STREAMS = 4096
MOST_EVENTS = 65536

# The environment belongs to the process, and engines may be opened by several trio runs, each in its thread.
_environment = threading.Lock()


@attrs.frozen(kw_only=True)
class XgmiOptions:
    """Of the xgmi backend; the defaults are Mori's.

    Attributes:
        xgmi_num_streams: Streams that the writes to one peer are spread over.
        xgmi_num_events: Events that tell their ends.
    """

    xgmi_num_streams: int = attrs.field(default=64, metadata={"most": MOST_STREAMS})
    xgmi_num_events: int = attrs.field(default=64, metadata={"most": MOST_EVENTS})

    @property
    def host(self) -> str:
        """Where Mori listens: nowhere, but it wants to be told."""
        return "127.0.0.1"

    def explain(self, error: Exception) -> str:
        """What to say when the backend cannot be made."""
        return f"xgmi: Mori cannot use the GPUs: {error}. Does `rocm-smi` see them here? Containers need /dev/kfd"

    def create_backend(self, library: Library, engine: IOEngine) -> None:
        """Give an engine this backend."""
        config = library.XgmiBackendConfig(self.xgmi_num_streams, self.xgmi_num_events)
        engine.create_backend(library.BackendType.XGMI, config)


@attrs.frozen(kw_only=True)
class RdmaOptions:
    """Of the rdma backend; the defaults are Mori's.

    Attributes:
        host: Where Mori listens for peers' Mori, on a port of its choice.
        rdma_devices: Names of NICs, separated by commas; empty: what the environment says, or all.
        qp_per_transfer: Queue pairs that one transfer uses.
        post_batch_size: Requests per post; -1: Mori chooses.
        num_worker_threads: Threads that post; -1: Mori chooses.
        poll_cq_mode: ``"polling"`` or ``"event"``: how it waits for completions; polling uses a core.
        enable_notification: Tell the peer's Mori of each transfer, as stock peers do.
        notif_per_qp: Receives for that posted ahead.
        enable_transfer_chunking: Cut transfers into chunks, for several NICs.
        chunk_bytes: Bytes of a chunk.
        max_chunks_per_transfer: At most so many.
        num_nics_per_transfer: NICs that one transfer is spread over.
    """

    host: str = "127.0.0.1"
    rdma_devices: str = ""
    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: str = attrs.field(default="polling", validator=attrs.validators.in_(("polling", "event")))
    enable_notification: bool = True
    notif_per_qp: int = 1024
    enable_transfer_chunking: bool = False
    chunk_bytes: int = 65536
    max_chunks_per_transfer: int = 64
    num_nics_per_transfer: int = 1

    def explain(self, error: Exception) -> str:
        """What to say when the backend cannot be made."""
        named = f" named {self.rdma_devices!r}" if self.rdma_devices else ""
        return (
            f"rdma: Mori finds no NIC{named} that it can use: {error}. `ibv_devices` lists them; a container "
            "needs --device=/dev/infiniband and --cap-add=IPC_LOCK; device_name says which to use. Without a NIC, "
            "between GPUs of one host: backend_type xgmi"
        )

    def create_backend(self, library: Library, engine: IOEngine) -> None:
        """Give an engine this backend."""
        options: dict[str, object] = {
            field.name: getattr(self, field.name)
            for field in attrs.fields(RdmaOptions)
            if field.name not in _NEWER or getattr(self, field.name) != field.default
        }
        del options["host"], options["rdma_devices"]
        modes = {"polling": library.PollCqMode.POLLING, "event": library.PollCqMode.EVENT}
        options["poll_cq_mode"] = modes[self.poll_cq_mode]
        with _chosen_devices(self.rdma_devices):
            engine.create_backend(library.BackendType.RDMA, library.RdmaBackendConfig(**options))


def read_options(backend: str, options: Mapping[str, object]) -> XgmiOptions | RdmaOptions:
    """The options of a backend, checked.

    Raises:
        ConfigError: one is unknown, or has a value of the wrong kind.
    """
    kind = XgmiOptions if backend == "xgmi" else RdmaOptions
    fields = {field.name: field for field in attrs.fields(kind)}
    for key, value in options.items():
        if key not in fields:
            allowed = ", ".join(fields)
            raise ConfigError(f"{backend} has no option {key!r}; allowed: {allowed}", key=key, value=value)
        wanted = type(fields[key].default)
        if type(value) is not wanted:
            raise ConfigError(f"{key} must be {wanted.__name__}, not {value!r}", key=key, value=value)
        if wanted is int and not (isinstance(value, int) and (value >= 1 or value == fields[key].default)):
            raise ConfigError(f"{key} must be at least 1, not {value!r}", key=key, value=value)
        most = fields[key].metadata.get("most", _INT)
        if wanted is int and isinstance(value, int) and value > most:
            raise ConfigError(f"{key} must be at most {most}, not {value!r}", key=key, value=value)
    try:
        return kind(**options)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(
            f"poll_cq_mode must be 'polling' or 'event', not {options['poll_cq_mode']!r}",
            key="poll_cq_mode",
            value=options["poll_cq_mode"],
        ) from error


@contextmanager
def _chosen_devices(names: str) -> Iterator[None]:
    """Around the making of a backend: the environment names these devices, and is as before afterwards.

    Also who names none waits for its turn: it would have those of another one.
    """
    with _environment:
        if not names:
            yield
            return
        before = os.environ.get(_DEVICES)
        os.environ[_DEVICES] = names
        try:
            yield
        finally:
            if before is None:
                del os.environ[_DEVICES]
            else:
                os.environ[_DEVICES] = before
