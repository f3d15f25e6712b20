"""Who listens on a port that we would listen on, and whether it lets us."""

from __future__ import annotations

from collections import deque

import trio

from ._endpoint import dialled_host, format_endpoint
from ._errors import BindFailed, PortHeld, RemoteProtocolError
from ._protocol import wire
from ._zmq import open_dialler
from .abc import Arrived, Disconnected, LinkEvent

# Seconds. libzmq makes connections in a thread of its own, which hardly anything delays: whoever takes longer is no
# ZMQ socket. A connector that fails to open for it does so in less than two seconds.
CONNECT_TIMEOUT = 1.5

# Seconds. A trio_mori answers in a round trip, unless its process holds the GIL meanwhile, as when it loads a library
# or a model.
ANSWER_TIMEOUT = 5.0

# Seconds. Whoever yields waits for its receivers for a quarter of a second, and then closes the port.
YIELD_TIMEOUT = 2.0


async def ask_holder(host: str, port: int, deployment: wire.Deployment, *, wanted: bool) -> wire.Holder | str | None:
    """Ask whoever listens on a port of this host who it is. Ends in seconds, whatever is there.

    Args:
        deployment: Who asks.
        wanted: Ask for the port, too. If it is given up, this returns when it is free.

    Returns:
        What it says; or what it is, in words, if it is no trio_mori that can answer; None if it has gone.
    """
    events: deque[LinkEvent] = deque()
    async with open_dialler(dialled_host(host), port) as link:

        async def next_event() -> LinkEvent:
            while not events:
                events.extend(await link.receive())
            return events.popleft()

        with trio.move_on_after(CONNECT_TIMEOUT) as connecting:
            await next_event()  # that it is connected
        if connecting.cancelled_caught:
            return (
                f"a process that took no ZMQ connection within {CONNECT_TIMEOUT:g} s: another program, or a sender "
                "that is stopped"
            )
        link.send(wire.encode(wire.Inquiry(wire.OLDEST_VERSION, wire.VERSION, wanted, deployment)))
        found: wire.Holder | str | None = (
            f"a process that did not say within {ANSWER_TIMEOUT:g} s who it is: a program with another protocol, or a "
            "sender that is stuck"
        )
        with trio.move_on_after(ANSWER_TIMEOUT):
            event = await next_event()
            found = _understand(event) if isinstance(event, Arrived) else None
        if isinstance(found, wire.Holder) and found.yields:
            with trio.move_on_after(YIELD_TIMEOUT):
                while not isinstance(await next_event(), Disconnected):
                    pass
        return found


def _understand(event: Arrived) -> wire.Holder | str:
    try:
        if not wire.is_native(event.frames):
            answer = wire.decode_stock_answer(event.frames)
            return "a sender of vllm-omni itself" if answer == wire.TRANSFER_ERROR else _STRANGER
        body = wire.decode_from_holder(event.frames)
    except RemoteProtocolError:
        return _STRANGER
    if isinstance(body, wire.VersionRange):
        return (
            f"a trio_mori of another release (protocol versions {body.oldest} to {body.newest}, ours "
            f"{wire.OLDEST_VERSION} to {wire.VERSION})"
        )
    return body


_STRANGER = "a program that speaks another protocol"


# --- what callers are told ----------------------------------------------------------------------------------


def tell_apart(holder: wire.Holder, deployment: wire.Deployment) -> str:
    """Who a holder is if it is no instance of this deployment, in words; empty if it is one."""
    theirs = holder.deployment
    pairs = (
        ("host", theirs.host, deployment.host),
        ("stage", theirs.stage, deployment.stage),
        ("rank", theirs.rank, deployment.rank),
        ("replica", theirs.replica, deployment.replica),
        ("configuration", theirs.digest, deployment.digest),
    )
    differences = ", ".join(f"{name} {its!r} where ours is {own!r}" for name, its, own in pairs if its != own)
    return differences and f"a trio_mori of another deployment, process {holder.pid} ({differences})"


def held_by(who: str, taken: BindFailed) -> BindFailed:
    """That an address is taken, and by whom."""
    where = format_endpoint(taken.host, taken.port)
    error = BindFailed(
        f"cannot listen on {where}: it is held by {who}; end that one (`ss -ltnp` names it), or set another port",
        host=taken.host,
        port=taken.port,
        errno=taken.errno,
    )
    error.__cause__ = taken
    return error


def held_by_instance(holder: wire.Holder, taken: BindFailed) -> PortHeld:
    """That an address is taken by an instance of this deployment that does not yield."""
    where = format_endpoint(taken.host, taken.port)
    error = PortHeld(
        f"cannot put at {where}: another instance of this stage, process {holder.pid}, listens there and puts itself, "
        "so that it does not give the address up. Put in that process, or end it, or give this instance an address of "
        "its own (zmq_port, rank or replica)",
        host=taken.host,
        port=taken.port,
        errno=taken.errno,
        pid=holder.pid,
    )
    error.__cause__ = taken
    return error
