"""What the chunk adapter is made of: no lock, no thread of its own, no clock but those that it is given."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import trio_mori_vllm_omni

FOLDER = Path(trio_mori_vllm_omni.__file__).parent / "chunks"
MODULES = sorted(path.stem for path in FOLDER.glob("_[a-z]*.py"))

# The scheduler's half, and what both halves say to each other.
PURE = ["_flows", "_mailbox", "_marks", "_records", "_commit", "_prompt", "_parking", "_reading", "_writing", "_desk"]


def imports(module: str) -> set[str]:
    """The packages that a module imports, and its own ones with their dot."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_module_makes_locks_or_threads_or_sleeps(module: str) -> None:
    assert not imports(module) & {"threading", "_thread", "concurrent", "multiprocessing", "asyncio"}
    source = (FOLDER / f"{module}.py").read_text()
    assert "time.sleep" not in source
    assert "trio.Lock" not in source
    # The clock of the waits is a default of the face, and handed down from there.
    assert "time.monotonic" not in source or module == "_adapter"


@pytest.mark.parametrize("module", PURE)
def test_the_scheduler_s_half_imports_only_itself(module: str) -> None:
    own = {name for name in imports(module) if name.startswith(".")}
    assert own <= {f".{each}" for each in PURE}


def test_the_scheduler_s_half_needs_neither_trio_nor_vllm() -> None:
    names = ", ".join(f"trio_mori_vllm_omni.chunks.{module}" for module in PURE)
    unwanted = {"trio", "zmq", "vllm", "vllm_omni", "trio_mori"}
    program = f"import sys, {names}; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_longer_than_three_hundred_lines(module: str) -> None:
    assert len((FOLDER / f"{module}.py").read_text().splitlines()) <= 300
