"""The rdma engine over a stand-in for Mori, since no machine of ours has a NIC that it uses."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import mori_standin
import pytest
import trio
from mori_standin import Fabric, PeerFailureEvent, PeerFailureReason, StatusCode
from rig import EVERY_ENGINE_CHECK, assert_free, begin, receiver_config, sender_config, wait_until
from threads import count_threads
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_mori import ConfigError, EngineUnavailable, TransferFailed, open_connector
from trio_mori._engines import _mori, _mori_pool, _mori_sweep, _mori_transfers, open_engine
from trio_mori._engines._mori import open_mori
from trio_mori._engines._mori_library import _USED, MemoryDesc, load
from trio_mori._engines._mori_options import RdmaOptions
from trio_mori._engines._mori_outlet import Outlet
from trio_mori._engines._mori_peer import MoriPeer
from trio_mori.abc import Engine, Region, Write
from trio_mori.testing._engine_bench import Check, EngineBench, fill, same

deterministic = pytest.mark.deterministic

SIZE = 65536
OPTIONS: dict[str, object] = {
    "host": "127.0.0.1",
    "rdma_devices": "mlx5_0,mlx5_1",
    "qp_per_transfer": 2,
    "post_batch_size": 8,
    "num_worker_threads": 3,
    "poll_cq_mode": "event",
    "enable_notification": False,
    "notif_per_qp": 16,
    "enable_transfer_chunking": True,
    "chunk_bytes": 4096,
    "max_chunks_per_transfer": 7,
    "num_nics_per_transfer": 2,
}


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    one = Fabric()
    monkeypatch.setattr(_mori, "load", lambda: one)
    return one


@asynccontextmanager
async def pair(size: int = SIZE) -> AsyncIterator[tuple[Engine, Engine, MoriPeer]]:
    async with open_engine("rdma", pool_size=size) as engine, open_engine("rdma", pool_size=size) as other:
        peer = engine.add_peer(other.descriptor)
        assert isinstance(peer, MoriPeer)
        fill(engine, 0, size)
        yield engine, other, peer


@pytest.mark.parametrize("check", EVERY_ENGINE_CHECK)
async def test_the_engine_keeps_its_contract(fabric: Fabric, check: Check) -> None:
    with trio.fail_after(30):
        await check(EngineBench(lambda size: open_engine("rdma", pool_size=size), closing_fences=True))


@deterministic
async def test_every_option_reaches_mori_and_the_environment_is_as_before(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_RDMA_DEVICES", "before")
    with trio.fail_after(10):
        async with open_engine("rdma", pool_size=SIZE, options=OPTIONS):
            assert os.environ["MORI_RDMA_DEVICES"] == "before"
    assert fabric.devices == ["mlx5_0,mlx5_1"]
    (config,) = fabric.configs
    assert OPTIONS.keys() == {field.name for field in attrs.fields(RdmaOptions)}
    for name, value in OPTIONS.items():
        if name not in ("host", "rdma_devices"):
            expected = mori_standin.PollCqMode.EVENT if name == "poll_cq_mode" else value
            assert getattr(config, name) == expected


@deterministic
@pytest.mark.parametrize("named", [True, False])
async def test_a_connectors_configuration_reaches_mori(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setenv("MORI_RDMA_DEVICES", "of_the_environment")
    told: dict[str, object] = {
        "qp_per_transfer": 2,
        "post_batch_size": 8,
        "num_worker_threads": 3,
        "poll_cq_mode": "event",
        "chunk_bytes": 4096,
        "num_nics_per_transfer": 2,
    }
    more = {"device_name": "mlx5_0"} if named else {}
    config = {"role": "sender", "host": "127.0.0.1", "zmq_port": 0, "backend_type": "rdma", "memory_pool_size": SIZE}
    with trio.fail_after(10):
        async with open_connector({**config, **told, **more}):
            assert os.environ["MORI_RDMA_DEVICES"] == "of_the_environment"
    assert fabric.devices == ["mlx5_0" if named else "of_the_environment"]
    (got,) = fabric.configs
    expected = {**told, "poll_cq_mode": mori_standin.PollCqMode.EVENT, "enable_transfer_chunking": True}
    assert {name: getattr(got, name) for name in expected} == expected


@deterministic
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("rdma", {"xgmi_num_streams": 4}),
        ("rdma", {"qp_per_transfer": 0}),
        ("rdma", {"qp_per_transfer": True}),
        ("rdma", {"post_batch_size": 1 << 31}),
        ("xgmi", {"xgmi_num_streams": 4097}),
        ("xgmi", {"xgmi_num_events": 65537}),
        ("rdma", {"poll_cq_mode": "sometimes"}),
        ("xgmi", {"qp_per_transfer": 1}),
    ],
)
async def test_a_wrong_option_names_itself(backend: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        async with open_engine(backend, pool_size=SIZE, device="cuda:0", options=options):
            pass
    assert refused.value.key in options


@deterministic
async def test_without_a_nic_it_says_what_mori_says_and_what_to_do(fabric: Fabric) -> None:
    fabric.nics = False
    with pytest.raises(EngineUnavailable, match=r"no active RDMA device.*/dev/infiniband.*xgmi"):
        async with open_engine("rdma", pool_size=SIZE):
            pass


@deterministic
async def test_without_mori_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(EngineUnavailable, match=r"pip install amd-mori.*3\.10 and 3\.12"):
        async with open_engine("rdma", pool_size=SIZE):
            pass


@deterministic
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "raise ImportError('libpci.so.3: cannot open shared object file')",
            r"does not load: libpci\.so\.3.*ROCm 7.*ldd",
        ),
        ("raise OSError('libamdhip64.so.7: cannot open shared object file')", r"does not load: libamdhip64\.so\.7"),
        ("import nowhere_to_be_found", "does not load: No module named 'nowhere_to_be_found'"),
        ("raise AttributeError('torch has no x')", r"does not load: AttributeError: .*amd-mori.*3\.10 and 3\.12"),
        ("syntax of another Python", r"does not load: SyntaxError: .*amd-mori"),
        ("", r"is not the mori of amd-mori.*pip install amd-mori"),
        ("class IOEngine: pass", r"mori.io\.py is of a release .* no IOEngine\.create_backend.* amd-mori 1\.2\.4"),
        (
            f"IOEngine = type('', (), dict.fromkeys({_USED['IOEngine']}))",
            r"mori.io\.py is of .* no IOEngineConfig\. Take",
        ),
    ],
)
async def test_a_mori_that_is_broken_or_another_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori" / "__init__.py").write_text("")
    (tmp_path / "mori" / "io.py").write_text(source)
    for name in ("mori", "mori.io"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(EngineUnavailable, match=reason) as refused:
            async with open_engine("rdma", pool_size=SIZE):
                pass
        assert isinstance(refused.value, ImportError)
    finally:
        for name in ("mori", "mori.io"):
            sys.modules.pop(name, None)


@deterministic
def test_a_mori_without_sessions_loads_and_has_no_short_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {name: [part for part in parts if part != "create_session"] for name, parts in _USED.items()}
    source = [f"{name} = type('', (), dict.fromkeys({parts}))" for name, parts in used.items()]
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori" / "__init__.py").write_text("")
    (tmp_path / "mori" / "io.py").write_text("\n".join(source))
    for name in ("mori", "mori.io"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        outlet: Any = SimpleNamespace(_engine=load().IOEngine, memory=None)
        assert Outlet.open_session(outlet, cast(Any, None)) is None
    finally:
        for name in ("mori", "mori.io"):
            sys.modules.pop(name, None)


@deterministic
async def test_a_release_of_mori_without_chunking_will_do_until_it_is_asked_for(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        def __init__(self, qp_per_transfer: int, post_batch_size: int, num_worker_threads: int, **more: object) -> None:
            if more.keys() > {"poll_cq_mode", "enable_notification", "notif_per_qp"}:
                raise TypeError("incompatible constructor arguments")

    def create_backend(self: mori_standin.IOEngine, type: object, config: object) -> None:
        assert isinstance(config, Old)
        created(self, type, mori_standin.RdmaBackendConfig())

    created: Any = mori_standin.IOEngine.create_backend
    monkeypatch.setattr(mori_standin.IOEngine, "create_backend", create_backend)
    monkeypatch.setattr(fabric, "RdmaBackendConfig", Old)
    with trio.fail_after(10):
        async with pair() as (engine, other, peer):
            await engine.write(peer, Write(0, 0, 100))
            assert same(engine, 0, other, 0, 100)
        with pytest.raises(EngineUnavailable, match=r"incompatible constructor arguments.*amd-mori 1.2.4"):
            async with open_engine("rdma", pool_size=SIZE, options={"enable_transfer_chunking": True}):
                pass


@deterministic
async def test_a_mori_without_the_backend_says_so(fabric: Fabric) -> None:
    region = _mori_pool.allocate(SIZE, "cpu")
    with pytest.raises(EngineUnavailable, match=r"no attribute 'XgmiBackendConfig'.*amd-mori 1.2.4"):
        async with open_mori("xgmi", pool_size=SIZE, device="cuda:0", options={}, region=region):
            pass


@deterministic
async def test_a_pool_that_mori_cannot_register_says_what_it_needs(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, tensor: object) -> None:
        raise RuntimeError("ibv_reg_mr: cannot allocate memory")

    monkeypatch.setattr(mori_standin.IOEngine, "register_torch_tensor", refuse)
    with pytest.raises(EngineUnavailable, match=r"65536 bytes on cpu: ibv_reg_mr.*ulimit -l"):
        async with open_engine("rdma", pool_size=SIZE):
            pass


@deterministic
async def test_the_environment_is_as_before_when_the_backend_cannot_be_made(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MORI_RDMA_DEVICES", raising=False)
    fabric.nics = False
    with pytest.raises(EngineUnavailable, match="named 'mlx5_0,mlx5_1'"):
        async with open_engine("rdma", pool_size=SIZE, options=OPTIONS):
            pass
    assert "MORI_RDMA_DEVICES" not in os.environ


@deterministic
def test_engines_of_several_threads_never_see_each_others_devices(fabric: Fabric) -> None:
    fabric.slow = 0.002

    async def open_and_close(devices: str) -> None:
        for _ in range(5):
            async with open_engine("rdma", pool_size=SIZE, options={"rdma_devices": devices}):
                pass

    names = ["mlx5_0", "mlx5_1", ""]
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(partial(trio.run, open_and_close), names))
    assert Counter(fabric.devices) == {"mlx5_0": 5, "mlx5_1": 5, None: 5}
    assert "MORI_RDMA_DEVICES" not in os.environ


@deterministic
@pytest.mark.parametrize("fate", [code for code in StatusCode if code not in (0, 2)])
async def test_whatever_is_not_success_is_an_error_with_mori_s_words(fabric: Fabric, fate: StatusCode) -> None:
    with trio.fail_after(10):
        async with pair() as (engine, _, peer):
            fabric.fate = fate
            for _ in range(2):
                with pytest.raises(TransferFailed, match=f"{fate.name} as the test wants") as failed:
                    await engine.write(peer, Write(0, 0, 100))
                assert failed.value.settled == (fate in (StatusCode.ERR_INVALID_ARGS, StatusCode.ERR_NOT_FOUND))


@deterministic
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("first", [True, False])
async def test_no_status_or_several_are_a_failure(fabric: Fabric, count: int, first: bool) -> None:
    with trio.fail_after(10):
        async with pair() as (engine, _, peer):
            if not first:
                await engine.write(peer, Write(0, 0, 100))
            fabric.count = count
            with pytest.raises(TransferFailed, match="no status") as failed:
                await engine.write(peer, Write(0, 0, 100))
            assert not failed.value.settled


@deterministic
async def test_what_mori_raises_for_a_peer_that_was_reached_before_is_carried_over(fabric: Fabric) -> None:
    with trio.fail_after(10):
        async with pair() as (engine, _, peer):
            await engine.write(peer, Write(0, 0, 100))
            fabric.unreachable.add(peer.engine.key)
            with pytest.raises(TransferFailed, match="cannot connect") as failed:
                await engine.write(peer, Write(0, 0, 100))
            assert not failed.value.settled
            assert isinstance(failed.value.__cause__, RuntimeError)


@deterministic
async def test_what_a_session_of_mori_raises_is_carried_over(fabric: Fabric) -> None:
    class Broken:
        def write(self, *arguments: object) -> None:
            raise RuntimeError("the session is broken")

    with trio.fail_after(10):
        async with pair() as (engine, _, peer):
            await engine.write(peer, Write(0, 0, 100))
            peer.session = Broken()  # type: ignore[assignment]
            with pytest.raises(TransferFailed, match="the session is broken") as failed:
                await engine.write(peer, Write(0, 0, 100))
            assert not failed.value.settled
            assert peer.outlet is not None
            assert peer.outlet.doubtful


@deterministic
async def test_what_mori_raises_when_it_is_asked_is_carried_over(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(mori_standin.TransferStatus):
        def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
            if threading.current_thread() is threading.main_thread():
                return StatusCode.IN_PROGRESS
            raise RuntimeError("the status is broken")

    monkeypatch.setattr(mori_standin, "TransferStatus", Broken)
    with trio.fail_after(10):
        async with pair() as (engine, _, peer):
            with pytest.raises(TransferFailed, match="the status is broken") as failed:
                await engine.write(peer, Write(0, 0, 100))
            assert not failed.value.settled
            assert isinstance(failed.value.__cause__, RuntimeError)


@deterministic
async def test_a_peer_that_cannot_be_connected_to_is_refused_and_tried_again(fabric: Fabric) -> None:
    with trio.fail_after(10):
        async with pair() as (engine, other, peer):
            fabric.unreachable.add(peer.engine.key)
            with pytest.raises(TransferFailed, match="cannot connect") as failed:
                await engine.write(peer, Write(0, 0, 100))
            assert failed.value.settled
            fabric.unreachable.clear()
            await engine.write(peer, Write(0, 0, 100))
            assert same(engine, 0, other, 0, 100)


@deterministic
async def test_writes_that_wait_for_a_connection_fail_with_it_and_later_ones_try_again(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(index: int) -> None:
        with pytest.raises(TransferFailed, match="cannot connect") as failed:
            await engine.write(peer, Write(index, index, 100))
        assert failed.value.settled

    def post(outlet: Outlet, remote: MemoryDesc, write: Write) -> object:
        nonlocal tries
        if cast(Any, outlet.engine)._fabric is fabric:  # not a thread that an abandoned engine has left behind
            tries += 1
            assert tried.wait(10)
        return posted(outlet, remote, write)

    tries, tried, posted = 0, threading.Event(), Outlet.post
    monkeypatch.setattr(Outlet, "post", post)
    with trio.fail_after(10):
        async with pair() as (engine, other, peer):
            fabric.unreachable.add(peer.engine.key)
            async with trio.open_nursery() as nursery:
                for index in range(20):
                    nursery.start_soon(write, index)
                await wait_all_tasks_blocked()
                tried.set()
            assert tries == 1
            await write(0)
            assert tries == 2
            fabric.unreachable.clear()
            await engine.write(peer, Write(0, 0, 100))
            assert same(engine, 0, other, 0, 100)


@deterministic
async def test_a_lost_peer_fails_its_transfers_at_once_and_close_waits_for_their_end(fabric: Fabric) -> None:
    async def write() -> None:
        with pytest.raises(TransferFailed, match="PEER_UNREACHABLE gone") as failed:
            await engine.write(peer, Write(0, 0, 100))
        assert not failed.value.settled

    with trio.fail_after(10):
        async with trio.open_nursery() as ending:
            async with pair() as (engine, _, peer):
                await engine.write(peer, Write(0, 0, 100))
                fabric.fate = StatusCode.IN_PROGRESS
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(write)
                    await wait_all_tasks_blocked()
                    fabric.failures.append(
                        PeerFailureEvent(peer.engine.key, PeerFailureReason.PEER_UNREACHABLE, "gone")
                    )

                async def end() -> None:
                    await wait_all_tasks_blocked()
                    for status in fabric.statuses:
                        status.code = StatusCode.ERR_RDMA_OP

                ending.start_soon(end)


@deterministic
async def test_a_lost_peer_is_connected_to_again_and_forgotten_when_it_is_dropped(fabric: Fabric) -> None:
    with trio.fail_after(10):
        async with pair() as (engine, other, peer):
            home = fabric.engines[engine._desc.key]
            await engine.write(peer, Write(0, 0, 100))
            fabric.fate = StatusCode.IN_PROGRESS
            fabric.failures.append(PeerFailureEvent(peer.engine.key, PeerFailureReason.PEER_UNREACHABLE))
            with pytest.raises(TransferFailed, match="PEER_UNREACHABLE"):
                await engine.write(peer, Write(0, 0, 100))
            fabric.statuses[-1].code = fabric.fate = StatusCode.SUCCESS
            await engine.write(peer, Write(0, 200, 100))
            assert same(engine, 0, other, 200, 100)
            for lost in (False, True):
                again = engine.add_peer(other.descriptor)
                await engine.write(again, Write(0, 0, 100))
                if lost:
                    fabric.fate = StatusCode.IN_PROGRESS
                    fabric.failures.append(PeerFailureEvent(peer.engine.key, PeerFailureReason.PEER_UNREACHABLE))
                    with pytest.raises(TransferFailed, match="PEER_UNREACHABLE"):
                        await engine.write(again, Write(0, 0, 100))
                    fabric.statuses[-1].code = StatusCode.SUCCESS
                assert home.remotes
                engine.drop_peer(again)
                assert not home.remotes


@deterministic
async def test_a_mori_that_does_not_tell_of_lost_peers_will_do(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mori_standin.IOEngine, "pop_peer_failure")
    monkeypatch.setattr(_mori_transfers, "INLINE", 0)
    with trio.fail_after(10):
        async with pair() as (engine, other, peer):
            fabric.asked = 5
            await engine.write(peer, Write(0, 0, 100))
            assert same(engine, 0, other, 0, 100)


@deterministic
@pytest.mark.parametrize("error", [RuntimeError("a bad state"), TypeError("incompatible function arguments")])
async def test_a_mori_that_cannot_be_asked_for_lost_peers_will_do(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(self: object) -> None:
        raise error

    monkeypatch.setattr(mori_standin.IOEngine, "pop_peer_failure", refuse)
    monkeypatch.setattr(_mori_transfers, "INLINE", 0)
    with trio.fail_after(10):
        async with pair() as (engine, other, peer):
            fabric.asked = 5
            await engine.write(peer, Write(0, 0, 100))
            assert same(engine, 0, other, 0, 100)
    assert str(error) in caplog.text


@deterministic
async def test_a_call_that_takes_other_arguments_is_a_failed_write(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, *arguments: object) -> None:
        raise TypeError("incompatible function arguments")

    with trio.fail_after(10):
        async with pair() as (engine, _, peer):
            monkeypatch.setattr(mori_standin.IOEngine, "batch_write", refuse)
            with pytest.raises(TransferFailed, match="incompatible function arguments"):
                await engine.write(peer, Write(0, 0, 100))


@deterministic
async def test_nothing_proves_the_end_of_a_peer_of_rdma(fabric: Fabric) -> None:
    with trio.fail_after(10):
        async with open_engine("rdma", pool_size=SIZE) as engine:
            async with open_engine("rdma", pool_size=SIZE) as gone:
                peer = engine.add_peer(gone.descriptor)
                engine.drop_peer(peer)
                descriptor = gone.descriptor
            peer = engine.add_peer(descriptor)  # as of a process elsewhere
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.wait_fenced, peer)
                await wait_all_tasks_blocked()
                assert nursery.child_tasks
                nursery.cancel_scope.cancel()


@deterministic
async def test_stuck_writes_use_one_thread_and_delay_nobody(fabric: Fabric) -> None:
    with trio.fail_after(10):
        async with pair() as (engine, _, peer), open_engine("rdma", pool_size=SIZE) as third:
            quick = engine.add_peer(third.descriptor)
            await engine.write(peer, Write(0, 0, 1))
            await engine.write(quick, Write(0, 0, 1))
            async with trio.open_nursery() as nursery:
                fabric.fate = StatusCode.IN_PROGRESS
                for index in range(64):
                    nursery.start_soon(engine.write, peer, Write(index, index, 100))
                await wait_all_tasks_blocked()
                transfers = engine._transfers
                limiters = (
                    transfers._sweep._threads,
                    transfers._threads,
                    trio.to_thread.current_default_thread_limiter(),
                )
                assert [limiter.borrowed_tokens for limiter in limiters] == [1, 0, 0]
                fabric.fate = StatusCode.SUCCESS
                await engine.write(quick, Write(0, 0, 100))
                for status in fabric.statuses:
                    status.code = StatusCode.SUCCESS


async def test_fifty_rounds_of_stuck_writes_are_failed_in_time_by_the_same_threads(
    fabric: Fabric, clock: MockClock
) -> None:
    """In each, eight writes that do not end; the next one succeeds, and threads do not become more with the rounds."""
    options = {"backend_type": "rdma", "memory_pool_size": 1 << 20, "transfer_timeout_base": 5}
    most = 0
    with trio.fail_after(60 + 51 * 5):
        async with open_connector(sender_config(**options)) as source:
            async with open_connector(receiver_config(source, **options)) as target:
                for number in range(50):
                    keys = [f"{number}_stuck{index}" for index in range(8)]
                    fabric.fate = StatusCode.IN_PROGRESS
                    for key in keys:
                        await source.put("0", "1", key, b"x")
                    before = len(fabric.statuses)
                    async with trio.open_nursery() as nursery:
                        outcomes = [begin(nursery, target.get, "0", "1", key) for key in keys]
                        await wait_until(lambda before=before: len(fabric.statuses) >= before + 8)
                        if number:
                            # One of trio's counts until it has its name.
                            await wait_until(lambda most=most: count_threads() <= most)
                        else:
                            # A thread that looks after writes counts while it does, at each end.
                            most = count_threads() + 2
                        clock.jump(5)
                        for outcome in outcomes:
                            with pytest.raises(TransferFailed, match="within 5"):
                                await outcome.wait()
                    fabric.fate = StatusCode.SUCCESS
                    await source.put("0", "1", "next", b"y")
                    assert await target.get("0", "1", "next") == b"y"
                    for status in fabric.statuses:
                        status.code = StatusCode.SUCCESS
                    await wait_until(lambda: target.health()["quarantined"] == 0)
                    for key in keys:
                        await source.cleanup(key)
                await assert_free(source, target)


@deterministic
@pytest.mark.parametrize(("size", "seconds"), [(100, 50e-6), (_mori_transfers.INLINE + 1, 0.0)])
async def test_the_loop_asks_after_a_small_write_for_the_time_of_a_message_and_after_a_large_one_once(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, size: int, seconds: float
) -> None:
    class Clocked(mori_standin.TransferStatus):
        """To ask for it takes the trio thread 10 us."""

        def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
            nonlocal now, asked
            if threading.current_thread() is threading.main_thread():
                now += 10e-6
                asked += 1
            return super().WaitFor(timeout_ms)

    now = 0.0
    asked = 0
    monkeypatch.setattr(_mori_transfers, "time", SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic))
    monkeypatch.setattr(mori_standin, "TransferStatus", Clocked)
    with trio.fail_after(10):
        async with pair(2 * _mori_transfers.INLINE) as (engine, _, peer), trio.open_nursery() as nursery:
            fabric.fate = StatusCode.IN_PROGRESS
            nursery.start_soon(engine.write, peer, Write(0, 0, size))
            await wait_until(lambda: engine._transfers._sweep.open)
            fabric.statuses[0].code = StatusCode.SUCCESS
    assert asked > 1 if seconds else asked == 1
    assert now == pytest.approx(10e-6 + seconds, abs=11e-6)


async def test_no_write_is_forgotten_however_often_the_sweep_is_held_up(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Waits that are over before they have begun, as the longer ones may be on a busy machine.
    monkeypatch.setattr(_mori_sweep, "SHORTEST", 1e-6)
    monkeypatch.setattr(_mori_transfers, "INLINE", 0)
    with trio.fail_after(20):
        async with pair() as (engine, _, peer):
            await engine.write(peer, Write(0, 0, 100))
            fabric.asked = 3
            for _ in range(2000):
                await engine.write(peer, Write(0, 0, 100))


@deterministic
@pytest.mark.parametrize("ticks", range(6))
async def test_a_write_that_is_abandoned_at_any_moment_ends_at_once(fabric: Fabric, ticks: int) -> None:
    async def write() -> None:
        with pytest.raises(TransferFailed) as failed:
            await engine.write(peer, Write(0, 0, 100))
        outcomes.append(failed.value)

    outcomes: list[TransferFailed] = []
    with trio.fail_after(10):
        async with pair() as (engine, _, peer):
            await engine.write(peer, Write(0, 0, 100))
            fabric.fate = StatusCode.IN_PROGRESS
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                for _ in range(ticks):
                    await trio.lowlevel.checkpoint()
                engine.abandon()
            (error,) = outcomes
            assert error.settled == (len(fabric.statuses) == 1), "it is refused if it was not posted"


@deterministic
async def test_a_pool_that_peers_may_still_write_to_outlives_an_engine_that_was_abandoned(fabric: Fabric) -> None:
    regions: dict[bool, weakref.ref[Region]] = {}
    with trio.fail_after(10):
        for abandons in (False, True):
            async with open_engine("rdma", pool_size=SIZE) as engine:
                regions[abandons] = weakref.ref(engine.region)
                if abandons:
                    engine.abandon()
            del engine
    assert regions[False]() is None, "memory of a GPU does not wait for the collector"
    assert regions[True]() is not None


@deterministic
def test_ctrl_c_between_a_post_and_the_wait_for_its_end_does_not_end_the_engine_over_the_write(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(mori_standin.TransferStatus):
        def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)
            return super().WaitFor(timeout_ms)

    async def main() -> None:
        with trio.fail_after(10):
            async with pair() as (engine, _, peer):
                await engine.write(peer, Write(0, 0, 100))
                monkeypatch.setattr(mori_standin, "TransferStatus", Interrupted)
                fabric.asked = 5
                await engine.write(peer, Write(0, 0, 100))

    monkeypatch.setattr(_mori_transfers, "INLINE", 0)
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert fabric.statuses[-1].Code() is StatusCode.SUCCESS, "the close has waited for it"


@deterministic
def test_ctrl_c_while_the_first_write_is_in_its_thread_leaves_the_thread_what_it_uses(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, over = threading.Event(), threading.Event()
    post = Outlet.post

    def posted_late(outlet: Outlet, remote: MemoryDesc, write: Write) -> object:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.wait(10)
        try:
            return post(outlet, remote, write)
        finally:
            over.set()

    async def main() -> None:
        with trio.fail_after(10):
            async with pair() as (engine, _, peer):
                await engine.write(peer, Write(0, 0, 100))

    monkeypatch.setattr(Outlet, "post", posted_late)
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    interrupted.set()
    assert over.wait(10)
    assert len(fabric.statuses) == 1, "its engine and memory were still there"
