"""The connector for code without an event loop, over memory engines in one loop and over shared memory in two."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import trio
from rig import LIMIT, POOL, SOON, UNIT, Pair, filled, is_free, open_pair, receiver_config, sender_config
from threads import Other

from trio_mori import (
    BindFailed,
    ConfigError,
    ConnectorClosed,
    KeyBusy,
    LeaseError,
    ManagedBuffer,
    Misuse,
    NoRoom,
    NotReady,
    StreamFailed,
    TooBig,
    UnsupportedPayload,
    blocking,
)
from trio_mori._arrival import Arrival
from trio_mori._portal import Portal, _Call
from trio_mori._staging import Reservation
from trio_mori.blocking import COPY_IN_LOOP, BlockingConnector

ROOT = Path(__file__).parent.parent

# Sizes that are copied in the loop, and in the thread that calls.
SIZES = (1000, COPY_IN_LOOP + 1)

LARGE = 16 << 20


class Both:
    """The two connectors of a pair, both in one loop, from a thread."""

    def __init__(self, portal: Portal, pair: Pair) -> None:
        self.portal = portal
        self.pair = pair
        self.sender = BlockingConnector(portal, pair.sender)
        self.receiver = BlockingConnector(portal, pair.receiver)

    def put(self, key: str, data: object, timeout: float | None = SOON) -> None:
        self.sender.put("0", "1", key, data, timeout=timeout)

    def get(self, key: str, timeout: float | None = SOON) -> object:
        return self.receiver.get("0", "1", key, timeout=timeout)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Until something holds in the loop, soon."""

        async def look() -> None:
            while not condition():  # noqa: ASYNC110 - no event tells
                await trio.sleep(0.001)

        self.portal.call(look, timeout=SOON, what="a condition")

    def assert_whole(self) -> None:
        """Both pools are wholly free, soon, and a payload still comes across."""
        self.portal.call(self.pair.assert_whole)


@contextmanager
def both(*, pool: int = POOL) -> Iterator[Both]:
    """A pair whose loop is closed in the end."""
    portal = Portal()
    pair = portal.enter(partial(open_pair, sender_pool=pool, receiver_pool=pool)).value
    try:
        yield Both(portal, pair)
    finally:
        portal.close()


@pytest.fixture(name="pair")
def open_both() -> Iterator[Both]:
    """A pair with pools that a large payload fits into."""
    with both(pool=LARGE) as pair:
        yield pair
        pair.assert_whole()


# --- put and get -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_got_and_belongs_to_the_caller(pair: Both, size: int) -> None:
    data = {"states": filled(size, 3), "last": False}
    receipt = pair.sender.put("0", "1", "k", data)
    data["states"] = filled(size, 9)
    assert receipt.size >= size
    assert receipt.metadata["source_port"] == pair.sender.get_connection_info()["zmq_port"]
    got = pair.get("k")
    assert isinstance(got, dict)
    assert torch.equal(got["states"], filled(size, 3))
    assert got["last"] is False
    pair.portal.call_sync(pair.pair.sender.put_nowait, "0", "1", "l", filled(size, 4))
    pair.get("l")
    assert torch.equal(got["states"], filled(size, 3))  # it aliases no pool


@pytest.mark.parametrize("size", SIZES)
def test_the_nowait_twins_do_not_wait(pair: Both, size: int) -> None:
    with pytest.raises(NotReady):
        pair.receiver.get_nowait("0", "1", "k")
    pair.sender.put_nowait("0", "1", "k", filled(size))
    pair.wait_until(lambda: pair.pair.receiver.statistics().held.get("arrived"))
    assert torch.equal(pair.receiver.get_nowait("0", "1", "k"), filled(size))  # type: ignore[arg-type]


def test_a_get_that_waits_is_woken_by_the_put_of_another_thread(pair: Both) -> None:
    others = [Other(pair.get, f"k{number}") for number in range(4)]
    pair.wait_until(lambda: pair.pair.parked() == 4)
    for number in range(4):
        pair.put(f"k{number}", number)
    assert [other.wait() for other in others] == [0, 1, 2, 3]


def test_a_get_that_times_out_leaves_the_payload_with_its_sender(pair: Both) -> None:
    with pytest.raises(TimeoutError, match=r"get of 'k' did not end within 0\.02 s"):
        pair.get("k", timeout=0.02)
    pair.put("k", "late")
    assert pair.get("k") == "late"


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_leaves_no_time_is_refused(pair: Both, timeout: float) -> None:
    refused: list[Callable[[], object]] = [
        partial(pair.put, "k", b"x", timeout),
        partial(pair.get, "k", timeout),
        partial(pair.receiver.lease, "0", "1", "k", timeout=timeout),
        partial(pair.sender.open_chunk_sender, "r", "1", from_stage="0", timeout=timeout),
        partial(pair.receiver.open_chunk_receiver, "r", "0", to_stage="1", timeout=timeout),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="give a number of seconds above zero"):
            call()


def test_a_put_waits_for_room_and_says_so_when_there_is_none_in_time() -> None:
    with both(pool=4 * UNIT) as pair:
        for key in ("a", "b"):
            pair.put(key, filled(2 * UNIT))
        with pytest.raises(TimeoutError, match="put of 'c' did not end within"):
            pair.put("c", filled(2 * UNIT), timeout=0.02)
        with pytest.raises(NoRoom):
            pair.sender.put_nowait("0", "1", "c", filled(2 * UNIT))
        other = Other(pair.put, "c", filled(2 * UNIT))
        pair.wait_until(lambda: pair.pair.sender.statistics().pool.waiting)
        pair.get("a")
        other.wait()
        for key in ("b", "c"):
            pair.get(key)
        pair.assert_whole()


def test_a_put_that_is_refused_leaves_no_trace(pair: Both) -> None:
    with pytest.raises(UnsupportedPayload, match=r"payload\['x'\]"):
        pair.put("k", {"x": object()})
    with pytest.raises(TooBig):
        pair.put("k", torch.empty(2 * LARGE, dtype=torch.uint8))
    pair.portal.call_sync(pair.pair.sender_engine.hold)
    other = Other(pair.get, "busy")
    pair.put("busy", filled(1000))
    pair.wait_until(lambda: pair.pair.sender_engine.held)
    for size in SIZES:
        with pytest.raises(KeyBusy):
            pair.put("busy", filled(size))
    pair.portal.call_sync(pair.pair.sender_engine.release)
    other.wait()


def test_a_key_that_becomes_busy_during_the_copy_refuses_the_put(pair: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Other] = []
    fill = Reservation.fill

    def fill_late(reservation: Reservation) -> None:
        if not others:
            pair.portal.call_sync(pair.pair.sender_engine.hold)
            others.append(Other(pair.get, "k"))
            pair.put("k", b"first")
            pair.wait_until(lambda: pair.pair.sender_engine.held)
        fill(reservation)

    monkeypatch.setattr(Reservation, "fill", fill_late)
    with pytest.raises(KeyBusy):
        pair.put("k", filled(SIZES[1]))
    pair.portal.call_sync(pair.pair.sender_engine.release)
    assert others[0].wait() == b"first"


def test_a_buffer_of_the_pool_is_passed_on_without_a_copy() -> None:
    with both(pool=4 * UNIT) as pair:
        held = pair.portal.call_sync(partial(buffer_of, pair.pair, 3 * UNIT))
        pair.put("k", held)  # twice this does not fit
        assert held.released
        assert pair.get("k") is not None


def buffer_of(pair: Pair, size: int) -> ManagedBuffer:
    """Memory of the sender's pool in a caller's hands."""
    pool = pair.sender._pool
    extent = pool.reserve_nowait(size, "outbound")
    return ManagedBuffer(pool, extent, size, partial(pool.extents.free, extent))


def test_a_lease_is_the_memory_it_arrived_in(pair: Both) -> None:
    pair.put("k", torch.arange(1000))
    with pair.receiver.lease("0", "1", "k", timeout=SOON) as lease:
        assert int(lease.as_tensor(torch.int64, (1000,)).sum()) == 499500
        assert pair.receiver.health()["pool"]["leased"]
    with pytest.raises(TimeoutError, match="lease of 'k' did not end within"):
        with pair.receiver.lease("0", "1", "k", timeout=0.02):
            pass


def test_a_tensor_that_outlives_its_lease_is_named(pair: Both) -> None:
    pair.put("k", torch.arange(1000))
    kept: list[torch.Tensor] = []
    with pytest.raises(LeaseError):
        with pair.receiver.lease("0", "1", "k") as lease:
            kept.append(lease.tensor)
    assert kept[0].numel() == 8000
    kept.clear()


def test_cleanup_and_statistics_and_health(pair: Both) -> None:
    pair.put("k", b"1")
    pair.put("l", b"2")
    assert pair.sender.cleanup("k") == 1
    assert pair.sender.cleanup("l", "0", "1") == 1
    with pytest.raises(ValueError, match="both or neither"):
        pair.sender.cleanup("l", "0")
    assert pair.sender.statistics().put["0_1"].payloads == 2
    assert pair.sender.health()["puts"] == 2
    assert pair.sender.get_connection_info()["can_put"]
    port = pair.sender.get_connection_info()["zmq_port"]
    pair.receiver.update_sender_info("127.0.0.1", port)
    with pytest.raises(ConfigError):
        pair.receiver.update_sender_info("127.0.0.1", 0)


# --- chunk streams -----------------------------------------------------------------------------------------


def test_a_stream_is_an_iterator_that_ends(pair: Both) -> None:
    def send() -> int:
        with pair.sender.open_chunk_sender("r", "1", from_stage="0", timeout=SOON) as out:
            for number in range(10):
                out.send(number)
            return out.sent

    other = Other(send)
    with pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks:
        assert list(chunks) == list(range(10))
        assert chunks.received == 10
        assert list(chunks) == []
    assert other.wait() == 10


def test_a_chunk_that_does_not_come_in_time_comes_with_the_next_call(pair: Both) -> None:
    with (
        pair.sender.open_chunk_sender("r", "1", from_stage="0") as out,
        pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks,
    ):
        chunks._timeout = 0.02
        with pytest.raises(TimeoutError, match=r"chunk 0 of 'r' did not end within 0\.02 s"):
            next(chunks)
        chunks._timeout = SOON
        out.send("a")
        assert next(chunks) == "a"
    pair.sender.cleanup("r")


def test_a_chunk_without_room_in_time_was_not_sent() -> None:
    with both(pool=2 * UNIT) as pair:
        with pair.sender.open_chunk_sender("r", "1", from_stage="0", timeout=SOON) as out:
            out.send(filled(UNIT - 500))
            out._timeout = 0.02
            with pytest.raises(TimeoutError, match=r"chunk 1 of 'r' did not end within 0\.02 s"):
                out.send(filled(UNIT + 500))
            assert out.sent == 1
        with pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks:
            assert len(list(chunks)) == 1
        pair.assert_whole()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_stream_that_is_left_by_an_exception_tells_the_receiver(pair: Both, kind: type[BaseException]) -> None:
    with pytest.raises(kind, match="mine"):
        with pair.sender.open_chunk_sender("r", "1", from_stage="0"):
            raise kind("mine")
    with pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks:
        with pytest.raises(StreamFailed, match=f"{kind.__name__}: mine"):
            next(chunks)


def test_two_threads_cannot_use_one_end_of_a_stream(pair: Both) -> None:
    with (
        pair.sender.open_chunk_sender("r", "1", from_stage="0") as out,
        pair.receiver.open_chunk_receiver("r", "0", to_stage="1") as chunks,
    ):
        other = Other(next, chunks)
        pair.wait_until(pair.pair.parked)
        with pytest.raises(Misuse, match="two tasks receive chunks of 'r' at once"):
            next(chunks)
        out.send("a")
        assert other.wait() == "a"
    pair.sender.cleanup("r")


# --- interrupts --------------------------------------------------------------------------------------------


def test_an_interrupt_as_a_call_is_answered_keeps_nothing_while_its_traceback_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = _Call.wait

    def interrupted(call: _Call[object]) -> None:
        wait(call)
        raise KeyboardInterrupt

    large = filled(COPY_IN_LOOP + 1)
    with both(pool=4 * COPY_IN_LOOP) as pair:
        pair.put("k", "here")
        with monkeypatch.context() as patch:
            patch.setattr(_Call, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt) as first:
                pair.get("k")
            with pytest.raises(KeyboardInterrupt) as second:
                pair.put("large", large)
        assert pair.get("k") == "here"
        assert first.value.__traceback__ is not second.value.__traceback__ is not None
        pair.assert_whole()


def test_an_interrupted_get_takes_nothing(pair: Both) -> None:
    def press() -> None:
        pair.wait_until(pair.pair.parked)
        os.kill(os.getpid(), signal.SIGINT)

    presser = Other(press)
    with pytest.raises(KeyboardInterrupt):
        pair.get("k", timeout=None)
    presser.wait()
    pair.put("k", "still there")
    assert pair.get("k") == "still there"


@pytest.mark.parametrize("size", SIZES)
def test_what_came_for_a_thread_that_was_interrupted_stays_with_the_sender(
    pair: Both, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    pair.put("k", filled(size))
    with monkeypatch.context() as patch:
        patch.setattr(Arrival, "restore", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.get("k")
    assert torch.equal(pair.get("k"), filled(size))  # type: ignore[arg-type]


def test_what_was_claimed_for_a_put_that_was_interrupted_is_free_again(
    pair: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.put("k", filled(SIZES[1]))
    with pytest.raises(NotReady):
        pair.receiver.get_nowait("0", "1", "k")
    pair.receiver.cleanup("k")


def interrupt(_: object) -> None:
    """As if Ctrl-C were pressed here."""
    raise KeyboardInterrupt


# --- life --------------------------------------------------------------------------------------------------


def open_sender(**more: object) -> BlockingConnector:
    """Over shared memory, in a loop of its own."""
    return blocking.open_connector(sender_config(memory_pool_size=POOL, **more))


def port_of(connector: BlockingConnector) -> int:
    return int(connector.get_connection_info()["zmq_port"])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_connectors_with_loops_of_their_own_meet_over_shared_memory() -> None:
    with (
        open_sender() as sender,
        blocking.open_connector(receiver_config(port_of(sender), memory_pool_size=POOL)) as receiver,
    ):
        other = Other(partial(receiver.get, "0", "1", "k", timeout=LIMIT))
        sender.put("0", "1", "k", {"x": filled(1000)})
        value = other.wait()
        assert isinstance(value, dict)
        assert torch.equal(value["x"], filled(1000))


def test_a_port_that_is_taken_is_an_error_of_the_constructor_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BindFailed):
            open_sender(zmq_port=taken.getsockname()[1])
    with pytest.raises(ConfigError):
        blocking.open_connector({"role": "nobody"})
    assert not [thread for thread in threading.enumerate()[before:] if thread.name == "trio_mori"]


def test_a_close_ends_the_calls_of_other_threads_and_frees_the_port() -> None:
    sender = open_sender()
    port = port_of(sender)
    receiver = blocking.open_connector(receiver_config(port, memory_pool_size=POOL))
    others = [
        Other(receiver.get, "0", "1", "k"),
        Other(enter, receiver.lease("0", "1", "l")),
        Other(sender.put, "0", "1", "big", filled(POOL)),
        Other(sender.put, "0", "1", "waits", filled(POOL)),
    ]
    while receiver.statistics().parked < 2 or not sender.statistics().pool.waiting:
        time.sleep(0.001)
    assert is_listening(port)
    receiver.close()
    sender.close()
    closed = 0
    for other in others:
        try:
            other.wait()
        except ConnectorClosed:
            closed += 1
    assert closed == 3  # one of the two puts had room
    assert not is_listening(port)


def test_a_lease_that_the_close_of_another_thread_cut_off_says_so() -> None:
    with both() as pair:
        pair.sender.put("0", "1", "k", filled(100))
        said = "its connector was closed, perhaps by another thread"
        block = ExitStack()
        lease = block.enter_context(pair.receiver.lease("0", "1", "k"))
        Other(pair.receiver.close).wait()
        with pytest.raises(LeaseError, match=said):
            lease.value()
        with pytest.raises(ConnectorClosed):
            block.close()


def enter(block: object) -> None:
    """Enter a block."""
    block.__enter__()  # type: ignore[attr-defined]


def test_a_closed_connector_says_so_and_still_tells_how_it_is() -> None:
    connector = open_sender()
    connector.put("0", "1", "k", b"x")
    others = [Other(connector.close) for _ in range(3)]
    connector.close()
    for other in others:
        other.wait()
    connector.close()
    calls: list[Callable[[], object]] = [
        partial(connector.put, "0", "1", "k", b"x"),
        partial(connector.put, "0", "1", "k", filled(SIZES[1])),
        partial(connector.get, "0", "1", "k"),
        partial(connector.get_nowait, "0", "1", "k"),
        partial(connector.cleanup, "k"),
        partial(enter, connector.lease("0", "1", "k")),
        partial(enter, connector.open_chunk_sender("r", "1", from_stage="0")),
    ]
    for call in calls:
        with pytest.raises(ConnectorClosed):
            call()
    assert connector.health()["status"] == "unhealthy"
    assert connector.statistics().put["0_1"].payloads == 1
    assert connector.get_connection_info()["can_put"]


def test_a_close_waits_for_a_copy_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with both(pool=LARGE) as pair:
        pair.put("k", filled(SIZES[1]))
        copying, may_copy = threading.Event(), threading.Event()
        restore = Arrival.restore

        def slow(arrival: Arrival) -> object:
            copying.set()
            assert may_copy.wait(LIMIT)
            return restore(arrival)

        monkeypatch.setattr(Arrival, "restore", slow)
        other = Other(pair.get, "k")
        assert copying.wait(LIMIT)
        closing = Other(pair.portal.close)
        may_copy.set()
        got = other.wait()
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, filled(SIZES[1]))
        closing.wait()
        assert is_free(pair.pair.receiver)
        assert pair.pair.receiver_engine.violations == []


def test_a_connector_whose_service_failed_says_why_in_every_call() -> None:
    connector = open_sender()
    connector._portal.call_sync(connector._connector._receiver.nursery.start_soon, fail, ZeroDivisionError("inside"))
    connector._portal._thread.join(LIMIT)
    with pytest.raises(ConnectorClosed, match="died of ZeroDivisionError: inside") as caught:
        connector.put("0", "1", "k", b"x")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    health = connector.health()
    assert health["status"] == "unhealthy"
    assert "ZeroDivisionError: inside" in health["error"]
    connector.close()


async def fail(error: Exception) -> None:
    raise error


def test_one_that_is_dropped_is_closed_soon_and_waited_for_by_nobody() -> None:
    connector = open_sender()
    port, thread = port_of(connector), connector._portal._thread
    del connector
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert not is_listening(port)


def test_one_that_is_dropped_in_its_own_loop_is_closed_soon() -> None:
    connectors = [open_sender()]
    portal = connectors[0]._portal
    portal.call_sync(connectors.clear)
    portal._thread.join(LIMIT)
    assert not portal._thread.is_alive()


def test_a_stream_keeps_its_connector_open() -> None:
    with open_sender(stage_id=0).open_chunk_sender("r", "1") as out:
        out.send("a")
    assert out.sent == 1


def test_an_error_in_the_block_comes_out_as_itself() -> None:
    def close_and_raise(error: Exception) -> None:
        with open_sender() as connector:
            connector.close()
            raise error

    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        close_and_raise(error)
    assert caught.value is error


PROGRAM = """
import threading
from trio_mori import blocking
conn = blocking.open_connector({"role": "sender", "host": "127.0.0.1", "zmq_port": 0, "memory_pool_size": 1 << 20})
receiver = blocking.open_connector({"role": "receiver", "sender_host": "127.0.0.1", "memory_pool_size": 1 << 20,
                                    "sender_zmq_port": conn.get_connection_info()["zmq_port"]})
conn.put("0", "1", "k", b"x")
print(receiver.get("0", "1", "k"), flush=True)
threading.Thread(target=receiver.get, args=("0", "1", "never"), daemon=True).start()
"""


def test_a_program_that_ends_with_open_connectors_ends_quietly() -> None:
    command = [sys.executable, "-W", "error", "-c", f"{PROGRAM}\ndel conn\nraise SystemExit(3)"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.stderr == ""
    assert run.stdout == "b'x'\n"
    assert run.returncode == 3


def test_a_forked_child_is_told_to_open_its_own() -> None:
    program = f"""{PROGRAM}
import os
from trio_mori import Misuse
child = os.fork()
if not child:
    try:
        conn.put("0", "1", "k", b"y")
    except Misuse as error:
        print(str(error).partition(" in process")[0], flush=True)
    conn.close()
    with blocking.open_connector({{"role": "sender", "host": "127.0.0.1", "zmq_port": 0,
                                  "memory_pool_size": 1 << 20}}) as own:
        own.put("0", "1", "k", b"y")
    os._exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
conn.put("0", "1", "l", b"z")
print(receiver.get("0", "1", "l"), flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["b'x'", "put of 'k' was made", "child 7", "b'z'"]
    assert run.returncode == 0
