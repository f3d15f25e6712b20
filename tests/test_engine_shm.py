"""The shm engine keeps the contract of an engine, within one process and with share directories."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from descriptors import open_files
from rig import EVERY_ENGINE_CHECK, wait_until
from trio.testing import wait_all_tasks_blocked

from trio_mori import ConfigError, DescriptorRefused, EngineUnavailable, TransferFailed, open_engine
from trio_mori._engines import _copies
from trio_mori._engines._copies import Copies
from trio_mori._engines._fence import LOOK, Fence
from trio_mori._engines._shm_owner import Memory, choose_way, decode, describe_self, encode, open_memory
from trio_mori._engines._syscalls import memfd_create, pidfd_open
from trio_mori.abc import Descriptor, Engine, Write
from trio_mori.testing import ENGINE_CHECKS, EngineBench
from trio_mori.testing._engine_bench import Check

deterministic = pytest.mark.deterministic

POOL = 1 << 20


@pytest.fixture
def share_directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "share"
    directory.mkdir(mode=0o700)
    yield directory
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("check", EVERY_ENGINE_CHECK)
async def test_it_keeps_the_contract(check: Check) -> None:
    with trio.fail_after(30):
        await check(EngineBench(lambda size: open_engine("shm", pool_size=size), closing_fences=True))


@pytest.mark.parametrize("check", ENGINE_CHECKS)
async def test_it_keeps_the_contract_with_a_share_directory(check: Check, share_directory: Path) -> None:
    options = {"share_directory": str(share_directory)}
    with trio.fail_after(30):
        await check(EngineBench(lambda size: open_engine("shm", pool_size=size, options=options), closing_fences=True))


@deterministic
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_ctrl_c_as_it_closes_leaves_no_descriptor_open_and_a_copy_under_way_its_memory(
    copies: bool, shared: bool, share_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"share_directory": str(share_directory)} if shared else {}
    wait, move = Copies.wait_none_running, _copies._move
    began, may_end, moved = threading.Event(), threading.Event(), threading.Event()

    async def press(self: Copies) -> None:
        signal.raise_signal(signal.SIGINT)
        await wait(self)

    def move_slowly(*arguments: Any) -> None:
        began.set()
        assert may_end.wait(10)
        move(*arguments)
        moved.set()

    async def write(engine: Engine) -> None:
        with pytest.raises(TransferFailed, match="abandoned while it ran"):
            await engine.write(engine.add_peer(engine.descriptor), Write(0, 2 * POOL, 2 * POOL))

    async def once(*, press_it: bool) -> None:
        async with trio.open_nursery() as nursery:
            with pytest.raises(KeyboardInterrupt) if press_it else nullcontext():
                async with open_engine("shm", pool_size=4 * POOL, options=options) as engine:
                    if copies and press_it:
                        nursery.start_soon(write, engine)
                        await trio.to_thread.run_sync(began.wait)

    trio.run(partial(once, press_it=False))
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(Copies, "wait_none_running", press)
    monkeypatch.setattr(_copies, "_move", move_slowly)
    trio.run(partial(once, press_it=True))
    may_end.set()
    assert not copies or moved.wait(10)
    # Python's own of a pool that is kept, and the end of a fence that will never tell stay open.
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * copies


@deterministic
@pytest.mark.parametrize("shared", [False, True])
async def test_opening_and_closing_leaves_no_descriptor_open(shared: bool, share_directory: Path) -> None:
    options = {"share_directory": str(share_directory)} if shared else {}

    async def once() -> None:
        async with (
            open_engine("shm", pool_size=POOL, options=options) as one,
            open_engine("shm", pool_size=POOL, options=options) as other,
        ):
            peer = one.add_peer(other.descriptor)
            await one.write(peer, Write(0, 0, POOL))

    await once()
    before = open_files()
    for _ in range(4):
        await once()
    await wait_until(lambda: open_files() <= before)  # a thread may have its last result in hand for a moment


async def test_opening_a_pool_lets_other_tasks_run() -> None:
    async with trio.open_nursery() as nursery:
        turns = Turns()
        nursery.start_soon(turns.count)
        async with open_engine("shm", pool_size=64 << 20):
            assert turns.taken > 10
        nursery.cancel_scope.cancel()


async def test_a_large_write_lets_other_tasks_run() -> None:
    size = 64 << 20
    async with open_engine("shm", pool_size=size) as one, open_engine("shm", pool_size=size) as other:
        peer = one.add_peer(other.descriptor)
        async with trio.open_nursery() as nursery:
            turns = Turns()
            nursery.start_soon(turns.count)
            await one.write(peer, Write(0, 0, size))
            assert turns.taken > 10
            nursery.cancel_scope.cancel()


class Turns:
    """How often a task that always wants to run could."""

    def __init__(self) -> None:
        self.taken = 0

    async def count(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            self.taken += 1


@deterministic
async def test_memory_outlives_the_engine_while_a_tensor_does_and_no_longer() -> None:
    async with open_engine("shm", pool_size=POOL) as engine:
        tensor = engine.region.tensor[:4096]
        tensor.fill_(7)
        start = tensor.data_ptr()
    del engine
    assert int(tensor.sum()) == 7 * 4096
    assert is_mapped(start)
    del tensor
    gc.collect()
    await wait_until(lambda: not is_mapped(start))  # as above


def is_mapped(address: int) -> bool:
    """Whether a pool of this process begins there."""
    return any(
        line.startswith(f"{address:x}-") and "trio-mori-pool" in line
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


async def test_an_abandoned_copy_is_no_fence_when_its_engine_closes() -> None:
    size = 64 << 20
    async with open_engine("shm", pool_size=size) as owner, trio.open_nursery() as nursery:
        async with open_engine("shm", pool_size=size) as writer:
            seen = owner.add_peer(writer.descriptor)
            failures: list[bool] = []

            async def write() -> None:
                try:
                    await writer.write(writer.add_peer(owner.descriptor), Write(0, 0, size))
                except TransferFailed as error:
                    failures.append(error.settled)

            nursery.start_soon(write)
            await wait_all_tasks_blocked()
            writer.abandon()
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel_when_blocked, scope)
            await owner.wait_fenced(seen)
        # The copy may have ended before it could be abandoned; then the engine is over.
        assert (failures, scope.cancelled_caught) in (([False], True), ([], False))


async def cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


@deterministic
async def test_nobody_can_take_memory_away_from_under_a_mapper() -> None:
    async with open_engine("shm", pool_size=POOL) as engine:
        _, memory = decode(engine.descriptor)
        for size in (0, 2 * POOL):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)


@deterministic
async def test_a_pool_is_for_its_user_alone() -> None:
    async with open_engine("shm", pool_size=POOL) as engine:
        status = os.fstat(decode(engine.descriptor)[1].fd)
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.geteuid())


@deterministic
@pytest.mark.skipif(os.geteuid() != 0, reason="needs leave to give files away")
async def test_memory_of_another_user_is_refused_though_all_else_is_right() -> None:
    async with open_engine("shm", pool_size=POOL) as engine:
        owner, memory = decode(engine.descriptor)
        os.fchown(memory.fd, 1234, -1)
        with pytest.raises(DescriptorRefused, match=r"not a pool of this user .*uid 1234, ours 0"):
            open_memory(owner, memory, engine.descriptor)


@deterministic
async def test_a_descriptor_that_names_another_file_is_refused_before_that_is_mapped(tmp_path: Path) -> None:
    async with open_engine("shm", pool_size=POOL) as engine, open_engine("shm", pool_size=POOL) as other:
        owner, memory = decode(engine.descriptor)
        room = os.fstat(memory.fd).st_size
        with ExitStack() as files:

            def keep(fd: int) -> int:
                files.callback(os.close, fd)
                return fd

            pipe, _ = (keep(fd) for fd in os.pipe())
            plain = keep(os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT))
            unsealed = keep(memfd_create("trio-mori-pool"))
            short = keep(memfd_create("trio-mori-pool"))
            for fd in (plain, unsealed):
                os.ftruncate(fd, room)
            for fd, reason in (
                (pipe, "not a pool"),
                (plain, "not anonymous memory"),
                (unsealed, "seals"),
                (short, "has 0"),
                (decode(other.descriptor)[1].fd, "another label"),
                (1 << 20, "closed"),
            ):
                forged = Memory(fd, POOL)
                with pytest.raises(DescriptorRefused, match=reason):
                    open_memory(owner, forged, encode(owner, forged))
            os.close(open_memory(owner, memory, engine.descriptor))


@deterministic
async def test_more_memory_than_there_is_is_an_error_and_nobody_is_killed() -> None:
    with pytest.raises(EngineUnavailable, match=rf"{1 << 50} bytes.*available.*memory_pool_size"):
        async with open_engine("shm", pool_size=1 << 50):
            pass


@deterministic
@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "posix_fallocate"])
async def test_a_pool_that_finds_no_memory_names_the_remedy_and_keeps_none(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _refuse_memory)
        with pytest.raises(
            EngineUnavailable, match=rf"memory ran out at 0 of the pool's {POOL} bytes .*memory_pool_size"
        ):
            async with open_engine("shm", pool_size=POOL):
                pass
        await trio.lowlevel.checkpoint()
        assert open_files() == before
    async with open_engine("shm", pool_size=POOL):
        pass


def _refuse_memory(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@deterministic
async def test_opening_can_be_cancelled() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with open_engine("shm", pool_size=POOL):
            pass
    assert scope.cancelled_caught


@deterministic
async def test_it_needs_no_memfd_and_pidfd_in_the_os_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    async with open_engine("shm", pool_size=POOL) as engine:
        await engine.write(engine.add_peer(engine.descriptor), Write(0, 0, POOL))
    os.close(pidfd_open(os.getpid()))
    with pytest.raises(ProcessLookupError):
        pidfd_open(1 << 22)


@deterministic
async def test_peers_of_another_user_or_machine_are_refused_with_the_remedy() -> None:
    ours = describe_self(shared=False)
    for theirs, remedy in (
        (msgspec.structs.replace(ours, boot=bytes(16)), "another machine.*crosses hosts"),
        (msgspec.structs.replace(ours, uid=ours.uid + 1), f"uid {ours.uid + 1}.*the same user"),
        (msgspec.structs.replace(ours, namespace=1), "pid namespace.*share_directory.*--pid="),
    ):
        with pytest.raises(DescriptorRefused, match=remedy):
            choose_way(ours, theirs)


@deterministic
async def test_a_share_directory_that_others_can_enter_is_refused_with_the_remedy(share_directory: Path) -> None:
    os.chmod(share_directory, 0o750)
    with pytest.raises(EngineUnavailable, match=r"drwxr-x---.*chmod 700"):
        async with open_engine("shm", pool_size=POOL, options={"share_directory": str(share_directory)}):
            pass


@deterministic
async def test_a_share_directory_that_is_not_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineUnavailable, match=r"share_directory .*/file cannot be used: Not a directory"):
        async with open_engine("shm", pool_size=POOL, options={"share_directory": str(tmp_path / "file")}):
            pass


@deterministic
async def test_an_error_in_the_body_leaves_a_sharing_engine_as_it_is(share_directory: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_engine("shm", pool_size=POOL, options={"share_directory": str(share_directory)}):
            raise KeyError("mine")


@deterministic
async def test_descriptors_of_nobody_say_what_is_wrong() -> None:
    async with open_engine("shm", pool_size=POOL) as engine:
        with pytest.raises(DescriptorRefused, match="shm"):
            engine.add_peer(Descriptor(b"/proc/1/mem", b"\0"))


@deterministic
@pytest.mark.parametrize("options", [{"share_directory": "relative"}, {"share_directory": 5}, {"speed": "high"}])
async def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises((ConfigError, EngineUnavailable), match=next(iter(options))):
        async with open_engine("shm", pool_size=POOL, options=options):
            pass


@deterministic
async def test_other_engines_devices_and_sizes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"memory.*shm"):
        open_engine("memory", pool_size=POOL)
    with pytest.raises(EngineUnavailable, match=r"nixl.*release.*shm"):
        open_engine("nixl", pool_size=POOL)
    for size, device, named in ((POOL, "cuda:0", "cuda:0"), (0, "cpu", "memory_pool_size")):
        with pytest.raises(ConfigError, match=named):
            async with open_engine("shm", pool_size=size, device=device):
                pass


def test_the_end_of_a_peer_is_seen_within_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    ours, theirs = os.pipe()
    fence = Fence(ours)
    try:
        assert not fence.is_over()
        os.close(theirs)
        assert not fence.is_over()  # a look counts as long as this
        now += 1.1 * LOOK
        assert fence.is_over()
    finally:
        fence.close()
