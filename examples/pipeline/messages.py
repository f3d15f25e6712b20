"""What the parent and a stage process say to each other, one JSON line each, over the stage's stdin and stdout.

The parent sends one `Order`. The stage says that it is `Listening`. When all are, the parent sends an empty line, and
the work begins: the stage says how far it is (`Progress`), and when it is `Done`. When all are, the parent closes their
stdin, and each says what passed through its connector (`Finished`), closes it and ends.
"""

from __future__ import annotations

import os

import msgspec

STDOUT, STDERR = 1, 2
NAMES = ("thinker", "talker", "code2wav")  # of the stages, by number


class Request(msgspec.Struct, frozen=True):
    """One of the sounds that go through the pipeline at the same time."""

    id: str
    semitones: int  # the recording is played higher or lower, so that no two requests are alike
    out: str


class Order(msgspec.Struct, frozen=True):
    """What a stage has to do."""

    deploy: str
    recording: str
    requests: list[Request]
    speed: float  # times real time in which the recording is fed in; 0 is as fast as it goes
    fixed_ports: bool
    traceback: bool
    devices: list[str] = []  # where each stage computes and has its pool; none: as the deploy file says
    sender_port: int | None = None  # where the stage before this one listens


class Listening(msgspec.Struct, tag=True):
    """The connector is open. ``port`` is for the stage after this one."""

    port: int


class Progress(msgspec.Struct, tag=True):
    """So many frames have passed, of so many in all; ``total`` is known to the first stage only."""

    frames: int
    total: int | None = None


class Done(msgspec.Struct, tag=True):
    """All requests are through this stage."""


class Count(msgspec.Struct):
    """Payloads and their bytes."""

    payloads: int
    bytes: int


class Finished(msgspec.Struct, tag=True):
    """What passed through the stage's connector by its own count, edge by edge (``0_1``), how many of its puts the
    engine has written to a peer, and when chunks arrived (seconds, on the clock that all stages share).
    """

    pid: int
    engine: str
    written: int
    put: dict[str, Count]
    got: dict[str, Count]
    latencies: list[float]
    first_sent: float
    last_arrived: float


class Failed(msgspec.Struct, tag=True):
    """The stage gives up; ``echo`` if only because another one is gone."""

    message: str
    echo: bool = False


class Compared(msgspec.Struct, tag=True):
    """The one-process run is over: these files do not equal it."""

    different: list[str]


Message = Listening | Progress | Done | Finished | Failed | Compared
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def line_of(message: Message | Order) -> bytes:
    """A message as it is written."""
    return msgspec.json.encode(message) + b"\n"


_parent = STDOUT


def keep_stdout() -> None:
    """Have stdout to ourselves: what libraries print, as Mori does when a copy fails, goes to stderr from now on."""
    global _parent
    _parent = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)


def tell(message: Message) -> None:
    """Say something to the parent."""
    line = line_of(message)
    while line:
        line = line[os.write(_parent, line) :]


def heard(line: bytes) -> Message:
    """What a stage said."""
    return _decoder.decode(line)
