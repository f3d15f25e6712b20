"""The benchmark of what `Engine.write` adds to Mori runs. Its figures are for whoever runs it on a quiet machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "mori_overhead.py"


def test_the_benchmark_tells_what_a_write_takes_here_and_in_bare_mori() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "2"], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"^(.+?) +p50 +([\d.]+) us", run.stdout, re.MULTILINE)
    assert [name for name, _ in lines] == ["bare batch_write + Wait", "Engine.write"]
    assert all(float(took) > 0 for _, took in lines)
    assert re.search(r"^ratio \d+\.\d+$", run.stdout, re.MULTILINE)
