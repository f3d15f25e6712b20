"""The command line: what it prints, where, and its exit status."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from trio_mori import _config
from trio_mori.__main__ import main

pytestmark = pytest.mark.deterministic

DEPLOY = """\
connectors:
  node: {name: TrioMoriConnector, extra: {zmq_port: 41000, memory_pool_size: 16777216, codec_vocab_size: 7}}
stages:
  - stage_id: 0
    output_connectors: {to_stage_1: node}
  - stage_id: 1
    input_connectors: {from_stage_0: node}
    output_connectors: {to_stage_2: node}
  - stage_id: 2
    input_connectors: {from_stage_1: node}
  - stage_id: 3
"""


@pytest.fixture(autouse=True)
def warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "_warned", set())


def check(tmp_path: Path, text: str, *more: str) -> int:
    """Run it on a file of this text."""
    path = tmp_path / "deploy.yaml"
    path.write_text(text, encoding="utf-8")
    return main(["check", str(path), *more])


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    try:
        version = metadata.version("trio-mori")
    except metadata.PackageNotFoundError:
        version = "(not installed"
    assert capsys.readouterr().out.startswith(f"trio-mori {version}")


def test_check_prints_the_edges_ports_and_keys_of_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, DEPLOY) == 0
    out = capsys.readouterr().out
    more = ["  memory_pool_size: 16777216", "  for others: codec_vocab_size"]
    assert out.splitlines() == [
        *("stage 0: sender, 0->1 by node", "  listens at tcp://127.0.0.1:41000", *more),
        *("stage 1: both, 0->1, 1->2 by node", "  listens at tcp://127.0.0.1:41001"),
        *("  gets from tcp://127.0.0.1:41000", *more),
        *("stage 2: receiver, 1->2 by node", "  gets from tcp://127.0.0.1:41001", *more),
        "stage 3: no edge, and so no connector",
    ]


def test_check_prints_one_stage_and_says_which_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, DEPLOY, "--stage", "2") == 0
    assert capsys.readouterr().out.startswith("stage 2: receiver")
    assert check(tmp_path, DEPLOY, "--stage", "7") == 1
    assert "there is no stage 7; there are 0, 1, 2, 3" in capsys.readouterr().err


def test_a_stage_that_needs_several_connectors_has_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = DEPLOY.replace(
        "  - stage_id: 3\n", "  - stage_id: 3\n    input_connectors: {from_stage_0: node, from_stage_1: node}\n"
    )
    assert check(tmp_path, text, "--stage", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("stage")] == [
        "stage 3: receiver, 0->3 by node",
        "stage 3: receiver, 1->3 by node",
    ]
    assert [line for line in lines if "gets from" in line] == [
        "  gets from tcp://127.0.0.1:41000",
        "  gets from tcp://127.0.0.1:41001",
    ]


def test_connectors_of_others_are_named_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DEPLOY.replace("to_stage_2: node", "to_stage_2: other").replace("from_stage_1: node", "from_stage_1: other")
    text = text.replace("stages:", "  other: {name: SharedMemoryConnector}\nstages:", 1)
    assert check(tmp_path, text) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "stage 1: 1->2 goes by SharedMemoryConnector, not by trio_mori" in lines
    assert "stage 1: receiver, 0->1 by node" in lines
    assert "stage 2: 1->2 goes by SharedMemoryConnector, not by trio_mori" in lines


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_pool_size: 16777216", "memory_pool_size: 512MB", "line 2: connectors.node: memory_pool_size: '512MB'"),
        ("stages:", "stage:", "did you mean 'stages' by 'stage'"),
        ("zmq_port: 41000", "zmq_port: 41000, role: both", "the edges make stage 0 a sender"),
    ],
)
def test_what_is_wrong_goes_to_stderr_and_into_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    assert check(tmp_path, DEPLOY.replace(old, new, 1)) == 1
    told = capsys.readouterr().err
    assert told.startswith("trio-mori: ")
    assert words in told
    assert main(["check", str(tmp_path / "none.yaml")]) == 1


def test_a_misspelt_key_is_warned_of_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert check(tmp_path, DEPLOY.replace("memory_pool_size", "memory_pol_size")) == 0
    assert "line 2: connectors.node: 'memory_pol_size' is no key" in caplog.text
    assert capsys.readouterr().out
