"""What needs vllm-omni runs in its lane (.ci/vllm-lane) and is skipped elsewhere; the rest runs everywhere."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = "vllm-omni is not installed here; .ci/vllm-lane runs these in an environment that has it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm_omni") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=MISSING))
