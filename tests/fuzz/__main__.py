"""See the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    try:
        import atheris
    except ImportError:
        print("atheris is missing: pip install '.[fuzz]', on a Python of which it has a wheel", file=sys.stderr)
        return 1
    with atheris.instrument_imports(include=["trio_mori"]):
        from .targets import CORPUS, TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz one decoder, with coverage.")
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS))
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--found", type=Path, default=None, help="a folder for inputs that reach something new")
    arguments = parser.parse_args()
    if arguments.list or arguments.target is None:
        for name, function in TARGETS.items():
            print(f"{name:16} {function.__doc__}")
        return 0
    found = arguments.found or Path(tempfile.mkdtemp(prefix=f"fuzz-{arguments.target}-"))
    options = [f"-max_total_time={arguments.seconds}", "-max_len=8192", "-rss_limit_mb=2048", "-timeout=10"]
    folders = [str(found), str(CORPUS / arguments.target)]

    def one(data: bytes) -> None:  # what it returns would mean something to atheris
        TARGETS[arguments.target](data)

    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={found}/", "-print_final_stats=1", *folders], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
