"""From what a step produced to a payload for the next stage: the model's input processor, and the marks around it.

Everything but `snapshot` runs in the worker, one at a time, and owns the dictionaries that processors share.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from vllm.v1.utils import ConstantList
from vllm_omni.data_entry_keys import MetaStruct, OmniPayloadStruct, unflatten_payload

from ._marks import is_true

# Request attributes that the scheduler goes on changing while a processor reads them.
_CONTAINERS = ("additional_information", "prompt_token_ids")
_TOKENS = (("_all_token_ids", "all_token_ids"), ("_output_token_ids", "output_token_ids"))

# Dictionaries that single processors set up on the adapter, by request.
_SET_UP_BY_PROCESSORS = ("_qwen3_tts_emitted_frames", "_cached_ic", "_moss_tts_state", "higgs_v3_emitted_frames")

# A mark is only ever read, and to make a tensor takes as long as to encode the rest of a small chunk.
_FLAGS = (torch.tensor(False), torch.tensor(True))


class ProcessorFailed(Exception):
    """A model's input processor raised; the cause is what it raised."""


@attrs.frozen(eq=False)
class Step:
    """What one step of a request produced.

    Attributes:
        request: A snapshot.
    """

    output: Any
    request: Any
    external_id: str
    tokens: tuple[int, ...]
    is_terminal: bool
    ends_segment: bool


class Books:
    """The dictionaries that processors share, by external id. They are attributes of the adapter, under these names."""

    def __init__(self) -> None:
        self.put_req_chunk: dict[str, int] = defaultdict(int)
        self.ramp_chunk_count: dict[str, int] = defaultdict(int)
        self.request_payload: dict[str, Any] = {}
        self.code_prompt_token_ids: dict[str, list[Any]] = defaultdict(list)
        self.adaptive_states: dict[str, Any] = {}
        self.pending_streaming_prefills: dict[str, Any] = {}
        self.segment_starts: dict[str, int] = {}


class Processing:
    """Builds payloads. `manager` is what processors are given as their transfer manager."""

    def __init__(self, manager: Any, books: Books, path: str | None) -> None:
        """Store, and import the processor.

        Args:
            path: Of the processor, with dots; None: this stage makes terminal chunks only.
        """
        self._manager = manager
        self._books = books
        self._path = path
        self._function: Callable[..., Any] | None = None
        self._takes_tokens = False
        if path:
            module, _, name = path.rpartition(".")
            self._function = getattr(importlib.import_module(module), name)
            self._takes_tokens = _takes_tokens(self._function)

    @property
    def function(self) -> Callable[..., Any] | None:
        """The input processor."""
        return self._function

    def build(self, step: Step, number: int) -> Any | None:
        """The payload of a step, as chunk `number` of its request; None: there is nothing to send.

        Raises:
            ProcessorFailed: the processor raised.
        """
        books, name = self._books, step.external_id
        books.put_req_chunk[name] = number
        books.ramp_chunk_count[name] = number - books.segment_starts.get(name, 0)
        payload = self._process(step)
        if step.ends_segment:
            books.segment_starts[name] = number + 1
            self._forget_segment(name)
        if payload is None:
            if not (step.ends_segment or step.is_terminal):
                return None
            payload = OmniPayloadStruct()
        _mark(payload, step)
        return payload

    def forget(self, external_id: str) -> None:
        """Drop what is known of a request."""
        books = self._books
        known: list[dict[str, Any]] = [books.put_req_chunk, books.request_payload, books.pending_streaming_prefills]
        for each in (*known, books.segment_starts):
            each.pop(external_id, None)
        self._forget_segment(external_id)

    def _forget_segment(self, external_id: str) -> None:
        books = self._books
        known: list[Any] = [books.code_prompt_token_ids, books.ramp_chunk_count, books.adaptive_states]
        for each in known + [getattr(self._manager, name, None) for name in _SET_UP_BY_PROCESSORS]:
            if isinstance(each, dict):
                each.pop(external_id, None)

    def _process(self, step: Step) -> Any | None:
        if self._function is None:
            return None
        output = unflatten_payload(step.output) if isinstance(step.output, Mapping) else step.output
        arguments = {
            "transfer_manager": self._manager,
            "multimodal_output": output,
            "request": step.request,
            # For a processor this means: hand out what is left.
            "is_finished": step.ends_segment or step.is_terminal,
        }
        if self._takes_tokens:
            arguments["new_token_ids"] = step.tokens
        try:
            return self._function(**arguments)
        except Exception as error:
            raise ProcessorFailed(f"{self._path} raised {type(error).__name__}: {error}") from error


def _mark(payload: Any, step: Step) -> None:
    """Set what ends with a chunk, unless the processor has decided: the end of a codec's own stream only it knows."""
    if payload.meta is None:
        payload.meta = MetaStruct()
    meta = payload.meta
    if meta.finished is None or not is_true(meta.codec_streaming):
        meta.finished = _FLAGS[step.is_terminal]
    if meta.is_segment_finished is None:
        meta.is_segment_finished = _FLAGS[step.ends_segment]


def _takes_tokens(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a callable without one
        return False
    return any(each.name == "new_token_ids" or each.kind is each.VAR_KEYWORD for each in parameters)


def snapshot(request: Any) -> Any:
    """A request as it is now, for a processor that reads it later. In the scheduler's thread."""
    copied = object.__new__(type(request))
    copied.__dict__.update(request.__dict__)
    for name in _CONTAINERS:
        if name in copied.__dict__:
            setattr(copied, name, _copied(copied.__dict__[name]))
    for private, public in _TOKENS:
        tokens = copied.__dict__.get(private)
        if isinstance(tokens, list):
            frozen = tokens.copy()
            setattr(copied, private, frozen)
            setattr(copied, public, ConstantList(frozen))
            if public == "output_token_ids":
                copied.output_token_count = len(frozen)
    return copied


def _copied(value: Any) -> Any:
    """Containers are copied, what they contain is not."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        # Of token ids, mostly; thousands of them, in each step.
        if not value or isinstance(value[0], int):
            return value.copy()
        return [_copied(each) for each in value]
    return tuple(_copied(each) for each in value) if isinstance(value, tuple) else value


def has_consumer(request: Any, stage: int) -> bool:
    """Whether a request goes on to the next stage, as far as it says."""
    info = getattr(request, "additional_information", None)
    if isinstance(info, dict):
        final = info.get("omni_final_stage_id")
    else:
        entry = getattr(info, "entries", {}).get("omni_final_stage_id")
        final = getattr(entry, "scalar_data", None)
    return type(final) is not int or final > stage
