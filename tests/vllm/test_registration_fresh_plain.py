"""Registering in a process that has imported nothing yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trio_mori_vllm_omni._registration import NAME, STOCK_NAME


def test_the_names_are_entered_when_the_factory_is_imported_later(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path

import pytest
import trio_mori_vllm_omni
trio_mori_vllm_omni.register()
trio_mori_vllm_omni.register()
assert not any(name.startswith("vllm_omni") for name in sys.modules)
folder = Path({str(tmp_path)!r})
path = folder / "vllm_omni" / "distributed" / "omni_connectors"
path.mkdir(parents=True)
for each in (path, path.parent, path.parent.parent):
    (each / "__init__.py").touch()
(path / "factory.py").write_text("class OmniConnectorFactory:\\n    _registry = {{}}\\n")
sys.path.insert(0, str(folder))
finders = list(sys.meta_path)
from vllm_omni.distributed.omni_connectors import factory
print(sorted(factory.OmniConnectorFactory._registry), len(finders) - len(sys.meta_path))
print(type(factory.__loader__).__name__, factory.__loader__ is factory.__spec__.loader)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{[STOCK_NAME, NAME]} 1\nSourceFileLoader True\n", done.stderr


def test_registering_imports_neither_vllm_nor_torch() -> None:
    program = (
        "import sys, trio_mori_vllm_omni as t; t.register(); "
        "print(sorted({'vllm', 'vllm_omni', 'torch', 'trio', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("configured", "shown"),
    [
        ("", ["here: of trio_mori"]),
        ("logging.getLogger('trio_mori').setLevel(logging.WARNING); ", []),
        ("logging.basicConfig(format='root: %(message)s', level=logging.INFO); ", ["root: of trio_mori"]),
    ],
    ids=["nobody has said where", "only warnings", "at the root"],
)
def test_what_trio_mori_logs_stands_in_vllm_s_log_unless_somebody_has_said_where(
    configured: str, shown: list[str]
) -> None:
    program = (
        "import logging, trio_mori_vllm_omni; "
        "handler = logging.StreamHandler(); handler.setFormatter(logging.Formatter('here: %(message)s')); "
        "vllm = logging.getLogger('vllm'); vllm.addHandler(handler); vllm.setLevel(logging.INFO); "
        f"vllm.propagate = False; {configured}trio_mori_vllm_omni.register(); trio_mori_vllm_omni.register(); "
        "logging.getLogger('trio_mori.vllm_omni').info('of trio_mori')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == shown
