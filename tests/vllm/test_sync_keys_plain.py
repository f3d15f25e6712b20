"""Keys in the deploy file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sync_pair import LIMIT, eventually, made, open_pair, poll
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from trio_mori_vllm_omni._sync import SyncConnector

from trio_mori import ConfigError
from trio_mori.__main__ import main

deterministic = pytest.mark.deterministic


def key_file(folder: Path, name: str) -> str:
    """The secret key of a new pair."""
    assert main(["keygen", str(folder / name)]) == 0
    return str(folder / f"{name}.secret")


@deterministic
def test_keys_in_the_deploy_file_secure_the_edge(tmp_path: Path) -> None:
    with open_pair(curve_secret_key=key_file(tmp_path, "stages")) as (up, down):
        assert up.put("0", "1", "k", b"hello")[0]
        assert poll(down, "k")[1] == 5
        port = up.get_connection_info()["zmq_port"]
        stranger = {"curve_secret_key": key_file(tmp_path, "stranger"), "backend_type": "shm", "stage_id": 1}
        with made(role="receiver", from_stage=0, sender_host="127.0.0.1", sender_zmq_port=port, **stranger) as other:
            eventually(lambda: other.get("0", "1", "k") is None and told(other), "that it is refused")
            assert other.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT) is None
        assert up.put("0", "1", "more", b"hello")[0]
        assert poll(down, "more")[1] == 5


def told(connector: SyncConnector) -> bool:
    """Whether it says that it was refused for its keys."""
    return "get: AuthenticationFailed" in connector.health()["refusals"]


@deterministic
def test_a_key_file_that_others_can_read_is_told_by_the_first_call(tmp_path: Path) -> None:
    path = key_file(tmp_path, "stages")
    os.chmod(path, 0o644)
    with (
        pytest.raises(ConfigError, match="chmod 600"),
        made(role="sender", stage_id=0, zmq_port=0, backend_type="shm", curve_secret_key=path),
    ):
        raise AssertionError
