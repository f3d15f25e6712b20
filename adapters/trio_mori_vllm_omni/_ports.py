"""Whose port is it? A listener of ours marks its port, so that another process can tell it from a stranger's.

vllm-omni makes two connectors with one configuration, in two processes where tensor parallelism is more than 1. Only
the one that puts listens. The other must not fail because the port is taken, but a port that a stranger has must be
reported when the connector is made, and not at the first put.
"""

from __future__ import annotations

import errno
import socket

from trio_mori import BindFailed

_ANYWHERE = ("auto", "*", "0.0.0.0")


def check_port(host: str, port: int, digest: str) -> None:
    """See that nobody but a connector of the same configuration listens there.

    Raises:
        BindFailed: somebody else does, or this process may not.
    """
    address = "127.0.0.1" if host in _ANYWHERE else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As ZMQ does: what an earlier process left in TIME_WAIT is no obstacle, a living listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and is_marked(port, digest):
                return
            raise BindFailed(
                f"cannot listen on {host}:{port}: {error.strerror}; stop whatever has this port, or give another "
                "zmq_port",
                host=host,
                port=port,
                errno=error.errno,
            ) from error


def mark_port(port: int, digest: str) -> socket.socket | None:
    """Say that the listener of this port is of this configuration, until the socket is closed or the process ends."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(_name(port, digest))
    except OSError:
        mark.close()
        return None
    return mark


def is_marked(port: int, digest: str) -> bool:
    """Whether a process of this network namespace has marked the port."""
    mark = mark_port(port, digest)
    if mark is None:
        return True
    mark.close()
    return False


def _name(port: int, digest: str) -> str:
    # An abstract name: it is scoped as ports are, by network namespace, and the kernel removes it with the process.
    return f"\0trio-mori-port-{port}-{digest}"
