"""What needs vllm-omni runs in its lane (.ci/vllm-lane) and is skipped elsewhere; the rest runs everywhere."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio_mori_vllm_omni._home as home_module

MISSING = "vllm-omni is not installed here; .ci/vllm-lane runs these in an environment that has it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm_omni") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def _leaves_nothing_in_the_loop() -> Iterator[None]:
    """All connectors of a process share one loop, and a test that begins counts on finding it at rest."""
    yield
    home, end = home_module._home, time.monotonic() + 20
    while home is not None and not home.is_over and home._nursery is not None and (left := home._nursery.child_tasks):
        assert time.monotonic() < end, f"left in the loop: {sorted(task.name for task in list(left))}"
        time.sleep(0.001)


@pytest.fixture(scope="session")
def setup_folder() -> Iterator[Path]:
    """The folder with drive_adapter.py and fakemori, laid beside the clone; on the path while the tests run."""
    folder = Path(os.environ.get("TRIO_MORI_VLLM_SETUP", ""))
    if not (folder / "drive_adapter.py").is_file():
        pytest.skip("TRIO_MORI_VLLM_SETUP names no folder with drive_adapter.py; .ci/vllm-lane sets it")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
