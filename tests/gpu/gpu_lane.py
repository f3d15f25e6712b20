"""What the tests of this folder stand on: which GPUs there are, and copies between them that take as long as wanted."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from trio_mori import open_engine
from trio_mori._engines._cuda_ipc import TRACKS, CudaIpcEngine
from trio_mori._engines._cuda_library import _TorchLane
from trio_mori._engines._cuda_peer import CudaPeer, Track
from trio_mori.abc import Descriptor, Engine, EnginePeer
from trio_mori.testing import EngineBench

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_gpu = pytest.mark.skipif(COUNT == 0, reason="needs a GPU that torch sees; see docs/gpu.md")

# Where sender and receiver have their pools: on one GPU, and on two where there are two.
PLACES = [
    pytest.param(("cuda:0", "cuda:0"), id="one-gpu"),
    pytest.param(
        ("cuda:0", "cuda:1"),
        id="two-gpus",
        marks=pytest.mark.skipif(COUNT < 2, reason=f"needs two GPUs, torch sees {COUNT}"),
    ),
]

# Cycles for which a GPU of up to 2.5 GHz is kept busy: long enough for a check to do what it does beside held writes.
HELD = 1_500_000_000


def streams_of(peer: EnginePeer, engine: Engine) -> Iterator[torch.cuda.Stream]:
    """The streams of all lanes that an engine will ever have to a peer."""
    assert isinstance(peer, CudaPeer)
    assert isinstance(engine, CudaIpcEngine)
    while len(peer.tracks) < TRACKS:
        peer.tracks.append(Track(engine._library.open_lane(engine.region.tensor.device)))
    for track in peer.tracks:
        assert isinstance(track.lane, _TorchLane)
        yield track.lane._side.stream


def hold(engine: Engine, peer: EnginePeer) -> None:
    """Have other work in front of all copies to a peer."""
    for stream in streams_of(peer, engine):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(HELD)


def release(engine: Engine) -> None:
    """Wait until it is done."""
    torch.cuda.synchronize(engine.region.tensor.device)


def bench(devices: tuple[str, str]) -> EngineBench:
    """Engines whose pools are on these GPUs in turn."""
    turns = itertools.cycle(devices)

    def opened(size: int) -> AbstractAsyncContextManager[Engine]:
        return open_engine("cuda_ipc", pool_size=size, device=next(turns))

    return EngineBench(opened, hold=hold, release=release, closing_fences=True)


@contextmanager
def owner_process(device: str, pool: int, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Descriptor]]:
    """Another process that owns a pool, and its descriptor; see tests/gpu_owner.py."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "gpu_owner.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "FAKE_GPUS": "0", "DEVICE": device, "POOL": str(pool), **environment},
    ) as process:
        assert process.stdout is not None
        try:
            engine, memory = map(bytes.fromhex, process.stdout.readline().split())
            yield process, Descriptor(engine, memory)
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], offset: int) -> int:
    """The byte at this offset of the process's pool."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{offset}\n")
    return int(process.stdout.readline())
