"""The Talker's prompt: what a streaming request was given so far, and how its next condition goes on with it.

A condition is a piece of prompt that the Thinker sends while the Talker already speaks. Conditions are numbered. A
Talker with a window keeps one condition before the present one: it starts again from these two, at each condition, or
when its context is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ._commit import declared_length
from ._records import Condition, Reception

# Models whose `tts_config` says how a prompt that grows is dealt with.
_WINDOWED = frozenset(("conditional_chattts", "minicpmtts"))


@attrs.frozen
class TalkerWindow:
    """How a stage's streaming prompt is kept within its context.

    Attributes:
        max_model_len: Tokens of context; 0: not known.
        keeps_previous: A condition is rebuilt from the one before it.
        only_when_full: That is done when the context is full, and not at each condition.
    """

    max_model_len: int = 0
    keeps_previous: bool = False
    only_when_full: bool = False

    @staticmethod
    def of(model_config: Any) -> TalkerWindow:
        """As a stage's model configuration says."""
        limit = int(getattr(model_config, "max_model_len", 0) or 0)
        if getattr(model_config, "hf_config_name", None) != "tts_config":
            return TalkerWindow(limit)
        hf_config = getattr(model_config, "hf_config", None)
        inner = getattr(hf_config, "tts_config", None)
        config = hf_config if inner is None else inner

        def value(name: str) -> Any:
            return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

        if value("model_type") not in _WINDOWED:
            return TalkerWindow(limit)
        own = int(value("max_position_embeddings") or 0)
        if own > 0:
            limit = min(limit, own) if limit else own
        attention = value("attention_type") or ("full_attention" if config is not None else None)
        if attention not in ("full_attention", "sliding_recompute"):
            return TalkerWindow(limit)
        return TalkerWindow(limit, keeps_previous=True, only_when_full=attention == "full_attention")


class Prompts:
    """Applies what chunks say of prompts. `rebuild` is vllm-omni's function that changes a request's prompt."""

    def __init__(self, window: TalkerWindow, rebuild: Callable[..., bool], *, receives: bool) -> None:
        self.window = window
        self._rebuild = rebuild
        self._receives = receives

    def apply(self, record: Reception, request: Any) -> bool:
        """Give a ready request what its chunk brought. Returns whether its prompt is a new one.

        Raises:
            ValueError: the chunk does not go on with what was there.
        """
        update, record.prompt = record.prompt, None
        if update is None:
            return False
        payload = update.payload
        request.additional_information = payload
        extends = update.is_extension
        if self._is_condition(payload):
            replaces = payload["meta"].get("replace_streaming_prompt") is True
            extends = update.was_resumable and (record.condition is not None or replaces)
        replaced = self.take_condition(record, payload, request, extends=extends)
        if replaced is None and extends:
            replaced = self._rebuild(payload, request, max_model_len=self.window.max_model_len)
        return bool(replaced)

    def _is_condition(self, payload: dict[str, Any]) -> bool:
        meta = payload.get("meta")
        return self.window.keeps_previous and isinstance(meta, dict) and declared_length(meta) is not None

    def take_condition(self, record: Reception, payload: dict[str, Any], request: Any, *, extends: bool) -> bool | None:
        """Count a condition, and change the prompt by it if it extends one.

        Returns:
            Whether the prompt is a new one; None: this is no condition, or the stage keeps no window.

        Raises:
            ValueError: it is not the next one, or does not fit.
        """
        if not self._is_condition(payload):
            return None
        meta = payload["meta"]
        length = declared_length(meta)
        assert length is not None
        before = record.condition or self._admitted_condition(request)
        number = self._number_of(payload, before)
        replaced = False
        if extends:
            replaced = self._rebuild(
                payload,
                request,
                max_model_len=self.window.max_model_len,
                previous_condition_len=None if before is None else before.length,
                previous_condition_seq=None if before is None else before.number,
                condition_seq=number,
                recompute_previous_chunks=1,
                recompute_on_capacity=self.window.only_when_full,
            )
        record.condition = Condition(length, number)
        return replaced

    def _number_of(self, payload: dict[str, Any], before: Condition | None) -> int:
        due = 0 if before is None else before.number + 1
        number = payload["meta"].get("streaming_condition_seq")
        if number is None:
            if payload.get("native_duplex") is True and not self._receives:
                raise ValueError("a condition of a native duplex session has no streaming_condition_seq")
            payload["meta"]["streaming_condition_seq"] = due
            return due
        if type(number) is not int or number < 0:
            raise ValueError(f"streaming_condition_seq is {number!r}, and has to be a number from 0 on")
        if number != due:
            raise ValueError(f"condition {number} of the Talker came in the place of condition {due}")
        return number

    def _admitted_condition(self, request: Any) -> Condition | None:
        """The condition that a session was admitted with, where nothing is received that would have been counted."""
        info = getattr(request, "model_intermediate_buffer", None)
        if self._receives or not isinstance(info, dict) or info.get("native_duplex") is not True:
            return None
        meta = info.get("meta")
        if not isinstance(meta, dict):
            return None
        length, number = declared_length(meta), meta.get("streaming_condition_seq")
        if length is None or type(number) is not int or number != 0:
            return None
        if length != request.num_prompt_tokens:
            raise ValueError(
                f"the first condition of the Talker has {length} tokens, and the prompt {request.num_prompt_tokens}"
            )
        return Condition(length, 0)
