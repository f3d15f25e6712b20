"""What is built of the sources is what is promised: both packages, typed, with their metadata, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import attrs
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"trio_mori": ROOT / "trio_mori", "trio_mori_vllm_omni": ROOT / "adapters" / "trio_mori_vllm_omni"}


@attrs.frozen
class Built:
    """What a build made."""

    wheel: Path
    sdist: Path

    @property
    def files(self) -> set[str]:
        """Of the wheel."""
        with ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def text(self, name: str) -> str:
        """A file of the wheel's metadata."""
        with ZipFile(self.wheel) as archive:
            (path,) = [each for each in archive.namelist() if each.endswith(f".dist-info/{name}")]
            return archive.read(path).decode()

    @property
    def metadata(self) -> Message:
        """Of the wheel."""
        return message_from_string(self.text("METADATA"))


def build(source: Path, target: Path) -> Built:
    """Build both from a source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    (sdist,) = target.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(name="built", scope="module")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from this tree."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def files_of(name: str) -> set[str]:
    """What belongs to a package, as a wheel names it."""
    folder = PACKAGES[name]
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {f"{name}/{path.relative_to(folder).as_posix()}" for path in paths}


def test_the_wheel_has_both_packages_whole_and_nothing_else(built: Built) -> None:
    files = {name for name in built.files if ".dist-info/" not in name}
    assert files == files_of("trio_mori") | files_of("trio_mori_vllm_omni")
    assert {
        "trio_mori/py.typed",
        "trio_mori_vllm_omni/py.typed",
        "trio_mori/_protocol/wire.py",
        "trio_mori_vllm_omni/__init__.py",
    } <= files


def test_a_wheel_made_of_the_sdist_is_the_same(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(tmp_path, filter="data")
        else:
            archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    again = build(source, tmp_path / "dist")
    assert again.files == built.files
    assert again.text("METADATA") == built.text("METADATA")


def test_the_sdist_can_be_tested(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert {f"tests/{Path(__file__).name}", "tests/rig.py", "examples/pipeline/pipeline.yaml"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_the_metadata_names_what_is_needed_and_what_is_needed_only_for_more(built: Built) -> None:
    metadata = built.metadata
    assert metadata["Name"] == "trio-mori"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    assert set(metadata.get_all("Provides-Extra", ())) == {"mori", "vllm-omni", "metrics", "test", "fuzz", "dev"}
    always, extra = set(), {}
    for requirement in metadata.get_all("Requires-Dist", ()):
        name = re.split(r"[ <>=;\[!~]", requirement)[0].lower()
        named = re.search(r"extra == '([\w-]+)'", requirement)
        if named is None:
            always.add(name)
        else:
            extra.setdefault(named[1], set()).add(name)
    assert always == {
        "attrs", "exceptiongroup", "msgspec", "pyyaml", "pyzmq", "sortedcontainers", "torch", "trio"
    }  # fmt: skip
    assert extra["mori"] == {"amd-mori"}
    assert extra["vllm-omni"] == {"vllm-omni"}
    assert {"pytest", "pytest-trio", "hypothesis"} <= extra["test"]
    assert {"ruff", "mypy"} <= extra["dev"]


def test_what_the_entry_points_name_is_there(built: Built) -> None:
    entries = ConfigParser()
    entries.read_string(built.text("entry_points.txt"))
    targets = [target for section in entries.sections() for _, target in entries.items(section)]
    assert targets
    for target in targets:
        module = target.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & built.files, target


def test_the_wheel_is_importable_as_it_is_and_loads_nothing_that_it_does_not_need(built: Built) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(built.wheel)!r}); import trio_mori, trio_mori.abc;"
        "print(trio_mori.__file__, sorted({'torch', 'zmq', 'mori'} & set(sys.modules)));"
        "trio_mori.TrioMoriError, trio_mori.ConnectorConfig; print(trio_mori.__version__);"
        "print(sorted({'torch', 'zmq', 'mori'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stderr == ""
    assert done.stdout == f"{built.wheel}/trio_mori/__init__.py []\n{built.metadata['Version']}\n[]\n"


def test_a_package_that_was_not_installed_says_so_when_it_is_asked_for_its_version(tmp_path: Path) -> None:
    (tmp_path / "trio_mori").symlink_to(ROOT / "trio_mori")
    program = f"import sys; sys.path = [{str(tmp_path)!r}, *sys.path[:3]]; import trio_mori; trio_mori.__version__"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert "AttributeError: trio_mori.__version__ is not known, for the package was not installed" in done.stderr


def test_only_public_names_are_shown() -> None:
    program = "import trio_mori; print([name for name in dir(trio_mori) if not name.startswith('__')])"
    program += "; print(sorted(trio_mori.__all__)); print('__version__' in dir(trio_mori))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=True)
    shown, public, has_version = done.stdout.splitlines()
    assert shown == public
    assert has_version == "True"
