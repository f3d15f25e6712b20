"""The connector's own tests, with Mori moving what they send."""

from __future__ import annotations

from collections.abc import Iterator

import connector_suite
import pytest
from mori_fabric import MoriFabric
from mori_lane import delayed, moriemu

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

globals().update(connector_suite.TESTS)


# Of a hundred copies.
TOO_LONG = "test_the_sweeper_sleeps_until_the_next_deadline_whatever_comes_and_goes"
assert TOO_LONG in connector_suite.TESTS

DELAYS = [0, 0.002, pytest.param(0.2, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True, params=DELAYS if moriemu else [0])
def _over_mori(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    connector_suite.over(MoriFabric, monkeypatch)
    if request.param == 0.2 and request.node.originalname == TOO_LONG:
        pytest.skip("a hundred copies, each of 200 ms")
    with delayed(request.param):
        yield
