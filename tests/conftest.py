"""How much hypothesis does. HYPOTHESIS_PROFILE picks the profile; under "ci", TRIO_MORI_EXAMPLES says how many
examples a property is tried with. No deadline in either: the machine may be busy.

And torch gets one thread: with two, a copy takes 8 ms instead of 0.2 whenever something else is running.

And the collector looks at nothing that was there before the first test: half of a gigabyte of modules that stay for
ever, which else cost a tenth of a second whenever a test calls `gc.collect`, and a second during the imports.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings
from trio.testing import MockClock

gc.disable()

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, which is later

settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile(
    "ci", max_examples=int(os.environ.get("TRIO_MORI_EXAMPLES", "1000")), deadline=None, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def clock() -> MockClock:
    """The time of a test's trio run: real, so that sockets and threads have theirs; `jump` spares it a time-out."""
    return MockClock(rate=1.0)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
