"""Structures for stock receivers: encoded when the first one asks, and never on the loop when that takes long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import attrs
import pytest
import torch
import trio
import trio.testing
from rig import LIMIT, assert_books_agree, assert_free, port_of, sender_config, wait_until
from stock_peers import StockClient, open_stock_client, restored

from trio_mori import Connector, UnsupportedPayload, _stock_reception, open_connector
from trio_mori.testing import MemoryFabric

LARGE = {"hidden": torch.arange(1 << 20, dtype=torch.int16), "step": 3}  # 2 MB: above what is copied on the loop
AREA = 4 << 20


class Encoder:
    """Stands in for the encoder, and lets a test hold it."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = trio.Event()
        self._encode = _stock_reception._stock_payload.stock_encode

    def __call__(self, header: bytes, source: torch.Tensor) -> bytes:
        self.begun += 1
        trio.from_thread.run(self.go_on.wait)
        return self._encode(header, source)


@attrs.frozen
class Stand:
    sender: Connector
    clients: list[StockClient]
    encoder: Encoder


@asynccontextmanager
async def open_stand(monkeypatch: pytest.MonkeyPatch, clients: int = 1, pool: int = 16 << 20) -> AsyncIterator[Stand]:
    encoder = Encoder()
    monkeypatch.setattr(_stock_reception._stock_payload, "stock_encode", encoder)
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT), ExitStack() as sockets:
        async with fabric.open(pool_size=pool) as ours, fabric.open(pool_size=AREA) as theirs:
            async with open_connector(sender_config(), engine=ours) as sender:
                asking = [sockets.enter_context(open_stock_client(port_of(sender), theirs)) for _ in range(clients)]
                yield Stand(sender, asking, encoder)
            assert ours.violations == []


async def test_a_large_structure_is_encoded_once_while_everything_else_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_stand(monkeypatch, clients=3) as stand:
        one, two, other = stand.clients
        size = (await stand.sender.put("0", "1", "k", LARGE)).metadata["data_size"]
        await stand.sender.put("0", "1", "raw", torch.zeros(100, dtype=torch.uint8))
        found: list[object] = []

        async def query(client: StockClient) -> None:
            found.append(await client.query("k@0_1"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(query, one)
            nursery.start_soon(query, two)
            await wait_until(lambda: stand.encoder.begun)
            assert await other.pull("raw@0_1", 0, 100) == b"trans_done"
            assert_books_agree(stand.sender)
            assert not found
            stand.encoder.go_on.set()
        assert found == [{"request_id": "k@0_1", "data_size": size, "is_fast_path": False}] * 2
        assert stand.encoder.begun == 1
        assert await one.pull("k@0_1", 0, size) == b"trans_done"
        value = restored(bytes(one.region(0, size).numpy()))
        assert torch.equal(value["hidden"], LARGE["hidden"])
        await other.query("nothing@0_1")
        await one.query("nothing@0_1")
        await assert_free(stand.sender)


async def test_a_structure_that_is_cleaned_up_while_it_is_encoded_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_stand(monkeypatch) as stand:
        (client,) = stand.clients
        await stand.sender.put("0", "1", "k", LARGE)
        found: list[object] = []

        async def query() -> None:
            found.append(await client.query("k@0_1"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(query)
            await wait_until(lambda: stand.encoder.begun)
            assert await stand.sender.cleanup("k") == 1
            assert stand.sender.statistics().held["pinned"], "the thread reads and writes it"
            stand.encoder.go_on.set()
        assert found == [None]
        await assert_free(stand.sender)


async def test_a_close_waits_for_an_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stand(monkeypatch) as stand:
        (client,) = stand.clients
        await stand.sender.put("0", "1", "k", LARGE)
        client.ask_nowait(client.pull_request("k@0_1", 0, 100))
        await wait_until(lambda: stand.encoder.begun)
        over = trio.Event()

        async def drain() -> None:
            await stand.sender._wind_up()
            over.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await trio.testing.wait_all_tasks_blocked()
            assert not over.is_set()
            stand.encoder.go_on.set()
        assert await client.answer() == b"trans_error"


async def test_a_structure_for_which_there_is_no_room_twice_is_not_found_and_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_stand(monkeypatch, pool=3 << 20) as stand:
        (client,) = stand.clients
        await stand.sender.put("0", "1", "k", LARGE)
        assert await client.query("k@0_1") is None
        assert not stand.encoder.begun
        assert stand.sender.statistics().held["published"]


@pytest.mark.parametrize("data", [LARGE, {"step": 3, "hidden": torch.arange(8)}], ids=["in a thread", "at once"])
async def test_a_structure_that_turns_out_to_have_no_stock_form_is_not_found_and_hurts_nobody(
    monkeypatch: pytest.MonkeyPatch, data: object
) -> None:
    async with open_stand(monkeypatch) as stand:

        def refuse(header: bytes, source: torch.Tensor) -> bytes:
            raise UnsupportedPayload("it is too large for msgpack", path="payload")

        monkeypatch.setattr(_stock_reception._stock_payload, "stock_encode", refuse)
        (client,) = stand.clients
        await stand.sender.put("0", "1", "k", data)
        assert await client.query("k@0_1") is None
        assert await client.query("k@0_1") is None
        await stand.sender.cleanup("k")
        await assert_free(stand.sender)
