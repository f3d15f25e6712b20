"""The chunk adapter under vllm-omni's own schedulers, with real requests and queues, and beside the stock adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from scheduler_stages import Stage, run_until, write_model

pytestmark = pytest.mark.vllm

Open = Callable[..., Stage]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, setup_folder: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def base() -> int:
    return free_port(4)


@pytest.fixture
def open_stage(model: Path, base: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes stages, with our adapter if nothing else is said, and shuts them down, the last ones first."""
    import vllm.plugins
    from trio_mori_vllm_omni import unregister

    vllm.plugins.plugins_loaded = False
    monkeypatch.delenv("TRIO_MORI_CHUNK_ADAPTER", raising=False)
    stages: list[Stage] = []

    def make(stage: int, *, ours: bool = True, **options: Any) -> Stage:
        options = {"chunk_adapter": ours, **options}
        made = Stage(model, stage, base, **options)
        stages.append(made)
        return made

    yield make
    for stage in reversed(stages):
        stage.shutdown()
    unregister()


def adapter_of(stage: Stage) -> Any:
    return stage.scheduler.chunk_transfer_adapter


def is_clean(stage: Stage) -> bool:
    """Memory, books and dictionaries as at the start."""
    adapter = adapter_of(stage)
    health = stage.connector.health()
    held = sum(size for state, size in health["pool"].items() if state != "free")
    books = (adapter._sender_tokens, adapter.put_req_chunk, adapter.get_req_chunk, adapter.code_prompt_token_ids)
    return not (held or any(books) or stage.scheduler.requests or adapter._pending_load_reqs)


def assert_clean(*stages: Stage) -> None:
    run_until(lambda: all(is_clean(stage) for stage in stages), *stages)


# --- who gets which adapter -------------------------------------------------------------------------------


def kind_of(stage: Stage) -> str:
    return type(adapter_of(stage)).__name__


@pytest.mark.parametrize(
    ("environment", "said", "expected"),
    [
        (None, None, "OmniChunkTransferAdapter"),
        ("1", None, "TrioChunkTransferAdapter"),
        ("1", False, "OmniChunkTransferAdapter"),
        (None, True, "TrioChunkTransferAdapter"),
    ],
)
def test_the_scheduler_builds_the_adapter_that_environment_and_yaml_say(
    open_stage: Open, monkeypatch: pytest.MonkeyPatch, environment: str | None, said: bool | None, expected: str
) -> None:
    if environment is not None:
        monkeypatch.setenv("TRIO_MORI_CHUNK_ADAPTER", environment)
    assert kind_of(open_stage(0, **({"chunk_adapter": None} if said is None else {"chunk_adapter": said}))) == expected


def test_another_connector_keeps_the_stock_adapter_and_the_log_says_so(
    open_stage: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRIO_MORI_CHUNK_ADAPTER", "1")
    with caplog.at_level(logging.WARNING, "trio_mori.vllm_omni"):
        stage = open_stage(0, connector="SharedMemoryConnector")
    assert kind_of(stage) == "OmniChunkTransferAdapter"
    assert caplog.text.count("this stage's connector is SharedMemoryConnector: vllm-omni's own is used") == 1


def test_made_by_hand_on_another_connector_it_refuses_with_the_remedy(open_stage: Open) -> None:
    from trio_mori_vllm_omni.chunks._adapter import TrioChunkTransferAdapter

    from trio_mori import ConfigError

    config = open_stage(0, connector="SharedMemoryConnector").scheduler.vllm_config
    with pytest.raises(ConfigError, match="has a SharedMemoryConnector: name TrioMoriConnector in the deploy file"):
        TrioChunkTransferAdapter(config)


def test_unregistering_binds_the_stock_class_again(open_stage: Open) -> None:
    from trio_mori_vllm_omni import register, unregister
    from vllm_omni.core.sched import omni_scheduler_mixin as mixin
    from vllm_omni.distributed.omni_connectors.transfer_adapter import chunk_transfer_adapter as module

    register()
    assert mixin.OmniChunkTransferAdapter is module.OmniChunkTransferAdapter
    assert type(mixin.OmniChunkTransferAdapter).__name__ == "Choice"
    unregister()
    assert mixin.OmniChunkTransferAdapter is module.OmniChunkTransferAdapter
    assert isinstance(module.OmniChunkTransferAdapter, type)


def test_it_has_every_name_that_vllm_omni_uses_of_the_stock_adapter(open_stage: Open) -> None:
    import re

    import vllm_omni

    used: set[str] = set()
    root = Path(vllm_omni.__file__).parent
    for path in (root / "core" / "sched").glob("*.py"):
        used |= set(re.findall(r"\badapter\.([a-z_]+)", path.read_text()))
        used |= set(re.findall(r"chunk_transfer_adapter\.([a-z_]+)", path.read_text()))
    for path in (root / "model_executor" / "stage_input_processors").glob("*.py"):
        used |= set(re.findall(r"transfer_manager\.([a-z_]+)", path.read_text()))
    stock, adapter = adapter_of(open_stage(0, ours=False)), adapter_of(open_stage(1))
    used = {name for name in used if hasattr(stock, name)}  # the others are set up by single processors
    assert len(used) > 20
    assert sorted(name for name in used if not hasattr(adapter, name)) == []


# --- requests ---------------------------------------------------------------------------------------------

MIXES = [(True, True), (True, False), (False, True)]
IDS = ["ours", "to stock", "from stock"]


@pytest.mark.parametrize(("up_is_ours", "down_is_ours"), MIXES, ids=IDS)
def test_requests_arrive_run_and_finish_in_both_stages(open_stage: Open, up_is_ours: bool, down_is_ours: bool) -> None:
    up, down = open_stage(0, ours=up_is_ours), open_stage(1, ours=down_is_ours)
    names = [f"r{at}" for at in range(6)]
    for name in names:
        up.add(name)
        down.add(name)
    run_until(lambda: down.finished == set(names), up, down)
    assert up.finished == set(names)
    assert all(down.seen[name] == up.seen[name] == [0, 1, 2, 3] for name in names)
    assert_clean(up, down)


@pytest.mark.parametrize("middle_is_ours", [True, False], ids=["ours", "a stock adapter between"])
def test_three_stages_pass_every_chunk_on(open_stage: Open, middle_is_ours: bool) -> None:
    stages = [open_stage(0, last=2), open_stage(1, last=2, kind="ar", ours=middle_is_ours), open_stage(2, last=2)]
    names = [f"r{at}" for at in range(4)]
    for name in names:
        for stage in stages:
            stage.add(name)
    run_until(lambda: stages[2].finished == set(names), *stages)
    for name in names:
        assert [stage.seen[name] for stage in stages] == [[0, 1, 2, 3]] * 3
    assert_clean(*stages)


@pytest.mark.parametrize(("up_is_ours", "down_is_ours"), MIXES, ids=IDS)
def test_an_aborted_request_leaves_nothing_and_the_others_finish(
    open_stage: Open, up_is_ours: bool, down_is_ours: bool
) -> None:
    up, down = open_stage(0, ours=up_is_ours), open_stage(1, ours=down_is_ours)
    for name in ("stays", "goes", "unread", "unread_0"):
        up.add(name, tokens=40)
        if not name.startswith("unread"):
            down.add(name)
    run_until(lambda: len(down.seen.get("goes", ())) > 3 and len(up.seen["unread"]) > 3, up, down)
    for name in ("goes", "unread", "unread_0"):
        up.abort(name)
    down.abort("goes")
    run_until(lambda: down.finished == {"stays"}, up, down)
    assert down.seen["stays"] == list(range(40))
    assert_clean(up, down)


def test_an_external_id_that_comes_back_gets_its_own_chunks(open_stage: Open) -> None:
    up, down = open_stage(0), open_stage(1)
    for life in range(4):
        up.add("r", tokens=20)
        if life % 2:
            down.add("r")
            run_until(lambda: len(down.seen.get("r", ())) > 5, up, down)
            down.abort("r")
        else:
            run_until(lambda: len(up.seen.get("r", ())) > 5, up)
        up.abort("r")
        up.seen.clear()
        down.seen.clear()
    up.add("r")
    down.add("r")
    run_until(lambda: "r" in down.finished, up, down)
    assert down.seen["r"] == [0, 1, 2, 3]
    assert_clean(up, down)


# One of these blocks is never given out; two requests of 15 tokens soon need two each, and there are three.
def test_a_preempted_request_sends_each_chunk_once(open_stage: Open) -> None:
    up, down = open_stage(0, blocks=4), open_stage(1)
    for name in ("a", "b"):
        up.add(name, tokens=12, prompt=15)
        down.add(name)
    run_until(lambda: down.finished == {"a", "b"}, up, down)
    assert up.preempted
    for name in ("a", "b"):
        assert down.seen[name] == sorted(set(down.seen[name]))
    assert_clean(up, down)


def test_two_thousand_requests_that_were_aborted_leave_everything_as_at_the_start(open_stage: Open) -> None:
    """A quarter of them while the next stage receives them."""
    up, down = open_stage(0), open_stage(1)
    for at in range(2000):
        name = f"r{at}"
        up.add(name, tokens=40)
        if at % 4 == 0:
            down.add(name)
        for _ in range(3):
            up.step()
            if at % 4 == 0:
                down.step()
        up.abort(name)
        if at % 4 == 0:
            down.abort(name)
    assert_clean(up, down)
    assert not down.finished


# --- the end of a stream ----------------------------------------------------------------------------------


def finished_request(name: str) -> Any:
    from drive_adapter import new_request
    from vllm.v1.request import RequestStatus

    request = new_request(name)
    request.status = RequestStatus.FINISHED_STOPPED
    return request


@pytest.mark.parametrize("last", [{"codes": {"audio": torch.full((2, 8), 19)}}, None], ids=["with data", "empty"])
@pytest.mark.parametrize("down_is_ours", [True, False], ids=["ours", "to stock"])
def test_twenty_chunks_arrive_before_the_end_even_if_clean_up_comes_right_after(
    open_stage: Open, last: dict[str, Any] | None, down_is_ours: bool
) -> None:
    from drive_adapter import new_request

    up, down = open_stage(0), open_stage(1, ours=down_is_ours)
    adapter = adapter_of(up)
    for number in range(19):
        request = new_request("r")
        request.num_computed_tokens = number + 1
        adapter.save_async({"codes": {"audio": torch.full((2, 8), number)}}, request)
    adapter.save_async(last, finished_request("r"), confirmed_num_computed_tokens=20)
    adapter.cleanup("r", "r")
    down.add("r")
    run_until(lambda: "r" in down.finished, down)
    assert down.seen["r"][:19] == list(range(19))
    assert down.seen["r"][19:] == [18 if last is None else 19]  # an empty end runs once more on what is there
    assert_clean(up, down)


def test_a_request_that_ends_in_this_stage_is_not_sent(open_stage: Open) -> None:
    from drive_adapter import new_request

    up = open_stage(0)
    for last in (False, True):
        request = finished_request("r") if last else new_request("r")
        request.additional_information = {"omni_final_stage_id": 0}
        adapter_of(up).save_async({"codes": {"audio": torch.zeros((2, 8))}}, request)
    up.step()
    assert up.connector.health()["puts"] == 0
    assert_clean(up)


# --- failures ---------------------------------------------------------------------------------------------


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> float:
    from vllm_omni.core.sched import omni_scheduler_mixin as mixin

    monkeypatch.setattr(mixin, "DEFAULT_INPUT_WAIT_TIMEOUT_S", 0.5)
    return 0.5


def test_a_chunk_that_never_comes_fails_its_request_and_no_other(open_stage: Open, limit: float) -> None:
    up, down = open_stage(0), open_stage(1)
    down.add("r")
    up.add("q", tokens=8)
    down.add("q")
    run_until(lambda: {"q", "r"} <= down.finished, up, down)
    assert down.reasons == {"r": "error", "q": "stop"}
    assert down.seen["q"] == list(range(8))
    assert_clean(up, down)


def test_a_stage_that_gives_up_tells_the_next_one_why(open_stage: Open, limit: float) -> None:
    stages = [open_stage(0, last=2), open_stage(1, last=2, kind="ar"), open_stage(2, last=2)]
    reasons = watch_failures(stages[2])
    adapter_of(stages[2])._desk.reading._clock = lambda: 0.0  # it is told before its own time is over
    stages[1].add("r", tokens=8)
    run_until(lambda: "r" not in stages[1].scheduler.requests, *stages)
    stages[2].add("r", tokens=8)
    run_until(lambda: "r" in reasons, *stages[1:])
    assert reasons["r"].startswith("stage 1: no chunk came for 0.5 s")
    assert_clean(*stages[1:])


def watch_failures(stage: Stage) -> dict[str, str]:
    """Notes why requests cannot go on, as the scheduler is told."""
    adapter, reasons = adapter_of(stage), dict[str, str]()
    collect = adapter.collect_failed_receive_request_ids

    def collecting() -> dict[str, str]:
        failures: dict[str, str] = collect()
        reasons.update(failures)
        return failures

    adapter.collect_failed_receive_request_ids = collecting
    return reasons


def test_the_death_of_the_stage_before_is_told_and_passed_on(open_stage: Open) -> None:
    up = open_stage(0, last=2)
    middle, down = open_stage(1, last=2, kind="ar", peer_timeout=0.5, heartbeat_interval=0.2), open_stage(2, last=2)
    told, passed_on = watch_failures(middle), watch_failures(down)
    for stage in (up, middle, down):
        stage.add("r", tokens=40)
    run_until(lambda: len(down.seen.get("r", ())) > 3, up, middle, down)
    up.shutdown()
    run_until(lambda: "r" in passed_on, middle, down)
    assert "PeerLost" in told["r"]
    assert passed_on["r"].startswith("stage 1: PeerLost")
    assert_clean(middle, down)


def test_a_processor_that_raises_is_told_here_and_in_the_next_stage(
    open_stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    import drive_adapter

    process = drive_adapter.make_payload

    def raising(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool) -> Any:
        if request.request_id == "r" and transfer_manager.put_req_chunk["r"] == 2:
            raise ValueError("no codes")
        return process(transfer_manager, multimodal_output, request, is_finished)

    monkeypatch.setattr(drive_adapter, "make_payload", raising)
    up, down = open_stage(0), open_stage(1)
    told = watch_failures(down)
    sent: dict[str, str] = {}
    collect = adapter_of(up).collect_failed_send_request_ids
    adapter_of(up).collect_failed_send_request_ids = lambda: sent.update(collect()) or {}
    for name in ("r", "q"):
        up.add(name, tokens=8)
        down.add(name)
    run_until(lambda: "r" in told and "q" in down.finished, up, down)
    assert "make_payload raised ValueError: no codes" in sent["r"]
    assert told == sent
    assert down.seen == {"r": [0, 1], "q": list(range(8))}
    assert_clean(up, down)


def test_an_abort_between_the_two_halves_of_a_tick_leaves_no_zombie(open_stage: Open) -> None:
    up, down = open_stage(0), open_stage(1)
    scheduler, adapter = down.scheduler, adapter_of(down)
    for name in ("r", "s", "q"):
        down.add(name)
        up.add(name, tokens=8)
    run_until(lambda: len(down.seen.get("s", ())) > 2, up, down)
    adapter.process_pending_chunks(scheduler.waiting, scheduler.running, scheduler_requests=scheduler.requests)
    for name in ("r", "s"):
        down.abort(name)
        up.abort(name)
    adapter.restore_queues(scheduler.waiting, scheduler.running, scheduler.requests)
    assert {each.request_id for each in (*scheduler.waiting, *scheduler.running)} == {"q"}
    run_until(lambda: "q" in down.finished, up, down)
    assert_clean(up, down)


def test_a_shutdown_ends_what_waits_and_may_be_repeated(open_stage: Open) -> None:
    up, down = open_stage(0), open_stage(1)
    down.add("r")
    up.add("q", tokens=40)
    for _ in range(3):
        up.step()
        down.step()
    for stage in (down, up):
        stage.shutdown()
        stage.shutdown()
    assert down.connector.health()["status"] == "unhealthy"
