"""Roles, several peers, and peers that come late, go, are killed, or are replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
import trio
from ports import free_port
from rig import (
    LIMIT,
    POOL,
    SOON,
    UNIT,
    Stage,
    assert_free,
    begin,
    filled,
    open_pair,
    pass_time,
    port_of,
    receiver_config,
    start_stage,
    wait_until,
)
from trio.testing import MockClock

from trio_mori import (
    EngineMismatch,
    KeyRefused,
    NoEndpoint,
    NotReady,
    PeerLost,
    WrongRole,
    open_connector,
)
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic


def to(stage: Stage | int) -> dict[str, object]:
    """Where a receiver finds its sender."""
    return {"sender_host": "127.0.0.1", "sender_zmq_port": stage if isinstance(stage, int) else stage.port}


# --- what a role allows -------------------------------------------------------------------------------------


@deterministic
@pytest.mark.parametrize("pages", [2, 3, 25])
async def test_a_middle_stage_opens_with_pools_of_any_number_of_pages(pages: int) -> None:
    size = pages * UNIT
    async with MemoryFabric().open(pool_size=size) as engine:
        config = {"role": "both", "zmq_port": 0, "memory_pool_size": size, "guaranteed_fraction": 0.5}
        async with open_connector(config, engine=engine) as connector:
            assert connector.statistics().pool.free == size


@deterministic
async def test_a_receiver_refuses_to_put() -> None:
    async with open_pair() as pair:
        with pytest.raises(WrongRole, match="put of 'k' on a connector of role receiver"):
            await pair.receiver.put("0", "1", "k", b"x")
        with pytest.raises(WrongRole):
            pair.receiver.put_nowait("0", "1", "k", b"x")
        with pytest.raises(WrongRole):
            pair.receiver.open_chunk_sender("r", "2", from_stage="1")


@deterministic
async def test_a_sender_without_an_endpoint_refuses_to_get_and_one_with_metadata_gets() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        with pytest.raises(WrongRole, match="get of 'k' on a connector of role sender"):
            await pair.sender.get("0", "1", "k")
        with pytest.raises(WrongRole):
            pair.sender.get_nowait("0", "1", "k")
        with pytest.raises(WrongRole):
            pair.sender.open_chunk_receiver("r", "0", to_stage="1")
        other = await start_stage(nursery, pair.fabric, role="sender")
        receipt = await other.connector.put("5", "0", "k", b"x")
        assert await pair.sender.get("5", "0", "k", receipt.metadata) == b"x"
        await other.close()


@deterministic
@pytest.mark.parametrize(
    "known", [{}, {"host": "auto"}, {"sender_host": "auto"}, {"sender_host": "127.0.0.1"}, {"sender_zmq_port": 5}]
)
async def test_a_receiver_that_was_not_told_its_sender_says_what_to_set(known: dict[str, object]) -> None:
    async with MemoryFabric().open() as engine, open_connector({"role": "receiver", **known}, engine=engine) as conn:
        with pytest.raises(NoEndpoint, match=r"set sender_host and sender_zmq_port, call update_sender_info"):
            await conn.get("0", "1", "k")
        with pytest.raises(NoEndpoint):
            conn.get_nowait("0", "1", "k")
        with pytest.raises(NoEndpoint):
            conn.open_chunk_receiver("r", "0", to_stage="1")


@deterministic
async def test_auto_as_the_senders_host_dials_loopback() -> None:
    async with open_pair() as pair:
        pair.receiver.update_sender_info("auto", port_of(pair.sender))
        await pair.put("k", b"x")
        assert await pair.get("k") == b"x"


@deterministic
async def test_engines_that_do_not_know_each_other_are_a_mismatch_that_names_both() -> None:
    async with MemoryFabric().open() as stranger, open_pair() as pair:
        async with open_connector(receiver_config(pair.sender), engine=stranger) as conn:
            for _ in range(2):
                with pytest.raises(EngineMismatch) as caught:
                    await conn.get("0", "1", "k")
                assert caught.value.ours == caught.value.theirs == ("memory",)
            with pytest.raises(EngineMismatch):
                conn.get_nowait("0", "1", "k")
        await pair.assert_whole()


# --- several peers ------------------------------------------------------------------------------------------


@deterministic
async def test_a_receiver_gets_from_two_senders_whatever_the_other_does() -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            fabric = MemoryFabric()
            one = await start_stage(nursery, fabric, role="sender")
            two = await start_stage(nursery, fabric, role="sender")
            target = await start_stage(nursery, fabric, role="receiver")
            one.engine.hold()
            stuck = await one.connector.put("0", "2", "stuck", filled(1000))
            outcome = begin(nursery, target.connector.get, "0", "2", "stuck", stuck.metadata)
            await wait_until(lambda: one.engine.held)
            for number in range(20):
                receipt = await two.connector.put("1", "2", f"k{number}", filled(1000, number))
                value = await target.connector.get("1", "2", f"k{number}", receipt.metadata)
                assert torch.equal(value, filled(1000, number))
            assert target.connector.health()["peers"] == 2
            one.engine.release()
            assert torch.equal(await outcome.wait(), filled(1000))
            await assert_free(one.connector, two.connector, target.connector)
            for stage in (one, two, target):
                await stage.close()


@deterministic
async def test_two_receivers_of_one_sender_each_get_their_own_and_share_a_key_in_turn() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        other = await start_stage(nursery, pair.fabric, role="receiver", **to(port_of(pair.sender)))
        await pair.put("a", b"a")
        await pair.put("b", b"b")
        assert await other.connector.get("0", "1", "a") == b"a"
        assert await pair.get("b") == b"b"
        first = await pair.get_later(nursery, "k")
        second = begin(nursery, other.connector.get, "0", "1", "k")
        await wait_until(lambda: pair.parked() == 2)
        await pair.put("k", b"one")
        assert await first.wait() == b"one"
        assert not second.over.is_set()
        await pair.put("k", b"two")
        assert await second.wait() == b"two"
        await pair.assert_whole()
        await other.close()


@pytest.mark.parametrize(
    ("requests", "chunks"), [pytest.param(25, 4, marks=deterministic), (200, 10)], ids=["25 by 4", "200 by 10"]
)
async def test_three_stages_move_every_chunk_with_the_middle_one_busy_both_ways(requests: int, chunks: int) -> None:
    def payload(request: int, chunk: int) -> torch.Tensor:
        return torch.arange(64, dtype=torch.int32) + request * 100 + chunk

    with trio.fail_after(3 * LIMIT):
        async with trio.open_nursery() as nursery:
            fabric = MemoryFabric()
            first = await start_stage(nursery, fabric, 4 * POOL, role="sender", stage_id=0)
            middle = await start_stage(nursery, fabric, 4 * POOL, role="both", stage_id=1, **to(first))
            last = await start_stage(nursery, fabric, 4 * POOL, role="receiver", stage_id=2, **to(middle))
            limiter = trio.CapacityLimiter(16)
            metadata: dict[tuple[str, int, int], dict[str, object]] = {}
            came = 0

            async def produce(request: int) -> None:
                for chunk in range(chunks):
                    receipt = await first.connector.put("0", "1", f"r{request}_0_{chunk}", payload(request, chunk))
                    metadata["1", request, chunk] = receipt.metadata

            async def pass_on(request: int) -> None:
                for chunk in range(chunks):
                    known = metadata.get(("1", request, chunk)) if request % 2 else None
                    value = await middle.connector.get("0", "1", f"r{request}_0_{chunk}", known)
                    assert isinstance(value, torch.Tensor)
                    receipt = await middle.connector.put("1", "2", f"r{request}_1_{chunk}", value + 1)
                    metadata["2", request, chunk] = receipt.metadata

            async def consume(request: int) -> None:
                nonlocal came
                for chunk in range(chunks):
                    known = metadata.get(("2", request, chunk)) if request % 2 else None
                    value = await last.connector.get("1", "2", f"r{request}_1_{chunk}", known)
                    assert isinstance(value, torch.Tensor)
                    assert torch.equal(value, payload(request, chunk) + 1)
                    came += 1

            async def run(request: int) -> None:
                async with limiter, trio.open_nursery() as stages:
                    for stage in (produce, pass_on, consume):
                        stages.start_soon(stage, request)

            async with trio.open_nursery() as streams:
                for request in range(requests):
                    streams.start_soon(run, request)
            assert came == requests * chunks
            assert [e.port for e in middle.connector._receiver.upstreams] == [first.port], "it never asked itself"
            await assert_free(first.connector, middle.connector, last.connector)
            for stage in (last, middle, first):
                await stage.close()


@deterministic
async def test_a_middle_stage_whose_inbound_half_is_full_still_puts() -> None:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            fabric = MemoryFabric()
            first = await start_stage(nursery, fabric, role="sender")
            middle = await start_stage(nursery, fabric, role="both", **to(first))
            last = await start_stage(nursery, fabric, role="receiver", **to(middle))
            share = POOL * 3 // 4
            await first.connector.put("0", "1", "big", filled(share))
            async with middle.connector.lease("0", "1", "big"):
                await first.connector.put("0", "1", "more", filled(2 * UNIT))
                with pytest.raises(NotReady):
                    middle.connector.get_nowait("0", "1", "more")
                await middle.connector.put("1", "2", "k", filled(POOL // 4, 2))
                assert torch.equal(await last.connector.get("1", "2", "k"), filled(POOL // 4, 2))
            assert torch.equal(await middle.connector.get("0", "1", "more"), filled(2 * UNIT))
            await assert_free(first.connector, middle.connector, last.connector)
            for stage in (last, middle, first):
                await stage.close()


@deterministic
async def test_room_that_a_payload_leaves_behind_serves_one_that_waits_to_come_in() -> None:
    """In role both the halves share the pool: what was sent makes room for what is received, at once."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            fabric = MemoryFabric()
            first = await start_stage(nursery, fabric, role="sender")
            middle = await start_stage(nursery, fabric, role="both", **to(first))
            last = await start_stage(nursery, fabric, role="receiver", **to(middle))
            await middle.connector.put("1", "2", "out", filled(POOL * 3 // 4))
            await first.connector.put("0", "1", "in", filled(POOL // 2))
            outcome = begin(nursery, middle.connector.get, "0", "1", "in")
            await wait_until(lambda: first.connector.statistics().held.get("claimed"))
            await last.connector.get("1", "2", "out")
            assert torch.equal(await outcome.wait(), filled(POOL // 2))
            for stage in (last, middle, first):
                await stage.close()


@deterministic
async def test_two_stages_that_send_to_each_other_work_and_close_in_any_order() -> None:
    for order in ((0, 1), (1, 0)):
        async with trio.open_nursery() as nursery:
            with trio.fail_after(LIMIT):
                fabric = MemoryFabric()
                one = await start_stage(nursery, fabric, role="both")
                two = await start_stage(nursery, fabric, role="both", **to(one))
                one.connector.update_sender_info("127.0.0.1", two.port)
                for number in range(5):
                    await one.connector.put("0", "1", f"a{number}", b"a")
                    await two.connector.put("1", "0", f"b{number}", b"b")
                    assert await two.connector.get("0", "1", f"a{number}") == b"a"
                    assert await one.connector.get("1", "0", f"b{number}") == b"b"
                await assert_free(one.connector, two.connector)
                for index in order:
                    await (one, two)[index].close()


# --- senders that come late and go --------------------------------------------------------------------------


@deterministic
async def test_a_get_waits_for_a_sender_that_is_not_up_yet() -> None:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            fabric, port = MemoryFabric(), free_port()
            target = await start_stage(nursery, fabric, role="receiver", **to(port))
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            with pytest.raises(NotReady):
                target.connector.get_nowait("0", "1", "other")
            source = await start_stage(nursery, fabric, role="sender", zmq_port=port)
            await source.connector.put("0", "1", "k", b"x")
            assert await outcome.wait() == b"x"
            await target.connector.cleanup("other")
            await assert_free(source.connector, target.connector)
            await target.close()
            await source.close()


@deterministic
@pytest.mark.parametrize("way", ["close", "crash"])
async def test_a_waiting_get_is_served_by_the_sender_that_comes_back(way: str) -> None:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            fabric = MemoryFabric()
            source = await start_stage(nursery, fabric, role="sender")
            port = source.port
            target = await start_stage(nursery, fabric, role="receiver", **to(port))
            await source.connector.put("0", "1", "first", b"first")
            assert await target.connector.get("0", "1", "first") == b"first"
            for number in range(3):
                outcomes = [begin(nursery, target.connector.get, "0", "1", f"k{number}_{i}") for i in range(5)]
                await wait_until(lambda: target.connector.statistics().parked == 5)
                await getattr(source, way)()
                source = await start_stage(nursery, fabric, role="sender", zmq_port=port)
                for index, outcome in enumerate(outcomes):
                    await source.connector.put("0", "1", f"k{number}_{index}", b"%d" % index)
                    assert await outcome.wait() == b"%d" % index
                await assert_free(source.connector, target.connector)
            await target.close()
            await source.close()


@deterministic
@pytest.mark.parametrize("way", ["close", "crash"])
async def test_a_waiting_get_survives_its_sender_for_peer_timeout_and_then_says_that_it_is_lost(
    way: str, clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            fabric = MemoryFabric()
            source = await start_stage(nursery, fabric, role="sender", zmq_port=free_port())
            target = await start_stage(
                nursery, fabric, role="receiver", **to(source), heartbeat_interval=1, peer_timeout=10
            )
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            await wait_until(lambda: target.connector.health()["peers"] == 1)
            clock.rate = 0.1  # a machine that stops for a second has not waited for the rest of peer_timeout
            await getattr(source, way)()
            await wait_until(lambda: target.connector.health()["peers"] == 0)
            await pass_time(clock, 9)
            assert not outcome.over.is_set()
            await pass_time(clock, 2)  # the heartbeat after it finds out
            clock.rate = 1.0
            with pytest.raises(PeerLost) as caught:
                await outcome.wait()
            assert caught.value.peer == f"tcp://127.0.0.1:{source.port}"
            assert target.connector.health()["timeouts"] == 1
            await assert_free(target.connector)
            again = begin(nursery, target.connector.get, "0", "1", "k")
            successor = await start_stage(nursery, fabric, role="sender", zmq_port=source.port)
            await successor.connector.put("0", "1", "k", b"x")
            assert await again.wait() == b"x"
            await target.close()
            await successor.close()


@deterministic
async def test_a_write_of_a_killed_sender_is_over_and_its_destination_is_free_again() -> None:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            fabric = MemoryFabric()
            source = await start_stage(nursery, fabric, role="sender")
            target = await start_stage(nursery, fabric, role="receiver", **to(source))
            source.engine.hold(arrived=0.5)
            await source.connector.put("0", "1", "k", filled(1000))
            outcome = begin(nursery, target.connector.get, "0", "1", "k")
            await wait_until(lambda: source.engine.held)
            outcome.scope.cancel()
            await wait_until(lambda: target.connector.health()["quarantined"])
            await source.crash()
            await assert_free(target.connector)
            await target.close()


@deterministic
async def test_a_payload_given_to_a_receiver_that_dies_goes_to_the_next() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        other = await start_stage(nursery, pair.fabric, role="receiver", **to(port_of(pair.sender)))
        with pytest.raises(NotReady):
            other.connector.get_nowait("0", "1", "k")
        await pair.put("k", b"x")
        await wait_until(lambda: other.connector.statistics().held["arrived"])
        await other.crash()
        assert await pair.get("k") == b"x"
        await pair.assert_whole()


@deterministic
async def test_a_write_into_a_receiver_that_dies_ends_and_the_payload_goes_to_the_next() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        other = await start_stage(nursery, pair.fabric, role="receiver", **to(port_of(pair.sender)))
        pair.sender_engine.hold()
        with pytest.raises(NotReady):
            other.connector.get_nowait("0", "1", "k")
        await wait_until(lambda: pair.parked() == 1)
        await pair.put("k", b"x")
        await wait_until(lambda: pair.sender_engine.held)
        await other.crash()
        pair.sender_engine.release()
        assert await pair.get("k") == b"x"
        await pair.assert_whole()


@deterministic
async def test_a_receiver_that_closes_gives_back_what_it_did_not_take() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        other = await start_stage(nursery, pair.fabric, role="receiver", **to(port_of(pair.sender)))
        with pytest.raises(NotReady):
            other.connector.get_nowait("0", "1", "k")
        await pair.put("k", b"x")
        await wait_until(lambda: other.connector.statistics().held["arrived"])
        await other.close()
        assert await pair.get("k") == b"x"
        await pair.assert_whole()


@deterministic
async def test_what_a_receiver_took_is_not_delivered_again_however_soon_it_closes() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        for number in range(10):
            other = await start_stage(nursery, pair.fabric, role="receiver", **to(port_of(pair.sender)))
            await pair.put(f"k{number}", b"x")
            assert await other.connector.get("0", "1", f"k{number}") == b"x"
            await other.close()
        await assert_free(pair.sender)


# --- a peer in another process ------------------------------------------------------------------------------

SENDER = """
    import sys, trio, torch
    from trio_mori import open_connector

    async def main():
        config = {"role": "sender", "host": "127.0.0.1", "zmq_port": int(sys.argv[1]), "memory_pool_size": 1 << 20}
        async with open_connector(config) as conn:
            await conn.put("0", "1", "first", torch.arange(1000))
            print(conn.get_connection_info()["zmq_port"], flush=True)
            await trio.sleep_forever()

    trio.run(main)
"""


async def start_sender(nursery: trio.Nursery, port: int = 0) -> tuple[trio.Process, int]:
    """A sender in a process of its own that has put "first", and its port."""
    command = [sys.executable, "-c", textwrap.dedent(SENDER), str(port)]
    process = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE, check=False))
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        line += await process.stdout.receive_some()
    return process, int(line)


async def test_a_sender_process_that_is_killed_is_lost_after_peer_timeout_or_replaced_by_the_next() -> None:
    with trio.fail_after(2 * LIMIT):
        async with trio.open_nursery() as nursery:
            process, port = await start_sender(nursery, free_port())
            times = {"heartbeat_interval": 0.1, "peer_timeout": 1}
            config = receiver_config(port, memory_pool_size=1 << 20, **times)
            async with open_connector(config) as conn:
                assert torch.equal(await conn.get("0", "1", "first"), torch.arange(1000))
                outcome = begin(nursery, conn.get, "0", "1", "k")
                await wait_until(lambda: conn.statistics().held["posted"])
                with trio.fail_after(times["peer_timeout"] + SOON):
                    process.send_signal(signal.SIGKILL)
                    await process.wait()
                    with pytest.raises(PeerLost):
                        await outcome.wait()
                    await assert_free(conn)
                waiting = begin(nursery, conn.get, "0", "1", "first")
                process, _ = await start_sender(nursery, port)
                assert torch.equal(await waiting.wait(), torch.arange(1000))
                await assert_free(conn)
            process.kill()


async def test_a_sender_process_that_is_stopped_is_lost_for_each_get_and_may_go_on() -> None:
    with trio.fail_after(2 * LIMIT):
        async with trio.open_nursery() as nursery:
            process, port = await start_sender(nursery, free_port())
            times = {"heartbeat_interval": 0.1, "peer_timeout": 0.5}
            async with open_connector(receiver_config(port, memory_pool_size=1 << 20, **times)) as conn:
                assert torch.equal(await conn.get("0", "1", "first"), torch.arange(1000))
                process.send_signal(signal.SIGSTOP)
                for _ in range(2):
                    with pytest.raises(PeerLost), trio.fail_after(SOON):
                        await conn.get("0", "1", "k")
                assert conn.health()["quarantined"] > 0, "a stopped process can be continued"
                process.send_signal(signal.SIGCONT)
                await assert_free(conn)
            process.kill()


async def test_a_payload_cannot_arrive_on_an_edge_that_is_spelled_alike() -> None:
    async with open_pair() as pair:
        with pytest.raises(KeyRefused):
            await pair.sender.put("a_b", "c", "k", b"x")
        with pytest.raises(KeyRefused):
            await pair.receiver.get("a", "b_c", "k")
        with pytest.raises(KeyRefused):
            await pair.sender.cleanup("k", "a_b", "c")
