"""The command line: ``trio-mori keygen PATH`` makes a pair of keys, ``trio-mori check FILE`` reads a deploy file."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from ._deploy import load_deploy
from ._deploy_report import report_stage
from ._errors import ConfigError
from ._key_files import write_pair


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="trio-mori", description="Tools for trio_mori connectors.")
    parser.add_argument("--version", action="version", version=f"trio-mori {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    keygen = commands.add_parser(
        "keygen",
        help="make a pair of CURVE keys",
        description="Write PATH.secret, which only its owner may read, and PATH.public. Existing files are kept.",
    )
    keygen.add_argument("path", metavar="PATH", help="where to write, without an ending")
    keygen.add_argument("--name", help="of the key in lists and logs (default: the last part of PATH)")
    check = commands.add_parser(
        "check",
        help="say what a deploy file comes to",
        description="Read a deploy file of vllm-omni and print the connectors of each stage: edges, ports and keys "
        "that are not as by default. Nothing is opened. The exit status is 1 if anything is wrong.",
    )
    check.add_argument("file", metavar="FILE", help="the deploy file")
    check.add_argument("--stage", type=int, metavar="N", help="only this one")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "check":
            return _check(chosen.file, chosen.stage)
        return _keygen(chosen.path, chosen.name or os.path.basename(chosen.path))
    except ConfigError as error:
        return _fail(str(error))


def _keygen(path: str, name: str) -> int:
    secret, public = write_pair(path, name)
    print(f"{secret}: curve_secret_key of the connector; keep it to its user")
    print(f"{public}: for curve_sender_key and curve_allowed_keys of its peers")
    return 0


def _check(path: str, stage: int | None) -> int:
    # What is warned of goes to stderr, too, in the words of the log.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="trio-mori: warning: %(message)s")
    deploy = load_deploy(path)
    status = 0
    for number in deploy.stages if stage is None else (stage,):
        report = report_stage(deploy, number)
        for line in report.lines:
            print(line)
        for error in report.errors:
            status = _fail(error)
    return status


def _fail(error: str) -> int:
    print(f"trio-mori: {error}", file=sys.stderr)
    return 1


def _version() -> str:
    try:
        return metadata.version("trio-mori")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its sources)"


if __name__ == "__main__":
    sys.exit(main())
