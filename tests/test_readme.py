"""What README.md and docs/ tell people is true: the commands exist, the code runs, the links lead somewhere."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from ports import free_port

import trio_mori
from trio_mori import ConfigError, Connector, ConnectorConfig, load_deploy

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEFAULTS = {field.name: field.default for field in attrs.fields(ConnectorConfig)}


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert commands[:2] == ["demo", "test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(commands) <= set(targets)


def test_the_code_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code.count("50051") == 2
    program = tmp_path / "readme.py"
    program.write_text(code.replace("50051", str(free_port())))
    command = [sys.executable, "-W", "error", str(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["torch.Size([16, 4096]) False", "499500", "torch.Size([25, 8])"]
    assert run.returncode == 0


@pytest.mark.deterministic
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.deterministic
def test_the_page_of_the_api_has_every_public_name_and_none_that_is_not_there() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    methods = {name for name in vars(Connector) if not name.startswith("_")}
    assert (set(trio_mori.__all__) | methods) - named == set()
    errors = set(re.findall(r"`([A-Z]\w+)`", text.partition("## Errors")[2].partition("## Tests")[0]))
    assert errors <= {*trio_mori.__all__}


@pytest.mark.deterministic
def test_the_configuration_table_names_keys_and_defaults_that_are_so() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", README.partition("## Configuration")[2], re.MULTILINE)
    told = {}
    for names, defaults in rows:
        for name, default in zip(re.findall(r"`(\w+)`", names), re.split(r", ", defaults) * 2, strict=False):
            told[name] = default.strip("` ")
    assert len(told) >= 10
    spelled = {None: "none", 1 << 30: "1 GiB"}
    for name, default in told.items():
        value = DEFAULTS[name]
        wanted = spelled.get(value, f"{value:g}" if isinstance(value, float) else str(value))
        assert default == wanted, name


def block(page: str, language: str, number: int = 0) -> str:
    """A code block of a page in docs/."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[number]


@pytest.mark.deterministic
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings_that_exist(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        target = page.parent / path if path else page
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{page.name} links to {path}#{anchor}"


@pytest.mark.deterministic
def test_the_deploy_file_in_the_documentation_is_one(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(block("configuration.md", "yaml"))
    deploy = load_deploy(path)
    assert [deploy.config_for_stage(stage).role for stage in deploy.stages] == ["sender", "both", "receiver"]
    told = {"ConnectorConfig": ConnectorConfig, "load_deploy": lambda _: deploy}
    exec(block("configuration.md", "python").replace("trio_mori.", ""), told)
    path.write_text(path.read_text().replace("50051", "70000"))
    with pytest.raises(
        ConfigError, match=r"deploy.yaml, line \d+: connectors.node: zmq_port: 70000 is not allowed; give"
    ):
        load_deploy(path)


@pytest.mark.deterministic
def test_the_formatter_in_the_documentation_writes_an_event_with_its_fields() -> None:
    names = {"logging": logging, "json": json}
    exec(block("operations.md", "python"), names)
    record = logging.makeLogRecord({"msg": "lost %s", "args": ("it",), "event": "peer_lost", "peer": "p", "seconds": 3})
    written = json.loads(names["Json"]().format(record))  # type: ignore[operator]
    assert written == {"event": "peer_lost", "text": "lost it", "peer": "p", "seconds": 3}
