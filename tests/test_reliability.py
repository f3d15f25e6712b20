"""The page about reliability names tests that exist, for every case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE))))
def test_each_test_that_the_page_names_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_every_case_has_a_promise_and_a_test() -> None:
    rows = re.findall(r"^\| (A\d+)\b[^|]*\|([^|]+)\|([^|]+)\|$", PAGE, re.MULTILINE)
    assert {case for case, *_ in rows} == {f"A{number}" for number in range(1, 16)}
    for case, promise, tests in rows:
        assert len(promise.split()) > 3, case
        assert "::test_" in tests, case


def test_every_file_that_the_page_names_exists() -> None:
    for name in re.findall(r"`(tests/[\w/]+(?:\.py)?)`", PAGE):
        assert (ROOT / name).exists(), name
