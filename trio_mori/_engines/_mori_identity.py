"""Who an engine of Mori is, and whether a peer can be who it says."""

from __future__ import annotations

import os
import re
import secrets

from .._errors import DescriptorRefused
from ._fence import Fence
from ._mori_library import EngineDesc
from ._process import Process, open_process

# A key of ours names the process, so that a peer that has it can be fenced; stock peers have keys of another form.
_KEY = re.compile(r"trio-mori-1:([0-9a-f]{32}):(\d{1,19}):(\d{1,7}):(\d{1,19}):[0-9a-f]{16}")


def new_key(process: Process) -> str:
    """A key for an engine of this process that no engine ever had, and none will have."""
    return f"trio-mori-1:{process.boot}:{process.namespace}:{process.pid}:{process.started}:{secrets.token_hex(8)}"


def process_of(key: str) -> Process | None:
    """The process that a key of ours names; None for a key of somebody else's."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    boot, namespace, pid, started = match.groups()
    return Process(boot, int(namespace), int(pid), int(started))


def fence_neighbour(who: str, peer: EngineDesc, ours: EngineDesc, process: Process) -> Fence | None:
    """The fence of a peer in another process that our GPUs reach; None where nothing can prove its end.

    Args:
        who: Its name in errors.
        process: Ours.

    Raises:
        DescriptorRefused: it is not where, or not who, it says. Mori would not notice: it tells memory of the own
            process by the pid, and takes its address from the descriptor as it is.
    """
    if peer.node_id != ours.node_id:
        raise DescriptorRefused(
            f"{who} runs on another machine (node {peer.node_id}, ours is {ours.node_id}): xgmi moves bytes within "
            "one; use rdma, or set $MORI_NODE_ID alike if it is one machine"
        )
    if peer.pid == os.getpid():
        raise DescriptorRefused(
            f"{who} says that it is of this process, {os.getpid()}, which has no such engine: it was closed, or runs "
            "in a container in which it has the same pid; start both with --pid=host"
        )
    named = process_of(peer.key)
    if named is None or (named.boot, named.namespace) != (process.boot, process.namespace):
        return None
    if named.pid != peer.pid:
        raise DescriptorRefused(f"{who}: its key and its descriptor name different processes")
    pidfd = open_process(named, who)
    return None if pidfd is None else Fence(pidfd)
