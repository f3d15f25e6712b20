"""Leases and managed buffers: payloads that are read, and put on, where they lie."""

from __future__ import annotations

import pytest
import torch
import trio
import trio.testing
from rig import POOL, assert_books_agree, begin, filled, open_pair, receiver_config, start_stage, wait_until

from trio_mori import KeyBusy, LeaseError, ManagedBuffer

pytestmark = pytest.mark.deterministic


async def test_a_lease_shows_the_payload_where_it_arrived() -> None:
    async with open_pair() as pair:
        data = torch.arange(64, dtype=torch.bfloat16).reshape(4, 16)
        await pair.put("k", data)
        async with pair.receiver.lease("0", "1", "k") as lease:
            assert lease.size == 128
            assert torch.equal(lease.as_tensor(torch.bfloat16, (4, 16)), data)
            value = lease.value()
            assert torch.equal(value, data)
            address = pair.receiver_engine.region.tensor.data_ptr()
            assert address <= value.data_ptr() < address + POOL
            assert pair.receiver.statistics().held["leased"] > 0
            del value
        await pair.assert_whole()


async def test_a_lease_of_a_structure_without_tensors_has_its_value() -> None:
    async with open_pair() as pair:
        await pair.put("k", {"a": 1})
        async with pair.receiver.lease("0", "1", "k") as lease:
            assert lease.value() == {"a": 1}
        await pair.assert_whole()


async def test_a_tensor_that_outlives_its_lease_keeps_the_memory_and_is_reported() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        with pytest.raises(LeaseError):
            async with pair.receiver.lease("0", "1", "k") as lease:
                kept = lease.tensor
        assert pair.receiver.statistics().held["leased"] > 0
        assert torch.equal(kept, filled(1000))
        del kept
        await pair.assert_whole()


async def test_a_lease_whose_block_fails_raises_that_error_and_gives_the_memory_back() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        with pytest.raises(ZeroDivisionError):
            async with pair.receiver.lease("0", "1", "k"):
                raise ZeroDivisionError
        await pair.assert_whole()


async def test_a_managed_buffer_of_this_pool_is_put_on_without_a_copy() -> None:
    async with open_pair(receiver={"role": "both", "host": "127.0.0.1", "zmq_port": 0}) as pair:
        await pair.put("k", filled(1000))
        async with pair.receiver.lease("0", "1", "k") as lease:
            receipt = await pair.receiver.put("1", "2", "on", lease.buffer)
            assert lease.buffer.released
        assert receipt.size == 1000
        held = pair.receiver.statistics().held
        assert held["published"] > 0
        assert held["leased"] == 0
        assert_books_agree(pair.receiver)
        assert await pair.receiver.cleanup("on") == 1
        await pair.assert_whole()


async def test_a_managed_buffer_stays_the_callers_when_its_key_became_busy_while_it_waited() -> None:
    async with open_pair(receiver={"role": "both", "host": "127.0.0.1", "zmq_port": 0}) as pair:
        middle = pair.receiver
        await pair.put("k", filled(POOL // 4))
        await middle.put("1", "2", "fill", filled(POOL * 5 // 8))
        await middle.put("1", "2", "on", b"before")
        async with trio.open_nursery() as nursery, middle.lease("0", "1", "k") as lease:
            last = await start_stage(nursery, pair.fabric, **receiver_config(middle))
            put = begin(nursery, middle.put, "1", "2", "on", lease.buffer)
            await wait_until(lambda: middle.statistics().pool.waiting)
            pair.receiver_engine.hold()
            got = begin(nursery, last.connector.get, "1", "2", "on")
            await wait_until(lambda: pair.receiver_engine.held)
            assert await middle.cleanup("fill") == 1
            with pytest.raises(KeyBusy):
                await put.wait()
            assert bool((lease.tensor == 7).all())
            assert_books_agree(middle)
            pair.receiver_engine.release()
            assert await got.wait() == b"before"
            await middle.put("1", "2", "on", lease.buffer)
            assert bool((await last.connector.get("1", "2", "on") == 7).all())
            await last.close()
        await pair.assert_whole()


async def test_a_managed_buffer_of_another_pool_is_copied() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(1000))
        async with pair.receiver.lease("0", "1", "k") as lease:
            assert isinstance(lease.buffer, ManagedBuffer)
            await pair.put("again", lease.buffer)
        assert torch.equal(await pair.get("again"), filled(1000))
        await pair.assert_whole()
