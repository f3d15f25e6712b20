"""The engines that `backend_type: auto` and `fallback: host` put over one pool."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from .._errors import ConfigError, EngineUnavailable
from ..abc import Engine
from ._cuda_ipc import open_cuda_ipc
from ._mori import open_mori
from ._several import SeveralEngines
from ._shm import open_shm
from ._staged import open_staged

logger = logging.getLogger("trio_mori.engine")


@asynccontextmanager
async def open_auto(*, pool_size: int, device: str, options: Mapping[str, object]) -> AsyncIterator[Engine]:
    """Open a pool with all engines that this host has for it. Each peer is reached by the first that both sides have.

    A pool in host memory has shm. One on a GPU has xgmi, where Mori is installed and finds its GPUs; cuda_ipc; and
    shm by a mirror of the pool in host memory, for peers that the GPU has no access to. Where there is no GPU at all
    the pool is in host memory.

    Options:
        only: The one way from GPU to GPU to open, ``"cuda_ipc"`` or ``"xgmi"``, which then must be there.
        shm, xgmi: Mappings with the options of these engines.
    """
    only = options.get("only")
    ours: dict[str, Any] = {name: options.get(name, {}) for name in ("shm", "xgmi")}
    for key in options:
        if key not in ("only", "shm", "xgmi"):
            raise ConfigError(f"auto has no option {key!r}; allowed: only, shm, xgmi", key=key, value=options[key])
    async with AsyncExitStack() as stack:
        members: list[Engine] = []
        why: list[str] = []

        async def try_to_open(name: str) -> None:
            try:
                if name == "cuda_ipc":
                    opened = open_cuda_ipc(pool_size=pool_size, device=device, options={})
                else:
                    region = members[0].region if members else None
                    opened = open_mori("xgmi", pool_size=pool_size, device=device, options=ours["xgmi"], region=region)
                members.append(await stack.enter_async_context(opened))
            except EngineUnavailable as error:
                if only is not None:
                    raise
                why.append(f"{name}: {error}")

        if device != "cpu":
            if only in (None, "cuda_ipc"):
                await try_to_open("cuda_ipc")
            if only == "xgmi" or (only is None and _has_mori()):
                await try_to_open("xgmi")
                members.reverse()
        if members:
            members.append(await stack.enter_async_context(open_staged(members[0].region, ours["shm"])))
            yield SeveralEngines(members)
            return
        if device != "cpu":
            logger.warning("no engine reaches a pool on %s here, so it is in host memory: %s", device, "; ".join(why))
        yield await stack.enter_async_context(open_shm(pool_size=pool_size, device="cpu", options=ours["shm"]))


def _has_mori() -> bool:
    """Whether it is installed, for the GPUs that torch sees: those of NVIDIA are not Mori's."""
    return torch.version.hip is not None and importlib.util.find_spec("mori") is not None
