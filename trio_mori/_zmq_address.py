"""Addresses of links over ZMQ: how a host is looked up, and how libzmq writes what was found."""

from __future__ import annotations

import trio


def endpoint_of(address: str, port: int) -> str:
    """As libzmq writes it."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


async def resolve(host: str, port: int) -> str:
    """The address of a host, IPv4 if it has one. Not left to libzmq, which would halt all links meanwhile."""
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    _family, *_, address = min(found, key=lambda entry: entry[0] != trio.socket.AF_INET)
    return str(address[0])
