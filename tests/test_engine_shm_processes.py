"""The shm engine between processes, users and pid namespaces, and what is left when one of them is killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from descriptors import open_files
from rig import wait_until

from trio_mori import DescriptorRefused, TransferFailed, _pages, open_engine
from trio_mori.abc import Descriptor, Write
from trio_mori.testing._engine_bench import altered_descriptors

POOL = 1 << 20
OWNER = (sys.executable, str(Path(__file__).with_name("shm_owner.py")))
IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
NOBODY = "65534"


@contextmanager
def owner_process(
    *, within: tuple[str, ...] = (), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Descriptor]]:
    """Another process that owns a pool, and its descriptor."""
    with subprocess.Popen(
        [*within, *OWNER],
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
    """The pools that this process has mapped, its own and others', by the numbers of their files."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "trio-mori-pool" in line}


@pytest.fixture
def share_directory(tmp_path: Path) -> str:
    directory = tmp_path / "share"
    directory.mkdir(mode=0o700)
    return str(directory)


@pytest.fixture(scope="session")
def pid_namespaces() -> None:
    """Skips where this user may not make a pid namespace, as containers have it."""
    try:
        subprocess.run([*IN_A_CONTAINER, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no pid namespaces for this user: {error}")


async def test_bytes_cross_to_another_process() -> None:
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            engine.region.tensor.fill_(42)
            peer = engine.add_peer(descriptor)
            assert engine.write_nowait(peer, Write(0, 100, 10))
            await engine.write(peer, Write(0, 5000, POOL - 5000))
            assert [ask(process, at) for at in (99, 100, 109, 110, 5000, POOL - 1)] == [0, 42, 42, 0, 42, 42]


async def test_a_descriptor_with_any_bit_altered_is_refused_and_nothing_stays_open() -> None:
    with owner_process() as (_, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            engine.drop_peer(engine.add_peer(descriptor))
            before = open_files()
            for forged in altered_descriptors(descriptor):
                with pytest.raises(DescriptorRefused):
                    engine.add_peer(forged)
            await wait_until(lambda: open_files() <= before)  # a thread may have its last result in hand for a moment
            engine.add_peer(descriptor)


async def test_a_peer_is_mapped_by_its_first_write_and_until_it_is_dropped() -> None:
    with owner_process() as (_, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            before = mapped_pools()
            peer = engine.add_peer(descriptor)
            assert mapped_pools() <= before
            await engine.write(peer, Write(0, 0, POOL))
            assert len(mapped_pools() - before) == 1
            engine.drop_peer(peer)
            await wait_until(lambda: mapped_pools() <= before)


async def test_a_large_write_finds_the_pages_that_it_needs_in_a_thread_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []

    def find_pages(address: int, nbytes: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        found.append(nbytes)

    monkeypatch.setattr(_pages, "find_pages", find_pages)
    with owner_process(POOL_SIZE=str(8 * POOL)) as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=8 * POOL) as engine:
            engine.region.tensor.fill_(42)
            peer = engine.add_peer(descriptor)
            for _ in range(2):
                await engine.write(peer, Write(0, 3 * POOL, 3 * POOL))
            assert found == [4 * POOL]
            assert [ask(process, at) for at in (3 * POOL - 1, 3 * POOL, 6 * POOL - 1, 6 * POOL)] == [0, 42, 42, 0]


async def test_a_killed_process_is_fenced_and_writes_to_it_fail() -> None:
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            peer = engine.add_peer(descriptor)
            await engine.write(peer, Write(0, 0, POOL))
            with trio.move_on_after(0.1) as alive:
                await engine.wait_fenced(peer)
            assert alive.cancelled_caught
            process.send_signal(signal.SIGKILL)
            await engine.wait_fenced(peer)
            with pytest.raises(TransferFailed, match="exited") as caught:
                await engine.write(peer, Write(0, 0, POOL))
            assert caught.value.settled
            engine.drop_peer(peer)
            with pytest.raises(DescriptorRefused, match="exited"):
                engine.add_peer(descriptor)  # a zombie, until its parent has asked for its end
            process.wait()
            with pytest.raises(DescriptorRefused, match="exited"):
                engine.add_peer(descriptor)


async def test_a_process_killed_during_writes_hurts_nobody() -> None:
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            peer = engine.add_peer(descriptor)

            async def kill_after(writes: int) -> None:
                for _ in range(writes):
                    await engine.write(peer, Write(0, 0, POOL))
                process.send_signal(signal.SIGKILL)

            async def write_until_refused() -> None:
                while True:
                    await engine.write(peer, Write(0, 0, POOL))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_after, 10)
                with pytest.raises(TransferFailed) as caught:
                    await write_until_refused()
            assert caught.value.settled


async def test_a_stopped_process_is_not_fenced_and_can_be_written_to() -> None:
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            engine.region.tensor.fill_(9)
            peer = engine.add_peer(descriptor)
            process.send_signal(signal.SIGSTOP)
            with trio.move_on_after(0.1) as alive:
                await engine.wait_fenced(peer)
            assert alive.cancelled_caught
            await engine.write(peer, Write(0, 0, 4096))
            process.send_signal(signal.SIGCONT)
            assert ask(process, 4095) == 9


async def test_a_killed_process_leaves_nothing_behind() -> None:
    before, mapped = set(os.listdir("/dev/shm")), mapped_pools()
    with owner_process() as (process, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            peer = engine.add_peer(descriptor)
            await engine.write(peer, Write(0, 0, POOL))
            process.send_signal(signal.SIGKILL)
            await engine.wait_fenced(peer)
    assert set(os.listdir("/dev/shm")) <= before
    del engine, peer
    await wait_until(lambda: mapped_pools() <= mapped)


async def test_a_share_directory_passes_memory_and_fence_between_processes(share_directory: str) -> None:
    with owner_process(SHARE_DIRECTORY=share_directory) as (process, descriptor), trio.fail_after(20):
        await check_shared(process, descriptor, share_directory)


@pytest.mark.usefixtures("pid_namespaces")
async def test_a_share_directory_passes_memory_and_fence_between_pid_namespaces(share_directory: str) -> None:
    with (
        owner_process(within=IN_A_CONTAINER, SHARE_DIRECTORY=share_directory) as (process, descriptor),
        trio.fail_after(20),
    ):
        await check_shared(process, descriptor, share_directory)


async def check_shared(process: subprocess.Popen[str], descriptor: Descriptor, share_directory: str) -> None:
    options = {"share_directory": share_directory}
    async with open_engine("shm", pool_size=POOL, options=options) as engine:
        engine.region.tensor.fill_(42)
        peer = engine.add_peer(descriptor)
        await engine.write(peer, Write(0, 5, 10))
        assert engine.write_nowait(peer, Write(0, 100, 10))
        assert [ask(process, at) for at in (4, 5, 14, 15, 100)] == [0, 42, 42, 0, 42]
        with trio.move_on_after(0.1) as alive:
            await engine.wait_fenced(peer)
        assert alive.cancelled_caught
        process.send_signal(signal.SIGKILL)
        await engine.wait_fenced(peer)
        with pytest.raises(TransferFailed, match="exited"):
            await engine.write(peer, Write(0, 0, 1))


@pytest.mark.usefixtures("pid_namespaces")
async def test_another_pid_namespace_without_a_share_directory_is_refused_with_the_remedy(share_directory: str) -> None:
    with owner_process(within=IN_A_CONTAINER) as (_, descriptor), trio.fail_after(20):
        for options, who in (({}, "neither side has"), ({"share_directory": share_directory}, "only one side has")):
            async with open_engine("shm", pool_size=POOL, options=options) as engine:
                with pytest.raises(DescriptorRefused, match=rf"{who} a share_directory.*--pid="):
                    engine.add_peer(descriptor)


async def test_another_share_directory_is_refused_at_the_first_write(share_directory: str, tmp_path: Path) -> None:
    with owner_process(SHARE_DIRECTORY=share_directory) as (_, descriptor), trio.fail_after(20):
        (tmp_path / "other").mkdir(mode=0o700)
        options = {"share_directory": str(tmp_path / "other")}
        async with open_engine("shm", pool_size=POOL, options=options) as engine:
            with pytest.raises(TransferFailed, match="another directory than ours") as caught:
                await engine.write(engine.add_peer(descriptor), Write(0, 0, 1))
            assert caught.value.settled


async def test_the_socket_of_a_killed_process_is_removed_when_it_is_old(share_directory: str) -> None:
    options = {"share_directory": share_directory}
    with (
        owner_process(SHARE_DIRECTORY=share_directory) as (living, _),
        owner_process(SHARE_DIRECTORY=share_directory) as (dead, _),
        trio.fail_after(20),
    ):
        dead.kill()
        dead.wait()
        sockets = sorted(os.listdir(share_directory))
        assert len(sockets) == 2
        async with open_engine("shm", pool_size=POOL, options=options):
            pass
        assert sorted(os.listdir(share_directory)) == sockets, "a young socket may not listen yet"
        for name in sockets:
            os.utime(os.path.join(share_directory, name), (0, 0))
        async with open_engine("shm", pool_size=POOL, options=options):
            pass
        assert len(os.listdir(share_directory)) == 1
        assert ask(living, 0) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user")
async def test_a_process_of_another_user_is_refused_by_both_uids() -> None:
    with owner_process(OWNER_UID=NOBODY) as (_, descriptor), trio.fail_after(20):
        async with open_engine("shm", pool_size=POOL) as engine:
            with pytest.raises(DescriptorRefused, match=rf"uid {NOBODY}.*uid 0.*same user"):
                engine.add_peer(descriptor)
