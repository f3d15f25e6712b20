"""Puts that wait for nothing, and what becomes of them when they have to, or are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from sync_pair import POOL, eventually, held_loop, is_whole, made, open_pair, poll, refusals
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from trio_mori_vllm_omni._sync import SyncConnector

deterministic = pytest.mark.deterministic


# --- puts that wait for nothing ---------------------------------------------------------------------------------


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
        small = {"backend_type": "shm", "memory_pool_size": 8192, "role": "receiver", "stage_id": 3, "from_stage": 0}
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
