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


# Of twenty copies or a hundred, one after the other, and of one in less than 50 ms.
TOO_LONG = {
    "test_chunks_come_in_order_and_then_the_end",
    "test_the_sweeper_sleeps_until_the_next_deadline_whatever_comes_and_goes",
    "test_writes_that_hang_delay_nobody_else_and_are_failed_in_time",
}
assert connector_suite.TESTS.keys() >= TOO_LONG, "one that is left out is not there"

DELAYS = [0, 0.002, pytest.param(0.2, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True, params=DELAYS if moriemu else [0])
def _over_mori(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    connector_suite.over(MoriFabric, monkeypatch)
    if request.param == 0.2 and request.node.originalname in TOO_LONG:
        pytest.skip("with copies of 200 ms it takes longer than it may")
    with delayed(request.param):
        yield
