"""What a chunk does to its request, in an AR stage and in a generation stage.

An AR stage's chunk becomes the request's additional information, and perhaps more of its prompt, when the request is
ready (`_prompt`). A generation stage's chunk *is* the prompt of the next step: its codes as token ids, or, if they have
more than one dimension, a placeholder with the tensor beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._marks import is_true, meta_of
from ._records import Flag, PromptUpdate, Reception

# Marks that the scheduler reads, and the model does not.
_NOT_FOR_THE_MODEL = frozenset({("meta", "finished")})


def mark_ends(record: Reception, payload: dict[str, Any]) -> bool:
    """Note what ends with a chunk. Returns whether anything does."""
    meta = meta_of(payload)
    is_finished, ends_segment = is_true(meta.get("finished")), is_true(meta.get("is_segment_finished"))
    if is_finished:
        record.flags.add(Flag.EXHAUSTED)
        record.request.resumable = False
    if ends_segment:
        record.flags.add(Flag.SEGMENT_ENDED)
    return is_finished or ends_segment


def commit_for_ar(record: Reception, payload: dict[str, Any], number: int) -> bool:
    """Keep a chunk until its request is ready. Returns that it will be."""
    meta = payload.get("meta")
    if not isinstance(meta, dict):
        meta = payload["meta"] = {}
    meta["streaming_prompt_recompute"] = False
    replaces = meta.get("replace_streaming_prompt") is True
    ids = payload.get("ids")
    has_prompt = replaces or declared_length(meta) is not None or (isinstance(ids, dict) and bool(ids.get("prompt")))
    was_resumable = bool(record.request.resumable)
    extends = was_resumable and has_prompt and (number > 0 or replaces)
    record.prompt = PromptUpdate(payload, extends, was_resumable)
    mark_ends(record, payload)
    return True


def declared_length(meta: dict[str, Any]) -> int | None:
    """The prompt that the stage before has declared, in tokens."""
    length = meta.get("next_stage_prompt_len")
    return length if type(length) is int and length > 0 else None


def commit_for_generation(
    record: Reception, payload: dict[str, Any], _: int, *, refresh: Callable[[Any], None]
) -> bool:
    """Make a chunk the request's next prompt. Returns whether there is anything to run.

    Args:
        refresh: Brings what the request says of its prompt up to date.
    """
    request = record.request
    ends = mark_ends(record, payload)
    codes = payload.get("codes")
    tokens, is_placeholder = _prompt_of(codes.get("audio") if isinstance(codes, dict) else None)
    has_tokens = bool(tokens)
    request.prompt_token_ids = tokens
    replaces = meta_of(payload).get("replace_runtime_additional_information") is True
    before = request.additional_information
    info = dict(before) if isinstance(before, dict) and not replaces else {}
    for key, value in payload.items():
        if not isinstance(value, dict):
            if key != "codes":
                info[key] = value
            continue
        inner = {
            name: part
            for name, part in value.items()
            if (key, name) not in _NOT_FOR_THE_MODEL and (is_placeholder or (key, name) != ("codes", "audio"))
        }
        known = info.get(key)
        merged = {**known, **inner} if isinstance(known, dict) else inner
        if merged or key != "codes":
            info[key] = merged
    request.additional_information = info
    if replaces:
        # A new or resumed request is given this one before the other.
        request.model_intermediate_buffer = info
    request.num_computed_tokens = 0
    if not has_tokens and is_true(meta_of(payload).get("is_segment_finished")):
        request.prompt_token_ids = [0]  # a boundary is scheduled even if nothing is new
    if not has_tokens and not ends:
        return False
    refresh(request)
    return True


def _prompt_of(codes: Any) -> tuple[list[int], bool]:
    """The token ids of a chunk's codes, and whether they only stand for a tensor."""
    if isinstance(codes, torch.Tensor):
        if codes.ndim >= 2:
            return ([0] if codes.numel() else []), True
        tokens = codes.tolist()
        return (tokens if isinstance(tokens, list) else [tokens]), False
    return ([] if codes is None else codes), False
