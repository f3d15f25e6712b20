"""A proxy between two peers that works on their messages, over tcp (ZMTP) and over the unix link.

A proxy that knows bytes only could cut a connection and delay it, and no more: ZMTP would notice anything else. This
one takes the messages out of both streams, and puts back what it likes. Connections stay one to one, so that routes
and identities are the peers' own. The name of the unix link is in the sender's `Welcome`; it is replaced there by one
that the proxy listens on.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from contextlib import suppress

import attrs
import msgspec

from trio_mori import RemoteProtocolError
from trio_mori._protocol import wire
from trio_mori._unix import LOCAL_PREFIX

_PACKET = 64 << 10  # bytes that the unix link puts into one
_GREETING = 64  # bytes of ZMTP 3 before the first frame
_MORE, _LONG, _COMMAND = 1, 2, 4


@attrs.frozen
class Noise:
    """What happens to messages, as the share of them to which it happens."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    truncate: float = 0.0


QUIET = Noise()


class _Framing(ABC):
    """Takes messages out of one direction of a connection, and makes bytes of them again."""

    @abstractmethod
    def feed(self, data: bytes) -> list[list[bytes] | bytes]:
        """What has come whole: messages, and bytes that are none and go on as they are."""

    @abstractmethod
    def pack(self, frames: list[bytes]) -> list[bytes]:
        """What to send for a message."""


class _Zmtp(_Framing):
    def __init__(self) -> None:
        self._data = bytearray()
        self._greeting = _GREETING  # bytes of it that have not come yet
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> list[list[bytes] | bytes]:
        self._data += data
        found: list[list[bytes] | bytes] = []
        if self._greeting:  # goes on as it comes: each side waits for the beginning of the other's
            greeting = self._take(min(self._greeting, len(self._data)))
            self._greeting -= len(greeting)
            found.append(greeting)
        while len(self._data) >= 2:
            flags = self._data[0]
            at = 9 if flags & _LONG else 2
            if len(self._data) < at:
                break
            size = int.from_bytes(self._data[1:at], "big")
            if len(self._data) < at + size:
                break
            if flags & _COMMAND:
                found.append(self._take(at + size))
                continue
            self._frames.append(self._take(at + size)[at:])
            if not flags & _MORE:
                found.append(self._frames)
                self._frames = []
        return found

    def _take(self, size: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken

    def pack(self, frames: list[bytes]) -> list[bytes]:
        packed = []
        for number, frame in enumerate(frames):
            more = _MORE if number + 1 < len(frames) else 0
            if len(frame) < 256:
                packed.append(bytes((more, len(frame))) + frame)
            else:
                packed.append(bytes((more | _LONG,)) + len(frame).to_bytes(8, "big") + frame)
        return [b"".join(packed)]


class _Packets(_Framing):
    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[list[bytes] | bytes]:
        self._parts.append(data[1:])
        if data[:1] != b"\0":
            return []
        message, self._parts = b"".join(self._parts), []
        lengths = struct.unpack_from(f"<{message[0]}I", message, 1)
        frames, at = [], 1 + 4 * len(lengths)
        for length in lengths:
            frames.append(message[at : at + length])
            at += length
        return [frames]

    def pack(self, frames: list[bytes]) -> list[bytes]:
        message = b"".join((struct.pack(f"<B{len(frames)}I", len(frames), *map(len, frames)), *frames))
        parts = [message[at : at + _PACKET - 1] for at in range(0, len(message), _PACKET - 1)]
        return [b"\1" + part for part in parts[:-1]] + [b"\0" + parts[-1]]


@attrs.define(eq=False)
class _Direction:
    """One way of a connection."""

    source: socket.socket
    target: socket.socket
    framing: _Framing
    from_sender: bool
    waiting: deque[bytes] = attrs.field(factory=deque)  # what the target did not take yet
    held: list[list[bytes]] = attrs.field(factory=list)
    messages: int = 0
    last: float = 0.0  # when a message came
    over: bool = False
    twin: _Direction | None = None


class Proxy:
    """Listens in the place of a sender, in a thread of its own, until `close`.

    Attributes:
        port: Where receivers dial.
        target: Where the sender listens; 0: nowhere, and connections are refused.
        noise: What happens to messages from now on.
        holding: Nothing passes, as if the peer were stuck; what came meanwhile passes afterwards.
        counts: What was done.
    """

    def __init__(self, chance: random.Random) -> None:
        self.target = 0
        self.noise = QUIET
        self.holding = False
        self.counts: Counter[str] = Counter()
        self._chance = chance
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[socket.socket, str] = {}  # and the real name, for those of the unix link
        self._names: dict[str, str] = {}
        self._directions: dict[socket.socket, _Direction] = {}
        self._later: list[tuple[float, int, _Direction, list[bytes]]] = []
        self._numbers = itertools.count()
        self._wish = ""
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._listen(listener, "")
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End all connections, with what is under way on them."""
        self._ask("cut")

    def describe(self) -> list[str]:
        """How its connections are, a line for each direction; right if nothing moves any more."""
        now = time.monotonic()
        return [
            f"{'unix' if isinstance(each.framing, _Packets) else 'tcp'}, {'from' if each.from_sender else 'to'} the "
            f"sender: {each.messages} messages, the last {now - each.last:.1f} s ago; {len(each.waiting)} wait for the "
            f"target, {len(each.held)} are held"
            for each in list(self._directions.values())
        ]

    def close(self) -> None:
        """End everything."""
        self._ask("close")
        self._thread.join(10)
        for each in (self._wake, self._woken):
            each.close()
        self._selector.close()

    def _ask(self, wish: str) -> None:
        self._wish = wish
        with suppress(OSError):
            self._wake.send(b"x")

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            pause = 0.02
            if self._later:
                pause = min(pause, max(0.0, self._later[0][0] - time.monotonic()))
            for key, events in self._selector.select(pause):
                self._serve(key.fileobj, events)  # type: ignore[arg-type]
            wish, self._wish = self._wish, ""
            if wish:
                self.counts["cuts"] += len(self._directions) // 2 if wish == "cut" else 0
                for direction in list(self._directions.values()):
                    self._end(direction)
            if wish == "close":
                for listener in self._listeners:
                    listener.close()
                return
            self._send_due()

    def _serve(self, socket_: socket.socket, events: int) -> None:
        if socket_ is self._woken:
            self._woken.recv(4096)
        elif socket_ in self._listeners:
            self._accept(socket_)
        else:
            direction = self._directions.get(socket_)
            if direction is None:
                return
            if events & selectors.EVENT_WRITE and direction.twin is not None:
                self._drain(direction.twin)
            if events & selectors.EVENT_READ:
                self._receive(direction)

    def _listen(self, listener: socket.socket, name: str) -> None:
        listener.setblocking(False)
        self._listeners[listener] = name
        self._selector.register(listener, selectors.EVENT_READ)

    def _accept(self, listener: socket.socket) -> None:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        name = self._listeners[listener]
        family, kind, place = (
            (socket.AF_UNIX, socket.SOCK_SEQPACKET, f"\0{name}")
            if name
            else (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", self.target))
        )
        far = socket.socket(family, kind)
        try:
            if not self.target:
                raise ConnectionRefusedError
            far.connect(place)
        except OSError:
            near.close()
            far.close()
            return
        self.counts["unix connections" if name else "tcp connections"] += 1
        make = _Packets if name else _Zmtp
        ask = _Direction(near, far, make(), from_sender=False)
        answer = _Direction(far, near, make(), from_sender=True, twin=ask)
        ask.twin = answer
        for direction in (ask, answer):
            direction.source.setblocking(False)
            if not name:  # as libzmq does: else a message waits up to 40 ms for the one before to be acknowledged
                direction.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._directions[direction.source] = direction
            self._selector.register(direction.source, selectors.EVENT_READ)

    def _end(self, direction: _Direction) -> None:
        for each in (direction, direction.twin):
            assert each is not None
            if not each.over:
                each.over = True
                del self._directions[each.source]
                self._selector.unregister(each.source)
                each.source.close()

    def _receive(self, direction: _Direction) -> None:
        try:
            data = direction.source.recv(_PACKET)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(direction)
            return
        for item in direction.framing.feed(data):
            if isinstance(item, bytes):
                self._send(direction, [item])
            else:
                self._consider(direction, item)

    # --- messages -----------------------------------------------------------------------------------------

    def _consider(self, direction: _Direction, frames: list[bytes]) -> None:
        """Do to a message what is to be done to it."""
        self.counts["messages"] += 1
        direction.messages += 1
        direction.last = time.monotonic()
        if direction.from_sender:
            frames = self._rename(frames)
        if self.holding or direction.held:
            direction.held.append(frames)
            self.counts["held"] += 1
            return
        noise = self.noise
        if self._happens("drop", noise.drop):
            return
        if self._happens("truncate", noise.truncate):
            frames = self._truncated(frames)
        if self._happens("duplicate", noise.duplicate):
            self._pass_on(direction, frames)
        if self._happens("delay", noise.delay):
            self._put_off(direction, frames, 0.3)
        elif self._happens("reorder", noise.reorder):
            self._put_off(direction, frames, 0.03)
        else:
            self._pass_on(direction, frames)

    def _happens(self, what: str, share: float) -> bool:
        if share and self._chance.random() < share:
            self.counts[what] += 1
            return True
        return False

    def _truncated(self, frames: list[bytes]) -> list[bytes]:
        if len(frames) > 1 and self._chance.random() < 0.3:
            return frames[:-1]
        return [*frames[:-1], frames[-1][: self._chance.randrange(len(frames[-1]) or 1)]]

    def _put_off(self, direction: _Direction, frames: list[bytes], most: float) -> None:
        when = time.monotonic() + self._chance.uniform(0, most)
        heapq.heappush(self._later, (when, next(self._numbers), direction, frames))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _when, _number, direction, frames = heapq.heappop(self._later)
            self._pass_on(direction, frames)
        if not self.holding:
            for direction in list(self._directions.values()):
                held, direction.held = direction.held, []
                for frames in held:
                    self._pass_on(direction, frames)

    def _pass_on(self, direction: _Direction, frames: list[bytes]) -> None:
        self._send(direction, direction.framing.pack(frames))

    def _send(self, direction: _Direction, pieces: list[bytes]) -> None:
        if not direction.over:
            direction.waiting.extend(pieces)
            self._drain(direction)

    def _drain(self, direction: _Direction) -> None:
        try:
            while direction.waiting:
                piece = direction.waiting[0]
                sent = direction.target.send(piece)
                if sent < len(piece):
                    direction.waiting[0] = piece[sent:]
                else:
                    direction.waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._end(direction)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if direction.waiting else 0)
        self._selector.modify(direction.target, events)

    def _rename(self, frames: list[bytes]) -> list[bytes]:
        """Put a name of ours into a sender's welcome, so that the unix link leads through here, too."""
        if not wire.is_native(frames):
            return frames
        try:
            body = wire.decode_from_sender(frames)
        except RemoteProtocolError:
            return frames
        if not isinstance(body, wire.Welcome) or not body.local:
            return frames
        if body.local not in self._names:
            name = self._names[body.local] = f"{LOCAL_PREFIX}proxy-{os.urandom(8).hex()}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(f"\0{name}")
            listener.listen(16)
            self._listen(listener, body.local)
        elif body.local in self._names.values():
            return frames
        return wire.encode(msgspec.structs.replace(body, local=self._names[body.local]))
