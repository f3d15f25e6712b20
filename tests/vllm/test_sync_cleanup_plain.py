"""What is given up with a request, and what nobody polls for any more."""

from __future__ import annotations

import time

import pytest
import torch
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from sync_pair import eventually, is_whole, open_pair, poll
from trio_mori_vllm_omni._interests import PATIENCE

deterministic = pytest.mark.deterministic


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
