"""What is measured: cases, in groups that share processes. Every case says what is inside the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .turn import Turn

KB, MB = 1 << 10, 1 << 20

OURS = ("async-unix", "async-zmq")
LEASED = ("leased-unix", "leased-zmq")
BARE = ("memory", "mori")
ENGINES = ("nixl", "mooncake")
ADAPTERS = ("shim+our-adapter", "shim+stock-adapter", "memory+stock-adapter", "mori+stock-adapter")
SYNC = ("blocking", "shim")

HAND_OFF = (
    "from just before put (under a chunk adapter: save_async) to when the payload is in the receiver's hands, owned "
    "(leased: entered; under an adapter: the request marked as ready)"
)
GET = "the get alone, of a payload that is there; p50 of puts beside it: the put alone"


@dataclasses.dataclass(frozen=True)
class Case:
    """One scenario with its numbers.

    Attributes:
        name: Unique.
        title: For people.
        clock: What is inside the measured time.
        turn: What is done in a turn.
        peers: Who takes part.
        rounds: At most so many, where a turn is long.
        together: All peers at once, in one window.
    """

    name: str
    title: str
    clock: str
    turn: Turn
    peers: tuple[str, ...]
    rounds: int = 1000
    together: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases that are measured in the same processes, with pools of that size.

    Attributes:
        one_by_one: A peer's processes live for its turns of one round only, and no two peers' at once.
        is_extra: Only with `--full`.
    """

    scenario: str
    pool: int
    cases: tuple[Case, ...]
    one_by_one: bool = False
    is_extra: bool = False


def size_title(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def waiting() -> Iterator[Group]:
    """One stream whose get waits when put comes."""
    # Chunks of a turn, and seconds between them: twice as long as the slowest peer takes, so that nobody queues.
    plan = {4 * KB: (30, 0.005), 64 * KB: (40, 0.005), MB: (15, 0.012), 16 * MB: (3, 0.12)}
    for structured in (False, True):
        peers = (*OURS, *LEASED, *SYNC, *BARE, *(ADAPTERS if structured else ENGINES))
        kind = "structured" if structured else "raw"
        cases = []
        for size, (chunks, interval) in plan.items():
            beside: tuple[str, ...] = ()
            if size == 64 * KB:
                beside = ("awake-unix",) if structured else ("awake-unix", "wake-up", "round-trip")
            turn = Turn("streams", chunks=chunks, size=size, structured=structured, interval=interval)
            title = f"hand-off to a waiting get, {size_title(size)} {kind}"
            cases.append(
                Case(f"waiting-{size_title(size)}-{kind}".replace(" ", ""), title, HAND_OFF, turn, (*peers, *beside))
            )
        yield Group("waiting", 192 * MB, tuple(cases))


def present() -> Iterator[Group]:
    """Payloads that were put before.

    Not NIXL: with its progress thread off, a read ends only while the other process polls, which here does nothing.
    """
    plan = {4 * KB: 20, 64 * KB: 20, MB: 10, 16 * MB: 4}
    for structured in (False, True):
        kind = "structured" if structured else "raw"
        peers = (*OURS, *LEASED, *SYNC, *BARE, *(() if structured else ("mooncake", "memcpy")))
        cases = tuple(
            Case(
                f"present-{size_title(size)}-{kind}".replace(" ", ""),
                f"get of a present payload, {size_title(size)} {kind}",
                GET,
                Turn("present", chunks=chunks, size=size, structured=structured),
                peers,
            )
            for size, chunks in plan.items()
        )
        yield Group("present", 192 * MB, cases)


def huge() -> Iterator[Group]:
    """256 MB, peer by peer: the pools of all at once would fill the machine.

    Stock SharedMemory once a round, to a get that waits: each time takes seconds.
    """
    for structured in (False, True):
        kind = "structured" if structured else "raw"
        everywhere = (*OURS, *LEASED, "mori", *(() if structured else ("mooncake",)))
        waiting_only, floor = (("memory",), ()) if structured else (("memory", "nixl"), ("memcpy",))
        waits = Turn("streams", size=256 * MB, structured=structured, interval=0.01)
        is_there = Turn("present", size=256 * MB, structured=structured)
        waiting_title, present_title = "hand-off to a waiting get, 256 MB", "get of a present payload, 256 MB"
        cases = (
            Case(f"waiting-256MB-{kind}", f"{waiting_title} {kind}", HAND_OFF, waits, (*everywhere, *waiting_only)),
            Case(f"present-256MB-{kind}", f"{present_title} {kind}", GET, is_there, (*everywhere, *floor)),
        )
        yield Group("huge", 700 * MB, cases, one_by_one=True, is_extra=structured)


def paced() -> Iterator[Group]:
    """Streams that each get a chunk at a fixed pace, all of them in a burst, as a step of a scheduler puts them."""
    everybody = (*OURS, "memory", "mori", *ENGINES, *ADAPTERS)
    plan = {1: (0.005, 100), 16: (0.050, 20), 64: (0.200, 3), 256: (0.800, 2)}
    cases = tuple(
        Case(
            f"paced-{streams}",
            f"{streams} paced stream{'s' * (streams > 1)}, 64 KB each {interval * 1000:.0f} ms",
            HAND_OFF,
            Turn("streams", streams=streams, chunks=chunks, structured=True, interval=interval),
            everybody if streams == 16 else (*OURS, *ADAPTERS),
        )
        for streams, (interval, chunks) in plan.items()
    )
    # An engine has no structures: it is given the same bytes, raw.
    yield Group("paced", 192 * MB, cases)


def flat_out() -> Iterator[Group]:
    """As fast as it goes."""
    turn = Turn("streams", streams=16, chunks=60, structured=True)
    clock = "chunks from the first put to the last get; latencies are those of a queue, and say nothing here"
    peers = (*OURS, "memory", "mori", *ENGINES, *ADAPTERS)
    yield Group("flat-out", 192 * MB, (Case("flat-out-16", "16 streams flat out, 64 KB", clock, turn, peers),))


def parked() -> Iterator[Group]:
    """Gets that wait for what does not come."""
    turn = Turn("parked", streams=1000, seconds=10)
    clock = "CPU time of each process over 10 s, after 1 s of rest, heartbeats included"
    title = "1,000 parked gets"
    ours = Case("parked-1000", title, clock, turn, (*OURS, "shim+our-adapter"), rounds=3, together=True)
    polling = dataclasses.replace(turn, seconds=2)
    stock = Case("parked-1000-stock-adapter", f"{title}, stock adapter", clock, polling, ADAPTERS[1:], rounds=1)
    yield Group("parked", 64 * MB, (ours, stock))


def allocator() -> Iterator[Group]:
    """The pool's books."""
    clock = (
        "free of one of the live extents and allocate of another of 4 to 64 KB, every second block a hole; one process"
    )
    cases = tuple(
        Case(
            f"allocator-{live}",
            f"free and allocate, {live:,} live",
            clock,
            Turn("allocator", streams=live, chunks=2000),
            ("extents", "stock-extents"),
        )
        for live in (10, 100, 1000, 10_000, 100_000)
    )
    yield Group("allocator", MB, cases)


def peers() -> Iterator[Group]:
    """The same streams from one sender or from many, and to one receiver or to many."""
    turn = Turn("streams", streams=16, chunks=40, structured=True)
    clock = "chunks from the first put to the last get; latencies are those of a queue, and say nothing here"
    cases = tuple(
        Case(
            f"peers-{many}",
            f"16 streams flat out, 64 KB, {way}",
            clock,
            turn,
            tuple(f"{many}-{count}-{link}" for link in ("zmq", "unix") for count in (1, 4, 16)),
        )
        for many, way in (("senders", "one receiver of many senders"), ("receivers", "many receivers of one sender"))
    )
    yield Group("peers", 32 * MB, cases)


def threads() -> Iterator[Group]:
    """Callers in threads."""
    clock = "each put and each get alone, of payloads that are there; the rate: all of them, from first to last"
    cases = tuple(
        Case(
            f"threads-{count}",
            f"put and get from {count} thread{'s' * (count > 1)}, 64 KB structured",
            clock,
            Turn("present", streams=count, chunks=160 // count, structured=True),
            ("shim", "blocking", *BARE),
        )
        for count in (1, 4, 16)
    )
    yield Group("threads", 192 * MB, cases)


def busy() -> Iterator[Group]:
    """The receiving process computes, as one with a scheduler does: whoever wakes up waits for the interpreter."""
    clock = HAND_OFF + "; another thread of the receiving process runs Python 8 of every 10 ms"
    one = Turn("streams", chunks=40, structured=True, interval=0.011, busy=0.8)  # not a multiple of its 10 ms
    many = dataclasses.replace(one, streams=16, chunks=10, interval=0.057)
    peers = (*OURS, *BARE, *ADAPTERS)
    yield Group(
        "busy",
        192 * MB,
        (
            Case("busy-1", "one stream, 64 KB, the receiver busy 80%", clock, one, (*peers, *SYNC)),
            Case("busy-16", "16 streams, 64 KB, the receiver busy 80%", clock, many, peers),
        ),
    )


SCENARIOS = {
    "waiting": waiting,
    "present": present,
    "huge": huge,
    "paced": paced,
    "flat-out": flat_out,
    "parked": parked,
    "allocator": allocator,
    "peers": peers,
    "threads": threads,
    "busy": busy,
}


QUICK_POOL = 64 * MB  # holds all of the largest quick turn
QUICK_ROUNDS = 2


def quick(case: Case) -> Case:
    """The same with so little in it that it says only whether it runs."""
    turn = case.turn
    chunks = min(turn.chunks, 20 if turn.scenario == "allocator" else 3)
    streams = min(turn.streams, {"parked": 100, "allocator": 1000}.get(turn.scenario, 16))
    size, interval = min(turn.size, 4 * MB), min(turn.interval, 0.05)
    seconds = min(turn.seconds, 0.5)
    smaller = dataclasses.replace(turn, chunks=chunks, streams=streams, size=size, interval=interval, seconds=seconds)
    return dataclasses.replace(case, rounds=QUICK_ROUNDS, turn=smaller)
