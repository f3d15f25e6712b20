"""The shm engine's share directory, asked for in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio

from trio_mori import ConfigError, open_connector


async def test_connectors_reach_each_other_by_a_configured_directory(tmp_path: Path) -> None:
    directory = tmp_path / "share"
    directory.mkdir(mode=0o700)
    common = {"memory_pool_size": 1 << 20, "share_directory": str(directory)}
    with trio.fail_after(20):
        async with open_connector({"role": "sender", "host": "127.0.0.1", "zmq_port": 0, **common}) as sender:
            port = sender.get_connection_info()["zmq_port"]
            async with open_connector(
                {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port, **common}
            ) as receiver:
                assert len(list(directory.iterdir())) == 2
                await sender.put("0", "1", "k", torch.arange(10))
                assert torch.equal(await receiver.get("0", "1", "k"), torch.arange(10))  # type: ignore[arg-type]
    assert list(directory.iterdir()) == []


async def test_a_configured_directory_that_is_missing_is_refused_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "forgotten-mount"
    common = {"memory_pool_size": 1 << 20, "share_directory": str(missing)}
    with pytest.raises(
        ConfigError, match=r"share_directory: '.*/forgotten-mount' does not exist; .*mkdir -m 700"
    ) as caught:
        async with open_connector({"role": "sender", "host": "127.0.0.1", "zmq_port": 0, **common}):
            pass
    assert (caught.value.key, caught.value.value) == ("share_directory", str(missing))
    assert not missing.exists()
