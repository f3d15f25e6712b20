"""What takes minutes of several processes runs when it is asked for by name (`-m faults`, .ci/run)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "faults" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("faults"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; -m faults runs it, and so does .ci/run"))
