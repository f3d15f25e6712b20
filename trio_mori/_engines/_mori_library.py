"""Mori's Python package: imported when an engine is opened, and as much of it as is used here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, cast

import torch

from .._errors import EngineUnavailable

# What is called of it; the configurations of the backends aside, of which one may be missing, and sessions, which are
# only a shorter way.
_USED = {
    "IOEngine": (
        "create_backend",
        "get_engine_desc",
        "register_remote_engine",
        "deregister_remote_engine",
        "register_torch_tensor",
        "deregister_memory",
        "allocate_transfer_uid",
        "batch_write",
    ),
    "IOEngineConfig": (),
    "StatusCode": ("IN_PROGRESS",),
    "BackendType": (),
    "EngineDesc": ("pack", "unpack"),
    "MemoryDesc": ("pack", "unpack"),
}

# What a call of Mori raises: its own errors, and pybind11's for arguments of another release.
RAISES = (RuntimeError, TypeError)

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
    except Exception as error:  # whatever its modules raise: of another Python, ROCm or torch, anything may
        raise EngineUnavailable(_broken(error)) from error
    if not hasattr(mori.io, "IOEngine"):
        raise EngineUnavailable(f"{mori.io.__file__} is not the mori of amd-mori: it has no IOEngine. {_absent()}")
    for name, parts in _USED.items():
        if not hasattr(mori.io, name):
            raise EngineUnavailable(f"{mori.io.__file__} {outdated(f'has no {name}')}")
        if lacking := [part for part in parts if not hasattr(getattr(mori.io, name), part)]:
            raise EngineUnavailable(f"{mori.io.__file__} {outdated(f'has no {name}.{lacking[0]}')}")
    return cast(Library, mori.io)


def outdated(why: str) -> str:
    """What to say of a release of Mori that has not what is used here."""
    return f"is of a release of Mori that trio-mori cannot use: it {why}. Take amd-mori 1.2.4 or later: {_install()}"


def _absent() -> str:
    return f"rdma and xgmi need AMD's Mori: {_install()}. On one host without it: backend_type shm"


def _install() -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    wheels = " and ".join(_WHEELS)
    other = "" if version in _WHEELS else f", and this is Python {version}"
    return f"pip install amd-mori (the import name is mori). It has wheels for Python {wheels} on Linux x86_64{other}"


def _broken(error: BaseException) -> str:
    what = str(error) if isinstance(error, ImportError | OSError) else f"{type(error).__name__}: {error}"
    return (
        f"Mori is installed and does not load: {what}. It needs ROCm 7 (libamdhip64.so.7) and, of the distribution, "
        "libpci3, libdrm2, libdrm-amdgpu1, libnuma1 and libibverbs1; `ldd` on its libmori_io.so says which is missing. "
        f"If none is: {_install()}"
    )
