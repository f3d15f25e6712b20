"""Chunks that are asked for before they are polled for, and what their senders are told of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trio_mori_vllm_omni._polls as polls_module
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from sync_pair import eventually, held_loop, is_whole, made, open_pair, poll
from sync_pair import patience as patience

deterministic = pytest.mark.deterministic


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
            patched.setattr(polls_module, "HELD", 0.5)
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
