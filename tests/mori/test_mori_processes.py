"""The xgmi engine between processes, which end as processes do."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio
from mori_lane import delayed, emulated, moriemu, open_xgmi
from mori_processes import SIZE, Talker, open_talker
from trio.testing import wait_all_tasks_blocked

from trio_mori._errors import DescriptorRefused, TransferFailed
from trio_mori.abc import Descriptor, Engine, EnginePeer, Write
from trio_mori.testing._engine_bench import fill

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

SCRIPT = Path(__file__).with_name("mori_process.py")


@attrs.frozen
class Owner:
    """A process with a pool."""

    process: Talker
    descriptor: Descriptor

    async def get(self, offset: int, size: int) -> bytes:
        await self.process.say(f"get {offset} {size}")
        return bytes.fromhex(await self.process.hear())


@asynccontextmanager
async def owner(device: str = "cuda:1") -> AsyncIterator[Owner]:
    async with open_talker("mori_process", "own", SIZE, device) as talker:
        engine, memory = (await talker.hear()).split()
        yield Owner(talker, Descriptor(bytes.fromhex(engine), bytes.fromhex(memory)))


async def test_bytes_arrive_in_another_process_and_nowhere_else() -> None:
    with trio.fail_after(60):
        async with owner() as other, open_xgmi(SIZE) as engine:
            peer = engine.add_peer(other.descriptor)
            fill(engine, 0, SIZE)
            for source, destination, size in ((0, 100, 5000), (7, 200_000, 65536)):
                await engine.write(peer, Write(source, destination, size))
                arrived = await other.get(destination - 16, size + 32)
                sent = bytes(engine.region.tensor[source : source + size].cpu().tolist())
                assert arrived == bytes(16) + sent + bytes(16)


async def test_a_killed_peer_is_fenced_and_refused() -> None:
    with trio.fail_after(60):
        async with owner() as other, open_xgmi(SIZE) as engine:
            peer = engine.add_peer(other.descriptor)
            await engine.write(peer, Write(0, 0, 10))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.wait_fenced, peer)
                await wait_all_tasks_blocked()
                await other.process.kill()
            with pytest.raises(TransferFailed, match="exited") as refused:
                await engine.write(peer, Write(0, 0, 10))
            assert refused.value.settled


async def test_a_peer_that_dies_before_the_first_write_is_refused() -> None:
    with trio.fail_after(60):
        async with owner() as other, open_xgmi(SIZE) as engine:
            peer = engine.add_peer(other.descriptor)
            await other.process.kill()
            with pytest.raises(TransferFailed, match="exited"):
                await engine.write(peer, Write(0, 0, 10))
            engine.drop_peer(peer)
            with pytest.raises(DescriptorRefused, match="exited"):
                engine.add_peer(other.descriptor)


async def test_a_restarted_peer_is_a_new_one_and_gets_the_bytes() -> None:
    with trio.fail_after(60):
        # Engines that were left to a copy without an end, by tests before this one, keep their peers mapped.
        kept = 0 if moriemu is None else moriemu.stats()["live_ipc_maps"]
        async with open_xgmi(SIZE) as engine:
            engine.region.tensor.fill_(5)
            for _ in range(2):
                async with owner() as other:
                    peer = engine.add_peer(other.descriptor)
                    await engine.write(peer, Write(0, 1000, 100))
                    assert await other.get(1000, 100) == bytes([5]) * 100
                    engine.drop_peer(peer)
                    if moriemu is not None:
                        assert moriemu.stats()["live_ipc_maps"] == kept, "the last one's pool stays mapped"


@emulated
async def test_a_receiver_that_is_killed_during_a_write_delays_nobody() -> None:
    with trio.fail_after(60):
        async with owner() as other, open_xgmi(SIZE) as engine:
            peer = engine.add_peer(other.descriptor)
            await engine.write(peer, Write(0, 0, 10))
            with delayed(0.3):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_write_or_fail, engine, peer)
                    await wait_all_tasks_blocked()
                    await other.process.kill()
            async with owner() as next_one:
                await engine.write(engine.add_peer(next_one.descriptor), Write(0, 0, 10))


async def _write_or_fail(engine: Engine, peer: EnginePeer) -> None:
    with suppress(TransferFailed):
        await engine.write(peer, Write(0, 0, 1024))


@emulated
@pytest.mark.parametrize(("how", "status"), [("wait", 0), ("abandon", 0), ("raise", 3), ("interrupt", -2)])
async def test_a_process_ends_with_copies_in_flight_as_it_meant_to(how: str, status: int) -> None:
    with trio.fail_after(60):
        async with owner() as other:
            line = f"{other.descriptor.engine.hex()} {other.descriptor.memory.hex()}\n"
            ended = await trio.run_process(
                [sys.executable, str(SCRIPT), "write", how],
                stdin=line.encode(),
                capture_stdout=True,
                capture_stderr=True,
                check=False,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
            assert ended.returncode == status, ended.stderr.decode()
            if how == "wait":
                assert await other.get(0, 8192) == bytes([7]) * 8192
