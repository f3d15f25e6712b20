"""The two books against each other, in a world that does them no favours."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from model import KEYS, NAMES, SIZES, check, finish
from network import Copy, Receiver, Sender, World

from trio_mori._protocol.inbox import State

PLACES = st.integers(0, 1)
INDEX = st.integers(0, 7)
OPEN = (State.POSTED, State.OFFERED, State.ARRIVED, State.TAKEN)


class Books(RuleBasedStateMachine):
    """One address at which senders follow one another, two places at which receivers do, and all that can happen."""

    world_type = World

    def __init__(self) -> None:
        super().__init__()
        self.world = self.world_type()

    @invariant()
    def everything_agrees(self) -> None:
        self.world.pump()
        check(self.world)

    def teardown(self) -> None:
        finish(self.world)

    # --- puts ---------------------------------------------------------------------------------------------

    def _sender(self, index: int) -> Sender | None:
        """Mostly the one that has the address."""
        running = [s for s in self.world.senders if s.running and not s.left]
        if self.world.sender in running and index < 6:
            return self.world.sender
        return running[index % len(running)] if running else None

    @rule(
        index=INDEX, key=st.sampled_from(KEYS), size=st.sampled_from(SIZES), late=st.sampled_from((False, False, True))
    )
    def put(self, index: int, key: str, size: int, late: bool) -> None:
        sender = self._sender(index)
        if sender is None:
            return
        staged = len(sender.staged)
        sender.stage(key, size)
        if len(sender.staged) > staged and not late:
            sender.publish(sender.staged[-1])

    @precondition(lambda self: self.world.sender.staged)
    @rule(index=INDEX, cancelled=st.booleans())
    def end_a_put(self, index: int, cancelled: bool) -> None:
        sender = self.world.sender
        if not sender.running:
            return
        put = sender.staged[index % len(sender.staged)]
        if cancelled:
            sender.unstage(put)
        else:
            sender.publish(put)

    @rule(index=INDEX, name=st.sampled_from(NAMES))
    def cleanup(self, index: int, name: str) -> None:
        sender = self._sender(index)
        if sender is not None:
            sender.cleanup(name)

    # --- gets ---------------------------------------------------------------------------------------------

    def _receiver(self, place: int) -> Receiver | None:
        receiver = self.world.receivers[place]
        return receiver if receiver.running else None

    @rule(place=PLACES, key=st.sampled_from(KEYS), bound=st.sampled_from((False, False, True)))
    def get(self, place: int, key: str, bound: bool) -> None:
        receiver = self._receiver(place)
        if receiver is not None and len(receiver.channel.interests) < 9:
            receiver.get(key, bound=bound)

    @rule(place=PLACES, index=INDEX)
    def give_back(self, place: int, index: int) -> None:
        receiver = self._receiver(place)
        interests = receiver.interests(*OPEN) if receiver is not None else []
        if receiver is not None and interests:
            receiver.book.give_back(interests[index % len(interests)])

    @rule(place=PLACES, index=INDEX, lease=st.booleans())
    def acknowledge(self, place: int, index: int, lease: bool) -> None:
        receiver = self._receiver(place)
        interests = receiver.interests(State.ARRIVED, State.TAKEN) if receiver is not None else []
        if receiver is not None and interests:
            interest = interests[index % len(interests)]
            if interest.state is State.ARRIVED:
                receiver.take(interest)
            receiver.acknowledge(interest, lease=lease)

    @rule(place=PLACES, index=INDEX)
    def take(self, place: int, index: int) -> None:
        receiver = self._receiver(place)
        interests = receiver.interests(State.ARRIVED) if receiver is not None else []
        if receiver is not None and interests:
            receiver.take(interests[index % len(interests)])

    @rule(place=PLACES, index=INDEX)
    def release(self, place: int, index: int) -> None:
        receiver = self._receiver(place)
        if receiver is not None and receiver.leases:
            receiver.release(index % len(receiver.leases))

    @rule(place=st.integers(0, 2), units=st.sampled_from((0, 0, 4, 12, 28)))
    def occupy(self, place: int, units: int) -> None:
        """The pool is used for something else, too; 0: not any more."""
        process = self.world.sender if place == 2 else self.world.receivers[place]
        if not process.running:
            return
        if units:
            process.pool.occupy(units)
        else:
            process.pool.vacate()

    # --- stock receivers ----------------------------------------------------------------------------------

    @rule(
        route=st.sampled_from((b"a", b"b")),
        key=st.sampled_from(KEYS),
        wrong=st.sampled_from((0, 0, 0, 1, 2)),
        query=st.booleans(),
    )
    def stock_request(self, route: bytes, key: str, wrong: int, query: bool) -> None:
        self.world.stock_request(route, key, wrong=wrong, query=query)

    # --- the network --------------------------------------------------------------------------------------

    @rule(place=PLACES, way=st.sampled_from(("up", "down")))
    def hold(self, place: int, way: str) -> None:
        self.world.held.add((place, way))

    @precondition(lambda self: self.world.held)
    @rule()
    def hold_no_more(self) -> None:
        self.world.held.clear()

    @precondition(lambda self: self.world.queues())
    @rule(index=INDEX, position=st.sampled_from((0, 0, 0, 1, 2, 3)), copy=st.sampled_from((False, False, True)))
    def deliver(self, index: int, position: int, copy: bool) -> None:
        """One message arrives, perhaps before an earlier one, perhaps not for the last time."""
        queues = self.world.queues()
        connection, way = queues[index % len(queues)]
        queue = connection.up if way == "up" else connection.down
        frames = queue[position % len(queue)]
        if not copy:
            queue.remove(frames)
        if way == "up":
            connection.deliver_up(frames)
        else:
            connection.deliver_down(frames)

    @precondition(lambda self: self.world.queues())
    @rule(index=INDEX, position=INDEX)
    def lose(self, index: int, position: int) -> None:
        queues = self.world.queues()
        connection, way = queues[index % len(queues)]
        queue = connection.up if way == "up" else connection.down
        del queue[position % len(queue)]

    @rule(place=PLACES, noticed=st.booleans(), again=st.sampled_from((True, True, False)))
    def break_link(self, place: int, noticed: bool, again: bool) -> None:
        receiver = self._receiver(place)
        if receiver is None:
            return
        connection = receiver.connection
        receiver.disconnect()
        if connection is not None and noticed and connection.sender.running:
            connection.sender.notice_disconnect(connection)
        if again:
            receiver.connect()
        self.world.forget_closed()

    @rule(place=PLACES)
    def connect(self, place: int) -> None:
        receiver = self._receiver(place)
        if receiver is not None and receiver.connection is None:
            receiver.connect()

    @rule(place=PLACES)
    def heartbeat(self, place: int) -> None:
        receiver = self._receiver(place)
        if receiver is not None:
            receiver.beat()

    # --- the engine ---------------------------------------------------------------------------------------

    @rule()
    def engine(self) -> None:
        """From now on writes take their time, or no more."""
        self.world.engine_waits = not self.world.engine_waits

    def _copies(self, *, stuck: bool) -> list[Copy]:
        return [c for s in self.world.senders for c in s.copies if c.stuck or not stuck]

    @precondition(lambda self: self._copies(stuck=False))
    @rule(index=INDEX, count=st.sampled_from((50, 5000, 200000)))
    def bytes_move(self, index: int, count: int) -> None:
        copies = self._copies(stuck=False)
        copies[index % len(copies)].advance(count)

    @precondition(lambda self: self._copies(stuck=False))
    @rule(index=INDEX, how=st.sampled_from(("ends", "ends", "settled", "unsettled")))
    def write_ends(self, index: int, how: str) -> None:
        copies = [c for c in self._copies(stuck=False) if c.sender.running and not c.stuck]
        if not copies:
            return
        copy = copies[index % len(copies)]
        if how == "ends":
            copy.sender.end(copy)
        else:
            copy.sender.fail(copy, settled=how == "settled")

    # --- time and processes -------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((1.0, 6.0, 21.0, 31.0, 31.0, 301.0)), beats=st.booleans())
    def time_passes(self, seconds: float, beats: bool) -> None:
        if beats:
            self.world.beat()
        self.world.pump()
        self.world.now += seconds
        if beats:
            self.world.beat()
            self.world.pump()
        self.world.pass_time(0.0)

    @rule(place=PLACES, killed=st.booleans())
    def replace_receiver(self, place: int, killed: bool) -> None:
        """Its process is killed or stopped, and another one takes its place."""
        world, old = self.world, self.world.receivers[place]
        if len(world.former) > 3:
            return
        world.former.append(old)
        old.running = False
        if killed:
            old.die()
        world.receivers[place] = Receiver(world, place)
        world.receivers[place].connect()

    @rule(index=INDEX)
    def stop_or_continue(self, index: int) -> None:
        """A process is stopped, or goes on as if nothing had been."""
        living = [p for p in (*self.world.senders, *self.world.all_receivers()) if p.alive]
        process = living[index % len(living)]
        process.running = not process.running

    @precondition(lambda self: self.world.former)
    @rule(index=INDEX)
    def prove_receiver_dead(self, index: int) -> None:
        world = self.world
        former = world.former.pop(index % len(world.former))
        former.die()
        for sender in world.senders:
            if sender.alive:
                sender.hear_of_death(former)

    @precondition(lambda self: len(self.world.senders) < 4)
    @rule(how=st.sampled_from(("killed", "stopped", "goes on", "leaves")), again=st.booleans())
    def replace_sender(self, how: str, again: bool) -> None:
        """The address gets another process behind it."""
        world, old = self.world, self.world.sender
        if how == "killed":
            old.die()
        elif how == "stopped":
            old.running = False
        elif how == "leaves" and old.running:
            old.leave()
            world.pump()
        world.sender = Sender(world)
        world.senders.append(world.sender)
        self._redial(again)

    @precondition(lambda self: len(self.world.senders) > 1)
    @rule(index=INDEX)
    def give_the_address_back(self, index: int) -> None:
        """An earlier process has the address again."""
        others = [s for s in self.world.senders if s.alive and not s.left and s is not self.world.sender]
        if others:
            self.world.sender = others[index % len(others)]
            self._redial(True)

    def _redial(self, again: bool) -> None:
        for receiver in self.world.receivers:
            if receiver.running:
                receiver.disconnect()
                if again:
                    receiver.connect()
        self.world.forget_closed()

    @precondition(lambda self: len(self.world.senders) > 1)
    @rule(place=PLACES, index=INDEX)
    def prove_sender_dead(self, place: int, index: int) -> None:
        world = self.world
        others = [s for s in world.senders if s is not world.sender]
        sender, receiver = others[index % len(others)], world.receivers[place]
        sender.die()
        if receiver.running:
            receiver.hear_of_death(sender)


class TestBooks(Books.TestCase):
    settings = settings(stateful_step_count=40)
