"""What needs vllm-omni runs in its lane (.ci/vllm-lane) and is skipped elsewhere; the rest runs everywhere."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = "vllm-omni is not installed here; .ci/vllm-lane runs these in an environment that has it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm_omni") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def setup_folder() -> Iterator[Path]:
    """The folder with drive_adapter.py and fakemori, laid beside the clone; on the path while the tests run."""
    folder = Path(os.environ.get("TRIO_MORI_VLLM_SETUP", ""))
    if not (folder / "drive_adapter.py").is_file():
        pytest.skip("TRIO_MORI_VLLM_SETUP names no folder with drive_adapter.py; .ci/vllm-lane sets it")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
