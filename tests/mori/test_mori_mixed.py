"""Our connector at one end and vllm-omni's own at the other, in a process of its own; Mori moves the bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import mori_stock
import pytest
import stock_vllm_omni
import trio
from mori_lane import delayed, emulated, moriemu
from mori_processes import Talker, open_talker
from mori_stock import KINDS, POOL, expected, payload, told
from ports import free_port
from rig import UNIT, assert_free, begin, is_free, port_of, wait_until

from trio_mori import Connector, ConnectorConfig, ManagedBuffer, PeerLost, TransferFailed, open_connector

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
if not stock_vllm_omni.is_there():
    pytest.skip(stock_vllm_omni.MISSING, allow_module_level=True)
pytestmark = pytest.mark.mori

# Seconds for a whole test, of which starting the first process takes three.
LIMIT = 120

# Seconds that a copy takes which is to be interrupted.
LONG = 4.0

DELAYS = [0, 0.002, 0.2] if moriemu else [0]


def config(role: str, port: int = 0, **more: object) -> ConnectorConfig:
    keys = {"sender_host": "127.0.0.1", "sender_zmq_port": port} if port else {}
    device = "cuda:0" if role == "sender" else "cuda:1"
    pool = {"backend_type": "xgmi", "memory_pool_device": device, "memory_pool_size": POOL}
    return ConnectorConfig.from_dict({"role": role, "host": "127.0.0.1", "zmq_port": 0, **pool, **keys, **more})


@asynccontextmanager
async def open_peer(role: str, port: int, delay: float = 0, made_by: str = "stock") -> AsyncIterator[Talker]:
    """A connector of vllm-omni that sends from this port, or receives from it."""
    async with open_talker("mori_stock", role, made_by, port) as talker:
        assert await talker.hear() == "ready"
        if delay:
            await tell(talker, f"delay {delay}")
        yield talker


async def tell(peer: Talker, line: str) -> None:
    """Have it do something."""
    await peer.say(line)
    assert await peer.hear() == "so"


async def put(peer: Talker, kind: str, key: str) -> dict[str, object]:
    """Have it put; returns the metadata."""
    await peer.say(f"put {key} {kind}")
    metadata: dict[str, object] = json.loads(await peer.hear())
    return metadata


async def begin_get(peer: Talker, kind: str, key: str, metadata: Mapping[str, object] | None = None) -> None:
    """Have it ask."""
    await peer.say(f"get {key} {kind} {compact(metadata)}")
    assert await peer.hear() == "asked"


async def get(peer: Talker, kind: str, key: str, metadata: Mapping[str, object] | None = None) -> None:
    """Have it get, and see that what came is what was put."""
    await begin_get(peer, kind, key, metadata)
    assert await peer.hear() == "same"


async def try_once(peer: Talker, key: str, metadata: Mapping[str, object] | None = None) -> bool:
    """Have it ask once; whether something came."""
    await peer.say(f"try {key} {compact(metadata)}")
    return await peer.hear() == "True"


def compact(metadata: Mapping[str, object] | None) -> str:
    return json.dumps(metadata, separators=(",", ":"))


async def get_here(connector: Connector, kind: str, key: str, metadata: Mapping[str, object] | None = None) -> None:
    """Get from a stock sender, and see that what came is what was put."""
    value = await connector.get("0", "1", key, metadata)
    came = told(value)
    if isinstance(value, ManagedBuffer):
        value.release()
    assert came == expected(kind, key), key


# --- payloads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", DELAYS)
async def test_payloads_of_every_kind_come_from_a_stock_sender(delay: float) -> None:
    port = free_port()
    with trio.fail_after(LIMIT):
        async with open_peer("sender", port, delay) as sender, open_connector(config("receiver", port)) as receiver:
            for kind in KINDS:
                await put(sender, kind, f"{kind}-1")
                await get_here(receiver, kind, f"{kind}-1")
                metadata = await put(sender, kind, f"{kind}-2")
                assert metadata["is_fast_path"] is (kind in mori_stock.RAW)
                await get_here(receiver, kind, f"{kind}-2", metadata)
            await assert_free(receiver)


@pytest.mark.parametrize("delay", DELAYS)
async def test_payloads_of_every_kind_go_to_a_stock_receiver(delay: float) -> None:
    with trio.fail_after(LIMIT):
        async with open_connector(config("sender", stock_keep=0.1)) as sender:
            async with open_peer("receiver", port_of(sender)) as receiver:
                with delayed(delay):
                    for kind in KINDS:
                        await sender.put("0", "1", f"{kind}-1", payload(kind, f"{kind}-1"))
                        await get(receiver, kind, f"{kind}-1")
                        receipt = await sender.put("0", "1", f"{kind}-2", payload(kind, f"{kind}-2"))
                        assert receipt.metadata["is_fast_path"] is (kind in mori_stock.RAW)
                        await get(receiver, kind, f"{kind}-2", receipt.metadata)
                await assert_free(sender)


async def test_a_get_before_the_put_is_answered_after_it() -> None:
    port = free_port()
    with trio.fail_after(LIMIT):
        async with open_peer("sender", port) as sender, open_connector(config("receiver", port)) as receiver:
            async with trio.open_nursery() as nursery:
                outcome = begin(nursery, get_here, receiver, "structure", "k")
                await put(sender, "word", "first")
                await get_here(receiver, "word", "first")  # after k was asked for
                await put(sender, "structure", "k")
                await outcome.wait()
        async with open_connector(config("sender")) as ours, open_peer("receiver", port_of(ours)) as theirs:
            await begin_get(theirs, "structure", "k")
            await ours.put("0", "1", "k", payload("structure", "k"))
            assert await theirs.hear() == "same"


@pytest.mark.parametrize("kind", ["tensor", "structure"])
async def test_many_payloads_cross_at_once(kind: str) -> None:
    port, keys = free_port(), [f"k{number}" for number in range(20)]
    with trio.fail_after(LIMIT):
        async with open_peer("sender", port, DELAYS[-1] / 100) as sender:
            async with open_connector(config("receiver", port)) as receiver:
                async with trio.open_nursery() as nursery:
                    for key in keys:
                        nursery.start_soon(get_here, receiver, kind, key)
                    for key in keys:
                        await put(sender, kind, key)
                await assert_free(receiver)
        async with open_connector(config("sender")) as ours, open_peer("receiver", port_of(ours)) as theirs:
            with delayed(DELAYS[-1] / 100):
                await theirs.say(f"many k {len(keys)} {kind}")
                for key in keys:
                    await ours.put("0", "1", key, payload(kind, key))
                assert await theirs.hear() == str(len(keys))


async def test_a_stage_in_the_middle_passes_on_what_it_got_between_stock_stages() -> None:
    port = free_port()
    with trio.fail_after(LIMIT):
        async with open_peer("sender", port) as first, open_connector(config("both", port, stock_keep=0.1)) as middle:
            async with open_peer("receiver", port_of(middle)) as last:
                for kind in KINDS:
                    await put(first, kind, kind)
                    value = await middle.get("0", "1", kind)
                    await middle.put("0", "1", kind, value)  # a raw payload without a copy: it is in the pool
                    await get(last, kind, kind)
                await assert_free(middle)


# --- what is wrong ------------------------------------------------------------------------------------------


async def test_a_length_that_is_not_the_payloads_is_refused_and_the_payload_stays() -> None:
    def wrong(metadata: Mapping[str, object]) -> list[dict[str, object]]:
        size = metadata["data_size"]
        assert isinstance(size, int)
        return [{**metadata, "data_size": size + off} for off in (-1, 1, 1 << 20)]

    port = free_port()
    with trio.fail_after(LIMIT):
        async with open_peer("sender", port) as sender, open_connector(config("receiver", port)) as receiver:
            for kind in ("bytes", "structure"):
                for metadata in wrong(await put(sender, kind, kind)):
                    with pytest.raises(TransferFailed):
                        await receiver.get("0", "1", kind, metadata)
                await get_here(receiver, kind, kind)
            await assert_free(receiver)
        async with open_connector(config("sender")) as ours, open_peer("receiver", port_of(ours)) as theirs:
            for kind in ("bytes", "structure"):
                receipt = await ours.put("0", "1", kind, payload(kind, kind))
                for metadata in wrong(receipt.metadata):
                    assert not await try_once(theirs, kind, metadata)
                await get(theirs, kind, kind)
            assert ours.statistics().events["out_refused_pulls"] == 6


@emulated
@pytest.mark.parametrize("how", ["enqueue", "event"])
async def test_a_copy_that_fails_costs_one_get_and_the_payload_comes_at_the_next(how: str) -> None:
    port = free_port()
    with trio.fail_after(LIMIT):
        async with open_peer("sender", port) as sender, open_connector(config("receiver", port)) as receiver:
            await put(sender, "bytes", "k")
            await tell(sender, f"fail {how}")
            with pytest.raises(TransferFailed):
                await receiver.get("0", "1", "k")
            await get_here(receiver, "bytes", "k")
        async with open_connector(config("sender", close_grace=0.3)) as ours:
            async with open_peer("receiver", port_of(ours)) as theirs:
                await ours.put("0", "1", "k", payload("bytes", "k"))
                moriemu.ctl("fail_copy", f"1:719:{how}")
                assert not await try_once(theirs, "k")
                await get(theirs, "bytes", "k")


# --- peers that go away -------------------------------------------------------------------------------------


@emulated
async def test_a_stock_receiver_that_is_killed_during_a_write_leaves_nothing_and_delays_no_other() -> None:
    with trio.fail_after(LIMIT):
        async with open_connector(config("sender", stock_keep=0.1)) as sender:
            async with open_peer("receiver", port_of(sender)) as other:
                async with open_peer("receiver", port_of(sender)) as doomed:
                    await sender.put("0", "1", "k", payload("bytes", "k"))
                    opened = moriemu.stats()["ipc_opens"]
                    with delayed(LONG):
                        await begin_get(doomed, "bytes", "k")
                        await wait_until(lambda: moriemu.stats()["ipc_opens"] > opened)
                        await doomed.kill()
                assert sender.statistics().held.get("pinned"), "the copy goes on"
                await sender.put("0", "1", "other", payload("structure", "other"))
                await get(other, "structure", "other")
                assert sender.statistics().held.get("pinned"), "and nobody waited for it"
                await wait_until(lambda: is_free(sender), within=2 * LONG)


@emulated
async def test_a_stock_receiver_whose_process_is_gone_when_its_pull_is_served_loses_nothing_for_the_next() -> None:
    with trio.fail_after(LIMIT):
        async with open_connector(config("sender", close_grace=0.3)) as sender:
            async with open_peer("receiver", port_of(sender)) as doomed:
                await sender.put("0", "1", "k", payload("bytes", "k"))
                moriemu.ctl("fail_copy", "1:719:event")
                with delayed(0.5):
                    await begin_get(doomed, "bytes", "k")
                    await wait_until(lambda: sender.statistics().held.get("pinned"))
                    await doomed.kill()
            async with open_peer("receiver", port_of(sender)) as successor:
                await get(successor, "bytes", "k")


@emulated
async def test_a_stock_sender_that_is_killed_during_a_write_is_lost_and_its_successor_is_found() -> None:
    port = free_port()
    with trio.fail_after(LIMIT):
        async with open_connector(config("receiver", port, close_grace=0)) as receiver:
            async with open_peer("sender", port, LONG) as doomed, trio.open_nursery() as nursery:
                await put(doomed, "bytes", "k")
                outcome = begin(nursery, receiver.get, "0", "1", "k")
                await wait_until(lambda: receiver.statistics().held.get("posted"))
                await doomed.kill()
                with pytest.raises(PeerLost):
                    await outcome.wait()
            size = -(-len(payload("bytes", "k")) // UNIT) * UNIT
            assert receiver.health()["quarantined"] == size, "nothing proves that the write has ended"
            async with open_peer("sender", port) as successor:
                await put(successor, "bytes", "k")
                await get_here(receiver, "bytes", "k")


# --- the plugin's connector ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [("stock", "ours"), ("ours", "stock")], ids="-".join)
async def test_payloads_of_every_kind_cross_between_the_plugins_connector_and_stock(ends: tuple[str, str]) -> None:
    port = free_port()
    with trio.fail_after(LIMIT):
        async with open_peer("sender", port, made_by=ends[0]) as sender:
            async with open_peer("receiver", port, made_by=ends[1]) as receiver:
                for delay in DELAYS:
                    if delay:
                        await tell(sender, f"delay {delay}")
                    for kind in KINDS:
                        key = f"{kind}-{delay}"
                        await put(sender, kind, key)
                        await get(receiver, kind, key)
                        metadata = await put(sender, kind, f"{key}-again")
                        await get(receiver, kind, f"{key}-again", metadata)


@pytest.mark.skipif(not stock_vllm_omni.FOLDER, reason="where all of vllm-omni is installed, it is what it is")
def test_the_stock_connector_is_the_wheels() -> None:
    expected("chunk", "k")
    stock_vllm_omni.import_stock()
    assert stock_vllm_omni.changed() == []
