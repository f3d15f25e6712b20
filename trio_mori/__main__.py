"""The command line: ``trio-mori keygen PATH`` makes a pair of keys for connectors that ask for them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ._errors import ConfigError
from ._key_files import write_pair


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="trio-mori", description="Tools for trio_mori connectors.")
    commands = parser.add_subparsers(dest="command", required=True)
    keygen = commands.add_parser(
        "keygen",
        help="make a pair of CURVE keys",
        description="Write PATH.secret, which only its owner may read, and PATH.public. Existing files are kept.",
    )
    keygen.add_argument("path", metavar="PATH", help="where to write, without an ending")
    keygen.add_argument("--name", help="of the key in lists and logs (default: the last part of PATH)")
    chosen = parser.parse_args(arguments)
    try:
        secret, public = write_pair(chosen.path, chosen.name or os.path.basename(chosen.path))
    except ConfigError as error:
        print(f"trio-mori: {error}", file=sys.stderr)
        return 1
    print(f"{secret}: curve_secret_key of the connector; keep it to its user")
    print(f"{public}: for curve_sender_key and curve_allowed_keys of its peers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
