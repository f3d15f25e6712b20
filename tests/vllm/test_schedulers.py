"""vllm-omni's own schedulers on the connector: an AR stage that sends, a generation stage that receives, no model.

A step is what EngineCore makes of it: schedule, run (here: invent an output), update. The plugin is found by its entry
point, as vllm's configuration runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from scheduler_stages import Stage, run_until, write_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, setup_folder: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def base() -> int:
    return free_port(4)


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
