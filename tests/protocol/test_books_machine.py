"""The two books against each other, in a world that does them no favours.

There is one rule, which decides what happens next among what can happen now. With a rule for each, Hypothesis would
leave out a random half of them in every example, and nine examples of ten would end before a payload had been taken
once. What is left out instead, by a draw at the start, are some of the troubles: else nothing would ever get far
enough to be in trouble. And the rule draws its choices as one string of bytes: a draw for each of them took more time
than all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import KEYS, NAMES, SIZES, check, finish
from network import World
from world_pool import ROUTES
from world_receiver import Receiver
from world_sender import Copy, Sender

from trio_mori._protocol.interests import State

# How often each kind of trouble is drawn, beside about 20 for puts, gets and what callers do, if it is in an example.
TROUBLES = {
    "held messages": 5,
    "slow writes": 4,
    "broken links": 3,
    "time": 4,
    "cleanups": 3,
    "receiving processes": 2,
    "sending processes": 2,
    "other uses of the pools": 2,
    "stock receivers": 3,
}
OPEN = (State.POSTED, State.OFFERED, State.ARRIVED, State.TAKEN)
HERE = (State.ARRIVED, State.TAKEN)

T = TypeVar("T")


class Books(RuleBasedStateMachine):
    """One address at which senders follow one another, two places at which receivers do, and all that can happen."""

    focus: set[str] | None = None  # these troubles, in every example, and no others

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.troubles: set[str] = set()
        # How many more of these there may be: each undoes much of what came before.
        self.left = {"receiving processes": 5, "sending processes": 5, "other uses of the pools": 6}
        self.choices: Iterator[int] = iter(())
        self.chosen: list[str] = []

    @initialize(troubles=st.sets(st.sampled_from(sorted(TROUBLES)), min_size=3, max_size=6))
    def choose(self, troubles: set[str]) -> None:
        self.troubles = troubles if self.focus is None else self.focus
        self.world.engine_waits = "slow writes" in self.troubles

    @rule(choices=st.binary(min_size=12, max_size=12))
    def step(self, choices: bytes) -> None:
        self.choices, self.chosen = iter(choices), []
        acts = self.acts()
        act = self.one(*(name for name, (weight, _) in acts.items() for _ in range(weight)))
        try:
            acts[act][1]()
        finally:
            note(", ".join(self.chosen))

    @invariant()
    def everything_agrees(self) -> None:
        self.world.pump()
        check(self.world)

    def teardown(self) -> None:
        finish(self.world)

    def acts(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """What can happen now: how often it is drawn, and what it is."""
        world, receivers = self.world, self.receivers()
        trouble = {name: TROUBLES[name] * (name in self.troubles and self.left.get(name, 1) > 0) for name in TROUBLES}
        acts = {  # the first that can happen is drawn more often than it says, for Hypothesis likes zeros
            "take": (10 * any(r.interests(*HERE) for r in receivers), self.take),
            "put": (4 * bool(self.senders()), self.put),
            "end of a put": (2 * any(s.staged for s in self.senders()), self.end_of_a_put),
            "get": (4 * bool(receivers), self.get),
            "give back": ((5 if world.held else 2) * any(r.interests(*OPEN) for r in receivers), self.give_back),
            "release": (2 * any(r.leases for r in receivers), self.release),
            "heartbeat": (2, self.heartbeat),
            "messages": (8 * bool(world.queues()), self.messages),
            "write": (8 * bool(self.copies()), self.write),
            "encoding": (6 * any(s.running and s.encodings for s in world.senders), self.end_of_an_encoding),
            "held messages": (trouble["held messages"], self.hold),
            "slow writes": (trouble["slow writes"], self.engine),
            "broken links": (trouble["broken links"] * bool(self.connected()), self.disconnect),
            "new links": (4 * bool(self.disconnected()), self.connect),
            "time": (trouble["time"] * (2 if self.copies() else 1), self.time),
            "cleanups": (trouble["cleanups"] * bool(self.senders()), self.cleanup),
            "stopped processes": (3 * bool(self.stopped()), self.go_on),
            "receiving processes": (trouble["receiving processes"], self.receiving_process),
            "sending processes": (trouble["sending processes"], self.sending_process),
            "other uses of the pools": (trouble["other uses of the pools"], self.occupy),
            "stock receivers": (trouble["stock receivers"] * world.sender.running, self.stock_request),
        }
        return {name: act for name, act in acts.items() if act[0]}

    def one(self, *options: T) -> T:
        """The next choice, kept for the report of a failing example."""
        index = next(self.choices) % len(options)
        option = options[index]
        plain = isinstance(option, str | bytes | int | float | tuple)
        self.chosen.append(str(option) if plain else f"{type(option).__name__} {index}")
        return option

    # --- puts ---------------------------------------------------------------------------------------------

    def senders(self) -> list[Sender]:
        """Those that can put."""
        return [s for s in self.world.senders if s.running and not s.left]

    def sender(self) -> Sender:
        """Mostly the one that has the address, sometimes one that had it before."""
        senders = self.senders()
        if self.world.sender in senders:
            senders += [self.world.sender] * 4
        return self.one(*senders)

    def key(self) -> str:
        return self.one(KEYS[0], KEYS[0], *KEYS)

    def put(self) -> None:
        """A put, mostly with a get for it, ahead of it or after."""
        sender, key = self.sender(), self.key()
        how = self.one("got", "awaited", "got", "awaited", "left", "not published")
        if how == "awaited":
            self.ask(key)
        staged = len(sender.staged)
        self.world.pump()
        sender.stage(key, self.one(*SIZES))
        if len(sender.staged) > staged and how != "not published":
            sender.publish(sender.staged[-1])
        if how == "got":
            self.ask(key)

    def end_of_a_put(self) -> None:
        sender = self.one(*(s for s in self.senders() if s.staged))
        put = self.one(*sender.staged)
        if self.one(False, False, True):
            sender.unstage(put)
        else:
            sender.publish(put)

    def cleanup(self) -> None:
        self.sender().cleanup(self.one(*NAMES))

    # --- gets ---------------------------------------------------------------------------------------------

    def receivers(self) -> list[Receiver]:
        return [r for r in self.world.receivers if r.running]

    def ask(self, key: str) -> None:
        most = self.one(5, 5, 5, 7)  # the last is more than a sender allows
        receivers = [r for r in self.receivers() if len(r.channel.interests) < most]
        if receivers:
            self.one(*receivers).get(key, bound=self.one(False, False, False, True))

    def get(self) -> None:
        self.ask(self.key())

    def take(self) -> None:
        receiver = self.one(*(r for r in self.receivers() if r.interests(*HERE)))
        interest = self.one(*receiver.interests(*HERE))
        then = self.one("acknowledge", "acknowledge", "lease", "read on")
        if interest.state is State.ARRIVED:
            receiver.take(interest)
        if then != "read on":
            receiver.acknowledge(interest, lease=then == "lease")

    def give_back(self) -> None:
        receiver = self.one(*(r for r in self.receivers() if r.interests(*OPEN)))
        receiver.book.give_back(self.one(*receiver.interests(*OPEN)))

    def release(self) -> None:
        receiver = self.one(*(r for r in self.receivers() if r.leases))
        receiver.release(self.one(*range(len(receiver.leases))))

    def occupy(self) -> None:
        """A pool is used for something else, too; or not any more."""
        self.left["other uses of the pools"] -= 1
        pool = self.one(self.world.sender, *self.world.receivers).pool
        if pool.occupied:
            pool.vacate(leave_every_second=self.one(True, False))
        else:
            pool.occupy(self.one(4, 12, 28))

    def stock_request(self) -> None:
        how = self.one("pull", "pull", "pull", "query", "long", "far")
        self.world.stock_request(self.one(*ROUTES), self.key(), how)

    # --- the network --------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on messages of one place wait, or no more."""
        place = self.one(0, 1)
        self.world.held -= {(place, "up"), (place, "down")}
        ways = self.one((), ("up",), ("down",), ("down",), ("up", "down"))
        self.world.held |= {(place, way) for way in ways}

    def messages(self) -> None:
        """Some that wait arrive, perhaps before earlier ones, perhaps not for the last time; or never."""
        queues = self.world.queues()
        connection, way = queues[self.one(*range(len(queues)))]
        queue = connection.up if way == "up" else connection.down
        fate = self.one("all arrive", "all arrive, the last one first", "arrives", "is copied", "is lost")
        if fate.startswith("all"):
            messages = queue[::-1] if fate.endswith("first") else queue[:]
        else:
            messages = [queue[self.one(*range(min(3, len(queue))))]]
        for letter in messages:
            if fate != "is copied":
                queue.remove(letter)
            if fate != "is lost":
                connection.deliver(way, letter)

    def connected(self) -> list[Receiver]:
        return [r for r in self.receivers() if r.connection is not None]

    def disconnected(self) -> list[Receiver]:
        """Those that have no connection to whoever has the address."""
        return [r for r in self.receivers() if r.connection is None or r.connection.sender is not self.world.sender]

    def disconnect(self) -> None:
        """A connection breaks, which the sender may notice or not; perhaps the receiver dials at once."""
        receiver = self.one(*self.connected())
        self.break_link(receiver)
        if self.one(True, False):
            receiver.connect()

    def connect(self) -> None:
        receiver = self.one(*self.disconnected())
        self.break_link(receiver)
        receiver.connect()

    def break_link(self, receiver: Receiver) -> None:
        connection = receiver.connection
        receiver.disconnect()
        if connection is not None and connection.sender.running and self.one(False, True):
            connection.sender.notice_disconnect(connection)
        self.world.forget_closed()

    def heartbeat(self) -> None:
        self.one(self.world, *self.receivers()).beat()

    # --- the engine ---------------------------------------------------------------------------------------

    def engine(self) -> None:
        """From now on writes and encodings take their time, or no more."""
        self.world.engine_waits = not self.world.engine_waits

    def copies(self) -> list[Copy]:
        return [c for s in self.world.senders for c in s.copies if not c.stuck or c.copied < c.ticket.size]

    def write(self) -> None:
        """Bytes move; or the engine says that it is over, which it says once, and to a running process."""
        copy = self.one(*self.copies())
        if copy.stuck or not copy.sender.running:
            how = "moves"
        else:
            how = self.one("ends", "ends", "moves", "fails", "fails unsettled")
        if how == "moves":
            copy.advance(copy.ticket.size // 2 + 1)
        elif how == "ends":
            copy.sender.end(copy)
        else:
            copy.sender.fail(copy, settled=how == "fails")

    def end_of_an_encoding(self) -> None:
        sender = self.one(*(s for s in self.world.senders if s.running and s.encodings))
        sender.end_encoding(self.one(*sender.encodings))

    # --- time and processes -------------------------------------------------------------------------------

    def time(self) -> None:
        self.world.pass_time(self.one(1.0, 6.0, 21.0, 21.0, 31.0, 31.0, 301.0), beats=self.one(True, False))

    def stopped(self) -> list[Sender | Receiver]:
        processes = [*self.world.senders, *self.world.all_receivers()]
        return [p for p in processes if p.alive and not p.running]

    def go_on(self) -> None:
        """A process that was stopped continues as if nothing had been."""
        self.one(*self.stopped()).running = True

    def receiving_process(self) -> None:
        """It is stopped, or another one takes its place; or an old one is proven dead."""
        self.left["receiving processes"] -= 1
        world = self.world
        if world.former and self.one(False, True):
            world.bury_receiver(self.one(*world.former))
            return
        process = self.one(*world.receivers)
        how = self.one("stops", "stops", "killed", "stopped for another", "leaves")
        if how == "stops":
            process.running = False
        elif len(world.former) < 3:
            world.replace_receiver(process.place, how)

    def sending_process(self) -> None:
        """As with receivers; it may also get the address back."""
        self.left["sending processes"] -= 1
        world = self.world
        others = [s for s in world.senders if s is not world.sender]
        if others and self.one(False, True):
            process = self.one(*others)
            how = self.one("returns", "returns", "proven dead")
            if how == "returns" and process.alive and not process.left:
                world.give_address(process, noticed=self.one(False, True), seamless=self.one(False, False, True))
            else:
                world.bury_sender(process)
            return
        how = self.one("stops", "stops", "killed", "stopped for another", "goes on beside", "leaves")
        if how == "stops":
            world.sender.running = False
        elif len(world.senders) < 4:
            world.replace_sender(how, noticed=self.one(False, True), seamless=self.one(False, False, True))


class TestBooks(Books.TestCase):
    settings = settings(stateful_step_count=56)
