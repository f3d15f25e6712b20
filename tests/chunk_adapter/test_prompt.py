"""The Talker's prompt: which chunks extend it, the order of conditions, and which models keep a window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chunk_fakes import Rig, Status
from trio_mori_vllm_omni.chunks._prompt import TalkerWindow
from trio_mori_vllm_omni.chunks._records import Flag

pytestmark = pytest.mark.deterministic

WINDOW = TalkerWindow(100, keeps_previous=True, only_when_full=True)


def condition(length: int = 5, **meta: Any) -> dict[str, Any]:
    return {"meta": {"next_stage_prompt_len": length, **meta}}


def talker(window: TalkerWindow = WINDOW, **fields: Any) -> Rig:
    """A Talker with a streaming request that waits for its first chunk."""
    rig = Rig(ar=True, talker=window)
    rig.add("r", resumable=True, **fields)
    rig.tick()
    return rig


def test_conditions_are_numbered_and_the_second_one_extends_the_prompt() -> None:
    rig = talker()
    for length in (5, 7):
        rig.loop.deliver("r", condition(length))
        assert rig.tick() == ["r"]
    assert rig.rebuilt == [
        {
            "max_model_len": 100, "previous_condition_len": 5, "previous_condition_seq": 0, "condition_seq": 1,
            "recompute_previous_chunks": 1, "recompute_on_capacity": True,
        }
    ]  # fmt: skip
    assert [info["meta"]["streaming_condition_seq"] for _, info in rig.ran] == [0, 1]


@pytest.mark.parametrize(("number", "reason"), [(2, "came in the place of condition 1"), (-1, "has to be a number")])
def test_a_condition_out_of_turn_fails_its_request_and_no_other(number: int, reason: str) -> None:
    rig = talker()
    rig.loop.deliver("r", condition())
    rig.tick()
    rig.loop.deliver("r", condition(streaming_condition_seq=number))
    rig.begin()
    assert reason in rig.desk.reading.take_failures()["r"]


def test_a_replaced_prompt_goes_through_admission_again() -> None:
    rig = talker()
    rig.loop.deliver("r", condition())
    rig.tick()
    rig.desk.watermarks["r"] = 3
    rig.loop.deliver("r", condition(replace_streaming_prompt=True))
    rig.begin()
    (request,) = rig.waiting
    assert request.status is Status.WAITING
    assert "r" in rig.desk.flag_set(Flag.REPLACED)
    assert rig.end() == ["r"]
    assert "r" not in rig.desk.flag_set(Flag.REPLACED)
    assert not rig.desk.watermarks


def test_a_stage_without_a_window_extends_by_what_is_declared_from_the_second_chunk_on() -> None:
    rig = talker(TalkerWindow(100))
    for _ in range(2):
        rig.loop.deliver("r", condition())
        rig.tick()
    assert rig.rebuilt == [{"max_model_len": 100}]


def test_a_request_that_cannot_be_resumed_is_not_extended() -> None:
    rig = Rig(ar=True, talker=TalkerWindow(100))
    rig.add("r")
    rig.tick()
    for _ in range(2):
        rig.loop.deliver("r", condition())
        rig.tick()
    assert rig.rebuilt == []


def test_a_chunk_of_an_ar_stage_becomes_the_request_s_information_when_it_is_ready() -> None:
    rig = talker()
    payload = {"hidden": "states", "meta": {"finished": False}}
    rig.loop.deliver("r", payload)
    rig.tick()
    assert rig.ran == [("r", payload)]


def test_a_sender_only_talker_counts_from_the_condition_that_it_was_admitted_with() -> None:
    rig = Rig(ar=True, talker=WINDOW)
    prompts = rig.desk.prompts
    prompts._receives = False
    buffer = {"native_duplex": True, **condition(1, streaming_condition_seq=0)}
    request = rig.add("r", model_intermediate_buffer=buffer)
    record = rig.desk.receptions.of("r")
    update = {"native_duplex": True, **condition(4, streaming_condition_seq=1)}
    assert prompts.take_condition(record, update, request, extends=True) is False
    assert rig.rebuilt[0]["previous_condition_len"] == 1
    with pytest.raises(ValueError, match="has no streaming_condition_seq"):
        prompts.take_condition(record, {"native_duplex": True, **condition()}, request, extends=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_model_len": 9}, TalkerWindow(9)),
        ({"max_model_len": 9, "hf_config_name": "tts_config", "hf_config": None}, TalkerWindow(9)),
        (
            {"max_model_len": 9, "hf_config_name": "tts_config", "hf_config": {"model_type": "other"}},
            TalkerWindow(9),
        ),
        (
            {
                "max_model_len": 9,
                "hf_config_name": "tts_config",
                "hf_config": SimpleNamespace(tts_config={"model_type": "minicpmtts", "max_position_embeddings": 7}),
            },
            TalkerWindow(7, keeps_previous=True, only_when_full=True),
        ),
        (
            {
                "hf_config_name": "tts_config",
                "hf_config": {
                    "model_type": "conditional_chattts",
                    "attention_type": "sliding_recompute",
                    "max_position_embeddings": 8,
                },
            },
            TalkerWindow(8, keeps_previous=True),
        ),
    ],
)
def test_the_window_is_what_the_model_s_configuration_says(config: dict[str, Any], expected: TalkerWindow) -> None:
    assert TalkerWindow.of(SimpleNamespace(**config)) == expected
