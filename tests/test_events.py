"""What a connector tells of itself: what is in quarantine, for how long and why; and what a log is searched for."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import trio
from ports import free_port
from rig import (
    FAST,
    LIMIT,
    POOL,
    UNIT,
    assert_free,
    begin,
    filled,
    is_local,
    open_pair,
    pass_time,
    port_of,
    receiver_config,
    sender_config,
    start_stage,
    wait_until,
)
from trio.testing import MockClock

from trio_mori import NotReady, PeerLost, TransferFailed, _events, open_connector
from trio_mori._protocol.doubts import AWAY, FORMER, OVERDUE, UNCONFIRMED, UNSETTLED, Doubt
from trio_mori._quarantine import QuarantineWatch
from trio_mori._zmq_listener import open_listener
from trio_mori.testing import MemoryFabric

deterministic = pytest.mark.deterministic
pytestmark = deterministic

OPERATIONS = Path(__file__).parent.parent / "docs" / "operations.md"


class Log:
    """The events among captured records."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="trio_mori")
        self._caplog = caplog

    def of(self, event: str) -> list[logging.LogRecord]:
        """The records of one event."""
        return [record for record in self._caplog.records if getattr(record, "event", None) == event]

    async def one(self, event: str) -> logging.LogRecord:
        """The only record of an event, soon."""
        await wait_until(lambda: self.of(event))
        [record] = self.of(event)
        return record


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


# --- the watch ------------------------------------------------------------------------------------------------


def test_time_runs_from_the_first_look_and_anew_after_an_end() -> None:
    watch = QuarantineWatch(str)
    first, second = Doubt("a", 1, "peer", AWAY), Doubt("b", 2, "peer", FORMER)
    assert [each.seconds for each in watch.look([first], 10)] == [0]
    found = watch.look([second, first], 13)
    assert [(each.size, each.seconds, each.peer, each.reason) for each in found] == [
        (1, 3, "peer", AWAY),
        (2, 0, "peer", FORMER),
    ]
    assert watch.look([], 14) == ()
    assert [each.seconds for each in watch.look([first], 20)] == [0]


def test_a_peer_and_reason_are_told_once_and_their_end_too(log: Log) -> None:
    watch = QuarantineWatch(str)
    doubts = [Doubt(number, 100, "peer", AWAY) for number in range(3)]
    watch.tell(doubts, 0, after=1)
    assert log.of(_events.QUARANTINE) == []
    for now in (1, 2, 3):
        watch.tell(doubts, now, after=1)
    [record] = log.of(_events.QUARANTINE)
    assert (record.size, record.peer, record.reason) == (300, "peer", AWAY)  # type: ignore[attr-defined]
    assert watch.has_told
    watch.tell([], 4)
    assert len(log.of(_events.QUARANTINE_OVER)) == 1
    assert not watch.has_told


# --- in a connector -------------------------------------------------------------------------------------------


async def test_health_says_what_is_in_quarantine_for_whom_for_how_long_and_why(clock: MockClock) -> None:
    async with open_pair(receiver={"heartbeat_interval": 50, "peer_timeout": 300}) as pair:
        async with trio.open_nursery() as nursery:
            outcome = await pair.hold_one(nursery, "k", filled(3 * UNIT))
            await wait_until(lambda: is_local(pair.receiver))  # on the way there its sender is away for a moment
            outcome.scope.cancel()
            await outcome.over.wait()
            [piece] = pair.receiver.health()["quarantine"]
            assert piece["size"] >= 3 * UNIT
            assert piece["reason"] == UNCONFIRMED
            assert piece["peer"] == f"tcp://127.0.0.1:{port_of(pair.sender)}"
            clock.jump(7)
            [piece] = pair.receiver.health()["quarantine"]
            assert 7 <= piece["seconds"] < 15
            assert pair.receiver.health()["status"] == "degraded"
            pair.sender_engine.release()
            await wait_until(lambda: pair.receiver.health()["quarantine"] == [])
            assert pair.receiver.health()["status"] == "healthy"


async def test_a_write_that_does_not_end_is_told_at_both_ends_until_it_has(log: Log, clock: MockClock) -> None:
    config = {"heartbeat_interval": 50, "peer_timeout": 300}
    async with open_pair(sender={"transfer_timeout_base": 5, **config}, receiver=config) as pair:
        async with trio.open_nursery() as nursery:
            outcome = await pair.hold_one(nursery, "k", filled(1000))
            clock.jump(5)
            with pytest.raises(TransferFailed):
                await outcome.wait()
            [piece] = pair.sender.health()["quarantine"]
            assert (piece["size"], piece["reason"]) == (1000, OVERDUE)
            assert piece["peer"].startswith("memory-")
            record = await log.one(_events.QUARANTINE)
            assert record.reason == OVERDUE  # type: ignore[attr-defined]
            pair.sender_engine.release()
            await wait_until(lambda: not pair.sender.health()["quarantine"])
            assert (await log.one(_events.QUARANTINE_OVER)).reason == OVERDUE  # type: ignore[attr-defined]
            assert pair.sender.health()["status"] == "healthy"


async def test_a_sender_that_had_slow_writes_once_is_not_degraded_by_later_ones(clock: MockClock) -> None:
    config = {"heartbeat_interval": 50, "peer_timeout": 300}
    async with open_pair(sender={"transfer_timeout_base": 5, **config}, receiver=config) as pair:
        async with trio.open_nursery() as nursery:
            outcome = await pair.hold_one(nursery, "k", filled(1000))
            clock.jump(5)
            with pytest.raises(TransferFailed):
                await outcome.wait()
            pair.sender_engine.release()
            await pair.get("k")
            later = await pair.hold_one(nursery, "later", filled(1000))
            assert pair.sender.statistics().in_flight == 1
            assert pair.sender.health()["status"] == "healthy"
            pair.sender_engine.release()
            await later.wait()


async def test_a_write_that_failed_and_may_go_on_is_told_at_once(log: Log) -> None:
    async with open_pair(sender={"close_grace": 0}, receiver={"close_grace": 0}) as pair:
        pair.sender_engine.fail(settled=False)
        await pair.put("k", filled(1000))
        with pytest.raises(TransferFailed):
            await pair.get("k")
        assert (await log.one(_events.QUARANTINE)).reason == UNSETTLED  # type: ignore[attr-defined]
        pair.sender_engine.kill()


async def test_memory_that_a_lost_sender_may_write_to_is_told_at_a_heartbeat(log: Log) -> None:
    async with open_pair(receiver={**FAST, "close_grace": 0}, sender={"close_grace": 0}) as pair:
        async with trio.open_nursery() as nursery:
            outcome = await pair.hold_one(nursery, "k", filled(UNIT))
            outcome.scope.cancel()
            await outcome.over.wait()
            record = await log.one(_events.QUARANTINE)
            assert record.peer == f"tcp://127.0.0.1:{port_of(pair.sender)}"  # type: ignore[attr-defined]
            pair.sender_engine.release()
            await log.one(_events.QUARANTINE_OVER)


async def test_what_expires_is_told_by_key(log: Log, clock: MockClock) -> None:
    async with open_pair(sender={"buffer_ttl_seconds": 10}) as pair:
        for number in range(7):
            await pair.put(f"k{number}", filled(10))
        clock.jump(10)
        record = await log.one(_events.EXPIRED)
        assert record.count == 7  # type: ignore[attr-defined]
        assert record.keys == [f"k{number}@0_1" for number in range(7)]  # type: ignore[attr-defined]
        assert record.getMessage().endswith("k4@0_1, ...")


async def test_opening_and_closing_are_told(log: Log) -> None:
    async with MemoryFabric().open() as engine:
        async with open_connector(sender_config(stage_id=3), engine=engine) as connector:
            record = await log.one(_events.OPEN)
            assert record.address == f"tcp://127.0.0.1:{port_of(connector)}"  # type: ignore[attr-defined]
            assert (record.role, record.stage, record.engine) == ("sender", 3, "memory")  # type: ignore[attr-defined]
            assert log.of(_events.CLOSED) == []
        await log.one(_events.CLOSED)


async def test_a_lost_sender_and_a_process_that_ended_are_told(log: Log) -> None:
    port = free_port()
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            sender = await start_stage(nursery, fabric, **sender_config() | {"zmq_port": port})
            receiver = await start_stage(nursery, fabric, **receiver_config(port, **FAST))
            await sender.connector.put("0", "1", "k", b"x")
            await receiver.connector.get("0", "1", "k")
            await sender.crash()
            with pytest.raises(PeerLost):
                await receiver.connector.get("0", "1", "never")
            address = f"tcp://127.0.0.1:{port}"
            assert (await log.one(_events.PEER_LOST)).peer == address  # type: ignore[attr-defined]
            assert (await log.one(_events.PEER_ENDED)).peer == address  # type: ignore[attr-defined]
            await receiver.close()


async def test_a_receiver_that_is_connected_and_silent_is_told_once(log: Log, clock: MockClock) -> None:
    rare = {"heartbeat_interval": 1000, "peer_timeout": 3000}
    async with open_pair(sender={"acknowledge_timeout": 4}, receiver=rare) as pair:
        await pair.put("k", filled(10))
        await pair.get("k")
        # Its last words: a hello as it goes over to the unix link, and an acknowledgement.
        await wait_until(lambda: is_local(pair.receiver))
        await assert_free(pair.sender)
        for _ in range(2):
            clock.jump(5)
            record = await log.one(_events.PEER_LOST)
            assert 4 <= record.seconds < 10  # type: ignore[attr-defined]
        await pair.put("more", filled(10))
        assert await pair.get("more") is not None


def test_the_documentation_names_every_event() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE))
    assert {value for name, value in vars(_events).items() if name.isupper()} <= named


# --- a sender that is not there -------------------------------------------------------------------------------

SLOW = {"heartbeat_interval": 1, "peer_timeout": 10}


async def test_a_sender_where_nobody_listens_is_told_once_by_its_address_and_seen_in_health(
    log: Log, clock: MockClock
) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with trio.fail_after(LIMIT * 10):
        async with (
            MemoryFabric().open() as engine,
            open_connector(receiver_config(port, **SLOW), engine=engine) as receiver,
            trio.open_nursery() as nursery,
        ):
            assert receiver.health()["senders"] == [
                {"address": address, "standing": "idle", "seconds": 0.0, "waiting": 0}
            ]
            begin(nursery, receiver.get, "0", "1", "k")
            with pytest.raises(NotReady):
                receiver.get_nowait("0", "1", "other")
            await pass_time(clock, 2)
            assert log.of(_events.SENDER_ABSENT) == []
            await pass_time(clock, 5)
            record = await log.one(_events.SENDER_ABSENT)
            assert (record.peer, record.count) == (address, 2)  # type: ignore[attr-defined]
            assert 3 <= record.seconds < 8  # type: ignore[attr-defined]
            for word in (address, "2 gets wait", "nobody there has taken a connection", "sender_zmq_port"):
                assert word in record.getMessage()
            [known] = receiver.statistics().senders
            assert (known.address, known.standing, known.waiting) == (address, "dialling", 2)
            assert known.seconds >= 7
            nursery.cancel_scope.cancel()


async def test_a_sender_that_came_and_went_is_told_of_again_and_one_that_nobody_waits_for_is_not(
    log: Log, clock: MockClock
) -> None:
    port = free_port()
    fabric = MemoryFabric()
    with trio.fail_after(LIMIT * 10):
        async with trio.open_nursery() as nursery:
            receiver = await start_stage(nursery, fabric, **receiver_config(port, **SLOW))
            waiting = begin(nursery, receiver.connector.get, "0", "1", "k")
            await pass_time(clock, 5)
            await log.one(_events.SENDER_ABSENT)
            sender = await start_stage(nursery, fabric, **sender_config() | {"zmq_port": port})
            await sender.connector.put("0", "1", "k", b"x")
            assert await waiting.wait() == b"x"
            [known] = receiver.connector.statistics().senders
            assert (known.standing, known.seconds, known.waiting) == ("connected", 0, 0)
            await sender.close()
            [upstream] = receiver.connector._receiver.upstreams.values()
            await wait_until(lambda: not upstream._reachable)  # libzmq tells of it in its own time
            await pass_time(clock, 15)
            assert len(log.of(_events.SENDER_ABSENT)) == 1
            begin(nursery, receiver.connector.get, "0", "1", "k")
            await pass_time(clock, 2)
            await wait_until(lambda: len(log.of(_events.SENDER_ABSENT)) == 2)
            assert "since it was lost" in log.of(_events.SENDER_ABSENT)[-1].getMessage()
            await receiver.close()


async def test_a_program_that_is_no_sender_is_told_as_such(log: Log, clock: MockClock) -> None:
    with trio.fail_after(LIMIT * 10):
        async with (
            open_listener(["127.0.0.1"], 0) as stranger,
            MemoryFabric().open() as engine,
            open_connector(receiver_config(stranger.port, **SLOW), engine=engine) as receiver,
            trio.open_nursery() as nursery,
        ):
            begin(nursery, receiver.get, "0", "1", "k")
            await stranger.receive()
            await pass_time(clock, 5)
            assert "has not answered as a sender does" in (await log.one(_events.SENDER_ABSENT)).getMessage()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"role": "receiver", "sender_host": "10.0.0.3", "sender_zmq_port": 7000},
            "receiver, gets from tcp://10.0.0.3:7000",
        ),
        (
            {"role": "receiver", "stage_id": 1},
            "receiver of stage 1, gets from whom update_sender_info or metadata names",
        ),
        ({"role": "sender", "zmq_port": 0}, "sender, listens at tcp://127.0.0.1:PORT"),
        (
            {"role": "both", "zmq_port": 0, "sender_host": "10.0.0.3", "sender_zmq_port": 7000},
            "both, listens at tcp://127.0.0.1:PORT, gets from tcp://10.0.0.3:7000",
        ),
    ],
)
async def test_opening_says_where_a_connector_listens_and_from_whom_it_gets(
    log: Log, config: dict[str, object], told: str
) -> None:
    async with MemoryFabric().open() as engine, open_connector(config, engine=engine) as connector:
        record = await log.one(_events.OPEN)
        assert f"connector open: {told.replace('PORT', str(port_of(connector)))}, engine" in record.getMessage()
        assert bool(record.address) == (config["role"] != "receiver")  # type: ignore[attr-defined]
        assert bool(record.sender) == ("sender_host" in config)  # type: ignore[attr-defined]


# --- a put that waits -----------------------------------------------------------------------------------------


async def test_a_put_that_waits_for_room_is_counted_and_told_once_with_what_the_pool_is_full_of(
    log: Log, clock: MockClock
) -> None:
    async with open_pair(sender=SLOW, receiver=SLOW) as pair, trio.open_nursery() as nursery:
        await pair.put("a", filled(POOL - UNIT))
        for number in range(2):
            begin(nursery, pair.put, f"k{number}", filled(2 * UNIT))
        await wait_until(lambda: pair.sender.health()["waiting_puts"] == 2)
        await pass_time(clock, 3)
        assert log.of(_events.PUTS_WAIT) == []
        await pass_time(clock, 9)
        record = await log.one(_events.PUTS_WAIT)
        assert (record.count, record.size) == (2, 2 * UNIT)  # type: ignore[attr-defined]
        assert 5 <= record.seconds < 8  # type: ignore[attr-defined]
        for words in ("2 puts wait", f"{POOL - UNIT} bytes published and not fetched", "memory_pool_size"):
            assert words in record.getMessage()
        for key in ("a", "k0", "k1"):
            await pair.get(key)
        await wait_until(lambda: pair.sender.statistics().waiting_puts == 0)
        await pair.put("a", filled(POOL))
        begin(nursery, pair.put, "again", filled(UNIT))
        await pass_time(clock, 6)
        await wait_until(lambda: len(log.of(_events.PUTS_WAIT)) == 2)
        await pair.get("a")
        await pair.get("again")


# --- a peer of another stage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "receiver", "told"),
    [
        ({"stage_id": 0, "to_stage": 1}, {"stage_id": 2, "from_stage": 0}, [("trio_mori.sender", 2)]),
        ({"stage_id": 3, "to_stage": 1}, {"stage_id": 1, "from_stage": 0}, [("trio_mori.receiver", 3)]),
        ({"stage_id": 0, "to_stage": 1}, {"stage_id": 1, "from_stage": 0}, []),
        ({"stage_id": 0}, {"stage_id": 2}, []),
        ({"to_stage": 1}, {"from_stage": 0}, []),
        # A middle stage that was told its output only, as vllm-omni tells it.
        ({"stage_id": 0, "to_stage": 1}, {"stage_id": 1, "from_stage": 1, "to_stage": 2}, []),
    ],
)
async def test_a_peer_of_another_stage_than_was_configured_is_told_once(
    log: Log, sender: dict[str, object], receiver: dict[str, object], told: list[tuple[str, int]]
) -> None:
    async with open_pair(sender=sender, receiver=receiver) as pair:
        for number in range(2):
            await pair.put(f"k{number}", filled(10))
            await pair.get(f"k{number}")
        await wait_until(lambda: is_local(pair.receiver))
        await pair.assert_whole()
        records = log.of(_events.OTHER_STAGE)
        assert [(each.name, each.stage) for each in records] == told  # type: ignore[attr-defined]
        for each in records:
            assert "for ever if" in each.getMessage()
