"""The stock connector at one end of an edge and ours at the other, over fakemori: both move bytes by `batch_write`."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ports import free_port

pytestmark = pytest.mark.vllm

LIMIT = 30.0
RDMA = {"host": "127.0.0.1", "backend_type": "rdma", "memory_pool_size": 4 << 20}


@pytest.fixture(autouse=True, scope="module")
def fakemori(setup_folder: Path) -> Iterator[None]:
    folder = str(setup_folder / "fakemori")
    sys.path.insert(0, folder)
    if getattr(sys.modules.get("mori"), "__file__", None) is None:
        sys.modules.pop("mori", None)  # the folder tests/mori, which stock took for the package when it looked for it
    pack_as_mori_does()
    from vllm_omni.distributed.omni_connectors.connectors import mori_transfer_engine_connector

    importlib.reload(mori_transfer_engine_connector)  # it may have been imported before there was a mori
    yield
    sys.path.remove(folder)


def pack_as_mori_does() -> None:
    """Our engine looks into descriptors before it believes them, and fakemori packs another form than Mori 1.2."""
    from mori.cpp import MemoryDesc, MemoryLocationType

    names = ("engine_key", "id", "device_id", "device_bus_id", "data", "size", "loc", "ipc_handle", "pid")

    def pack(desc: Any) -> bytes:
        values = [getattr(desc, name, None) for name in names]
        values[3], values[6], values[7] = "", MemoryLocationType.CPU.value, bytes(64)
        return msgspec.msgpack.encode(values)

    def unpack(packed: bytes) -> Any:
        return MemoryDesc(**dict(zip(names, msgspec.msgpack.decode(packed), strict=True)))

    MemoryDesc.pack, MemoryDesc.unpack = pack, unpack


def stock(extra: dict[str, Any]) -> Any:
    from vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector import (
        MoriTransferEngineConnector,
    )

    return MoriTransferEngineConnector({**RDMA, **extra})


def ours(extra: dict[str, Any]) -> Any:
    from trio_mori_vllm_omni import TrioMoriConnector

    return TrioMoriConnector({**RDMA, **extra}, resolved=True)


@contextmanager
def open_pair(sender: Callable[..., Any], receiver: Callable[..., Any], port: int) -> Iterator[tuple[Any, Any]]:
    with ExitStack() as stack:
        up = sender({"role": "sender", "stage_id": 0, "zmq_port": port})
        stack.callback(up.close)
        down = receiver(
            {"role": "receiver", "stage_id": 1, "from_stage": 0, "sender_host": "127.0.0.1", "sender_zmq_port": port}
        )
        stack.callback(down.close)
        yield up, down


DIRECTIONS = [(stock, ours), (ours, stock)]
IDS = ["from stock", "to stock"]


@pytest.fixture(params=DIRECTIONS, ids=IDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    with open_pair(*request.param, free_port()) as both:
        yield both


def poll(connector: Any, key: str, metadata: dict[str, Any] | None = None) -> Any:
    end = time.monotonic() + LIMIT
    while (result := connector.get("0", "1", key, metadata)) is None:
        assert time.monotonic() < end, f"{key} has not come"
        time.sleep(0.001)
    return result


def test_a_structure_crosses(pair: tuple[Any, Any]) -> None:
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct

    up, down = pair
    for chunk in range(10):
        payload = OmniPayloadStruct(
            codes=CodesStruct(audio=torch.full((16, 512), chunk)), meta=MetaStruct(finished=torch.tensor(chunk == 9))
        )
        assert up.put("0", "1", f"r_0_{chunk}", payload)[0]
        value, _ = poll(down, f"r_0_{chunk}")
        assert torch.equal(value["codes"]["audio"], torch.full((16, 512), chunk))
        assert bool(value["meta"]["finished"]) is (chunk == 9)


@pytest.mark.parametrize("data", [torch.arange(1000, dtype=torch.int32), bytes(range(250)) * 16])
def test_a_raw_payload_crosses(pair: tuple[Any, Any], data: torch.Tensor | bytes) -> None:
    expected = data if isinstance(data, bytes) else data.numpy().tobytes()
    up, down = pair
    ok, size, _ = up.put("0", "1", "k", data)
    assert (ok, size) == (True, 4000)
    value, moved = poll(down, "k")
    assert (value.size, moved, value.to_bytes()) == (4000, 4000, expected)
    assert value.as_tensor(torch.int32, (1000,)).shape == (1000,)
    value.release()


def test_put_s_metadata_serves_the_other_end(pair: tuple[Any, Any]) -> None:
    up, down = pair
    for key, data in (("raw", torch.ones(100)), ("structure", {"a": torch.ones(100), "n": [1, (2, 3)]})):
        _, size, metadata = up.put("0", "1", key, data)
        result = down.get("0", "1", key, metadata)
        assert result is not None
        assert result[1] == size


def test_a_request_output_crosses(pair: tuple[Any, Any]) -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    up, down = pair
    completion = CompletionOutput(index=0, text="hi", token_ids=[1, 2], cumulative_logprob=None, logprobs=None)
    output = RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=[3], prompt_logprobs=None, outputs=[completion], finished=True
    )
    assert up.put("0", "1", "r", {"engine_inputs": output})[0]
    value, _ = poll(down, "r")
    assert type(value["engine_inputs"]) is RequestOutput
    assert type(value["engine_inputs"].outputs[0]) is CompletionOutput
    assert value["engine_inputs"].outputs[0].text == "hi"


def test_many_streams_cross_at_once(pair: tuple[Any, Any]) -> None:
    up, down = pair

    def send() -> None:
        for chunk in range(10):
            for request in range(8):
                assert up.put("0", "1", f"r{request}_0_{chunk}", {"x": torch.full((64,), chunk * 100 + request)})[0]

    thread = threading.Thread(target=send)
    thread.start()
    end = time.monotonic() + LIMIT
    wanted = dict.fromkeys(range(8), 0)
    while wanted:
        assert time.monotonic() < end, wanted
        for request, chunk in list(wanted.items()):
            result = down.get("0", "1", f"r{request}_0_{chunk}", None)
            if result is not None:
                assert int(result[0]["x"][0]) == chunk * 100 + request
                wanted[request] = chunk + 1
                if chunk == 9:
                    del wanted[request]
    thread.join(LIMIT)


def test_our_receiver_completes_metadata_that_stock_gives_up_on() -> None:
    """What 0.30.0 sends along with a request is host and port only; its own receiver finds no size in it."""
    port = free_port()
    with open_pair(stock, ours, port) as (up, down):
        assert up.put("0", "1", "r_0_0", {"n": 1})[0]
        assert poll(down, "r_0_0", {"source_host": "127.0.0.1", "source_port": port})[0] == {"n": 1}
    port = free_port()
    with open_pair(stock, stock, port) as (up, down):
        assert up.put("0", "1", "r_0_0", {"n": 1})[0]
        assert down.get("0", "1", "r_0_0", {"source_host": "127.0.0.1", "source_port": port}) is None


def test_a_stock_sender_that_is_replaced_by_ours_is_found_again() -> None:
    port = free_port()
    down = ours({"role": "receiver", "stage_id": 1, "from_stage": 0, "sender_host": "auto", "sender_zmq_port": port})
    try:
        for at, maker in enumerate((stock, ours, stock)):
            up = maker({"role": "sender", "stage_id": 0, "zmq_port": port})
            assert up.put("0", "1", f"k{at}", {"at": at})[0]
            assert poll(down, f"k{at}")[0] == {"at": at}
            up.close()
    finally:
        down.close()
