"""The three-stage example with its pools on GPUs, by the change to its deploy file that the file itself names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from mori_lane import emulated, moriemu

from examples.pipeline.__main__ import order_from, parse
from examples.pipeline.demo import Demo

pytest.importorskip("mori.io", reason="needs amd-mori: see docs/mori.md")
pytestmark = pytest.mark.mori

ROOT = Path(__file__).parent.parent.parent
SITE = Path(__file__).parent / "site"


RUNS = [(0, 2), (0.002, 2), pytest.param(0.2, 1, marks=pytest.mark.slow)] if moriemu else [(0, 4)]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the example, whose processes will have GPUs."""
    deploy = (ROOT / "examples" / "pipeline" / "pipeline.yaml").read_text()
    for before, after in (('backend_type: "shm"', "xgmi"), ('memory_pool_device: "cpu"', "cuda")):
        assert deploy.count(before) == 1
        deploy = deploy.replace(before, f'{before.partition(":")[0]}: "{after}"')
    (tmp_path / "gpu.yaml").write_text(deploy)
    if moriemu:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(SITE), os.environ["PYTHONPATH"])))
        monkeypatch.setenv("HIPEMU_DEVICES", "3")
    return ["--deploy", str(tmp_path / "gpu.yaml"), "--out", str(tmp_path / "out.wav"), "--speed", "0"]


@pytest.mark.parametrize(("delay", "requests"), RUNS)
def test_the_pipeline_makes_over_xgmi_what_one_process_makes(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, delay: float, requests: int
) -> None:
    monkeypatch.setenv("HIPEMU_COPY_DELAY_US", str(int(delay * 1e6)))
    run = subprocess.run(
        [sys.executable, "-m", "examples.pipeline", *arguments, "--requests", str(requests)],
        cwd=ROOT,
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


@emulated
@pytest.mark.parametrize("mode", ["enqueue", "event"])
async def test_a_copy_that_fails_in_the_pipeline_is_a_typed_error_of_a_stage_and_all_end_by_themselves(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("HIPEMU_COPY_DELAY_US", "2000")
    monkeypatch.setenv("HIPEMU_FAIL_COPY", f"2:719:{mode}")
    demo = Demo(order_from(parse([*arguments, "--requests", "1"])))
    with trio.fail_after(100):
        await demo.run()
    assert demo.failure is not None
    assert re.search(r"stage \d \(\w+\) failed: TransferFailed: .* Mori says ERR_GPU_OP", demo.failure), demo.failure
    statuses = [stage.process.returncode for stage in demo.stages if stage.process]
    assert len(statuses) == 3
    # The parent sends SIGTERM; one that has just said why it fails no longer handles it.
    assert set(statuses) <= {0, 1, 128 + signal.SIGTERM, -signal.SIGTERM}, statuses
