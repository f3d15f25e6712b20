"""A process of the tests of this folder that has a connector of vllm-omni, its own or ours, with its pool on a GPU.

mori_stock.py sender CONNECTOR PORT     says "ready". "put KEY KIND": says the metadata; "delay SECONDS": copies take so
                                        long from now on, says "so"; "fail HOW": the next copy fails, says "so"
mori_stock.py receiver CONNECTOR PORT   says "ready". "get KEY KIND [METADATA]": says "asked", waits until it is there,
                                        says "same" or what came; "try KEY [METADATA]": says if it came;
                                        "many NAME COUNT KIND": in four threads, says how many are the same

CONNECTOR is stock or ours; KIND is one of `KINDS`.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mori_lane
import stock_vllm_omni
import torch

if mori_lane.moriemu is not None:
    mori_lane.moriemu.install()
stock_vllm_omni.install()

POOL = 16 << 20


# --- payloads, the same in every process --------------------------------------------------------------------


def _numbers(key: str, *shape: int) -> torch.Tensor:
    """Others for every key."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randint(-(2**31), 2**31, shape, generator=generator)


def _tensor(key: str) -> torch.Tensor:
    return _numbers(key, 333, 1000).to(torch.bfloat16)


def _column(key: str) -> torch.Tensor:
    return _numbers(key, 1000, 7)[:, 3]


def _bytes(key: str) -> bytes:
    return _numbers(key, 12_345).to(torch.uint8).numpy().tobytes()


def _structure(key: str) -> dict[str, object]:
    numbers = _numbers(key, 16, 512)
    nested = [1, {"half": numbers.to(torch.float16), "none": None, "empty": torch.empty(0)}]
    return {"hidden": numbers.to(torch.bfloat16), "codes": numbers, "text": key, "finished": False, "nested": nested}


def _chunk(key: str) -> Any:
    """What vllm-omni's chunk adapter sends."""
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct

    meta = MetaStruct(finished=torch.tensor(True), left_context_size=25)
    return OmniPayloadStruct(codes=CodesStruct(audio=_numbers(key, 16, 25)), meta=meta)


def _word(key: str) -> dict[str, str]:
    return {"word": key}


RAW: dict[str, Callable[[str], Any]] = {"tensor": _tensor, "column": _column, "bytes": _bytes}
KINDS = RAW | {"structure": _structure, "chunk": _chunk, "word": _word}


def payload(kind: str, key: str) -> Any:
    """What is put under a key."""
    return KINDS[kind](key)


def expected(kind: str, key: str) -> object:
    """What is to come out of `get`: bytes, or what vllm-omni's serializer makes of it; in the form of `told`."""
    if kind in RAW:
        data = payload(kind, key)
        return data if isinstance(data, bytes) else told(data)[-1]  # type: ignore[index]
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

    return told(OmniSerializer.deserialize(OmniSerializer.serialize(payload(kind, key))))


def told(value: Any) -> object:
    """A value in a form that can be compared, down to the bytes of its tensors; that of a buffer is its bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {name: told(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [told(each) for each in value]
    return value.to_bytes() if hasattr(value, "release") else value


# --- what it does -------------------------------------------------------------------------------------------


def say(word: object) -> None:
    print(word, flush=True)


def serve(connector: Any, command: str, *arguments: str) -> None:
    if command == "put":
        ok, _, metadata = connector.put("0", "1", arguments[0], payload(arguments[1], arguments[0]))
        assert ok
        say(json.dumps(metadata))
    elif command == "delay":
        mori_lane.control("copy_delay_us", int(1e6 * float(arguments[0])))
        say("so")
    elif command == "fail":
        mori_lane.control("fail_copy", f"1:719:{arguments[0]}")
        say("so")
    elif command == "get":
        say("asked")
        say(get(connector, *arguments))
    elif command == "try":
        say(connector.get("0", "1", arguments[0], *map(json.loads, arguments[1:])) is not None)
    else:
        assert command == "many"
        keys = [f"{arguments[0]}{number}" for number in range(int(arguments[1]))]
        with ThreadPoolExecutor(4) as threads:
            say([*threads.map(lambda key: get(connector, key, arguments[2]), keys)].count("same"))


def get(connector: Any, key: str, kind: str, metadata: str = "null") -> str:
    """Poll, as vllm-omni does."""
    while (result := connector.get("0", "1", key, json.loads(metadata))) is None:
        time.sleep(0.001)
    value, _ = result
    came = told(value)
    if kind in RAW:
        value.release()
    return "same" if came == expected(kind, key) else f"other: {came!r:.300}"


def run(role: str, made_by: str, port: str) -> None:
    keys = {"zmq_port": int(port)} if role == "sender" else {"sender_host": "127.0.0.1", "sender_zmq_port": int(port)}
    device = "cuda:0" if role == "sender" else "cuda:1"
    make = {"stock": stock_vllm_omni.open_stock, "ours": stock_vllm_omni.open_ours}[made_by]
    pool = {"backend_type": "xgmi", "memory_pool_size": POOL, "memory_pool_device": device}
    connector = make({"role": role, "stage_id": int(role == "receiver"), "host": "127.0.0.1", **pool, **keys})
    say("ready")
    for line in sys.stdin:
        serve(connector, *line.rstrip("\n").split(" ", 3))
    connector.close()
