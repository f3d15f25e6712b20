"""What is done to whom in a round: everything that is random about it, made of its seed."""

from __future__ import annotations

import random
from enum import Enum

import attrs

from .full import SEAMS
from .proxy import QUIET, Noise

# Seconds that the takers of a stream need, without faults, for what its source may be ahead of them: they take and are
# told one after the other, and a source without a pause could be ahead by minutes.
CATCHING_UP = 10.0

# Seconds that a payload takes at least, of all streams: of small ones the processes of a round get through 500 a
# second on a busy machine with two cores.
EACH = 0.002


class Kind(Enum):
    """A fault in a process, or between two."""

    KILL = "is killed and started again"
    REPLACE = "is killed, and one with other data takes its address"
    STOP = "is stopped for a while"
    STARVE = "has no descriptors left for a while"
    FULL = "has no shared memory left for a while"
    RETURN = "is killed, and started again while no shared memory is left"
    STEP = "has its clock stepped"
    CUT = "its connections are cut"
    HOLD = "nothing passes for a while"
    DROP = "is told to forget a payload"


@attrs.frozen
class Fault:
    """One of them.

    Attributes:
        at: Seconds after the beginning of the round.
        place: Of the stage; for what happens between two, of the one that sends.
        seconds: How long it lasts.
        amount: Descriptors that are left, seconds that the clock is stepped, or which call is refused memory.
    """

    at: float
    kind: Kind
    place: int
    seconds: float = 0.0
    amount: int = 0

    def __str__(self) -> str:
        more = f" ({self.seconds:.1f} s, {self.amount})" if self.seconds or self.amount else ""
        return f"{self.at:.1f} s: stage {self.place} {self.kind.value}{more}"


@attrs.frozen(kw_only=True)
class Plan:
    """A round.

    Attributes:
        stages: How many.
        streams: Between them.
        local: Whether peers go over to the unix link.
        pool: Bytes of each stage's.
        largest: Bytes of the largest payload.
        ttl: Seconds; None: never.
        noise: On all links, while the faults last.
        paces: Of each stage; see `Spec`.
    """

    seed: str
    stages: int
    streams: int
    local: bool
    pool: int
    largest: int
    ttl: float | None
    noise: Noise
    paces: tuple[float, ...]
    impatience: float
    slow_copies: bool
    seconds: float
    faults: tuple[Fault, ...]

    @property
    def kills(self) -> bool:
        """Whether a process ends: what it had is lost with it, and has to be put again."""
        return any(fault.kind in (Kind.KILL, Kind.REPLACE, Kind.RETURN) for fault in self.faults)

    @property
    def taking(self) -> float:
        """Seconds that a payload of a stream takes in the mean at the slowest stage that takes it."""
        return max(*self.paces[1:], 2 * EACH * self.streams) / 2

    @property
    def ahead(self) -> int:
        """Payloads of a stream that its source may put without a thought for who takes them."""
        return int(CATCHING_UP / self.taking)

    def role_of(self, place: int) -> str:
        """What a stage is to the others, in words."""
        return "sender" if place == 0 else "receiver" if place == self.stages - 1 else "middle stage"

    def __str__(self) -> str:
        noise = ", ".join(f"{name} {share:.0%}" for name, share in attrs.asdict(self.noise).items() if share)
        return "\n".join(
            [
                f"{self.stages} stages, {self.streams} streams, {'unix' if self.local else 'tcp'} links, pools of "
                f"{self.pool >> 10} KiB, payloads up to {self.largest >> 10} KiB, ttl {self.ttl}, "
                f"noise: {noise or 'none'}, paces {self.paces}, impatience {self.impatience:.0%}"
                f"{', slow copies' if self.slow_copies else ''}",
                *map(str, self.faults),
            ]
        )


_PASSING = (Kind.STOP, Kind.STARVE, Kind.FULL, Kind.STEP, Kind.CUT, Kind.HOLD)


def make_plan(seed: str, seconds: float) -> Plan:
    """The round of a seed."""
    chance = random.Random(seed)
    stages = chance.choice((2, 2, 3))
    kinds: list[Kind] = list(_PASSING)
    ttl = None
    # What is dropped is told to one receiver once. One that is killed then has heard it, or not: who knows.
    drops = chance.random() < 0.3
    if drops:
        kinds += [Kind.DROP] * 6
        ttl = chance.choice((None, 1.0))
    else:
        kinds += [Kind.KILL] * 5 + [Kind.RETURN] * 2 + [Kind.REPLACE]
    pool = chance.choice((1 << 20, 4 << 20, 16 << 20))
    noisy = chance.random() < 0.6
    return Plan(
        seed=seed,
        stages=stages,
        streams=chance.choice((1, 4, 16)),
        local=chance.random() < 0.5,
        pool=pool,
        largest=chance.choice((4 << 10, pool // 16, pool // 4)),
        ttl=ttl,
        noise=_make_noise(chance) if noisy else QUIET,
        paces=tuple(chance.choice((0.0, 0.005, 0.02, 0.1)) for _ in range(stages)),
        impatience=chance.choice((0.0, 0.1, 0.5)),
        slow_copies=chance.random() < 0.5,
        seconds=seconds,
        faults=_make_faults(chance, kinds, stages, seconds),
    )


def _make_noise(chance: random.Random) -> Noise:
    def share() -> float:
        return chance.choice((0.0, 0.02, 0.1))

    return Noise(share(), share(), share(), share(), share())


def _make_faults(chance: random.Random, kinds: list[Kind], stages: int, seconds: float) -> tuple[Fault, ...]:
    """Faults in a row: of those in processes one is over before the next one begins."""
    faults = []
    at = chance.uniform(0.2, 1.0)
    while at < seconds:
        kind = chance.choice(kinds)
        between = kind in (Kind.CUT, Kind.HOLD)
        place = 0 if kind in (Kind.REPLACE, Kind.DROP) else chance.randrange(stages - 1 if between else stages)
        # Shorter and longer than peer_timeout and acknowledge_timeout.
        lasts = 0.0 if kind in (Kind.CUT, Kind.STEP, Kind.DROP) else chance.choice((0.05, 0.5, 3.0))
        seam = chance.randrange(len(SEAMS))
        amounts = {Kind.STARVE: chance.choice((0, 1, 3, 6)), Kind.STEP: chance.choice((-86400, 3600))}
        amount = {**amounts, Kind.FULL: seam, Kind.RETURN: seam}.get(kind, 0)
        faults.append(Fault(at, kind, place, lasts, amount))
        at += lasts + chance.uniform(0.05, 1.5)
    return tuple(faults)
