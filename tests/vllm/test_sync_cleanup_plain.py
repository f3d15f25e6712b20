"""What is given up with a request, and what nobody polls for any more."""

from __future__ import annotations

import time

import pytest
import torch
from sync_pair import LIMIT, eventually, held_loop, is_whole, open_pair, poll
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from sync_pair import patience as patience
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


@deterministic
@pytest.mark.parametrize("name", ["forget_request", "cleanup"])
def test_a_clean_up_leaves_alone_what_is_put_after_it(name: str) -> None:
    with open_pair() as (up, down):
        for chunk in range(3):
            up.put("0", "1", f"r_0_{chunk}", {"life": torch.tensor([1])})
        with held_loop(up):
            up.put("0", "1", "r_0_3", {"life": torch.tensor([1])})
            getattr(up, name)("r")
            up.put("0", "1", "r_0_4", {"life": torch.tensor([2])})
        assert poll(down, "r_0_4")[0] == {"life": torch.tensor([2])}
        assert down.get("0", "1", "r_0_3") is None
        eventually(lambda: is_whole(up), "that nothing is left of the first life")


@deterministic
@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("waits", [False, True], ids=["polls", "waits"])
def test_what_came_for_an_aborted_request_is_not_taken_for_a_chunk_of_the_next_one_of_its_name(waits: bool) -> None:
    def life(number: int) -> dict[str, torch.Tensor]:
        return {"life": torch.tensor([number])}

    with open_pair() as (up, down):
        for chunk in range(2):
            up.put("0", "1", f"r_0_{chunk}", life(1))
        poll(down, "r_0_0")
        eventually(lambda: down.health()["pool"].get("leased", 0) > 0, "that the second chunk came ahead")
        assert down.get("0", "1", "rr_0_1") is None
        up.forget_request("r")
        for chunk in range(2):
            up.put("0", "1", f"r_0_{chunk}", life(2))
        if waits:
            found = down.get_with_deadline("0", "1", "r_0_0", deadline=time.monotonic() + LIMIT)
        else:
            found = poll(down, "r_0_0")
        assert found is not None
        assert found[0] == life(2)
        assert poll(down, "r_0_1")[0] == life(2)
        assert down.health()["polled"] == 2, "another request's, and the next one of this"


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
