"""A process that has imported what halves need (vllm takes ten seconds), and forks one for each request.

    python -m benchmarks.bench.zygote FD [MODULE ...]

A request is a JSON message on the socket FD, with the half's end of a socket pair attached; the answer is its process
id. It ends when the socket does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from .turn import Pipe


def run_half(order: dict[str, Any], descriptor: int) -> None:
    """Be a half, until the pipe ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pipe = Pipe(Connection(descriptor))
    module, _, name = order["half"].partition(":")
    try:
        half = getattr(importlib.import_module(f"{__package__}.halves.{module}"), name)(**order["options"])
        half.serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the controlling process has gone, or wants no more of this one


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    channel.sendall(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            channel.close()
            try:
                run_half(json.loads(message), descriptors[0])
            except BaseException:  # noqa: BLE001 - printed; a fork must never return into the loop
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        os.close(descriptors[0])
        channel.sendall(str(child).encode())


if __name__ == "__main__":
    main()
