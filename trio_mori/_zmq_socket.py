"""ZMQ sockets as links use them: options, context, addresses, and what libzmq says about their connections."""

from __future__ import annotations

import errno
import itertools
import os
import socket as sockets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import attrs
import trio
import zmq
from zmq.utils import z85

from ._descriptors import is_shortage, no_descriptors
from ._keys import Keys
from ._link import Transport
from ._protocol.wire import MAX_BODY
from .abc import Arrived

Socket = zmq.Socket[bytes]

# Both dialects have two frames; the rest is room for later versions.
MAX_FRAMES = 8
# A body above MAX_BODY gets a typed refusal from the protocol; only far above it is the connection cut.
MAX_BYTES = 4 * MAX_BODY

# Milliseconds until an attempt to reach a host that does not answer at all is made anew. The kernel would go on for two
# minutes at growing intervals, and miss a host that comes back by up to the longest of them.
CONNECT_TIMEOUT = 5_000

# Milliseconds: more than any task keeps the trio thread from closing the socket; see `DiallingLink`.
NEVER_RECONNECT = 3_600_000

# Messages to one peer that may wait until it reads: twice the fetches that one may have open at most, each of which is
# answered once. One that reads nothing and has more coming is no receiver of ours, and counts as gone.
SEND_LIMIT = 65536

# Messages of one connection that may wait until we read; at 4 MiB each they are 256 MiB. Whoever sends more waits. By
# count and not by bytes, as a message of 2 bytes takes 64 of memory, and one of 36 a buffer of 18 KB if it comes alone.
# As long as this many wait, libzmq does not read on, and so does not see that the connection is gone: who reads them
# all learns it then, and as the last thing in any case.
RECEIVE_LIMIT = 64

# Seconds: a host that vanished without a word is noticed after 10 + 3 * 5, before the peer_timeout of 30.
KEEPALIVE_IDLE = 10
KEEPALIVE_INTERVAL = 5
KEEPALIVE_COUNT = 3

# Parts of a message with too many of them that are left out before other tasks get a turn: a batch of `MAX_BATCH` takes
# 6 ms. One of millions, which may be empty, would else keep the loop for seconds.
SKIPPED_AT_ONCE = 32

# Parts of one message that are left out before its connection is cut off: 64 bytes of memory each, so that messages
# with fewer take 64 MiB when `RECEIVE_LIMIT` of them wait. To leave so many out takes 12 ms.
MAX_LEFT_OUT = 512 * SKIPPED_AT_ONCE

# Plain integers: `&` on the enums costs more than asking the socket.
_POLLIN = int(zmq.POLLIN)
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class ZmqTransport(Transport):
    """A ZMQ socket; the first frame of a ROUTER's messages is the route.

    Attributes:
        doubted: Descriptors of connections that a message is waited for from. Reading one takes it out.
        reads: Messages that were read while there were any.
        crowded: Descriptors of connections by which a message with more than `MAX_LEFT_OUT` parts too many came.
    """

    def __init__(self, socket: Socket, *, max_frames: int = MAX_FRAMES, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(cast(int, socket.get(zmq.FD)))
        self.socket = socket
        self._routed = socket.type == zmq.ROUTER
        self._max_frames = max_frames + self._routed
        self._max_bytes = max_bytes
        self.doubted: set[int] = set()
        self.reads = 0
        self.crowded: set[int] = set()
        self._left_out = 0  # parts of the message that is being left out

    def settle(self) -> bool:
        self.readable = bool(cast(int, self.socket.get(zmq.EVENTS)) & _POLLIN)
        return self.readable

    def read(self) -> Arrived | None:
        # By Frame, which knows its size and whether more follow: 2.5 us a message against 3.7 with recv_multipart.
        if self.is_skipping:
            self._skip()
            return None
        frame = self.socket.recv(_DONTWAIT, copy=False)
        parts = [frame]
        size = len(frame)
        while frame.more:
            if len(parts) == self._max_frames:
                self.is_skipping, self._left_out = True, 0
                return None
            frame = self.socket.recv(_DONTWAIT, copy=False)
            parts.append(frame)
            size += len(frame)
        if self.doubted:
            self._clear(frame)
        if size > self._max_bytes:
            return None
        frames = [part.bytes for part in parts]
        return Arrived(frames[1:], frames[0]) if self._routed else Arrived(frames)

    def _skip(self) -> None:
        for _ in range(SKIPPED_AT_ONCE):
            frame = self.socket.recv(_DONTWAIT, copy=False)
            if not frame.more:
                self.is_skipping = False
                if self.doubted:
                    self._clear(frame)
                return
        self._left_out += SKIPPED_AT_ONCE
        if self._left_out == MAX_LEFT_OUT:
            self.crowded.add(frame.get(zmq.SRCFD))

    def _clear(self, frame: zmq.Frame) -> None:
        self.doubted.discard(frame.get(zmq.SRCFD))
        self.reads += 1

    def write(self, frames: Sequence[bytes], route: bytes) -> bool:
        # Copies: at 100 KB that takes as long as to lend the bytes to libzmq, 17 us, and less below.
        try:
            if self._routed:
                self.socket.send(route, _MORE)
            for frame in frames[:-1]:
                self.socket.send(frame, _MORE)
            self.socket.send(frames[-1], _DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True


# --- sockets ------------------------------------------------------------------------------------------------

# One for the process, and never terminated: that would wait for every socket of every thread. Its threads start with
# the first socket, and end with the process.
_context: zmq.Context[Socket] = zmq.Context()
# Those of secured listeners, which end with them.
_own_contexts: set[zmq.Context[Socket]] = set()
_inherited: list[zmq.Context[Socket]] = []


def _renew_context() -> None:
    # A forked child has the parent's sockets but not the threads that serve them. It must not even free them.
    global _context
    _inherited.extend([_context, *_own_contexts])
    _own_contexts.clear()
    _context = zmq.Context()


os.register_at_fork(after_in_child=_renew_context)


@contextmanager
def open_own_context() -> Iterator[zmq.Context[Socket]]:
    """A context for one secured listener. All sockets in it have to be closed before it is left.

    libzmq asks one address per context whether a peer may connect. A context that all share would need one place that
    answers for the listeners of all trio runs, and that outlives each of them.
    """
    context: zmq.Context[Socket] = zmq.Context()
    _own_contexts.add(context)
    try:
        yield context
    finally:
        if context in _own_contexts:  # otherwise a forked child leaves it
            _own_contexts.remove(context)
            context.term()  # 4 ms, to join its two threads; its sockets are closed, and do not linger


@contextmanager
def open_socket(kind: int, max_bytes: int, context: zmq.Context[Socket] | None = None) -> Iterator[Socket]:
    """A socket with the options of our links. Nothing lingers when it is closed.

    Raises:
        NoDescriptors: none is left for it.
    """
    try:
        socket = (context or _context).socket(kind)
    except zmq.ZMQError as error:
        if is_shortage(error.errno):
            raise no_descriptors("a ZMQ socket", error.errno) from error
        raise
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_LIMIT)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
        if kind == zmq.ROUTER:
            # Without it, what is above the limit is dropped without a word.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        else:
            # The protocol bounds what we have to say.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT)
            socket.setsockopt(zmq.RECONNECT_IVL, NEVER_RECONNECT)
        yield socket
    finally:
        socket.close()


def lock(socket: Socket, keys: Keys) -> None:
    """Let only those in who know the public key and are let in by `_zmq_guard`, which has to answer by then."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    # Without a domain libzmq asks nobody where nobody answers, and lets all in.
    socket.setsockopt(zmq.ZAP_DOMAIN, b"trio-mori")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def show_keys(socket: Socket, keys: Keys) -> None:
    """Dial with our keys, and only who has the sender's."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.sender)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def new_key_pair() -> tuple[bytes, bytes]:
    """A public and a secret key, 40 characters each."""
    public, secret = zmq.curve_keypair()
    return public, secret


def public_key_of(secret: bytes) -> bytes:
    """The public half of a secret key."""
    return zmq.curve_public(secret)


def is_key(text: bytes) -> bool:
    """Whether these are the 40 characters of some key."""
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def encode_key(key: bytes) -> bytes:
    """The 40 characters of a key's 32 bytes."""
    return z85.encode(key)


@attrs.frozen
class Happened:
    """What libzmq said about a connection.

    Attributes:
        event: One of the numbers ``zmq.EVENT_...``.
        value: Its detail: a descriptor, an errno, a code.
    """

    event: int
    value: int


class Monitor:
    """What libzmq's thread says about the connections of a socket."""

    def __init__(self, transport: ZmqTransport) -> None:
        self._transport = transport

    async def wait(self) -> Happened:
        """Wait for the next event."""
        while not self._transport.settle():
            await trio.lowlevel.wait_readable(self._transport.fd)
        header, _ = self._transport.socket.recv_multipart(_DONTWAIT)
        return Happened(*struct.unpack_from("=HI", header))

    def forget(self) -> None:
        """Let nobody wait for what has happened until now."""
        while self._transport.settle():
            self._transport.socket.recv_multipart(_DONTWAIT)


def copy_of(descriptor: int) -> sockets.socket:
    """A connection of libzmq's, kept open. It may be over, and its descriptor be something else.

    Raises:
        OSError: it is no socket, or no descriptor is left.
    """
    copy = os.dup(descriptor)
    try:
        return sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


_monitor_numbers = itertools.count()


@contextmanager
def watch(socket: Socket, events: int) -> Iterator[Monitor]:
    """Have a socket's events reported, to one at a time. It must not be closed before this has been left."""
    address = f"inproc://trio-mori-monitor-{next(_monitor_numbers)}"
    with socket.context.socket(zmq.PAIR) as ear:
        ear.setsockopt(zmq.LINGER, 0)
        ear.setsockopt(zmq.RCVHWM, 0)  # at a limit libzmq's thread would wait for us, and serve no socket meanwhile
        socket.monitor(address, events)
        try:
            ear.connect(address)
            yield Monitor(ZmqTransport(ear))
        finally:
            # Before the ear closes: the end of watching is an event too, and libzmq's thread would wait for ever for
            # an ear to hear it, and no socket of the process be served.
            socket.disable_monitor()


async def resolve(host: str, port: int) -> str:
    """The address of a host, IPv4 if it has one. Not left to libzmq, which would halt all links meanwhile."""
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    _family, *_, address = min(found, key=lambda entry: entry[0] != trio.socket.AF_INET)
    return str(address[0])
