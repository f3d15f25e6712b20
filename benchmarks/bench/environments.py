"""The Pythons that peers live in: the project's, that of vllm-omni, that of the benchmarks' own peers."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .turn import Pipe

ROOT = Path(__file__).parents[2]
START_LIMIT = 300.0  # seconds to import vllm: ten on a quiet machine, many times that on a busy one


class Missing(Exception):
    """An environment is not here; says how to get it."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What it takes to start processes of one environment."""

    python: Path
    path: tuple[Path, ...]
    preload: tuple[str, ...]


def project() -> Kind:
    return Kind(Path(sys.executable), (ROOT, ROOT / "adapters"), ("benchmarks.bench.halves.ours",))


def vllm() -> Kind:
    """Built by .ci/vllm-lane. Its set-up also has the stand-in for Mori and the loops of a scheduler."""
    remedy = "run .ci/vllm-lane SETUP once (docs/vllm-omni.md, Tests), and set TRIO_MORI_VLLM_SETUP=SETUP"
    setup = Path(os.environ.get("TRIO_MORI_VLLM_SETUP", ROOT.parent / "shared/vllm_omni"))
    if not (setup / "drive_adapter.py").is_file():
        raise Missing(f"no set-up of vllm-omni at {setup}; {remedy}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trio-mori"
    built = sorted(cache.glob("vllm-omni-*/ready"), key=lambda path: path.stat().st_mtime)
    if not built:
        raise Missing(f"no environment with vllm-omni under {cache}; {remedy}")
    path = (ROOT, ROOT / "adapters", setup, setup / "fakemori")
    # The last ones are what the loops and the adapter import when they are first called.
    modules = (
        *("benchmarks.bench.halves.vllm", "benchmarks.bench.halves.adapter"),
        *("vllm.sampling_params", "vllm.v1.core.sched.request_queue", "vllm.v1.request"),
        *("vllm_omni.engine.stage_init_utils", "vllm_omni.request", "vllm_omni.data_entry_keys"),
        "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter",
    )
    return Kind(built[-1].parent / "venv/bin/python", path, modules)


def engines() -> Kind:
    python = ROOT / ".venv-bench/bin/python"
    if not python.exists():
        raise Missing(f"no {python.relative_to(ROOT)}; `make bench` makes it (PyPI: nixl-cu12, Mooncake; 350 MB)")
    return Kind(python, (ROOT,), ())


KINDS = {"project": project, "vllm": vllm, "engines": engines}


class Environment:
    """A zygote, and the halves that it forks."""

    def __init__(self, name: str, log: int) -> None:
        """Start it; what its processes print goes to the descriptor `log`.

        Raises:
            Missing: it is not here.
        """
        kind = KINDS[name]()
        self.name = name
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [kind.python, "-m", "benchmarks.bench.zygote", str(theirs.fileno()), *kind.preload],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={
                **{key: value for key, value in os.environ.items() if key != "PYTHONHOME"},
                "PYTHONPATH": os.pathsep.join(map(str, kind.path)),
                "PYTHONSAFEPATH": "1",
                "OMP_NUM_THREADS": "1",  # stock copies in torch, whose threads wait for each other on busy cores
                "VLLM_LOGGING_LEVEL": "CRITICAL",
                "NIXL_LOG_LEVEL": "ERROR",
                "MC_LOG_LEVEL": "ERROR",
            },
        )
        theirs.close()

    def wait_ready(self) -> None:
        """Until its modules are imported. Raises RuntimeError if that fails."""
        self._channel.settimeout(START_LIMIT)
        if self._channel.recv(16) != b"ready":
            raise RuntimeError(f"the environment {self.name!r} did not start; see the log")

    def fork(self, half: str, options: dict[str, Any]) -> tuple[Pipe, int]:
        """Start a half: ``module:Class`` of `halves`. Its pipe, and its process id."""
        ours, theirs = socket.socketpair()
        message = json.dumps({"half": half, "options": options}).encode()
        socket.send_fds(self._channel, [message], [theirs.fileno()])
        theirs.close()
        process = int(self._channel.recv(32))
        return Pipe(Connection(ours.detach())), process

    def close(self) -> None:
        """End the zygote, which holds nothing. Halves end when their pipes do."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
