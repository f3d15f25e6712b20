"""What must hold in the world of `network`, after every step and at the end."""

from __future__ import annotations

from network import World
from world_pool import GUARANTEED, LIMITS, SENDER_POOL, STOCK_POOL, UNIT
from world_receiver import Receiver
from world_sender import Copy, Sender

from trio_mori._errors import NoRoom, TooBig
from trio_mori._protocol import wire
from trio_mori._protocol.entries import Fetch, Phase, Want
from trio_mori._protocol.extents import INBOUND, Extent
from trio_mori._protocol.interests import TOO_BIG, State
from trio_mori._protocol.shelf import extents_of

__all__ = ["KEYS", "check", "finish"]

KEYS = ("r_0_0@0_1", "r_0_1@0_1", "x@0_1")
NAMES = ("r", "r_0_0", "x")
# Empty, small, of several units, larger than what a receiver expects at first, than half its pool, and than its pool.
SIZES = (0, 0, 100, 100, 100, UNIT, 3 * UNIT + 5, STOCK_POOL, 17 * UNIT, 25 * UNIT, SENDER_POOL - 14 * UNIT)


def check(world: World) -> None:
    """What must hold after every step."""
    live = {}
    for process in [*world.senders, *world.all_receivers()]:
        if process.alive:
            live[process] = _check_pool(process)
    for sender in world.senders:
        for copy in sender.copies:
            _check_copy(copy, live)
        for encoding in sender.encodings:
            extents = {encoding.extent, encoding.put.entry.extent}
            assert not sender.alive or extents <= live[sender], "what a thread reads and writes was freed"
        if sender.alive:
            _check_puts(sender)
        if sender.running and not sender.left:
            _check_waiting(sender)
    for receiver in world.all_receivers():
        if receiver.alive:
            _check_payloads(receiver)


def _check_pool(process: Sender | Receiver) -> set[Extent]:
    """Each extent has one owner, and all of them with the free bytes are the pool."""
    pool = process.pool
    pool.check()
    if isinstance(process, Sender):
        owned = [e for entry in process.book.shelf.everything() for e in extents_of(entry)]
    else:
        owned = process.book.live_extents()
        assert process.book._placement._preposted == sum(i.preposted for i in process.channel.interests.values())
        waiting = process.interests(State.OFFERED)
        if waiting and not pool.used(INBOUND):
            least = min(i.needed for i in waiting)
            assert least > GUARANTEED, "a payload waits for room that is guaranteed to what is received"
    owned += pool.occupied
    live = set(owned)
    assert len(live) == len(owned), "an extent has two owners"
    assert live == set(pool), "an extent has no owner, or a free one has"
    return live


def _check_copy(copy: Copy, live: dict[Sender | Receiver, set[Extent]]) -> None:
    """What a write may still touch is nobody else's."""
    if not copy.ticket.size:
        return
    if copy.sender.alive:
        assert copy.source in live[copy.sender], "the source of a write was freed"
        assert copy.source in extents_of(copy.ticket.entry), "the source of a write is another payload's"
        assert copy.ticket.entry.pins, "what a write reads is not pinned"
    receiver, extent = copy.receiver, copy.destination
    if receiver is None or extent is None or not receiver.alive:
        return
    assert extent in live[receiver], "the destination of a write was freed"
    if extent in receiver.channel.ghosts.get(copy.sender.epoch, ()):
        return
    assert isinstance(copy.ticket.holder, Fetch)
    interest = receiver.channel.interests.get(copy.ticket.holder.id)
    assert interest is not None, "a ghost is somebody's"
    assert interest.extent is extent, "the destination of a write is somebody else's"
    assert interest.state in (State.POSTED, State.RETURNING), "a payload is read while it is written"


def _check_puts(sender: Sender) -> None:
    """Nothing leaves without a reason, and nothing is taken twice."""
    left = [put for put in sender.puts if put.entry.phase is Phase.FREED]
    for put in left:
        assert put.reasons, f"put {put.number} of {put.key} is lost"
        sender.puts.remove(put)
    for put in [*left, *sender.puts]:
        assert put.takers <= 1 or put.excused, f"put {put.number} of {put.key} was taken {put.takers} times"


def _check_waiting(sender: Sender) -> None:
    """No live fetch waits for what is there, nor for what is known to be gone."""
    for key, queue in sender.book._matching.waiting.items():
        assert queue
        waiting = [f for f in queue if f.session.connected]
        assert all(f.state is Want.WAITING and f.entry is None for f in queue)
        entry = sender.book.shelf.find(key)
        assert not waiting or entry is None or entry.phase is not Phase.PUBLISHED, f"{key} is there, and not given"
        assert not waiting or key not in sender.book.shelf._tombstones, f"{key} is gone, and nobody is told"


def _check_payloads(receiver: Receiver) -> None:
    """Whoever has a payload sees the bytes of one put of that key, and no others."""
    memory = receiver.pool.memory
    for interest in receiver.interests(State.ARRIVED, State.TAKEN):
        put = receiver.payload_of(interest)
        start = interest.extent.offset if interest.extent is not None else 0
        assert put.key == interest.key
        assert put.size == interest.size
        assert memory[start : start + put.size] == put.data, f"put {put.number} arrived with other bytes"
    for extent, put in receiver.leases:
        assert memory[extent.offset : extent.offset + put.size] == put.data, "leased bytes changed"


# --- the end ----------------------------------------------------------------------------------------------


def finish(world: World) -> None:
    """Heal everything, and see that nothing was lost, that nobody waits in vain, and that all memory comes back."""
    _heal(world)
    _take_everything(world)
    sender = world.sender
    _check_nobody_is_stuck(world)
    for put in sender.puts:
        dying = put.entry.phase is Phase.DYING
        assert dying or put.excused or not put.takers, f"put {put.number} was acknowledged and is kept"
    _give_everything_back(world)
    _get_what_is_left(world)
    _give_everything_back(world)
    for key in KEYS:
        sender.cleanup(key.partition("@")[0])
    world.pump()
    check(world)
    assert set(sender.pool) <= _read_by(sender.copies), "the sender keeps what nobody needs"
    for receiver in world.receivers:
        receiver.hear_of_death(sender)
        assert receiver.pool.free_bytes == receiver.pool.size
    sender.copies = [c for c in sender.copies if c.receiver is None]  # what their end means to this sender, anew:
    for receiver in world.receivers:
        sender.hear_of_death(receiver)
    assert set(sender.pool) <= _read_by(sender.copies)


def _read_by(copies: list[Copy]) -> set[Extent]:
    return {extent for copy in copies for extent in extents_of(copy.ticket.entry)}


def _heal(world: World) -> None:
    sender = world.sender
    world.held.clear()
    world.engine_waits = False
    sender.running = True
    for receiver in world.receivers:
        receiver.running = True
    for old in world.senders:
        if old is not sender:
            old.die()
    for copy in [c for c in sender.copies if not c.stuck]:
        sender.end(copy)
    for encoding in sender.encodings[:]:
        sender.end_encoding(encoding)
    for put in sender.staged[:]:
        sender.unstage(put)
    sender.pool.vacate()
    for former in world.former:
        former.die()
        sender.hear_of_death(former)
    for receiver in world.receivers:
        for old in world.senders:
            if old is not sender:
                receiver.hear_of_death(old)
        receiver.disconnect()
        receiver.connect()
    world.pump()
    _beat(world)
    world.now += LIMITS.acknowledge_timeout + 1.0  # stock callers, and receivers under a former name, lapse
    for _ in range(2):
        _beat(world)
        world.pass_time(0.0, beats=False)
    world.pump()
    if not all(r.channel.up for r in world.receivers):
        # Too many receivers under former names, which cannot be forgotten while they may be written to.
        for copy in sender.copies[:]:
            sender.end(copy)
        _beat(world)
    assert all(r.channel.up for r in world.receivers), "a receiver is kept out"
    check(world)


def _beat(world: World) -> None:
    for _ in range(3):
        world.beat()
        world.pump()


def _take_everything(world: World) -> None:
    for receiver in world.receivers:
        receiver.pool.vacate()
        while receiver.leases:
            receiver.release(0)
    for _ in range(40):
        world.pump()
        _beat(world)
        check(world)
        arrived = [(r, i) for r in world.receivers for i in r.interests(State.ARRIVED, State.TAKEN)]
        if not arrived:
            return
        for receiver, interest in arrived:
            if interest.state is State.ARRIVED:
                receiver.take(interest)
            receiver.acknowledge(interest, lease=False)
    raise AssertionError("there is no end to what arrives")


def _check_nobody_is_stuck(world: World) -> None:
    """A live interest has what it wants, unless that is not there or there is no room for it."""
    for receiver in world.receivers:
        for interest in receiver.interests(State.POSTED, State.OFFERED):
            entry = world.sender.book.shelf.find(interest.key)
            if entry is None:
                continue
            holder = entry.holder
            assert entry.phase is Phase.CLAIMED, f"{interest.key} is {entry.phase.name}, and a get waits for it"
            assert isinstance(holder, Fetch)
            assert holder.state is Want.OFFERED
            other = next((r for r in world.receivers if r.channel.token == holder.session.token), None)
            assert other is not None, f"{interest.key} is kept for one that is gone, and a get waits for it"
            offered = other.channel.interests[holder.id]
            assert offered.state is State.OFFERED
            ghosts = [e for extents in other.channel.ghosts.values() for e in extents]
            doubtful = {i.extent for i in other.interests(State.RETURNING)}.union(ghosts)
            assert other.pool.live, "a payload waits for room, and all of it is free"
            assert set(other.pool) <= doubtful, "a payload waits for room that nobody has"


def _fits(receiver: Receiver, size: int) -> bool:
    receiver.pool.on_free = None
    try:
        receiver.pool.free(receiver.pool.allocate(size, INBOUND))
    except NoRoom:
        return False
    except TooBig:
        return True  # it is to be told, unless it stands behind others
    finally:
        receiver.pool.on_free = receiver.book.find_room
    return True


def _give_everything_back(world: World) -> None:
    for receiver in world.receivers:
        for interest in list(receiver.channel.interests.values()):
            receiver.book.give_back(interest)
    world.pump()
    _beat(world)
    check(world)
    for receiver in world.receivers:
        stuck = [c for c in world.sender.copies if c.receiver is receiver]
        ids = {c.ticket.holder.id for c in stuck if isinstance(c.ticket.holder, Fetch)}
        assert set(receiver.channel.interests) <= ids, "what was given back is not confirmed"
        ghosts = receiver.channel.ghosts.get(world.sender.epoch, [])  # it had the address before, and may still write
        kept = {c.destination for c in stuck}.union(ghosts)
        assert set(receiver.pool) <= kept, "the receiver keeps what nobody needs"


def _get_what_is_left(world: World) -> None:
    sender, receiver = world.sender, world.receivers[0]
    for key in KEYS:
        entry = sender.book.shelf.find(key)
        put = sender.last_puts.get(key)
        if put is None:
            continue
        interest = receiver.get(key)
        if interest is None:
            return  # too much is in quarantine
        world.pump()
        if entry is not None:
            answered = entry.phase is not Phase.PUBLISHED or interest.failure is not None
            assert answered, f"{key} is there, and a get waits for it"
            if interest.state is State.ARRIVED:
                check(world)
                receiver.take(interest)
                receiver.acknowledge(interest, lease=False)
                world.pump()
                assert put.entry.phase in (Phase.FREED, Phase.DYING)
            elif interest.failure is not None:
                assert interest.failure[0] == TOO_BIG
            else:
                assert interest.state is State.OFFERED, f"{key} is {entry.phase.name}, and a get waits for it"
                assert not _fits(receiver, put.size), "a payload waits for room that is there"
                receiver.book.give_back(interest)
                world.pump()
        elif put.reasons & {"cleaned", "expired"} and not (put.takers or put.excused or put.told):
            assert interest.failure is not None, f"{key} is gone, and a get waits for it"
            assert interest.failure[0] in (wire.GONE, wire.EXPIRED)
