"""drive_adapter.py: every stage a process, the plugin found by its entry point in each.

Once as it is; else by warm_driver.py, which saves the stages' imports.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Three processes import vllm for 12 s of a core each. The driver gives up on them after 180 s, which is too short where
# much else runs; then it is tried again.
LIMIT = 240
TRIES = 3

# For a run of the warm driver, the first of which waits for its imports: more than 240 s where 16 processes wanted two
# cores.
WARM_LIMIT = 600


def told(*arguments: str, connector: str = "TrioMoriConnector") -> list[str]:
    extra = {"host": "127.0.0.1", "zmq_port": free_port(4), "backend_type": "shm", "memory_pool_size": 64 << 20}
    return ["--load-plugins", "--connector", connector, "--extra", json.dumps(extra), *arguments]


def drive_as_it_is(folder: Path, arguments: list[str]) -> str:
    command = [sys.executable, str(folder / "drive_adapter.py"), *arguments]
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        if "stages did not start" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def drive(setup_folder: Path) -> Iterator[Callable[..., str]]:
    """A run; returns the report."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("warm_driver.py")), str(setup_folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:

        def run(arguments: list[str], **environment: str) -> str:
            assert driver.stdin is not None
            assert driver.stdout is not None
            limit = threading.Timer(WARM_LIMIT, driver.kill)
            limit.start()
            print(json.dumps([arguments, environment]), file=driver.stdin, flush=True)
            line = driver.stdout.readline()
            limit.cancel()
            assert line, f"the driver ended, or took more than {WARM_LIMIT} s"
            status, report = json.loads(line)
            assert status == 0, report
            return str(report)

        yield run
        driver.kill()


def assert_all_arrived(report: str, *, stages: int, chunks: int) -> None:
    for edge in range(stages - 1):
        assert f"edge {edge}->{edge + 1}: {chunks}/{chunks} chunks" in report, report
    assert "corrupt 0" in report
    assert report.count("failed_sends=0 failed_recvs=0") == stages, report
    assert report.count("leftovers={}") == stages, report
    assert all(float(seconds) < 2 for seconds in re.findall(r"shutdown=([\d.]+)s", report)), report
    assert report.count("'refusals': {}") == stages, report
    assert "RESULT ok" in report


def test_three_stages_move_two_thousand_chunks_over_each_edge(setup_folder: Path) -> None:
    arguments = told("--stages", "3", "--sender-info", "orchestrator", "--requests", "200")
    assert_all_arrived(drive_as_it_is(setup_folder, arguments), stages=3, chunks=2000)


@pytest.mark.parametrize(("stages", "sender_info"), [(2, "none"), (3, "first")])
def test_the_stages_find_each_other_by_whatever_they_are_told(
    drive: Callable[..., str], stages: int, sender_info: str
) -> None:
    report = drive(told("--stages", str(stages), "--sender-info", sender_info, "--requests", "20"))
    assert_all_arrived(report, stages=stages, chunks=200)


def test_a_deployment_that_names_the_stock_connector_runs_here(drive: Callable[..., str]) -> None:
    arguments = told("--stages", "3", "--requests", "20", "--interval-ms", "0", connector="MoriTransferEngineConnector")
    assert_all_arrived(drive(arguments, TRIO_MORI_REPLACE_STOCK="1"), stages=3, chunks=200)


def test_our_chunk_adapter_moves_two_thousand_chunks_over_each_edge(drive: Callable[..., str]) -> None:
    report = drive(told("--stages", "3", "--requests", "200"), TRIO_MORI_CHUNK_ADAPTER="1")
    assert_all_arrived(report, stages=3, chunks=2000)
