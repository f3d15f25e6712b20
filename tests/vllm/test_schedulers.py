"""vllm-omni's own schedulers on the connector: an AR stage that sends, a generation stage that receives, no model.

A step is what EngineCore makes of it: schedule, run (here: invent an output), update. The plugin is found by its entry
point, as vllm's configuration runs it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

LIMIT = 60.0
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, setup_folder: Path) -> Path:
    """A folder with the configuration of a very small model, and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 128,
        "max_position_embeddings": 512, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Stage:
    """A scheduler, and a model that answers each step with one token and, in the AR stage, one chunk."""

    def __init__(self, model: Path, stage: int, base: int, *, blocks: int = 64) -> None:
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
        extra = {"host": "127.0.0.1", "zmq_port": base, "memory_pool_size": 16 << 20, "stage_id": stage}
        role = "receiver" if stage else "sender"
        for name, value in {
            "async_chunk": True,
            "stage_id": stage,
            "worker_type": "generation" if stage else "ar",
            "stage_connector_config": {"name": "TrioMoriConnector", "extra": {**extra, "role": role}},
            "custom_process_next_stage_input_func": None if stage else "drive_adapter.make_payload",
            "active_stream_window": 0,
            "omni_kv_config": None,
        }.items():
            object.__setattr__(config.model_config, name, value)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        kind = OmniGenerationScheduler if stage else OmniARScheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.stage = stage
        self.seen: dict[str, list[int]] = {}
        self.finished: set[str] = set()
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
        chunks = []
        for name in names:
            seen = self.seen.setdefault(name, [])
            if self.stage:
                info = self.scheduler.requests[name].additional_information or {}
                seen.append(int(info["codes"]["audio"][0, 0]))
            else:
                seen.append(len(seen))
                chunks.append({"codes": {"audio": torch.full((2, 8), seen[-1])}})
        outputs = self.scheduler.update_from_output(
            scheduled,
            OmniModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[] if self.stage else [5] for _ in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[None] * len(names),
                inter_stage_outputs=None if self.stage else chunks,
            ),
        )
        for group in outputs.values():
            self.finished |= {each.request_id for each in group.outputs if each.finish_reason is not None}

    def shutdown(self) -> None:
        self.scheduler.chunk_transfer_adapter.shutdown()


@pytest.fixture
def base() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return min(port, 60000)


@pytest.fixture
def stages(model: Path, base: int, request: pytest.FixtureRequest) -> Iterator[tuple[Stage, Stage]]:
    import vllm.plugins
    from trio_mori_vllm_omni import unregister

    vllm.plugins.plugins_loaded = False
    up = Stage(model, 0, base, blocks=getattr(request, "param", 64))
    down = Stage(model, 1, base)
    yield up, down
    down.shutdown()
    up.shutdown()
    unregister()


def run_until(condition: Callable[[], bool], *stages: Stage) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, [(s.seen, s.finished, s.connector.health()) for s in stages]
        for stage in stages:
            stage.step()
        time.sleep(0.001)


def assert_clean(*stages: Stage) -> None:
    """Memory, books and dictionaries as at the start."""

    def is_clean() -> bool:
        for stage in stages:
            health = stage.connector.health()
            held = sum(size for state, size in health["pool"].items() if state != "free")
            adapter = stage.scheduler.chunk_transfer_adapter
            books = (adapter._sender_tokens, adapter.put_req_chunk, adapter.get_req_chunk, adapter._pending_load_reqs)
            if held or health["polled"] or any(books) or stage.scheduler.requests:
                return False
        return True

    run_until(is_clean, *stages)


def test_the_schedulers_use_our_connector(stages: tuple[Stage, Stage]) -> None:
    from trio_mori_vllm_omni import TrioMoriConnector

    assert all(type(stage.connector) is TrioMoriConnector for stage in stages)


def test_requests_arrive_run_and_finish_in_both_stages(stages: tuple[Stage, Stage]) -> None:
    up, down = stages
    names = [f"r{at}" for at in range(6)]
    for name in names:
        up.add(name)
        down.add(name)
    run_until(lambda: down.finished == set(names), up, down)
    assert up.finished == set(names)
    assert all(down.seen[name] == up.seen[name] == [0, 1, 2, 3] for name in names)
    assert_clean(up, down)


def test_an_aborted_request_leaves_nothing_and_the_others_finish(stages: tuple[Stage, Stage]) -> None:
    up, down = stages
    for name in ("stays", "goes", "unread"):
        up.add(name, tokens=40)
        if name != "unread":
            down.add(name)
    run_until(lambda: len(down.seen.get("goes", ())) > 3 and len(up.seen["unread"]) > 3, up, down)
    for name in ("goes", "unread"):
        up.abort(name)
    down.abort("goes")
    run_until(lambda: down.finished == {"stays"}, up, down)
    assert down.seen["stays"] == list(range(40))
    assert_clean(up, down)


# One of these blocks is never given out; two requests of 15 tokens soon need two each, and there are three.
@pytest.mark.parametrize("stages", [4], indirect=True)
def test_a_preempted_request_sends_each_chunk_once(stages: tuple[Stage, Stage]) -> None:
    up, down = stages
    for name in ("a", "b"):
        up.add(name, tokens=12, prompt=15)
        down.add(name)
    run_until(lambda: down.finished == {"a", "b"}, up, down)
    assert up.preempted
    for name in ("a", "b"):
        assert down.seen[name] == sorted(set(down.seen[name]))
    assert_clean(up, down)
