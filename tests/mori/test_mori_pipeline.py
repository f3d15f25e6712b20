"""The three-stage example with its pools on GPUs, by the change to its deploy file that the file itself names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mori_lane import moriemu

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

ROOT = Path(__file__).parent.parent.parent
SITE = Path(__file__).parent / "site"


RUNS = [(0.002, 2), pytest.param(0.2, 1, marks=pytest.mark.slow)] if moriemu else [(0, 4)]


@pytest.mark.parametrize(("delay", "requests"), RUNS)
def test_the_pipeline_makes_over_xgmi_what_one_process_makes(tmp_path: Path, delay: float, requests: int) -> None:
    deploy = (ROOT / "examples" / "pipeline" / "pipeline.yaml").read_text()
    for before, after in (('backend_type: "shm"', "xgmi"), ('memory_pool_device: "cpu"', "cuda")):
        assert deploy.count(before) == 1
        deploy = deploy.replace(before, f'{before.partition(":")[0]}: "{after}"')
    (tmp_path / "gpu.yaml").write_text(deploy)
    environment = dict(os.environ)
    if moriemu:
        environment["PYTHONPATH"] = os.pathsep.join((str(SITE), environment["PYTHONPATH"]))
        environment |= {"HIPEMU_DEVICES": "3", "HIPEMU_COPY_DELAY_US": str(int(delay * 1e6))}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "examples.pipeline", "--deploy", str(tmp_path / "gpu.yaml")),
            *("--out", str(tmp_path / "out.wav"), "--requests", str(requests), "--speed", "0"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "bit-identical: yes"
    assert "xgmi wrote" in run.stdout
    rows = re.findall(r"(\d) -> (\d) [a-z ]+? +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) ", run.stdout)
    assert [row[:2] for row in rows] == [("0", "1"), ("1", "2")]
    assert len({rows[0][2], rows[0][3], rows[1][3]}) == 3, "three processes"
    for row in rows:
        assert row[4] == row[5] == row[6] != "0", "all that was put was written, and got"
