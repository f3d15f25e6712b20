"""The stock chunk adapter over our connector, found by the entry point: a model's stages in threads of one process.

`drive_adapter.py` builds each stage as vllm-omni 0.30 does, and runs the calls of its scheduler.
"""

from __future__ import annotations

import queue
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ports import free_port

pytestmark = pytest.mark.vllm

LIMIT = 60.0
POOL = 64 << 20


@pytest.fixture(autouse=True)
def plugins(setup_folder: Path) -> Iterator[None]:
    """As EngineCore does first."""
    import vllm.plugins
    import vllm_omni.distributed.omni_connectors.factory  # noqa: F401
    from trio_mori_vllm_omni import unregister

    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    yield
    unregister()


@pytest.fixture
def base() -> int:
    """The first of eight free ports."""
    return free_port(8)


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{what} has not come true"
        time.sleep(0.005)


def run_stages(base: int, **settings: Any) -> dict[int, dict[str, Any]]:
    """All stages, to their end; what each reports."""
    import drive_adapter

    a = Namespace(
        connector="TrioMoriConnector", extra={"host": "127.0.0.1", "zmq_port": base, "memory_pool_size": POOL},
        plugin="", load_plugins=False, stages=3, requests=20, chunks=10, chunk_bytes=65536, concurrency=8,
        interval_ms=0.0, tick_ms=1.0, sender_info="orchestrator", timeout=LIMIT, stop_on_failure=False, tag="t",
    )  # fmt: skip
    vars(a).update(settings)
    ready, go, stop = threading.Semaphore(0), threading.Event(), threading.Event()
    started, done, out = SimpleNamespace(value=0), SimpleNamespace(value=0), queue.Queue()
    threads = [
        threading.Thread(target=drive_adapter.run_stage, args=(a, stage, ready, go, started, done, stop, out))
        for stage in range(a.stages)
    ]
    for thread in threads:
        thread.start()
    go.set()
    try:
        results = dict(out.get(timeout=2 * LIMIT) for _ in threads)
    finally:
        stop.set()
    for thread in threads:
        thread.join(LIMIT)
    shutdowns = dict(out.get(timeout=LIMIT) for _ in threads)
    assert max(shutdowns.values()) < 2
    return results


def assert_complete(results: dict[int, dict[str, Any]], *, requests: int = 20, chunks: int = 10) -> None:
    for stage, result in results.items():
        assert "error" not in result, result
        assert result["failed_sends"] == {}
        assert not result["failed_recvs"]
        assert not any(result["leftovers"].values()), result["leftovers"]
        assert result["health"]["refusals"] == {}
        if stage:
            assert (len(result["t_ready"]), result["finished"], result["corrupt"]) == (requests * chunks, requests, 0)


@pytest.mark.parametrize("sender_info", ["orchestrator", "first", "none"])
def test_every_chunk_arrives_whatever_the_requests_say_of_their_sender(base: int, sender_info: str) -> None:
    results = run_stages(base, sender_info=sender_info)
    assert_complete(results)
    assert [results[stage]["role"] for stage in range(3)] == ["sender", "receiver", "receiver"]


def test_host_auto_is_enough(base: int) -> None:
    assert_complete(run_stages(base, extra={"host": "auto", "zmq_port": base, "memory_pool_size": POOL}))


@pytest.mark.parametrize("switch", ["environment", "yaml"])
def test_the_stock_name_leads_here_when_it_is_replaced(base: int, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra: dict[str, object] = {"host": "auto", "zmq_port": base, "memory_pool_size": POOL, "backend_type": "shm"}
    if switch == "environment":
        monkeypatch.setenv("TRIO_MORI_REPLACE_STOCK", "1")
    else:
        extra["replace_stock"] = True
    assert_complete(run_stages(base, connector="MoriTransferEngineConnector", extra=extra, sender_info="orchestrator"))


# --- the shipped deploy file ------------------------------------------------------------------------------------


def stage_adapters(base: int) -> list[Any]:
    """Adapters of the three stages of the shipped file, over shared memory instead of XGMI."""
    import vllm_omni
    from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter
    from vllm_omni.engine.stage_init_utils import get_stage_connector_spec, load_omni_transfer_config_for_model

    shipped = Path(vllm_omni.__file__).parent / "deploy" / "qwen3_omni_moe_mori_intranode.yaml"
    config = load_omni_transfer_config_for_model("m", str(shipped))
    assert {edge: spec.name for edge, spec in config.connectors.items()} == {
        ("0", "1"): "MoriTransferEngineConnector",
        ("1", "2"): "MoriTransferEngineConnector",
    }
    adapters = []
    for stage in range(3):
        spec = get_stage_connector_spec(config, stage, True)
        shm = {"backend_type": "shm", "memory_pool_device": "cpu", "memory_pool_size": POOL, "zmq_port": base}
        spec["extra"] = {**spec["extra"], **shm, "stage_id": stage}
        adapters.append(make_adapter(spec, stage))
    assert isinstance(adapters[0], OmniChunkTransferAdapter)
    return adapters


def make_adapter(spec: dict[str, Any], stage: int) -> Any:
    from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

    model = SimpleNamespace(
        stage_id=stage, async_chunk=True, worker_type="generation", max_num_seqs=16, active_stream_window=0,
        max_model_len=0, stage_connector_config=spec,
        custom_process_next_stage_input_func="drive_adapter.make_payload",
    )  # fmt: skip
    return OmniChunkTransferAdapter(
        SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=16))
    )


def test_the_shipped_deploy_file_serves_all_three_stages_untouched(base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from trio_mori_vllm_omni import TrioMoriConnector

    monkeypatch.setenv("TRIO_MORI_REPLACE_STOCK", "1")
    adapters = stage_adapters(base)
    try:
        connectors = [adapter.connector for adapter in adapters]
        assert all(type(connector) is TrioMoriConnector for connector in connectors)
        assert [c.zmq_port for c in connectors] == [base, base + 1, base + 2]
        assert [c.stage_id for c in connectors] == [0, 1, 2]
        assert all(c.config["codec_left_context_frames"] == 25 for c in connectors)
        for stage in (0, 1):
            put_chunk(adapters[stage], "r", 0, last=False)
            key = f"r_{stage}_0"
            result = connectors[stage + 1].get_with_deadline(
                str(stage), str(stage + 1), key, deadline=time.monotonic() + LIMIT
            )
            assert result is not None
            assert int(result[0]["codes"]["audio"][0, 0]) == 7
    finally:
        for adapter in adapters:
            adapter.shutdown()


@pytest.mark.parametrize("name", ["qwen3_omni_moe_mi300x", "qwen3_omni_moe_nvidia"])
def test_vllm_omni_reads_the_deploy_files_of_ours_as_we_do(name: str) -> None:
    import trio_mori_vllm_omni
    from trio_mori_vllm_omni._place import find_place
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
    from vllm_omni.distributed.omni_connectors.utils.initialization import resolve_connector_spec
    from vllm_omni.engine.stage_init_utils import get_stage_connector_spec, load_omni_transfer_config_for_model

    path = Path(trio_mori_vllm_omni.__file__).parent / "deploy" / f"{name}.yaml"
    config = load_omni_transfer_config_for_model("m", str(path))
    assert {edge: spec.name for edge, spec in config.connectors.items()} == {
        ("0", "1"): "TrioMoriConnector",
        ("1", "2"): "TrioMoriConnector",
    }
    places = []
    for stage in range(3):
        spec = get_stage_connector_spec(config, stage, True)
        resolved = resolve_connector_spec(
            ConnectorSpec(spec["name"], spec["extra"]), stage_id=stage, role=spec["extra"]["role"]
        )
        places.append(find_place(resolved.extra, resolved=False))
    assert [place.config.zmq_port for place in places] == [50051, 50052, 50053]
    assert [place.sender_zmq_port for place in places] == [None, 50051, 50052]


# --- aborts -----------------------------------------------------------------------------------------------------


def put_chunk(adapter: Any, request: str, chunk: int, *, last: bool) -> Any:
    import drive_adapter
    from vllm.v1.request import RequestStatus

    r = drive_adapter.new_request(request)
    r.num_computed_tokens = chunk + 1
    if last:
        r.status = RequestStatus.FINISHED_STOPPED
    adapter.save_async({"codes": {"audio": torch.full((2, 64), 7)}}, r, is_segment_finished=False)
    return r


def test_two_thousand_aborted_requests_leave_nothing_behind_and_finished_ones_stay_readable(base: int) -> None:
    """A hundred at a time, with three chunks put; every second one has its latest chunk still queued."""
    extra = {"host": "127.0.0.1", "zmq_port": base, "memory_pool_size": POOL, "role": "sender", "stage_id": 0}
    adapter = make_adapter({"name": "TrioMoriConnector", "extra": extra}, 0)
    connector = adapter.connector

    def hold(chunks: int) -> bool:
        return bool(connector.health()["pool"].get("published", 0) == chunks * 4096)

    try:
        for chunk in range(3):
            put_chunk(adapter, "whole", chunk, last=chunk == 2)
        eventually(lambda: hold(3), "that the whole one was put")
        adapter.cleanup("whole", "whole")
        for first in range(0, 2000, 100):
            names = [f"a{at}" for at in range(first, first + 100)]
            for name in names:
                for chunk in range(3):
                    put_chunk(adapter, name, chunk, last=False)
            eventually(lambda: hold(303), "that all was put")
            for at, name in enumerate(names):
                if at % 2:
                    put_chunk(adapter, name, 3, last=False)
                adapter.cleanup(name, name)
            eventually(lambda: hold(3), "that only the whole one is left")
        assert adapter._sender_tokens == {}
        assert not adapter.put_req_chunk
        assert connector.health()["refusals"] == {}
        connector.cleanup("whole")
        pool = connector.health()["pool"]
        assert sum(size for state, size in pool.items() if state != "free") == 0
    finally:
        adapter.shutdown()


def test_a_worker_and_a_scheduler_of_one_process_share_a_connector(base: int) -> None:
    import vllm_omni.distributed.omni_connectors.model_runner.omni_connector_runtime as runtime

    mixin = next(c for c in vars(runtime).values() if isinstance(c, type) and "_create_connector" in vars(c))
    extra = {"host": "127.0.0.1", "zmq_port": base, "memory_pool_size": POOL, "role": "sender"}
    spec = {"name": "TrioMoriConnector", "extra": {**extra, "stage_id": 0}}
    model = SimpleNamespace(
        stage_id=0, async_chunk=True, worker_type="ar", stage_connector_config=spec,
        custom_process_next_stage_input_func="drive_adapter.make_payload",
    )  # fmt: skip
    worker = mixin._create_connector(model)
    adapter = make_adapter(spec, 0)
    try:
        put_chunk(adapter, "r", 0, last=False)
        eventually(lambda: worker.health()["puts"] == 1, "that both know of the put")
        assert worker.get_connection_info() == adapter.connector.get_connection_info()
    finally:
        adapter.shutdown()
        worker.close()


def test_rank_and_replica_of_the_process_enter_into_its_ports(base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from trio_mori_vllm_omni import TrioMoriConnector

    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("VLLM_OMNI_REPLICA_ID", "3")
    extra = {"host": "127.0.0.1", "zmq_port": base, "memory_pool_size": POOL, "role": "receiver", "stage_id": 1}
    connector = TrioMoriConnector(extra)
    try:
        assert connector.zmq_port == base + 1 + 2 * 16 + 3 * 1024
        assert connector.sender_zmq_port == base + 2 * 16 + 3 * 1024
    finally:
        connector.close()


# --- seams ------------------------------------------------------------------------------------------------------


def test_vllm_omni_has_what_the_plugin_holds_on_to() -> None:
    """Fails when a new vllm-omni moves a seam. Then adapt the module that the message names, and the version bound."""
    import inspect

    from trio_mori_vllm_omni import TrioMoriConnector, _adapter_hook, _registration
    from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.transfer_adapter import chunk_transfer_adapter
    from vllm_omni.distributed.omni_connectors.utils.initialization import compute_connector_zmq_port
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniMsgpackDecoder, OmniMsgpackEncoder

    moved = "has moved in this vllm-omni; see adapters/trio_mori_vllm_omni/"
    registry = OmniConnectorFactory._registry
    assert isinstance(registry, dict), f"OmniConnectorFactory._registry {moved}_registration.py"
    assert registry[_registration.NAME] is _registration.construct, f"the registry {moved}_registration.py"
    assert isinstance(registry[_registration.STOCK_NAME], _registration._StockOrOurs)
    adapter = chunk_transfer_adapter.OmniChunkTransferAdapter
    hooked = getattr(adapter, _adapter_hook.METHOD, None)
    assert hooked is not None, f"{_adapter_hook.METHOD} {moved}_adapter_hook.py"
    stock = getattr(hooked, "stock", hooked)
    assert list(inspect.signature(stock).parameters) == ["self", "external_req_id", "sender_token"]
    source = inspect.getsource(getattr(adapter, "stock", adapter))
    assert source.count(f"self.{_adapter_hook.METHOD}(") == 2, f"who calls {_adapter_hook.METHOD} {moved}"
    for name in ("num_puts", "terminal_sent"):
        assert hasattr(chunk_transfer_adapter._SenderGeneration(), name), f"{name} {moved}_adapter_hook.py"
    for name in ("_encode_tensor", "_encode_ndarray", "_encode_pil_image"):
        assert hasattr(OmniMsgpackEncoder, name), f"{name} {moved}_values.py"
    assert hasattr(OmniMsgpackDecoder, "_post_process"), f"_post_process {moved}_values.py"
    abstract = set(OmniConnectorBase.__abstractmethods__)
    assert abstract == {"put", "get", "cleanup", "health", "close"}, f"the base class {moved}_sync.py"
    assert not TrioMoriConnector.__abstractmethods__
    for name in ("put", "get", "get_with_deadline", "abandon_get"):
        ours, theirs = (
            list(inspect.signature(getattr(c, name)).parameters) for c in (TrioMoriConnector, OmniConnectorBase)
        )
        assert ours == theirs, f"the arguments of {name} {moved}_sync.py"
    for stage, rank, replica in ((0, 0, 0), (1, 2, 0), (2, 0, 3), (3, 5, 2)):
        from trio_mori_vllm_omni._place import find_place

        ours = find_place(
            {"role": "sender", "stage_id": stage, "zmq_port": 50000}, resolved=False, rank=rank, replica=replica
        )
        theirs = compute_connector_zmq_port(
            50000, purpose="request_forwarding", from_stage=stage, local_rank=rank, replica_id=replica
        )
        assert ours.config.zmq_port == theirs, f"the sum of ports {moved}_place.py"


def test_the_plugin_is_found_by_its_entry_point_and_goes_without_a_trace() -> None:
    from trio_mori_vllm_omni import unregister
    from vllm_omni.distributed.omni_connectors.factory import (
        OmniConnectorFactory,
        _create_mori_transfer_engine_connector,
    )

    assert [p.value for p in entry_points(group="vllm.general_plugins") if p.name == "trio_mori"] == [
        "trio_mori_vllm_omni:register"
    ]
    assert "TrioMoriConnector" in OmniConnectorFactory.list_registered_connectors()
    unregister()
    assert "TrioMoriConnector" not in OmniConnectorFactory.list_registered_connectors()
    assert OmniConnectorFactory._registry["MoriTransferEngineConnector"] is _create_mori_transfer_engine_connector
