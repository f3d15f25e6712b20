"""vllm-omni's own schedulers as stages in one process, with a model that answers each step at once.

A step is what EngineCore makes of it: schedule, run (here: invent an output), update.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIMIT = 60.0
BLOCK = 16


def write_model(folder: Path) -> Path:
    """The configuration of a very small model, and nothing else."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 128,
        "max_position_embeddings": 512, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Stage:
    """A scheduler, and a model that answers each step with one token and, in the AR stage, one chunk."""

    def __init__(
        self,
        model: Path,
        stage: int,
        base: int,
        *,
        blocks: int = 64,
        connector: str = "TrioMoriConnector",
        kind: str | None = None,
        last: int = 1,
        **extra: Any,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
        from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

        config = EngineArgs(
            model=str(model), tokenizer=str(model), skip_tokenizer_init=True, load_format="dummy", dtype="float32",
            max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256, block_size=BLOCK, enforce_eager=True,
            enable_prefix_caching=False, async_scheduling=False,
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks = blocks
        extra = {"host": "127.0.0.1", "zmq_port": base, "memory_pool_size": 16 << 20, "stage_id": stage, **extra}
        role = "receiver" if stage else "sender"
        kind = kind or ("generation" if stage else "ar")
        for name, value in {
            "async_chunk": True,
            "stage_id": stage,
            "worker_type": kind,
            "stage_connector_config": {"name": connector, "extra": {**extra, "role": role}},
            "custom_process_next_stage_input_func": None if stage == last else "drive_adapter.make_payload",
            "active_stream_window": 0,
            "omni_kv_config": None,
        }.items():
            object.__setattr__(config.model_config, name, value)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        scheduler = OmniGenerationScheduler if kind == "generation" else OmniARScheduler
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.stage = stage
        self.is_ar = kind == "ar"
        self.is_last = stage == last
        self.seen: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.preempted: set[str] = set()

    @property
    def connector(self) -> Any:
        return self.scheduler.chunk_transfer_adapter.connector

    def add(self, request: str, *, tokens: int = 4, prompt: int = 1) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm_omni.request import OmniRequest

        made = OmniRequest(
            request_id=request,
            prompt_token_ids=[0] * prompt,
            sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            pooling_params=None,
        )
        made.external_req_id = request
        self.scheduler.add_request(made)

    def abort(self, request: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        from vllm_omni.outputs import OmniModelRunnerOutput

        scheduled = self.scheduler.schedule()
        self.preempted |= set(scheduled.preempted_req_ids or ())
        names = list(scheduled.num_scheduled_tokens)
        informed = getattr(scheduled.scheduled_cached_reqs, "additional_information", {})
        chunks = []
        for name in names:
            seen = self.seen.setdefault(name, [])
            if self.stage:
                info = self.scheduler.requests[name].additional_information or informed.get(name) or {}
                codes = (info.get("codes") or {}).get("audio")
                seen.append(-1 if codes is None else int(codes[0, 0]))
            else:
                seen.append(len(seen))
            if not self.is_last:
                chunks.append({"codes": {"audio": torch.full((2, 8), seen[-1])}})
        outputs = self.scheduler.update_from_output(
            scheduled,
            OmniModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[5] if self.is_ar else [] for _ in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[None] * len(names),
                inter_stage_outputs=None if self.is_last else chunks,
            ),
        )
        for group in outputs.values():
            ended = [each for each in group.outputs if each.finish_reason is not None]
            self.finished |= {each.request_id for each in ended}
            self.reasons |= {each.request_id: str(each.finish_reason) for each in ended}

    def shutdown(self) -> None:
        self.scheduler.chunk_transfer_adapter.shutdown()


def run_until(condition: Callable[[], bool], *stages: Stage) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, [(s.seen, s.finished, s.connector.health()) for s in stages]
        for stage in stages:
            stage.step()
        time.sleep(0.001)
