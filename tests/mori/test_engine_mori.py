"""The xgmi engine over the real Mori: the contract of an engine, with copies of every pace."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
import trio
from mori_lane import Answers, Holding, bench, control, delayed, emulated, moriemu, open_xgmi
from trio.testing import wait_all_tasks_blocked

from trio_mori import DescriptorRefused, EngineUnavailable, TransferFailed
from trio_mori._engines import open_engine
from trio_mori.abc import Descriptor, Engine, EnginePeer, Write
from trio_mori.testing._engine_bench import Check, fill, same
from trio_mori.testing._engine_checks import ENGINE_CHECKS

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

KIB = 1024


@pytest.mark.parametrize("delay", [0, 0.002, 0.2] if moriemu else [0])
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_the_engine_keeps_its_contract(check: Check, delay: float) -> None:
    with trio.fail_after(60):
        with delayed(delay):
            await check(bench(delay))


async def test_a_write_out_of_range_is_refused_before_mori_sees_it() -> None:
    class Recorder:
        def write(self, *arguments: int) -> None:
            posted.append(arguments)

    posted: list[object] = []
    with trio.fail_after(30):
        async with open_xgmi(64 * KIB) as engine, open_xgmi(64 * KIB) as other:
            peer = engine.add_peer(other.descriptor)
            for first in (True, False):
                if not first:
                    del engine._transfers._open_and_post
                    await engine.write(peer, Write(0, 0, 64 * KIB))
                    peer.session = Recorder()
                engine._transfers._open_and_post = lambda peer, write: posted.append(write)
                for write in (Write(0, 64 * KIB - 1, 2), Write(64 * KIB, 0, 1), Write(0, 1 << 62, 1), Write(0, -1, 1)):
                    with pytest.raises(TransferFailed, match="refused") as refused:
                        await engine.write(peer, write)
                    assert refused.value.settled
            assert not posted


@emulated
async def test_beside_64_stuck_writes_a_fresh_one_completes_and_the_loop_answers() -> None:
    answers = Answers()

    async def answer() -> None:
        while not answers.over:
            asked = trio.current_time()
            await trio.sleep(0.002)
            answers.add(trio.current_time() - asked - 0.002)

    with trio.fail_after(60):
        async with open_xgmi(64 * KIB) as engine, open_xgmi(64 * KIB) as stuck, open_xgmi(64 * KIB) as free:
            held, quick = engine.add_peer(stuck.descriptor), engine.add_peer(free.descriptor)
            fill(engine, 0, 64 * KIB)
            await engine.write(held, Write(0, 0, 1))
            await engine.write(quick, Write(0, 0, 1))
            Holding(held=3.0).hold(engine, held)
            async with trio.open_nursery() as nursery:
                for index in range(64):
                    nursery.start_soon(engine.write, held, Write(index * KIB, index * KIB, KIB))
                await wait_all_tasks_blocked()
                async with trio.open_nursery() as answering:
                    answering.start_soon(answer)
                    with trio.fail_after(2):
                        while not answers.over:
                            await engine.write(quick, Write(0, 0, 64 * KIB))
                assert engine._transfers._writes == 64, "they are no longer stuck"
                assert same(engine, 0, free, 0, 64 * KIB)
                answers.assert_prompt()


@pytest.mark.parametrize("delay", [0, 0.002] if moriemu else [0])
async def test_first_writes_at_once_and_drops_and_a_close_do_not_deadlock_and_the_close_sees_their_end(
    delay: float,
) -> None:
    begun = under_way = ended = met = 0

    async def write(engine: Engine, peer: EnginePeer, at: int) -> None:
        nonlocal begun, under_way, ended
        begun += 1
        under_way += 1
        with suppress(TransferFailed):  # of a peer that was dropped, or an engine closed, before it was its turn
            await engine.write(peer, Write(at, at, 4 * KIB))
        under_way -= 1
        ended += 1

    with trio.fail_after(120):
        async with open_xgmi(16 * KIB) as one, open_xgmi(16 * KIB) as other, trio.open_nursery() as nursery:
            with delayed(delay):
                for number in range(100):
                    async with open_xgmi(16 * KIB) as engine:
                        for owner in (one, other):
                            peer = engine.add_peer(owner.descriptor)
                            for index in range(4):
                                nursery.start_soon(write, engine, peer, index)
                        for _ in range(number % 4):  # with none they are refused, later Mori has them in its threads
                            await trio.lowlevel.checkpoint()
                        if number % 2:
                            engine.drop_peer(peer)
                        met += under_way
                    assert not under_way, "the close did not wait for them"
                    del engine, peer
    assert begun == ended == 800
    assert met > 200, "they were over before the engine closed"


@emulated
@pytest.mark.parametrize("mode", ["enqueue", "event"])
async def test_a_failed_copy_is_a_typed_error_that_keeps_the_memory(mode: str) -> None:
    with trio.fail_after(30):
        async with open_xgmi(64 * KIB) as engine, open_xgmi(64 * KIB) as other:
            peer = engine.add_peer(other.descriptor)
            fill(engine, 0, 64 * KIB)
            for first in (True, False):
                control("fail_copy", f"1:719:{mode}")
                with pytest.raises(TransferFailed, match="ERR_GPU_OP") as failed:
                    await engine.write(peer, Write(0, 0, KIB))
                assert not failed.value.settled, first
                await engine.write(peer, Write(0, 0, 64 * KIB))
                assert same(engine, 0, other, 0, 64 * KIB)


# --- who may be a peer --------------------------------------------------------------------------------------

# What each half of a descriptor is, in the order in which Mori packs it.
ENGINE = ("key", "node_id", "hostname", "host", "port", "pid")
MEMORY = ("engine_key", "id", "device_id", "device_bus_id", "data", "size", "loc", "ipc_handle")


def altered(descriptor: Descriptor, **changes: object) -> Descriptor:
    """A descriptor as Mori would pack it if things were otherwise."""
    halves = []
    for names, packed in ((ENGINE, descriptor.engine), (MEMORY, descriptor.memory)):
        fields = msgspec.msgpack.decode(packed)
        for name in changes.keys() & set(names):
            fields[names.index(name)] = changes[name]
        halves.append(msgspec.msgpack.encode(fields))
    return Descriptor(*halves)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_key": "another"}, "is said to be of another engine"),
        ({"loc": 1}, "in host memory.*cuda:N"),
        ({"ipc_handle": bytes(64)}, "no ipc handle"),
        ({"ipc_handle": b"x"}, "not a descriptor"),
        ({"size": 0}, "not a descriptor"),
        ({"size": -1}, "not a descriptor"),
        ({"size": 1 << 63}, "not a descriptor"),
        ({"node_id": "elsewhere", "key": "k", "engine_key": "k"}, "another machine.*rdma"),
        ({"key": "k", "engine_key": "k"}, "--pid=host"),
        ({"key": "", "engine_key": ""}, "not a descriptor"),
        ({"port": 65536}, "not a descriptor"),
        ({"size": 12345}, "no engine of this process has this descriptor"),
    ],
)
async def test_a_descriptor_that_cannot_be_true_is_refused_with_the_reason(
    changes: dict[str, object], reason: str
) -> None:
    with trio.fail_after(30):
        async with open_xgmi(64 * KIB) as engine, open_xgmi(64 * KIB) as other:
            assert altered(other.descriptor) == other.descriptor
            with pytest.raises(DescriptorRefused, match=reason):
                engine.add_peer(altered(other.descriptor, **changes))


async def test_nothing_proves_the_end_of_a_stock_peer() -> None:
    with trio.fail_after(30):
        async with open_xgmi(64 * KIB) as engine, open_xgmi(64 * KIB) as other, trio.open_nursery() as nursery:
            stock = altered(other.descriptor, key="stock", engine_key="stock", pid=1)
            nursery.start_soon(engine.wait_fenced, engine.add_peer(stock))
            await wait_all_tasks_blocked()
            assert nursery.child_tasks
            nursery.cancel_scope.cancel()


# --- options, and rdma where there is no NIC ----------------------------------------------------------------


async def test_the_options_of_xgmi_reach_mori(monkeypatch: pytest.MonkeyPatch) -> None:
    import mori.io

    told: list[tuple[int, int]] = []
    real = mori.io.XgmiBackendConfig

    def config(streams: int, events: int) -> object:
        told.append((streams, events))
        return real(streams, events)

    monkeypatch.setattr(mori.io, "XgmiBackendConfig", config)
    options = {"xgmi_num_streams": 3, "xgmi_num_events": 5}
    with trio.fail_after(30):
        async with open_engine("xgmi", pool_size=64 * KIB, device="cuda:0", options=options) as engine:
            async with open_xgmi(64 * KIB) as other:
                del told[1:]
                await engine.write(engine.add_peer(other.descriptor), Write(0, 0, KIB))
    assert told == [(3, 5), (3, 5)]


@emulated
async def test_rdma_without_a_nic_says_what_mori_says_and_what_to_do() -> None:
    with pytest.raises(EngineUnavailable, match=r"no active RDMA device on this host.*ibv_devices.*xgmi"):
        async with open_engine("rdma", pool_size=64 * KIB):
            pass


@emulated
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_rdma_that_falls_back_to_xgmi_keeps_the_contract(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", "0")
    with trio.fail_after(60), delayed(0.002):
        await check(bench(0.002, "rdma"))
