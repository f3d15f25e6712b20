"""Runs drive_adapter.py again and again, with stages forked from one process that has imported what they need.

As it is, it spawns them, and each imports vllm for 12 s of a core. What a stage does from there is the same: it runs
the plugins, and makes its adapter and its connector.

Each line of its input is a run: arguments and environment as JSON. Each line of its output is what came of it: exit
status and report.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

STAGES_IMPORT = (
    "vllm.plugins",
    "vllm.sampling_params",
    "vllm.v1.core.sched.request_queue",
    "vllm.v1.request",
    "vllm_omni.data_entry_keys",
    "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter",
    "vllm_omni.engine.stage_init_utils",
    "vllm_omni.request",
)

fork = multiprocessing.get_context("fork")


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    output, sys.stdout = sys.stdout, sys.stderr  # some modules print
    driver = importlib.import_module("drive_adapter")
    for module in STAGES_IMPORT:
        importlib.import_module(module)
    driver.mp = SimpleNamespace(get_context=lambda _: fork)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as report:
            run = fork.Process(target=drive, args=(driver, *json.loads(line), report.fileno()))
            run.start()
            run.join()
            report.seek(0)
            print(json.dumps([run.exitcode, report.read().decode()]), file=output, flush=True)


def drive(driver: Any, arguments: list[str], environment: dict[str, str], report: int) -> None:
    """One run, in a process of its own."""
    for stream in (1, 2):
        os.dup2(report, stream)
    sys.argv[1:] = arguments
    os.environ.update(environment)
    driver.main()


if __name__ == "__main__":
    main(sys.argv[1])
