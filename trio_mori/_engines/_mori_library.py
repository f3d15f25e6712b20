"""Mori's Python package: imported when an engine is opened, and as much of it as is used here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, cast

import torch

from .._errors import EngineUnavailable

# Wheels on PyPI of amd-mori 1.2.4, the newest when this was written.
_WHEELS = ("3.10", "3.12")


class Code(Protocol):
    """A member of Mori's StatusCode."""

    @property
    def name(self) -> str: ...


class Status(Protocol):
    """The state of one transfer. One poller at a time: asking while another thread waits keeps the GIL."""

    def WaitFor(self, timeout_ms: int, /) -> Code: ...
    def Code(self) -> Code: ...
    def Succeeded(self) -> bool: ...
    def Message(self) -> str: ...


class EngineDesc(Protocol):
    """A peer's engine, or ours."""

    key: str
    node_id: str
    pid: int
    port: int

    def pack(self) -> bytes: ...


class MemoryDesc(Protocol):
    """Registered memory of a peer, or ours."""

    engine_key: str
    size: int

    def pack(self) -> bytes: ...


class Session(Protocol):
    """The short way between two pieces of memory."""

    def write(self, local_offset: int, remote_offset: int, size: int, uid: int, /) -> Status: ...


class PeerFailure(Protocol):
    """What Mori noticed of a peer by itself."""

    remote_engine_key: str
    reason: Code
    detail: str


class IOEngine(Protocol):
    """Mori's engine."""

    def create_backend(self, type: object, config: object, /) -> None: ...
    def get_engine_desc(self) -> EngineDesc: ...
    def register_remote_engine(self, desc: EngineDesc, /) -> None: ...
    def deregister_remote_engine(self, desc: EngineDesc, /) -> None: ...
    def register_torch_tensor(self, tensor: torch.Tensor, /) -> MemoryDesc: ...
    def deregister_memory(self, desc: MemoryDesc, /) -> None: ...
    def allocate_transfer_uid(self) -> int: ...
    def create_session(self, local: MemoryDesc, remote: MemoryDesc, /) -> Session | None: ...
    def batch_write(
        self,
        local: Sequence[MemoryDesc],
        local_offsets: Sequence[Sequence[int]],
        remote: Sequence[MemoryDesc],
        remote_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        uids: Sequence[int],
        /,
    ) -> Sequence[Status]: ...


class _Unpack(Protocol):
    def unpack(self, packed: bytes, /) -> object: ...


class Library(Protocol):
    """The module `mori.io`."""

    class StatusCode:
        IN_PROGRESS: Code

    class BackendType:
        XGMI: object
        RDMA: object

    class PollCqMode:
        POLLING: object
        EVENT: object

    EngineDesc: _Unpack
    MemoryDesc: _Unpack

    def IOEngine(self, key: str, config: object, /) -> IOEngine: ...
    def IOEngineConfig(self, host: str, port: int, /) -> object: ...
    def XgmiBackendConfig(self, num_streams: int, num_events: int, /) -> object: ...
    def RdmaBackendConfig(self, **options: object) -> object: ...


def load() -> Library:
    """Import Mori. Takes up to seconds the first time, so in a thread.

    Raises:
        EngineUnavailable: it is not installed, or does not load; says which library failed, and what to do.
    """
    try:
        import mori.io
    except ModuleNotFoundError as error:
        if error.name not in ("mori", "mori.io"):
            raise EngineUnavailable(_broken(error)) from error
        raise EngineUnavailable(_absent()) from error
    except (ImportError, OSError) as error:
        raise EngineUnavailable(_broken(error)) from error
    if not hasattr(mori.io, "IOEngine"):
        raise EngineUnavailable(f"{mori.io.__file__} is not the mori of amd-mori: it has no IOEngine. {_absent()}")
    return cast(Library, mori.io)


def _absent() -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    wheels = " and ".join(_WHEELS)
    other = "" if version in _WHEELS else f", and this is Python {version}"
    return (
        "rdma and xgmi need AMD's Mori: pip install amd-mori (the import name is mori). It has wheels for Python "
        f"{wheels} on Linux x86_64{other}. On one host without it: backend_type shm"
    )


def _broken(error: BaseException) -> str:
    return (
        f"Mori is installed and does not load: {error}. It needs ROCm 7 (libamdhip64.so.7) and, of the distribution, "
        "libpci3, libdrm2, libdrm-amdgpu1, libnuma1 and libibverbs1; `ldd` on its libmori_io.so says which is missing"
    )
