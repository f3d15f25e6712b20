"""Who listens on a port that we would listen on, and whether it lets us."""

from __future__ import annotations

from contextlib import suppress

import attrs
import trio

from ._endpoint import dialled_host, format_endpoint
from ._errors import BindFailed, PortHeld, RemoteProtocolError
from ._keys import Keys
from ._protocol import stock_wire, wire
from ._zmq_dialler import open_dialler
from ._zmtp import LISTENER, fetch_name
from .abc import Arrived, Link, Refused

# Seconds. libzmq makes connections in a thread of its own, which hardly anything delays: whoever takes longer is no
# ZMQ socket.
CONNECT_TIMEOUT = 1.2

# Seconds that the name of the socket may take, which comes by the same thread; and that a ZMQ socket of another name
# may take to answer, whatever it says. With the one above it is less than two: then a connector on a port that is
# taken has failed to open.
NAME_TIMEOUT = 0.3
STRANGER_TIMEOUT = 0.3

# Seconds. A trio_mori answers in a round trip, unless its process holds the GIL meanwhile, as when it loads a library
# or a model.
ANSWER_TIMEOUT = 5.0


async def ask_holder(
    host: str, port: int, deployment: wire.Deployment, *, keys: Keys | None, wanted: bool, patience: float
) -> wire.Holder | str | None:
    """Ask whoever listens on a port of this host who it is. Ends in seconds, whatever is there.

    Args:
        deployment: Who asks.
        keys: Ours. Only who has the same pair is asked.
        wanted: Ask for the port, too. If it is given up, this returns when it is free.
        patience: Seconds that this may take.

    Returns:
        What it says; or what it is, in words, if that is no answer to go by; None if nobody listens, or not any more.
    """
    host = dialled_host(host)
    found: wire.Holder | str | None = None
    keys = None if keys is None else attrs.evolve(keys, sender=keys.public)
    latest = trio.current_time() + CONNECT_TIMEOUT
    try:
        with trio.move_on_at(latest) as connecting:
            witness = await trio.open_tcp_stream(host, port)
    except OSError:
        return None
    if connecting.cancelled_caught:
        return _NO_ZMQ
    # A link tries on when nobody is there any more. This connection ends together with the listener.
    async with witness, trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_at_end, witness, nursery.cancel_scope)
        async with open_dialler(host, port, keys=keys) as link:
            found = await _greet(link, keys, latest)
            if found is None:
                # Whoever has our keys is one of us.
                is_ours = keys is not None or await _is_trio_mori(host, port)
                inquiry = wire.Inquiry(wire.OLDEST_VERSION, wire.VERSION, wanted, deployment)
                found = await _converse(link, inquiry, ANSWER_TIMEOUT if is_ours else STRANGER_TIMEOUT)
            if isinstance(found, wire.Holder) and found.yields and found.deployment == deployment:
                with trio.move_on_after(patience):
                    await trio.sleep_forever()
                found = f"process {found.pid}, which said {patience:g} s ago that it gives it up, and is stuck"
        nursery.cancel_scope.cancel()
    return found


async def _cancel_at_end(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass
    scope.cancel()


async def _greet(link: Link, keys: Keys | None, latest: float) -> str | None:
    """Wait until it is connected; otherwise say what is there."""
    with trio.move_on_at(latest):
        refused = [event for event in await link.receive() if isinstance(event, Refused)]
        return f"a ZMQ program that this one may not talk to: {refused[0].why}" if refused else None
    return _NO_ZMQ if keys is None else _NO_KEYS


async def _is_trio_mori(host: str, port: int) -> bool:
    name = b""
    with trio.move_on_after(NAME_TIMEOUT):
        name = await fetch_name(host, port)
    return name == LISTENER


async def _converse(link: Link, inquiry: wire.Inquiry, seconds: float) -> wire.Holder | str | None:
    link.send(wire.encode(inquiry))
    with trio.move_on_after(seconds):
        event = (await link.receive())[0]
        return _understand(event) if isinstance(event, Arrived) else None
    return _SILENT


def _understand(event: Arrived) -> wire.Holder | str:
    try:
        if not wire.is_native(event.frames):
            answer = stock_wire.decode_answer(event.frames)
            return _STOCK if answer == stock_wire.TRANSFER_ERROR else _STRANGER
        body = wire.decode_from_holder(event.frames)
    except RemoteProtocolError:
        return _STRANGER
    if isinstance(body, wire.VersionRange):
        return (
            f"a trio_mori of another release (protocol versions {body.oldest} to {body.newest}, ours "
            f"{wire.OLDEST_VERSION} to {wire.VERSION})"
        )
    return body


# What listens there, in words.
_NO_ZMQ = "a process that took no ZMQ connection: another program, or a sender that is stopped"
_NO_KEYS = (
    "a process that took no ZMQ connection by the keys of this one: another program, a sender that is stopped, or one "
    "with other keys or none"
)
_SILENT = "a process that does not say who it is: a program with another protocol, or a sender that is stuck"
_STOCK = "a sender of vllm-omni itself"
_STRANGER = "a program that speaks another protocol"

# When it was asked several times, and yet nobody was there.
NOBODY = (
    "processes that come and go or hang up, or by a connection that has it as its own end: the system gives those in "
    "net.ipv4.ip_local_port_range to whoever connects to something"
)


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
        f"cannot listen on {where}: it is held by {who}; end that one (`ss -tanp` names it), or set another port",
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
