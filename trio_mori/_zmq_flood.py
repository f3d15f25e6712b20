"""Connections that send messages without an end are cut off: libzmq keeps their parts in memory, without a limit."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import socket as system
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import attrs
import trio
import zmq

from ._events import PEER_CUT_OFF
from ._log_limit import LogLimit
from ._zmq_socket import MAX_FRAMES, MAX_LEFT_OUT, RECEIVE_LIMIT, Happened, ZmqTransport

logger = logging.getLogger("trio_mori.security")

# Bytes beyond the largest message: parts have headers, and libzmq may be just reading some.
SLACK = 1 << 20

# Seconds between two looks at connections that bytes come by. Parts of two bytes each, which take 64 bytes of memory,
# are read at 25 MB/s: 40 MB of memory in this time. A look takes 10 us, 0.02% of a core.
PAUSE = 0.05

# Seconds more for each of them: with thousands, looking takes no more than a twentieth of the time.
PAUSE_EACH = 0.0002

# Seconds until all of them are looked at, for what libzmq has read so fast that it was never seen to be there. Twice as
# many after each such look at which none had read anything: nobody says much for long, and is never seen to.
LONG_PAUSE = 5.0
LONGEST_PAUSE = 40.0

_CONNECTED = int(zmq.EVENT_CONNECTED)
_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
CONNECTIONS = _ACCEPTED | _DISCONNECTED

# `tcpi_bytes_received` of Linux's `struct tcp_info`: 8 bytes, 24 numbers of 4, 3 of 8.
_RECEIVED_AT = 8 + 24 * 4 + 3 * 8
_SO_COOKIE = 57

_ONCE = select.EPOLLIN | select.EPOLLONESHOT


@attrs.define
class _Connection:
    """One that was accepted, or made.

    Attributes:
        cookie: The kernel's number for it, which does not come again as descriptors do.
        read: Bytes that libzmq had read from it when it was last looked at.
        base: Of these, how many are not held against it.
        doubted: Whether a message of it has been waited for since then.
        cleared: Whether one had come when `base` was set. If not, bytes before it may be parts of the next.
        reads: Messages that had been read when it was first found to be over the limit.
    """

    cookie: bytes
    read: int = 0
    base: int = 0
    doubted: bool = True
    cleared: bool = False
    reads: int | None = None


class Sluice:
    """Cuts off the connections of a socket that send more than a message may have, and no message.

    How many whole messages wait is bounded by the socket (`RECEIVE_LIMIT`), how many parts each of them has by nothing:
    a connection by which one of far too many has come is cut off, too, as soon as that is read.

    The kernel counts the bytes of each connection. From a look at one on, the next message that is read from it clears
    it, whatever its size; if none has come when its bytes have grown by the limit, though all messages that were whole
    have been read, they are parts of one that could only be dropped. A peer that waits for us to read has sent whole
    messages, the first of which clears it. What the kernel holds unread is not counted. Messages are asked where they
    come from as long as a connection is in doubt: once for each look at it, and while one rests that has sent
    something and no message.

    Idle connections cost a look in `LONGEST_PAUSE` each: an epoll of our own tells that bytes have come, once, and from
    then on only those are looked at until no more come. The descriptors that it and the looks name are libzmq's,
    which may have closed one, and the system have given its number to something else: what is looked at is a copy, and
    only if it has the cookie.

    Attributes:
        cut: Connections that were cut off.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        poll: select.epoll,
        copy: system.socket,
        *,
        limit: int,
        address: str,
        log_limit: LogLimit,
    ) -> None:
        self.cut = 0
        self._transport = transport
        self._limit = limit + SLACK
        self._address = address
        self._connections: dict[int, _Connection] = {}
        self._moving: set[int] = set()
        self._pause = LONG_PAUSE
        self._nap: trio.CancelScope | None = None
        self._poll = poll
        self._copy = copy
        self._arrived = trio.Event()
        self._log_limit = log_limit

    def note(self, happened: Happened) -> None:
        """Take what libzmq says about its connections."""
        descriptor = happened.value
        if happened.event == _DISCONNECTED:
            self._forget(descriptor)
        elif happened.event in (_ACCEPTED, _CONNECTED):
            self._forget(descriptor)
            with suppress(OSError), self._copied(descriptor) as copy:  # it may be over already
                self._connections[descriptor] = _Connection(_cookie_of(copy))
                self._transport.doubted.add(descriptor)
                self._poll.register(descriptor, _ONCE)
                self._arrived.set()
                self._shorten()

    def is_alone(self, descriptor: int) -> bool:
        """Whether a connection has no other end; if so, it frees its port as soon as it is closed.

        As long as nobody listens on a port that the system also gives to whoever connects, an attempt to connect to it
        may be given that port for its own end, and answers itself. It would last for ever, and the sender whose port
        that is could not listen.
        """
        try:
            with self._copied(descriptor) as copy:
                is_alone = bool(copy.getsockname() == copy.getpeername())
                if is_alone:  # without this it would hold the port for another minute, to wait for what is on its way
                    copy.setsockopt(system.SOL_SOCKET, system.SO_LINGER, struct.pack("ii", 1, 0))
                return is_alone
        except OSError:  # it is over
            return False

    async def watch_forever(self, wake: Callable[[], None]) -> None:
        """Look at the connections whenever bytes come by them, until cancelled.

        Args:
            wake: Called when the socket was asked, and has input: its reader is to look again.
        """
        while True:
            if not self._connections:
                self._arrived = trio.Event()
                await self._arrived.wait()
            if self._moving:
                await trio.sleep(PAUSE + PAUSE_EACH * len(self._moving))
            elif not await self._is_any_moving():
                self._moving.update(self._connections)
            self._moving.update(self._connections.keys() & {descriptor for descriptor, _ in self._poll.poll(0)})
            if self._look():
                wake()
            if self._moving:
                self._shorten()

    async def _is_any_moving(self) -> bool:
        """Wait until bytes come. False if none were seen for so long that all are to be looked at."""
        with trio.move_on_after(self._pause) as self._nap:
            await trio.lowlevel.wait_readable(self._poll)
        is_over, self._nap = self._nap.cancelled_caught, None
        if is_over:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return not is_over

    def _shorten(self) -> None:
        """Let all be looked at soon, as somebody has begun to speak."""
        self._pause = LONG_PAUSE
        if self._nap is not None:
            self._nap.deadline = min(self._nap.deadline, trio.current_time() + LONG_PAUSE)

    def _forget(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)
        self._moving.discard(descriptor)
        self._transport.doubted.discard(descriptor)
        self._transport.crowded.discard(descriptor)

    def _look(self) -> bool:
        """Look at those that bytes come by. Returns whether the socket turned out to have input."""
        suspects = []
        for descriptor in list(self._moving):
            connection = self._connections[descriptor]
            try:
                with self._copied(descriptor) as copy:
                    _check(copy, connection)
                    read = _read_from(copy)
                is_at_rest = read == connection.read and connection.reads is None
                if is_at_rest:
                    self._moving.discard(descriptor)
                    self._poll.modify(descriptor, _ONCE)
            except OSError:  # it is over, as `note` is about to be told
                self._moving.discard(descriptor)
                continue
            connection.read = read
            self._doubt(descriptor, connection)
            if is_at_rest and connection.cleared and read == connection.base:
                self._trust(descriptor, connection)
            elif read - connection.base > self._limit:
                suspects.append((descriptor, connection))
        # After their bytes were counted: if nothing waits now, no whole message is among them.
        waiting = bool(suspects) and self._transport.settle()
        for descriptor, connection in suspects:
            if self._is_flood(connection, waiting=waiting):
                size = connection.read - connection.base
                self._cut(descriptor, connection, f"{size} bytes of a message without an end", self._limit)
        self._cut_crowded()
        return waiting

    def _cut_crowded(self) -> None:
        """Cut off those by which a message of far too many parts has come."""
        while self._transport.crowded:
            descriptor = self._transport.crowded.pop()
            connection = self._connections.get(descriptor)
            # A part has two bytes at least. With fewer it is one that has got the descriptor since.
            if connection is not None and connection.read >= 2 * MAX_LEFT_OUT:
                self._cut(descriptor, connection, f"a message of more than {MAX_LEFT_OUT} parts", MAX_FRAMES)

    def _doubt(self, descriptor: int, connection: _Connection) -> None:
        """Wait for a message of a connection, if none is waited for."""
        if descriptor not in self._transport.doubted:
            connection.base, connection.reads = connection.read, None
            connection.doubted, connection.cleared = True, connection.doubted
            self._transport.doubted.add(descriptor)

    def _trust(self, descriptor: int, connection: _Connection) -> None:
        """Ask no message whether it is of this connection, which has nothing more to say for now."""
        self._transport.doubted.discard(descriptor)
        connection.doubted = False

    def _is_flood(self, connection: _Connection, *, waiting: bool) -> bool:
        """Whether no message of it can be among those that wait to be read."""
        if not waiting:
            return True
        # Others send without a pause. libzmq gives each connection its turn, so that one of it would have been read.
        if connection.reads is None:
            connection.reads = self._transport.reads
        return self._transport.reads - connection.reads > RECEIVE_LIMIT + 2 * len(self._connections)

    def _cut(self, descriptor: int, connection: _Connection, what: str, limit: int) -> None:
        self._forget(descriptor)
        try:
            with self._copied(descriptor) as copy:
                _check(copy, connection)
                host = copy.getpeername()[0]
                # Tell it at once, not only when it has been quiet for a minute.
                copy.setsockopt(system.SOL_SOCKET, system.SO_LINGER, struct.pack("ii", 1, 0))
                copy.shutdown(system.SHUT_RDWR)
        except OSError:  # it was over just then
            return
        self.cut += 1
        if self._log_limit.admits():
            logger.warning(
                "a connection of %s with %s was cut off: %s, and %d is the limit; "
                "it is broken or means ill, see what runs there",
                self._address,
                host,
                what,
                limit,
                extra={"event": PEER_CUT_OFF, "address": self._address, "peer": host},
            )

    @contextmanager
    def _copied(self, descriptor: int) -> Iterator[system.socket]:
        """Whatever has this number, kept open meanwhile."""
        os.dup2(descriptor, self._copy.fileno(), inheritable=False)
        try:
            yield self._copy
        finally:
            os.dup2(self._poll.fileno(), self._copy.fileno(), inheritable=False)


@contextmanager
def open_sluice(transport: ZmqTransport, *, limit: int, address: str, log_limit: LogLimit) -> Iterator[Sluice]:
    """Watch the connections of a socket, as told by `note`.

    Args:
        transport: Of the socket.
        limit: Bytes that a message may have.
        address: What the log calls it.
        log_limit: Of those that are cut off; one for all sockets of an address, however often it is dialled.
    """
    # Copies take the place of this one, so that they can be made when no descriptors are left. Between them it is
    # another one of the epoll, so that it keeps nobody's connection open.
    with select.epoll() as poll, system.socket(system.AF_INET, system.SOCK_STREAM) as copy:
        os.dup2(poll.fileno(), copy.fileno(), inheritable=False)
        yield Sluice(transport, poll, copy, limit=limit, address=address, log_limit=log_limit)


def _check(copy: system.socket, connection: _Connection) -> None:
    if _cookie_of(copy) != connection.cookie:
        raise OSError(errno.ENOTCONN, "another connection has its descriptor")


def _cookie_of(connection: system.socket) -> bytes:
    return connection.getsockopt(system.SOL_SOCKET, _SO_COOKIE, 8)


def _read_from(connection: system.socket) -> int:
    """Bytes that came by a connection and were read."""
    (received,) = struct.unpack_from(
        "=Q", connection.getsockopt(system.IPPROTO_TCP, system.TCP_INFO, 256), _RECEIVED_AT
    )
    (unread,) = struct.unpack("=i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
    return int(received - unread)
