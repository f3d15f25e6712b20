"""The engines that move bytes, by name. None is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from .._descriptors import require_descriptors
from .._errors import ConfigError, EngineUnavailable
from ..abc import Engine


class _Opener(Protocol):
    def __call__(
        self, *, pool_size: int, device: str, options: Mapping[str, object]
    ) -> AbstractAsyncContextManager[Engine]: ...


def _shm_opener() -> _Opener:
    from ._shm import open_shm

    return open_shm


def _mori_opener(backend: str) -> _Opener:
    from ._mori import open_mori

    return partial(open_mori, backend)


def _cuda_ipc_opener() -> _Opener:
    from ._cuda_ipc import open_cuda_ipc

    return open_cuda_ipc


def _auto_opener() -> _Opener:
    from ._auto import open_auto

    return open_auto


_ENGINES: dict[str, Callable[[], _Opener]] = {
    "shm": _shm_opener,
    "cuda_ipc": _cuda_ipc_opener,
    "auto": _auto_opener,
    "rdma": partial(_mori_opener, "rdma"),
    "xgmi": partial(_mori_opener, "xgmi"),
}

# Names that a deployment may carry and that this release cannot serve.
_ABSENT = ("nixl",)


def open_engine(
    name: str, *, pool_size: int, device: str = "cpu", options: Mapping[str, object] | None = None
) -> AbstractAsyncContextManager[Engine]:
    """Open the engine of this name with a region of `pool_size` bytes; it ends with the ``async with``.

    Leaving the context waits for writes in flight, unless `Engine.abandon` was called; nothing may be written
    afterwards. The region's memory stays for as long as somebody holds its tensor or its buffer.

    Args:
        name: ``"shm"``, ``"cuda_ipc"``, ``"rdma"``, ``"xgmi"``, or ``"auto"`` for those of them that this host has.
        pool_size: Bytes of the region, all of them allocated before the body runs.
        device: Where the region lives, as torch spells it.
        options: What only this engine knows; see `trio_mori._engines._shm`, `_mori` and `_auto`.

    Raises:
        ConfigError: no engine has this name, or it has no such device, size or option.
        EngineUnavailable: this release or this host cannot run it; says why.
        NoDescriptors: too few file descriptors are left.
    """
    if name in _ABSENT:
        raise EngineUnavailable(
            f"backend_type {name!r} is not part of this release of trio-mori, which has: {_names()}"
        )
    if name not in _ENGINES:
        raise ConfigError(f"backend_type {name!r} is unknown; allowed: {_names()}", key="backend_type", value=name)
    require_descriptors("an engine")
    return _ENGINES[name]()(pool_size=pool_size, device=device, options=options or {})


def _names() -> str:
    return ", ".join(sorted(_ENGINES))
