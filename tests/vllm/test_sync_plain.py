"""Connectors with blocking calls, as vllm-omni makes them: two stages in one process, over shared memory."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch
import trio_mori_vllm_omni._home as home_module
import trio_mori_vllm_omni._interests as interests_module
from ports import free_port
from trio_mori_vllm_omni._interests import PATIENCE
from trio_mori_vllm_omni._place import find_place
from trio_mori_vllm_omni._posted_puts import COPIED_IN_LOOP
from trio_mori_vllm_omni._received import ReceivedBuffer
from trio_mori_vllm_omni._sync import SyncConnector

from trio_mori import (
    BindFailed,
    ConfigError,
    ConnectorClosed,
    LeaseError,
    NoEndpoint,
    PortHeld,
    TrioMoriError,
    blocking,
)
from trio_mori.__main__ import main

deterministic = pytest.mark.deterministic

POOL = 1 << 20
# Much longer than anything here takes, and shorter than anybody's patience.
LIMIT = 20.0


class Identity:
    """A codec that changes nothing."""

    def plain(self, value: object) -> tuple[object, bool]:
        if isinstance(value, complex):
            raise TypeError("complex numbers do not travel")
        return value, True

    def revived(self, tree: object) -> object:
        return tree


def make(extra: dict[str, object]) -> SyncConnector:
    extra = {"host": "127.0.0.1", "memory_pool_size": POOL, **extra}
    return SyncConnector(extra, find_place(extra, resolved=True), Identity())


@contextmanager
def made(**extra: object) -> Iterator[SyncConnector]:
    connector = make(extra)
    try:
        yield connector
    finally:
        connector.close()


@contextmanager
def open_pair(**extra: object) -> Iterator[tuple[SyncConnector, SyncConnector]]:
    """A sender and its receiver."""
    shm = {"backend_type": "shm", **extra}
    with made(role="sender", stage_id=0, zmq_port=0, **shm) as up:
        info = up.get_connection_info()
        with made(
            role="receiver", stage_id=1, from_stage=0, sender_host=info["host"], sender_zmq_port=info["zmq_port"], **shm
        ) as down:
            yield up, down


@pytest.fixture(autouse=True)
def _leaves_nothing_in_the_loop() -> Iterator[None]:
    """All connectors of a process share one loop, and a test that begins counts on finding it at rest."""
    yield
    home = home_module._home
    if home is not None and not home.is_over:
        eventually(lambda: home._nursery is not None and not home._nursery.child_tasks, "that the loop is at rest")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is kept, though the machine may halt the test before it polls again."""
    monkeypatch.setattr(interests_module, "PATIENCE", 2 * LIMIT)


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{what} has not come true"
        time.sleep(0.001)


def poll(connector: SyncConnector, key: str, metadata: dict[str, object] | None = None) -> tuple[object, int]:
    """Poll as the adapter does, until it is there."""
    got: list[tuple[object, int]] = []

    def is_there() -> bool:
        result = connector.get("0", "1", key, metadata)
        if result is not None:
            got.append(result)
        return bool(got)

    eventually(is_there, f"the arrival of {key}")
    return got[0]


def is_told(call: Callable[[], object], what: str) -> bool:
    """Whether a call says that the connector is closed, and that this is why."""
    try:
        call()
    except ConnectorClosed as error:
        return what in str(error)
    return False


def is_whole(connector: SyncConnector) -> bool:
    health = connector.health()
    pool = health["pool"]
    return health["polled"] == 0 and sum(size for state, size in pool.items() if state != "free") == 0


def refusals(connector: SyncConnector) -> dict[str, int]:
    return {kind: entry["count"] for kind, entry in connector.health()["refusals"].items()}


@contextmanager
def held_loop(connector: SyncConnector) -> Iterator[None]:
    """The loop does nothing while the block lasts."""
    busy, go = threading.Event(), threading.Event()
    connector._home.portal.post(lambda: (busy.set(), go.wait(LIMIT)))
    assert busy.wait(LIMIT)
    try:
        yield
    finally:
        go.set()


# --- put and get ------------------------------------------------------------------------------------------------


@deterministic
def test_a_structure_is_delivered_once_and_leaves_both_pools_free() -> None:
    with open_pair() as (up, down):
        sent = {"codes": {"audio": torch.arange(4096).reshape(8, 512)}, "meta": {"finished": torch.tensor(False)}}
        ok, size, metadata = up.put("0", "1", "r_0_0", sent)
        assert ok
        assert metadata is not None
        assert metadata["data_size"] == size > 4096 * 8
        value, moved = poll(down, "r_0_0")
        assert isinstance(value, dict)
        assert torch.equal(value["codes"]["audio"], sent["codes"]["audio"])
        assert moved >= 4096 * 8
        assert down.get("0", "1", "r_0_0") is None
        down.abandon_get("r_0_0")
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")


@deterministic
@pytest.mark.parametrize("size", [COPIED_IN_LOOP - 4096, COPIED_IN_LOOP + 4096])
def test_the_source_of_a_put_may_be_overwritten_when_it_has_returned(size: int) -> None:
    with open_pair() as (up, down):
        source = torch.ones(size, dtype=torch.uint8)
        assert up.put("0", "1", "k", {"x": source})[0]
        source.zero_()
        value, _ = poll(down, "k")
        assert isinstance(value, dict)
        assert bool((value["x"] == 1).all())


@deterministic
@pytest.mark.usefixtures("patience")
def test_what_is_polled_for_is_answered_from_memory_while_the_loop_does_nothing() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "r_0_0") is None
        up.put("0", "1", "r_0_0", {"step": torch.arange(100)})
        eventually(lambda: down.health()["pool"].get("leased", 0) > 0, "the arrival")
        with held_loop(down):
            result = down.get("0", "1", "r_0_0")
            assert down.get("0", "1", "r_0_1") is None
        assert result is not None
        value, _ = result
        assert isinstance(value, dict)
        assert torch.equal(value["step"], torch.arange(100))


@deterministic
@pytest.mark.parametrize("data", [torch.arange(100, dtype=torch.int16), bytes(range(200))])
def test_a_raw_payload_arrives_as_its_bytes(data: torch.Tensor | bytes) -> None:
    expected = data if isinstance(data, bytes) else data.numpy().tobytes()
    with open_pair() as (up, down):
        ok, size, metadata = up.put("0", "1", "k", data)
        assert (ok, size) == (True, 200)
        assert metadata is not None
        assert metadata["is_fast_path"] is True
        value, moved = poll(down, "k")
        assert isinstance(value, ReceivedBuffer)
        assert (value.size, moved, value.to_bytes()) == (200, 200, expected)
        assert value.tensor.dtype == torch.uint8
        assert value.as_tensor(torch.int16, (10, 10)).shape == (10, 10)
        with pytest.raises(ValueError, match="has 404 bytes, but this buffer has 200"):
            value.as_tensor(torch.int16, (202,))
        kept = value.tensor
        value.release()
        value.release()
        assert kept.numpy().tobytes() == expected
        with pytest.raises(LeaseError):
            value.tensor  # noqa: B018


@deterministic
def test_a_received_buffer_can_be_put_again() -> None:
    with open_pair() as (up, down):
        up.put("0", "1", "k", b"first")
        value, _ = poll(down, "k")
        up.put("0", "1", "again", value)
        again, _ = poll(down, "again")
        assert isinstance(again, ReceivedBuffer)
        assert again.to_bytes() == b"first"


@deterministic
def test_the_bytes_of_a_bytearray_are_no_raw_payload() -> None:
    with open_pair() as (up, down):
        up.put("0", "1", "k", bytearray(b"abc"))
        assert poll(down, "k")[0] == b"abc"


@deterministic
def test_metadata_with_host_and_port_only_is_enough() -> None:
    with open_pair() as (up, down):
        info = up.get_connection_info()
        down.update_sender_info("127.0.0.1", 1)
        up.put("0", "1", "r_0_0", {"n": 1})
        assert poll(down, "r_0_0", {"source_host": info["host"], "source_port": info["zmq_port"]})[0] == {"n": 1}


@deterministic
def test_with_all_of_put_s_metadata_one_get_waits_for_the_transfer() -> None:
    with open_pair() as (up, down):
        _, _, metadata = up.put("0", "1", "k", {"n": 1})
        result = down.get("0", "1", "k", metadata)
        assert result is not None
        assert result[0] == {"n": 1}


@deterministic
def test_a_deadline_that_passes_consumes_nothing() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "k") is None
        begun = time.monotonic()
        assert down.get_with_deadline("0", "1", "k", deadline=begun + 0.05) is None
        assert 0.04 < time.monotonic() - begun < LIMIT
        assert down.get_with_deadline("0", "1", "k", deadline=begun) is None
        up.put("0", "1", "k", {"n": 1})
        result = down.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT)
        assert result is not None
        assert result[0] == {"n": 1}
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")


@deterministic
def test_a_get_without_an_endpoint_says_how_to_give_one() -> None:
    with made(role="receiver", stage_id=1, backend_type="shm") as down:
        with pytest.raises(NoEndpoint, match=r"update_sender_info\(host, port\)"):
            down.get("0", "1", "k")
        with pytest.raises(ConfigError, match="from 1 to 65535"):
            down.update_sender_info("127.0.0.1", 70000)


@deterministic
def test_a_middle_stage_receives_and_sends_on_its_one_connector() -> None:
    base = free_port(3)
    stages = [
        {"role": role, "stage_id": stage, "from_stage": max(stage - 1, 0), "backend_type": "shm"} | ports
        for stage, (role, ports) in enumerate(
            [
                ("sender", {"zmq_port": base}),
                ("receiver", {"sender_host": "auto", "sender_zmq_port": base}),
                ("receiver", {"sender_host": "auto", "sender_zmq_port": base + 1}),
            ]
        )
    ]
    with made(**stages[0]) as first, made(**stages[1]) as middle, made(**stages[2]) as last:
        assert middle.can_put
        assert first.put("0", "1", "r_0_0", {"n": 1})[0]
        assert middle.put("1", "2", "r_1_0", poll(middle, "r_0_0")[0])[0]
        result = last.get_with_deadline("1", "2", "r_1_0", deadline=time.monotonic() + LIMIT)
        assert result is not None
        assert result[0] == {"n": 1}


@deterministic
@pytest.mark.usefixtures("patience")
def test_the_next_chunk_is_asked_for_before_it_is_polled_for_and_none_after_the_last() -> None:
    with open_pair() as (up, down):
        for chunk in range(3):
            up.put("0", "1", f"r_0_{chunk}", {"meta": {"finished": torch.tensor(chunk == 2)}})
        poll(down, "r_0_0")
        eventually(lambda: down.health()["polled"] == 1, "that the next one is asked for")
        eventually(lambda: down.health()["pool"]["leased"] > 0, "that it has come")
        with held_loop(down):
            assert down.get("0", "1", "r_0_1") is not None
        assert poll(down, "r_0_2")[0] == {"meta": {"finished": torch.tensor(True)}}
        eventually(lambda: is_whole(up) and is_whole(down), "that nothing more is asked for")


@deterministic
@pytest.mark.usefixtures("patience")
def test_of_chunks_that_are_read_in_a_row_the_first_wakes_the_loop_and_a_later_poll_for_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_pair() as (up, down):
        for request in "abc":
            up.put("0", "1", f"{request}_0_0", {"meta": {"finished": torch.tensor(False)}})
            assert down.get("0", "1", f"{request}_0_0") is None
        eventually(lambda: down.health()["pool"]["leased"] == 3 << 16, "that all have come")
        with monkeypatch.context() as patched:
            posted: list[Callable[[], object]] = []
            patched.setattr(down._home, "post", posted.append)
            patched.setattr(home_module, "HELD", 0.5)
            for request in "abc":
                assert down.get("0", "1", f"{request}_0_0") is not None
            assert len(posted) == 1

            def is_told() -> bool:
                assert down.get("0", "1", "a_0_1") is None
                return len(posted) > 1

            eventually(is_told, "that a poll wakes the loop")
            assert len(posted) == 2
        for callback in posted:
            down._home.post(callback)
        eventually(lambda: is_whole(up), "that the sender has heard of all")


def test_what_was_read_is_told_though_nobody_polls_any_more() -> None:
    with open_pair() as (up, down):
        up.put("0", "1", "r_0_0", {"meta": {"finished": torch.tensor(False)}})
        poll(down, "r_0_0")
        eventually(lambda: is_whole(up), "that the sender has heard of it")


@deterministic
def test_what_was_read_is_told_by_the_close() -> None:
    with made(role="sender", stage_id=0, zmq_port=0, backend_type="shm") as up:
        info = up.get_connection_info()
        source = {"sender_host": info["host"], "sender_zmq_port": info["zmq_port"]}
        with made(role="receiver", stage_id=1, from_stage=0, backend_type="shm", **source) as down:
            up.put("0", "1", "r_0_0", {"meta": {"finished": torch.tensor(False)}})
            poll(down, "r_0_0")
        eventually(lambda: is_whole(up), "that the sender has heard of it")


@deterministic
def test_a_small_put_under_a_new_key_waits_for_nothing_and_the_source_may_change() -> None:
    with open_pair() as (up, down):
        assert up.put("0", "1", "first", b"x")[0]
        source = torch.arange(1000)
        with held_loop(up):
            ok, size, metadata = up.put("0", "1", "r_0_0", {"t": source})
            source.zero_()
        assert (ok, size) == (True, metadata["data_size"] if metadata else 0)
        got = down.get("0", "1", "r_0_0", metadata)
        assert got is not None
        assert isinstance(got[0], dict)
        assert got[0]["t"].equal(torch.arange(1000))


@deterministic
@pytest.mark.parametrize("then", ["put", "cleanup"])
def test_a_put_whose_thread_was_halted_before_it_could_wake_the_loop_keeps_its_place(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_pair() as (up, down):
        assert up.put("0", "1", "first", b"x")[0]
        held: list[Callable[[], object]] = []
        with monkeypatch.context() as patch:
            patch.setattr(up._home, "post", held.append)
            assert up.put("0", "1", "r_0_0", b"old")[0]
        if then == "cleanup":
            up.cleanup("r")
            assert up.health()["pool"]["free"] == POOL - 4096, "what was put before is cleaned up"
        assert up.put("0", "1", "r_0_0", b"new!")[0]
        for wake in held:
            up._home.post(wake)
        assert poll(down, "r_0_0")[1] == 4
        assert down.get("0", "1", "r_0_0") is None
        assert poll(down, "first")[1] == 1
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")


@contextmanager
def pair_in_pieces() -> Iterator[tuple[SyncConnector, SyncConnector]]:
    """Half of the sender's pool is free, in pieces of 4 KB between 128 payloads, `p1_0_1`, `p3_0_1` and so on."""
    with open_pair() as (up, down):
        for piece in range(POOL // 4096):
            assert up.put("0", "1", f"p{piece}_0_1", b"x")[0]
        for piece in range(0, POOL // 4096, 2):
            poll(down, f"p{piece}_0_1")
        eventually(lambda: up.health()["pool"]["free"] == POOL // 2, "that every second piece is free")
        yield up, down


@deterministic
def test_a_put_that_found_room_only_in_pieces_is_not_lost() -> None:
    with pair_in_pieces() as (up, down):
        assert up.put("0", "1", "big", bytes(100_000))[0]
        assert up.put("0", "1", "big", b"y") == (False, 0, None)
        assert refusals(up) == {"put: KeyBusy": 1}
        for piece in range(1, POOL // 4096, 2):
            poll(down, f"p{piece}_0_1")
        assert poll(down, "big")[1] == 100_000
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")


@deterministic
def test_a_put_that_waits_for_a_larger_piece_is_cleaned_up_with_its_request() -> None:
    with pair_in_pieces() as (up, down):
        assert up.put("0", "1", "r_0_1", bytes(100_000))[0]
        up.cleanup("r")
        for piece in range(1, POOL // 4096, 2):
            poll(down, f"p{piece}_0_1")
        eventually(lambda: is_whole(up), "that the pool is free")
        assert up.put("0", "1", "r_0_1", b"new")[0]
        assert poll(down, "r_0_1")[1] == 3


# --- refusals ---------------------------------------------------------------------------------------------------


@deterministic
def test_a_refused_put_says_why_in_health_and_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with open_pair() as (up, _), caplog.at_level(logging.WARNING, "trio_mori.vllm_omni"):
        for _ in range(3):
            assert up.put("0", "1", "big", torch.zeros(2 * POOL, dtype=torch.uint8)) == (False, 0, None)
        assert up.put("0", "1", "empty", b"") == (False, 0, None)
        assert up.put("0", "1", "odd", 1j) == (False, 0, None)
        assert up.put("0", "1", "half", torch.zeros(POOL // 2, dtype=torch.uint8))[0]
        assert up.put("0", "1", "more", torch.zeros(POOL, dtype=torch.uint8)) == (False, 0, None)
        assert refusals(up) == {"put: TooBig": 3, "put: UnsupportedPayload": 2, "put: NoRoom": 1}
        assert len(caplog.records) == 3
        up.cleanup("half")
        eventually(lambda: is_whole(up), "that the pool is free")


@deterministic
def test_a_connector_that_only_receives_refuses_put() -> None:
    with made(role="receiver", sender_host="127.0.0.1", sender_zmq_port=1, backend_type="shm") as down:
        assert not down.can_put
        assert down.put("0", "1", "k", b"x") == (False, 0, None)
        assert refusals(down) == {"put: WrongRole": 1}


@deterministic
def test_a_get_that_cannot_succeed_is_asked_again_after_a_pause_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with open_pair() as (up, down), caplog.at_level(logging.WARNING, "trio_mori.vllm_omni"):
        small = {"backend_type": "shm", "memory_pool_size": 8192, "role": "receiver", "stage_id": 3, "from_stage": 2}
        info = up.get_connection_info()
        with made(**small, sender_host=info["host"], sender_zmq_port=info["zmq_port"]) as tiny:
            up.put("0", "1", "k", torch.zeros(100_000, dtype=torch.uint8))

            def is_refused() -> bool:
                assert tiny.get("0", "1", "k") is None
                return bool(refusals(tiny))

            eventually(is_refused, "the refusal")
            for _ in range(100):
                assert tiny.get("0", "1", "k") is None
            assert refusals(tiny) == {"get: TooBig": 1}
            assert len(caplog.records) == 1
        assert poll(down, "k")[1] == 100_000


# --- cleaning up ------------------------------------------------------------------------------------------------


@deterministic
def test_cleanup_takes_both_stages_or_neither() -> None:
    with open_pair() as (up, down):
        with pytest.raises(ValueError, match="both from_stage and to_stage, or neither"):
            up.cleanup("k", "0")
        for edge in ((), ("0", "1")):
            up.put("0", "1", "k", {"t": torch.zeros(100)})
            up.cleanup("k", *edge)
            eventually(lambda: is_whole(up), "that the pool is free")
        up.put("0", "1", "k", {"t": torch.zeros(100)})
        up.cleanup("k", "1", "2")
        assert isinstance(poll(down, "k")[0], dict)


@deterministic
def test_cleanup_of_a_request_gives_up_what_is_polled_for_of_it_and_nothing_else() -> None:
    with open_pair() as (_, down):
        for key in ("r", "r_0_0", "r_0_12", "rr_0_0", "r_0_x", "r_1_0"):
            assert down.get("0", "1", key) is None
        down.cleanup("r", "0", "1")
        assert down.health()["polled"] == 3
        down.cleanup("rr")
        assert down.health()["polled"] == 2


@deterministic
def test_chunks_of_an_aborted_request_are_forgotten_and_others_stay() -> None:
    with open_pair() as (up, down):
        for request in ("a", "b"):
            for chunk in range(3):
                assert up.put("0", "1", f"{request}_0_{chunk}", {"t": torch.zeros(100)})[0]
        up.forget_request("a")
        eventually(lambda: up.health()["pool"]["published"] == 3 * 4096, "that three chunks are left")
        for chunk in range(3):
            poll(down, f"b_0_{chunk}")
        assert down.get("0", "1", "a_0_0") is None


@deterministic
def test_the_first_chunk_of_a_request_drops_what_is_left_of_an_earlier_one() -> None:
    with open_pair() as (up, down):
        for chunk in range(3):
            up.put("0", "1", f"r_0_{chunk}", {"life": torch.tensor([1])})
        up.put("0", "1", "r_0_0", {"life": torch.tensor([2])})
        assert poll(down, "r_0_0")[0] == {"life": torch.tensor([2])}
        for _ in range(20):
            assert down.get("0", "1", "r_0_1") is None
        up.put("0", "1", "r_0_1", {"life": torch.tensor([2])})
        assert poll(down, "r_0_1")[0] == {"life": torch.tensor([2])}


def test_a_payload_that_nobody_polls_for_any_more_goes_back_to_its_sender() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "r_0_0") is None
        up.put("0", "1", "r_0_0", {"n": torch.zeros(100)})
        eventually(lambda: down.health()["pool"].get("leased", 0) > 0, "the arrival")
        begun = time.monotonic()
        eventually(lambda: is_whole(down), "that it has gone back")
        assert time.monotonic() - begun > PATIENCE / 2
        assert up.health()["pool"]["published"] == 4096
        assert isinstance(poll(down, "r_0_0")[0], dict)


# --- instances, threads, ends -----------------------------------------------------------------------------------


@deterministic
def test_two_instances_of_one_configuration_share_memory_and_port() -> None:
    with open_pair() as (up, down):
        again = make(dict(up.config))
        try:
            assert again.get_connection_info() == up.get_connection_info()
            assert again.put("0", "1", "k", {"n": 1})[0]
            up.close()
            assert again.put("0", "1", "l", {"n": 2})[0]
            assert poll(down, "k")[0] == {"n": 1}
            assert poll(down, "l")[0] == {"n": 2}
        finally:
            again.close()
        assert again.health()["status"] == "unhealthy"


@deterministic
def test_a_connector_that_was_closed_says_so_and_can_be_made_again() -> None:
    with open_pair() as (up, _):
        port = up.get_connection_info()["zmq_port"]
        up.close()
        up.close()
        for call in (
            lambda: up.put("0", "1", "k", b"x"),
            lambda: up.get("0", "1", "k", {"source_host": "127.0.0.1", "source_port": port}),
            lambda: up.cleanup("k"),
            lambda: up.abandon_get("k"),
            up.get_connection_info,
        ):
            with pytest.raises(ConnectorClosed, match="stage 0 was closed"):
                call()
        up.forget_request("k")
        with made(role="sender", stage_id=0, zmq_port=port, backend_type="shm") as fresh:
            assert fresh.put("0", "1", "k", b"x")[0]


@deterministic
def test_closing_ends_the_calls_that_wait_with_a_typed_error() -> None:
    with open_pair() as (_, down):
        errors: list[Exception] = []

        def wait() -> None:
            try:
                down.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT)
            except TrioMoriError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: down.health()["parked"] > 0, "that it waits")
        begun = time.monotonic()
        down.close()
        thread.join(LIMIT)
        assert time.monotonic() - begun < 2
        assert [type(error) for error in errors] == [ConnectorClosed]


@deterministic
def test_closing_is_quick_when_the_sender_has_never_been_there() -> None:
    with made(
        role="receiver", stage_id=1, from_stage=0, sender_host="127.0.0.1", sender_zmq_port=9, backend_type="shm"
    ) as down:
        assert down.get("0", "1", "k") is None
        begun = time.monotonic()
        down.close()
        assert time.monotonic() - begun < 2


@deterministic
def test_a_connector_that_is_collected_lets_go_without_waiting() -> None:
    with open_pair() as (up, _):
        config = dict(up.config)
        again = make(config)
        with held_loop(up):
            del again
            gc.collect()
        eventually(lambda: up._client is not None and up._client.shared.users == 1, "that it has let go")


@deterministic
def test_a_constructor_that_failed_leaves_nothing_to_close() -> None:
    with made(role="sender", stage_id=0, zmq_port=0, backend_type="shm") as up:
        port = up.get_connection_info()["zmq_port"]
        with pytest.raises(BindFailed, match=f"cannot listen on tcp://127.0.0.1:{port}"):
            make({"role": "sender", "stage_id": 5, "zmq_port": port, "backend_type": "shm"})
        gc.collect()


def test_a_put_gets_the_port_from_an_idle_instance_of_another_process_and_not_from_one_that_put() -> None:
    extra: dict[str, object] = {"role": "sender", "stage_id": 0, "zmq_port": free_port(1), "backend_type": "shm"}
    config = find_place({"host": "127.0.0.1", "memory_pool_size": POOL, **extra}, resolved=True).config
    with blocking.open_connector(config) as other:  # another trio run is as good as another process
        with made(**extra) as up:
            assert other.health()["port"] == "held"  # making one is no reason to give the port up
            assert up.put("0", "1", "k", b"x")[0]
            assert other.health()["port"] == "passive"
    with blocking.open_connector(config) as other:
        other.put("0", "1", "k", b"x", timeout=LIMIT)
        with made(**extra) as up, pytest.raises(PortHeld):
            up.put("0", "1", "k", b"y")


@deterministic
def test_calls_in_the_loop_s_own_thread_are_refused_and_close_does_not_wait() -> None:
    with open_pair() as (up, _):
        outcome: list[object] = []
        done = threading.Event()

        def call() -> None:
            try:
                up.put("0", "1", "k", b"x")
            except TrioMoriError as error:
                outcome.append(error)
            up.close()
            done.set()

        up._home.portal.post(call)
        assert done.wait(LIMIT)
        assert "own thread" in str(outcome[0])
        eventually(lambda: up.health()["status"] == "unhealthy", "that it is closed")


@deterministic
def test_the_loop_s_death_is_the_cause_of_every_later_error_and_a_new_connector_gets_a_new_loop() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "k") is None

        async def fail() -> None:
            raise RuntimeError("planted")

        up._home.post(lambda: up._home._nursery.start_soon(fail))  # type: ignore[union-attr]
        begun = time.monotonic()
        for call in (
            lambda: up.put("0", "1", "k", b"x"),
            lambda: down.get("0", "1", "k"),
            lambda: down.get_with_deadline("0", "1", "k", deadline=begun + LIMIT),
            lambda: up.cleanup("k"),
        ):
            eventually(lambda call=call: is_told(call, "died of RuntimeError: planted"), "the error")  # type: ignore[misc]
        for connector in (up, down):
            assert connector.health()["status"] == "unhealthy"
            connector.close()
        assert time.monotonic() - begun < 2
    with open_pair() as (up, down):
        up.put("0", "1", "k", {"n": 1})
        assert poll(down, "k")[0] == {"n": 1}


def test_a_failure_of_the_core_connector_is_the_cause_of_every_later_error_and_spares_the_others() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "k") is None
        assert down._client is not None
        shared = down._client.shared

        async def fail() -> None:
            raise RuntimeError("planted")

        core = down._home.portal.call(shared.core, "receiver")
        down._home.post(lambda: core._receiver.nursery.start_soon(fail))

        eventually(lambda: is_told(lambda: down.get("0", "1", "k"), "planted"), "that the poller is told")
        with pytest.raises(ConnectorClosed, match=r"stage 1 has failed.*planted"):
            down.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT)
        assert up.put("0", "1", "k", b"x")[0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # from 3.12 on
def test_a_forked_child_is_refused_and_leaves_its_parent_alone() -> None:
    with open_pair() as (up, down):
        child = os.fork()
        if not child:
            code = 1
            try:
                up.put("0", "1", "k", b"x")
            except TrioMoriError as error:
                code = 0 if "fork" in str(error) else 2
            up.close()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        up.put("0", "1", "k", {"n": 1})
        assert poll(down, "k")[0] == {"n": 1}


@attrs.frozen
class Got:
    """What a get returned, and when."""

    key: int
    value: object
    asked: int
    answered: int


class History:
    """Which puts of each key succeeded, and when, to say whether gets returned what they may."""

    def __init__(self, keys: int) -> None:
        self._puts: list[dict[int, tuple[int, int]]] = [{} for _ in range(keys)]  # version -> begin and end
        self._numbers = itertools.count(1)

    @staticmethod
    def value(key: int, version: int) -> dict[str, object]:
        """A payload that no other put has, of a length of its own."""
        return {"key": key, "v": torch.arange(version, version + (version * 7919 + key) % 3000 + 1)}

    def put(self, connector: SyncConnector, key: int) -> None:
        version, begun = next(self._numbers), time.monotonic_ns()
        done, _, _ = connector.put("0", "1", f"k{key}_0_0", self.value(key, version))
        if done:
            self._puts[key][version] = begun, time.monotonic_ns()

    def check(self, gets: list[Got]) -> None:
        """Each payload byte for byte, once, and the latest of its key at some time since it was asked for.

        A get is asked for when the payload before it is taken, at the earliest. What has arrived is delivered also if
        its key is put again before it is taken: then the next get has the new one.
        """
        seen: set[int] = set()
        taken: dict[int, list[Got]] = {}
        for got in sorted(gets, key=lambda each: each.asked):
            assert isinstance(got.value, dict)
            version, puts = int(got.value["v"][0]), self._puts[got.key]
            expected = self.value(got.key, version)["v"]
            assert got.value["key"] == got.key
            assert isinstance(expected, torch.Tensor)
            assert torch.equal(got.value["v"], expected)
            assert version not in seen, "delivered twice"
            seen.add(version)
            begun, ended = puts[version]
            assert begun < got.answered
            earlier = taken.setdefault(got.key, [])
            since = max((g.asked for g in earlier if g.answered < got.asked), default=0)
            earlier.append(got)
            replaced = [other for other, (start, end) in puts.items() if ended < start and end < since]
            assert not replaced, f"version {version} of k{got.key} came after {replaced}"


def test_sixteen_threads_get_the_latest_put_or_nothing_and_leave_both_pools_free() -> None:
    """For longer: TRIO_MORI_STRESS_SECONDS=60."""
    keys, threads = 200, 16
    with open_pair(memory_pool_size=8 << 20) as (up, down):
        stop = time.monotonic() + float(os.environ.get("TRIO_MORI_STRESS_SECONDS", "2"))
        errors: list[BaseException] = []
        history = History(keys)
        gets: list[Got] = []

        def act(state: int) -> None:
            key, kind = state % keys, (state >> 8) % 12
            name = f"k{key}_0_0"
            if kind < 4:
                history.put(up, key)
            elif kind < 9:
                asked = time.monotonic_ns()
                result = down.get("0", "1", name)
                if result is not None:
                    gets.append(Got(key, result[0], asked, time.monotonic_ns()))
            elif kind == 9:
                up.cleanup(name)
            elif kind == 10:
                up.forget_request(f"k{key}")
            else:
                assert {down.health()["status"], up.health()["status"]} <= {"healthy", "degraded"}
                down.abandon_get(name)

        def run(state: int) -> None:
            try:
                while time.monotonic() < stop:
                    state = (1103515245 * state + 12345) % (1 << 31)
                    act(state)
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        running = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(2 * LIMIT + 60)
        assert errors == []
        assert gets
        history.check(gets)
        assert set(refusals(up)) <= {"put: KeyBusy", "put: NoRoom"}
        assert set(refusals(down)) <= {"get: Gone"}
        for key in range(keys):
            up.cleanup(f"k{key}_0_0")
            down.abandon_get(f"k{key}_0_0")
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")


@deterministic
def test_closed_connectors_leave_nothing_in_the_loop() -> None:
    home = home_module.home_of_this_process()

    async def tasks() -> int:
        assert home._nursery is not None
        return len(home._nursery.child_tasks)

    assert home.portal.call(tasks) == 0
    for _ in range(3):
        with open_pair() as (up, down):
            assert down.get("0", "1", "k") is None
            up.put("0", "1", "l", b"x")
    eventually(lambda: home.portal.call(tasks) == 0, "that no task is left")
    assert not home._shared


@deterministic
def test_one_thread_serves_all_connectors_of_the_process() -> None:
    with open_pair() as (up, down):
        assert up._home is down._home is home_module.home_of_this_process()
        assert up._home.portal.call(_thread_id) == down._home.portal.call(_thread_id)


async def _thread_id() -> int:
    return threading.get_ident()


# --- keys -----------------------------------------------------------------------------------------------------


def key_file(folder: Path, name: str) -> str:
    """The secret key of a new pair."""
    assert main(["keygen", str(folder / name)]) == 0
    return str(folder / f"{name}.secret")


@deterministic
def test_keys_in_the_deploy_file_secure_the_edge(tmp_path: Path) -> None:
    with open_pair(curve_secret_key=key_file(tmp_path, "stages")) as (up, down):
        assert up.put("0", "1", "k", b"hello")[0]
        assert poll(down, "k")[1] == 5
        port = up.get_connection_info()["zmq_port"]
        stranger = {"curve_secret_key": key_file(tmp_path, "stranger"), "backend_type": "shm", "stage_id": 1}
        with made(role="receiver", from_stage=0, sender_host="127.0.0.1", sender_zmq_port=port, **stranger) as other:
            eventually(lambda: other.get("0", "1", "k") is None and told(other), "that it is refused")
            assert other.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT) is None
        assert up.put("0", "1", "more", b"hello")[0]
        assert poll(down, "more")[1] == 5


def told(connector: SyncConnector) -> bool:
    """Whether it says that it was refused for its keys."""
    return "get: AuthenticationFailed" in connector.health()["refusals"]


@deterministic
def test_a_key_file_that_others_can_read_is_told_by_the_first_call(tmp_path: Path) -> None:
    path = key_file(tmp_path, "stages")
    os.chmod(path, 0o644)
    with (
        pytest.raises(ConfigError, match="chmod 600"),
        made(role="sender", stage_id=0, zmq_port=0, backend_type="shm", curve_secret_key=path),
    ):
        raise AssertionError
