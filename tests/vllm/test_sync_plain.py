"""Connectors with blocking calls, as vllm-omni makes them: what is put, polled for, and got."""

from __future__ import annotations

import time

import pytest
import torch
from ports import free_port
from sync_pair import LIMIT, eventually, held_loop, is_whole, made, open_pair, poll
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from sync_pair import patience as patience
from trio_mori_vllm_omni._posted_puts import COPIED_IN_LOOP
from trio_mori_vllm_omni._received import ReceivedBuffer

from trio_mori import ConfigError, LeaseError, NoEndpoint

deterministic = pytest.mark.deterministic


@deterministic
def test_a_structure_is_delivered_once_and_leaves_both_pools_free() -> None:
    with open_pair() as (up, down):
        sent = {"codes": {"audio": torch.arange(4096).reshape(8, 512)}, "meta": {"finished": torch.tensor(False)}}
        ok, size, metadata = up.put("0", "1", "r_0_0", sent)
        assert ok
        assert metadata is not None
        assert metadata["data_size"] == size > 4096 * 8
        value, moved = poll(down, "r_0_0")
        assert isinstance(value, dict)
        assert torch.equal(value["codes"]["audio"], sent["codes"]["audio"])
        assert moved >= 4096 * 8
        assert down.get("0", "1", "r_0_0") is None
        down.abandon_get("r_0_0")
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")


@deterministic
@pytest.mark.parametrize("size", [COPIED_IN_LOOP - 4096, COPIED_IN_LOOP + 4096])
def test_the_source_of_a_put_may_be_overwritten_when_it_has_returned(size: int) -> None:
    with open_pair() as (up, down):
        source = torch.ones(size, dtype=torch.uint8)
        assert up.put("0", "1", "k", {"x": source})[0]
        source.zero_()
        value, _ = poll(down, "k")
        assert isinstance(value, dict)
        assert bool((value["x"] == 1).all())


@deterministic
@pytest.mark.usefixtures("patience")
def test_what_is_polled_for_is_answered_from_memory_while_the_loop_does_nothing() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "r_0_0") is None
        up.put("0", "1", "r_0_0", {"step": torch.arange(100)})
        eventually(lambda: down.health()["pool"].get("leased", 0) > 0, "the arrival")
        with held_loop(down):
            result = down.get("0", "1", "r_0_0")
            assert down.get("0", "1", "r_0_1") is None
        assert result is not None
        value, _ = result
        assert isinstance(value, dict)
        assert torch.equal(value["step"], torch.arange(100))


@deterministic
@pytest.mark.parametrize("data", [torch.arange(100, dtype=torch.int16), bytes(range(200))])
def test_a_raw_payload_arrives_as_its_bytes(data: torch.Tensor | bytes) -> None:
    expected = data if isinstance(data, bytes) else data.numpy().tobytes()
    with open_pair() as (up, down):
        ok, size, metadata = up.put("0", "1", "k", data)
        assert (ok, size) == (True, 200)
        assert metadata is not None
        assert metadata["is_fast_path"] is True
        value, moved = poll(down, "k")
        assert isinstance(value, ReceivedBuffer)
        assert (value.size, moved, value.to_bytes()) == (200, 200, expected)
        assert value.tensor.dtype == torch.uint8
        assert value.as_tensor(torch.int16, (10, 10)).shape == (10, 10)
        with pytest.raises(ValueError, match="has 404 bytes, but this buffer has 200"):
            value.as_tensor(torch.int16, (202,))
        kept = value.tensor
        value.release()
        value.release()
        assert kept.numpy().tobytes() == expected
        with pytest.raises(LeaseError):
            value.tensor  # noqa: B018


@deterministic
def test_a_received_buffer_can_be_put_again() -> None:
    with open_pair() as (up, down):
        up.put("0", "1", "k", b"first")
        value, _ = poll(down, "k")
        up.put("0", "1", "again", value)
        again, _ = poll(down, "again")
        assert isinstance(again, ReceivedBuffer)
        assert again.to_bytes() == b"first"


@deterministic
def test_the_bytes_of_a_bytearray_are_no_raw_payload() -> None:
    with open_pair() as (up, down):
        up.put("0", "1", "k", bytearray(b"abc"))
        assert poll(down, "k")[0] == b"abc"


@deterministic
def test_metadata_with_host_and_port_only_is_enough() -> None:
    with open_pair() as (up, down):
        info = up.get_connection_info()
        down.update_sender_info("127.0.0.1", 1)
        up.put("0", "1", "r_0_0", {"n": 1})
        assert poll(down, "r_0_0", {"source_host": info["host"], "source_port": info["zmq_port"]})[0] == {"n": 1}


@deterministic
def test_with_all_of_put_s_metadata_one_get_waits_for_the_transfer() -> None:
    with open_pair() as (up, down):
        _, _, metadata = up.put("0", "1", "k", {"n": 1})
        result = down.get("0", "1", "k", metadata)
        assert result is not None
        assert result[0] == {"n": 1}


@deterministic
def test_a_deadline_that_passes_consumes_nothing() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "k") is None
        begun = time.monotonic()
        assert down.get_with_deadline("0", "1", "k", deadline=begun + 0.05) is None
        assert 0.04 < time.monotonic() - begun < LIMIT
        assert down.get_with_deadline("0", "1", "k", deadline=begun) is None
        up.put("0", "1", "k", {"n": 1})
        result = down.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT)
        assert result is not None
        assert result[0] == {"n": 1}
        eventually(lambda: is_whole(up) and is_whole(down), "that both pools are free")


@deterministic
def test_a_get_without_an_endpoint_says_how_to_give_one() -> None:
    with made(role="receiver", stage_id=1, backend_type="shm") as down:
        with pytest.raises(NoEndpoint, match=r"update_sender_info\(host, port\)"):
            down.get("0", "1", "k")
        with pytest.raises(ConfigError, match="from 1 to 65535"):
            down.update_sender_info("127.0.0.1", 70000)


@deterministic
def test_a_middle_stage_receives_and_sends_on_its_one_connector() -> None:
    base = free_port(3)
    stages = [
        {"role": role, "stage_id": stage, "from_stage": max(stage - 1, 0), "backend_type": "shm"} | ports
        for stage, (role, ports) in enumerate(
            [
                ("sender", {"zmq_port": base}),
                ("receiver", {"sender_host": "auto", "sender_zmq_port": base}),
                ("receiver", {"sender_host": "auto", "sender_zmq_port": base + 1}),
            ]
        )
    ]
    with made(**stages[0]) as first, made(**stages[1]) as middle, made(**stages[2]) as last:
        assert middle.can_put
        assert first.put("0", "1", "r_0_0", {"n": 1})[0]
        assert middle.put("1", "2", "r_1_0", poll(middle, "r_0_0")[0])[0]
        result = last.get_with_deadline("1", "2", "r_1_0", deadline=time.monotonic() + LIMIT)
        assert result is not None
        assert result[0] == {"n": 1}
