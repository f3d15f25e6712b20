"""The connector's own tests, with Mori moving what they send."""

from __future__ import annotations

import connector_suite
import pytest
from mori_fabric import MoriFabric

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

globals().update(connector_suite.TESTS)


@pytest.fixture(autouse=True)
def _over_mori(monkeypatch: pytest.MonkeyPatch) -> None:
    connector_suite.over(MoriFabric, monkeypatch)
