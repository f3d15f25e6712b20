"""What a chunk does to a request of a generation stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_fakes import Request, codes
from trio_mori_vllm_omni.chunks._commit import commit_for_generation
from trio_mori_vllm_omni.chunks._marks import MAX_REASON, failed_terminal, failure_of, is_last, is_true
from trio_mori_vllm_omni.chunks._records import Flag, Reception

pytestmark = pytest.mark.deterministic


def commit(request: Request, payload: dict[str, Any]) -> tuple[bool, Reception]:
    record = Reception("r", request)
    return commit_for_generation(record, payload, 0, refresh=lambda request: None), record


def test_a_list_or_one_dimensional_tensor_of_codes_becomes_the_prompt() -> None:
    for audio in ([3, 4], torch.tensor([3, 4])):
        request = Request("r", num_computed_tokens=9)
        assert commit(request, {"codes": {"audio": audio, "ref": "voice"}})[0]
        assert request.prompt_token_ids == [3, 4]
        assert request.num_computed_tokens == 0
        assert request.additional_information == {"codes": {"ref": "voice"}}


def test_codes_of_more_dimensions_stay_a_tensor_behind_a_placeholder() -> None:
    request, audio = Request("r"), torch.ones((2, 3))
    assert commit(request, {"codes": {"audio": audio}})[0]
    assert request.prompt_token_ids == [0]
    assert request.additional_information["codes"]["audio"] is audio
    assert not commit(request, {"codes": {"audio": torch.ones((0, 3))}})[0]


def test_information_is_merged_with_what_was_there_unless_it_replaces_that() -> None:
    request = Request("r", additional_information={"meta": {"a": 1}, "x": 1})
    commit(request, codes(1, b=2))
    assert request.additional_information == {"meta": {"a": 1, "b": 2, "is_segment_finished": False}, "x": 1}
    commit(request, codes(1, replace_runtime_additional_information=True))
    assert "x" not in request.additional_information
    assert request.model_intermediate_buffer is request.additional_information


@pytest.mark.parametrize("mark", [True, torch.tensor(True), torch.tensor([1])])
def test_the_end_is_a_boolean_or_a_tensor_of_one(mark: Any) -> None:
    request = Request("r", resumable=True)
    done, record = commit(request, codes(finished=mark))
    assert done
    assert record.flags == {Flag.EXHAUSTED}
    assert request.resumable is False
    assert is_last(codes(finished=mark))


def test_an_empty_boundary_is_scheduled_with_a_placeholder() -> None:
    request = Request("r", resumable=True)
    done, record = commit(request, codes(segment=True))
    assert (done, request.prompt_token_ids, record.flags) == (True, [0], {Flag.SEGMENT_ENDED})


def test_other_values_mark_nothing() -> None:
    assert not any(is_true(value) for value in (None, False, 0, torch.tensor(False), torch.tensor([True, True])))
    assert not is_last({})
    assert not is_last({"meta": None})
    assert not is_last([1])


def test_a_failed_terminal_is_the_end_and_says_why_in_so_many_characters() -> None:
    payload = failed_terminal("x" * 10_000)
    assert is_last(payload)
    assert failure_of(payload) == "x" * MAX_REASON
    assert failure_of(codes(finished=True)) is None
