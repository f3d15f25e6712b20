"""The cuda_ipc engine over GPUs made of host memory: its contract, other processes, and what it refuses."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import trio
from descriptors import open_files
from rig import EVERY_ENGINE_CHECK, begin, filled, receiver_config, sender_config, wait_until
from trio.testing import wait_all_tasks_blocked

from trio_mori import (
    ConfigError,
    Connector,
    DescriptorRefused,
    EngineUnavailable,
    TransferFailed,
    open_connector,
    open_engine,
)
from trio_mori._engines import _cuda_ipc, _cuda_library
from trio_mori._engines._cuda_owner import Memory, Owner, decode
from trio_mori._engines._cuda_peer import CudaPeer
from trio_mori._protocol.matching import Matching
from trio_mori._reception import NativePeer
from trio_mori._unix import UnixListener
from trio_mori.abc import Descriptor, Engine, EnginePeer, Posted, Write
from trio_mori.testing import EngineBench, FakeGpus
from trio_mori.testing._engine_bench import Check, altered_descriptors

deterministic = pytest.mark.deterministic

POOL = 1 << 20

# Seconds for a test that starts processes, each of which imports torch; on a busy machine that takes half a minute.
LIMIT = 120


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    fakes = FakeGpus()
    monkeypatch.setattr(_cuda_library, "load", lambda: fakes)
    return fakes


def target_of(peer: EnginePeer) -> torch.Tensor:
    """The pool of a peer in this process."""
    assert isinstance(peer, CudaPeer)
    return _cuda_ipc._siblings.find(peer.owner.nonce, peer.descriptor, peer.identity).region.tensor


@pytest.mark.parametrize("check", EVERY_ENGINE_CHECK)
async def test_it_keeps_the_contract(check: Check, gpus: FakeGpus) -> None:
    def hold(engine: Engine, peer: EnginePeer) -> None:
        gpus.hold(target_of(peer))

    with trio.fail_after(30):
        await check(
            EngineBench(
                lambda size: open_engine("cuda_ipc", pool_size=size, device="cuda:1"),
                hold=hold,
                release=lambda engine: gpus.release(),
                closing_fences=True,
            )
        )


@contextmanager
def owner_process(**environment: str) -> Iterator[tuple[subprocess.Popen[str], Descriptor]]:
    """Another process that owns a pool, and its descriptor."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gpu_owner.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, **environment},
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


def mapped_pools() -> set[str]:
    """The pools that this process has mapped, by the numbers of their files."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "trio-mori-fake-gpu" in line}


async def test_a_peer_is_mapped_once_by_its_first_write_and_until_it_is_dropped(gpus: FakeGpus) -> None:
    with owner_process() as (process, descriptor), trio.fail_after(LIMIT):
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as engine:
            engine.region.tensor.fill_(42)
            before = mapped_pools()
            peer = engine.add_peer(descriptor)
            assert gpus.mapped == 0
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(engine.write, peer, Write(0, 1000 * number, 500))
            assert gpus.mapped == 1
            assert len(mapped_pools() - before) == 1
            assert [ask(process, at) for at in (0, 499, 500, 7499, 7500)] == [42, 42, 0, 42, 0]
            engine.drop_peer(peer)
            await wait_until(lambda: mapped_pools() <= before)


async def test_a_killed_process_is_fenced_and_the_next_one_is_written_to(gpus: FakeGpus) -> None:
    with trio.fail_after(LIMIT):
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as engine:
            engine.region.tensor.fill_(3)
            with owner_process() as (process, descriptor):
                peer = engine.add_peer(descriptor)
                await engine.write(peer, Write(0, 0, POOL))
                process.kill()
                await engine.wait_fenced(peer)
                with pytest.raises(TransferFailed, match="its process has exited"):
                    await engine.write(peer, Write(0, 0, POOL))
            engine.drop_peer(peer)
            with pytest.raises(DescriptorRefused, match="has exited"):
                engine.add_peer(descriptor)
            with owner_process() as (process, descriptor):
                await engine.write(engine.add_peer(descriptor), Write(0, 0, POOL))
                assert ask(process, POOL - 1) == 3


async def test_a_descriptor_with_any_bit_altered_is_refused_before_the_driver_sees_it(gpus: FakeGpus) -> None:
    with owner_process() as (process, descriptor), trio.fail_after(LIMIT):
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as engine:
            engine.region.tensor.fill_(9)
            for forged in altered_descriptors(descriptor):
                with pytest.raises(DescriptorRefused):
                    engine.add_peer(forged)
            assert gpus.mapped == 0
            await engine.write(engine.add_peer(descriptor), Write(0, 0, 1))
            assert ask(process, 0) == 9


async def test_gpus_without_access_are_named_with_the_remedy(gpus: FakeGpus) -> None:
    gpus.access = False
    with owner_process(DEVICE="cuda:1") as (_, descriptor), trio.fail_after(LIMIT):
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda:0") as engine:
            peer = engine.add_peer(descriptor)
            with pytest.raises(TransferFailed, match=r"Fake GPU cuda:0.*Fake GPU cuda:1.*fallback: host") as caught:
                await engine.write(peer, Write(0, 0, 1))
            assert caught.value.settled


@deterministic
async def test_small_writes_overtake_a_large_one_to_the_same_peer(gpus: FakeGpus) -> None:
    async with (
        open_engine("cuda_ipc", pool_size=POOL, device="cuda") as one,
        open_engine("cuda_ipc", pool_size=POOL, device="cuda") as other,
        trio.open_nursery() as nursery,
    ):
        peer = one.add_peer(other.descriptor)
        gpus.hold(other.region.tensor)
        for _ in range(9):
            nursery.start_soon(one.write, peer, Write(0, 0, POOL))
        await wait_all_tasks_blocked()
        assert isinstance(peer, CudaPeer)
        assert sorted(track.copies for track in peer.tracks) == [2, 2, 2, 3]
        gpus.release()


@deterministic
async def test_a_small_write_is_over_in_place_and_one_that_is_not_is_waited_for(gpus: FakeGpus) -> None:
    async with (
        open_engine("cuda_ipc", pool_size=POOL, device="cuda") as one,
        open_engine("cuda_ipc", pool_size=POOL, device="cuda") as other,
    ):
        peer = one.add_peer(other.descriptor)
        assert one.write_nowait(peer, Write(0, 0, 1)) is False  # the peer is not mapped yet
        await one.write(peer, Write(0, 0, 1))
        assert one.write_nowait(peer, Write(0, 0, 1)) is True
        gpus.hold(other.region.tensor)
        one.region.tensor[:POOL] = 7
        copies = [one.write_nowait(peer, Write(0, place, POOL // 8)) for place in range(0, POOL, POOL // 8)]
        assert isinstance(peer, CudaPeer)
        assert [track.copies for track in peer.tracks] == [2, 2, 2, 2]
        gpus.release()
        for copy in copies:
            assert isinstance(copy, Posted)
            await copy.wait()
        assert bool((other.region.tensor == 7).all())
        assert [track.copies for track in peer.tracks] == [0, 0, 0, 0]


@deterministic
async def test_what_was_posted_and_nobody_has_waited_for_yet_is_abandoned_with_all(gpus: FakeGpus) -> None:
    async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as owner:
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as writer:
            peer = writer.add_peer(owner.descriptor)
            await writer.write(peer, Write(0, 0, 1))
            gpus.hold(owner.region.tensor)
            posted = writer.write_nowait(peer, Write(0, 0, POOL))
            assert isinstance(posted, Posted)
            writer.abandon()
            with pytest.raises(TransferFailed, match="abandoned") as caught:
                await posted.wait()
            assert not caught.value.settled
        gpus.release()


@deterministic
async def test_a_put_returns_while_its_payload_is_still_being_copied_to_a_get_that_waits(gpus: FakeGpus) -> None:
    pool = {"backend_type": "cuda_ipc", "memory_pool_device": "cuda:0", "memory_pool_size": POOL}
    async with (
        open_connector(sender_config(**pool)) as source,
        open_connector(receiver_config(source, **pool)) as target,
        trio.open_nursery() as nursery,
    ):
        await source.put("0", "1", "first", filled(1))
        await target.get("0", "1", "first")  # the two have met, and the pool is mapped
        outcome = begin(nursery, target.get, "0", "1", "k")
        await wait_until(lambda: "k@0_1" in source_book(source).waiting)
        gpus.hold(target._pool.region.tensor)
        await source.put("0", "1", "k", filled(9))
        assert source.statistics().in_flight == 1
        await wait_all_tasks_blocked()
        assert not outcome.over.is_set()
        gpus.release()
        assert torch.equal(await outcome.wait(), filled(9))  # type: ignore[arg-type]
        assert source.statistics().in_flight == 0


@deterministic
async def test_who_waits_for_a_payload_is_nudged_as_its_copy_begins_and_nobody_else(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    nudged: list[bytes] = []
    monkeypatch.setattr(UnixListener, "nudge", lambda self, route: nudged.append(route))
    pool = {"backend_type": "cuda_ipc", "memory_pool_device": "cuda:0", "memory_pool_size": POOL}
    async with (
        open_connector(sender_config(**pool)) as source,
        open_connector(receiver_config(source, **pool)) as target,
        trio.open_nursery() as nursery,
    ):
        source._pool.on_gpu = True  # as a real one would be
        await source.put("0", "1", "first", filled(1))
        await target.get("0", "1", "first")
        assert source._sender is not None
        (session,) = source._sender.book.sessions.values()
        await wait_until(
            lambda: isinstance(session.handle, NativePeer) and isinstance(session.handle.link, UnixListener)
        )
        outcome = begin(nursery, target.get, "0", "1", "k")
        await wait_until(lambda: "k@0_1" in source_book(source).waiting)
        await source.put("0", "1", "other", filled(9))
        assert nudged == []
        await source.put("0", "1", "k", filled(9))
        assert isinstance(session.handle, NativePeer)
        assert nudged == [session.handle.route]
        assert torch.equal(await outcome.wait(), filled(9))  # type: ignore[arg-type]


def source_book(source: Connector) -> Matching:
    assert source._sender is not None
    return source._sender.book._matching


@deterministic
async def test_a_gpu_that_fails_leaves_it_open_whether_bytes_move(gpus: FakeGpus) -> None:
    async with (
        open_engine("cuda_ipc", pool_size=POOL, device="cuda") as one,
        open_engine("cuda_ipc", pool_size=POOL, device="cuda") as other,
    ):
        peer = one.add_peer(other.descriptor)
        await one.write(peer, Write(0, 0, 1))
        gpus.broken = True
        with pytest.raises(TransferFailed, match="illegal memory access") as caught:
            await one.write(peer, Write(0, 0, 1))
        assert not caught.value.settled
        with pytest.raises(TransferFailed, match="illegal memory access") as caught:
            one.write_nowait(peer, Write(0, 0, 1))
        assert not caught.value.settled


@deterministic
async def test_an_abandoned_copy_is_no_fence_when_its_engine_closes(gpus: FakeGpus) -> None:
    async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as owner, trio.open_nursery() as nursery:
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as writer:
            seen = owner.add_peer(writer.descriptor)
            gpus.hold(owner.region.tensor)

            async def write() -> None:
                with pytest.raises(TransferFailed, match="abandoned"):
                    await writer.write(writer.add_peer(owner.descriptor), Write(0, 0, POOL))

            nursery.start_soon(write)
            await wait_all_tasks_blocked()
            writer.abandon()
        with trio.move_on_after(0.05) as scope:
            await owner.wait_fenced(seen)
        assert scope.cancelled_caught
        gpus.release()


@deterministic
async def test_peers_of_another_machine_or_pid_namespace_are_refused_with_the_remedy(gpus: FakeGpus) -> None:
    async with open_engine("cuda_ipc", pool_size=POOL, device="cuda") as engine:
        owner, memory = decode(engine.descriptor)

        def described(owner: Owner, memory: Memory) -> Descriptor:
            return Descriptor(msgspec.msgpack.encode(owner), msgspec.msgpack.encode(memory))

        with pytest.raises(DescriptorRefused, match=r"another machine.*rdma"):
            engine.add_peer(described(msgspec.structs.replace(owner, boot=bytes(16)), memory))
        expandable = msgspec.structs.replace(memory, handle=b"\2e" + memory.handle[2:])
        with pytest.raises(DescriptorRefused, match="expandable"):
            engine.add_peer(described(owner, expandable))
        with pytest.raises(DescriptorRefused, match=r"--pid=host.*share_directory"):
            engine.add_peer(described(msgspec.structs.replace(owner, namespace=1), memory))


@deterministic
async def test_opening_and_closing_leaves_no_descriptor_open(gpus: FakeGpus) -> None:
    async def once() -> None:
        async with (
            open_engine("cuda_ipc", pool_size=POOL, device="cuda") as one,
            open_engine("cuda_ipc", pool_size=POOL, device="cuda") as other,
        ):
            await one.write(one.add_peer(other.descriptor), Write(0, 0, POOL))

    await once()
    before = open_files()
    for _ in range(4):
        await once()
    await wait_until(lambda: open_files() <= before)  # a thread may have its last result in hand for a moment


@deterministic
async def test_wrong_devices_sizes_and_options_are_refused_by_name(gpus: FakeGpus) -> None:
    for arguments, error, named in (
        ({"pool_size": POOL, "device": "cpu"}, ConfigError, "memory_pool_device"),
        ({"pool_size": 0, "device": "cuda"}, ConfigError, "memory_pool_size"),
        ({"pool_size": POOL, "device": "cuda", "options": {"speed": 1}}, ConfigError, "speed"),
        ({"pool_size": POOL, "device": "cuda:7"}, EngineUnavailable, "cuda:7"),
    ):
        with pytest.raises(error, match=named):
            async with open_engine("cuda_ipc", **arguments):  # type: ignore[arg-type]
                pass


@deterministic
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
async def test_without_a_gpu_it_says_what_is_missing() -> None:
    with pytest.raises(EngineUnavailable, match=r"torch .* sees none.*nvidia-smi"):
        async with open_engine("cuda_ipc", pool_size=POOL, device="cuda"):
            pass
