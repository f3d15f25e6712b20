"""Values arrive as vllm-omni's own serializer would have delivered them."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.vllm


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Inner:
    tensor: torch.Tensor
    pair: tuple[int, str]


def values() -> Iterator[tuple[str, object]]:
    from PIL import Image
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct
    from vllm_omni.outputs import OmniRequestOutput

    image = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    completion = CompletionOutput(index=0, text="hi", token_ids=[1, 2], cumulative_logprob=-0.5, logprobs=None)
    completion.multimodal_output = {"audio": torch.arange(4.0)}  # type: ignore[attr-defined]
    output = RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=[3], prompt_logprobs=None, outputs=[completion], finished=True
    )
    output.multimodal_output = {"image": image}  # type: ignore[attr-defined]
    yield (
        "the adapter's payload",
        OmniPayloadStruct(
            codes=CodesStruct(audio=torch.arange(6).reshape(2, 3)),
            meta=MetaStruct(finished=torch.tensor(True), is_segment_finished=torch.tensor(False), req_id=["a"]),
        ),
    )
    yield "an empty payload", OmniPayloadStruct()
    yield "a request output", output
    yield "a completion", completion
    yield "an output of vllm-omni", {"engine_inputs": [OmniRequestOutput(request_id="r", finished=True)], "n": 1}
    yield (
        "tensors of many kinds",
        {
            "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "strided": torch.arange(12).reshape(3, 4).t()[1:],
            "grad": torch.ones(2, requires_grad=True),
            "bool": torch.tensor([True, False]),
            "f8": torch.zeros(3, dtype=torch.float8_e4m3fn),
            "complex": torch.ones(2, dtype=torch.complex64),
        },
    )
    yield (
        "arrays and images",
        {
            "array": np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1],
            "text": np.array(["a", "bc"]),
            "images": [image, image.convert("L"), image.convert("RGBA"), image.convert("P")],
        },
    )
    yield "types that change", {
        "tuple": (1, (2,)), "set": {7}, "slice": slice(1, 10, 2), "enum": Colour.RED, "bytes": bytearray(b"x"),
        "view": memoryview(b"yz"), "inner": Inner(torch.ones(2), (1, "a")), "size": torch.Size([1, 2]),
    }  # fmt: skip
    yield "keys that are no text", {"layers": {0: torch.ones(1), 24: torch.zeros(1)}, "pairs": {(1, 2): 3}}
    yield "a list", [None, True, -1, 2**63, 1.5, float("inf"), "é", b"", [], {}]
    yield "a number", 7
    yield "a text", "text"
    yield "bytes that are no raw payload", bytearray(b"abc")
    yield "an array alone", np.arange(3.0)


VALUES = [] if not __import__("importlib.util").util.find_spec("vllm_omni") else list(values())


def assert_same(one: Any, other: Any, path: str = "value") -> None:
    assert type(one) is type(other), f"{path}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device), path
        assert one.view(-1).view(torch.uint8).tolist() == other.view(-1).view(torch.uint8).tolist(), path
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, path
        assert one.shape == other.shape, path
        assert one.tobytes() == other.tobytes(), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key, value in one.items():
            assert_same(value, other[key], f"{path}[{key!r}]")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for at, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}[{at}]")
    elif hasattr(one, "tobytes"):
        assert (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes()), path
    elif hasattr(one, "__dict__"):
        assert_same(vars(one), vars(other), path)
    else:
        assert one == other, path


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    from trio_mori_vllm_omni import TrioMoriConnector

    shm = {"host": "127.0.0.1", "memory_pool_size": 1 << 20, "backend_type": "shm"}
    up = TrioMoriConnector({"role": "sender", "stage_id": 0, "zmq_port": 0, **shm})
    info = up.get_connection_info()
    down = TrioMoriConnector(
        {"role": "receiver", "stage_id": 1, "sender_host": info["host"], "sender_zmq_port": info["zmq_port"], **shm}
    )
    yield up, down
    down.close()
    up.close()


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[name for name, _ in VALUES])
def test_a_value_arrives_as_the_serializer_would_deliver_it(name: str, value: object, pair: tuple[Any, Any]) -> None:
    from trio_mori_vllm_omni._values import StockCodec
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

    up, down = pair
    encoded = OmniSerializer.serialize(value)
    # A struct that omits defaults gets a longer map header from msgspec than the dict of the same content.
    length = len(OmniSerializer.serialize(StockCodec().plain(value)[0]))
    assert 0 <= len(encoded) - length <= 4
    ok, size, metadata = up.put("0", "1", name, value)
    assert ok, up.health()["refusals"]
    assert (size, metadata["data_size"], metadata["is_fast_path"]) == (length, length, False)
    received, _ = down.get("0", "1", name, metadata)
    assert_same(received, OmniSerializer.deserialize(encoded))


@pytest.mark.parametrize("value", [object(), 1 << 70, {"f": len}, np.array([object()])])
def test_what_the_serializer_refuses_is_refused(value: object, pair: tuple[Any, Any]) -> None:
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

    with pytest.raises((TypeError, OverflowError)):
        OmniSerializer.serialize(value)
    assert pair[0].put("0", "1", "k", value) == (False, 0, None)
    assert "put: UnsupportedPayload" in pair[0].health()["refusals"]


def test_a_buffer_of_the_stock_connector_can_be_put(pair: tuple[Any, Any]) -> None:
    from vllm_omni.distributed.omni_connectors.utils.memory_pool import BufferAllocator, ManagedBuffer

    pool = torch.arange(64, dtype=torch.uint8)
    allocator = BufferAllocator(64, alignment=1)
    offset = allocator.alloc(16)
    up, down = pair
    _, size, metadata = up.put("0", "1", "buffer", ManagedBuffer(allocator, offset, 16, pool))
    received, _ = down.get("0", "1", "buffer", metadata)
    assert (size, metadata["is_fast_path"]) == (16, True)
    assert received.to_bytes() == bytes(range(offset, offset + 16))


def test_whatever_the_last_step_knows_by_its_keys_is_suspect() -> None:
    from trio_mori_vllm_omni._values import SUSPECT
    from vllm_omni.distributed.omni_connectors.utils import serialization

    for keys in (serialization._REQUEST_OUTPUT_KEYS, serialization._COMPLETION_OUTPUT_KEYS):
        assert keys & SUSPECT
    markers = {serialization._TENSOR_MARKER, serialization._NDARRAY_MARKER, serialization._PIL_IMAGE_MARKER}
    assert markers <= SUSPECT


@pytest.mark.parametrize("form", [OrderedDict, lambda tree: [tree], lambda tree: ({"x": tree},)])
def test_what_the_last_step_makes_of_a_tree_is_made_wherever_it_is(form: Callable[[object], object]) -> None:
    from trio_mori_vllm_omni._values import StockCodec
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniMsgpackDecoder

    tree = form({"index": 0, "text": "hi", "token_ids": [1], "finish_reason": None, "cumulative_logprob": None,
                 "logprobs": None})  # fmt: skip
    expected = OmniMsgpackDecoder()._post_process(tree)
    revived = StockCodec().revived(tree)
    assert type(revived) is type(expected)
    assert repr(revived) == repr(expected)
    assert repr(expected) != repr(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"__tensor__": True},
        {"__tensor__": True, "dtype": "load", "shape": [1], "data": b"x"},
        {"__ndarray__": True, "dtype": "<f4", "shape": [3], "data": b"xyz"},
        {"__pil_image__": True, "mode": "RGB", "shape": "no", "data": b"x"},
        [{"request_id": "r", "prompt": 1, "prompt_token_ids": 2, "outputs": 3, "finished": 4}],
        {"index": 0, "text": "hi", "token_ids": [], "finish_reason": None, "cumulative_logprob": "x"},
    ],
    ids=["bare", "dtype", "array", "image", "request", "completion"],
)
def test_what_has_the_marks_of_an_output_and_is_none_is_refused(tree: object) -> None:
    from trio_mori_vllm_omni._values import StockCodec

    from trio_mori import RemoteProtocolError

    with pytest.raises(RemoteProtocolError, match="cannot be made one"):
        StockCodec().revived(tree)
