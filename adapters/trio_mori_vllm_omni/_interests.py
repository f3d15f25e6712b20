"""What was polled for: asked for once, answered from memory, and given up when nobody polls any more.

vllm-omni polls for each request's next chunk every millisecond, and simply stops when the request is aborted. So an
interest that is not polled for `PATIENCE` is given up, and what came for it goes back to its sender.

```
          poll            arrived                    poll
 (none) -------> WAITING ---------> ARRIVED ---------------------> (none): the caller has it
                    |  failed                     pause is over
                    +--------------> FAILED ---------------------> WAITING: asked for again
 any state, not polled for PATIENCE, or dropped ------------------> (none): given up
```
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

A = TypeVar("A")

# The adapter polls every millisecond; a scheduler that is stuck for two seconds only costs a transfer.
PATIENCE = 2.0

# Before asking again after a failure that a new request does not heal at once.
PAUSE = 1.0


class State(enum.Enum):
    """Of an interest."""

    WAITING = enum.auto()
    ARRIVED = enum.auto()
    FAILED = enum.auto()
    OVER = enum.auto()


@attrs.define(eq=False)
class Interest(Generic[A]):
    """One payload that is polled for.

    Attributes:
        name: Its full key and where its sender is.
        stop: Ends the asking; set by whoever carries it out.
    """

    name: tuple[str, str, int]
    polled_at: float
    state: State = State.WAITING
    arrival: A | None = None
    retry_at: float = 0.0
    stop: Callable[[], None] | None = None


class Interests(Generic[A]):
    """Whoever calls, one at a time, says what time it is and carries out what is returned."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str, int], Interest[A]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def poll(self, name: tuple[str, str, int], now: float) -> tuple[Interest[A], bool]:
        """Look for a payload.

        Returns:
            The interest, and whether to ask for it now. If it has `arrived`, it is the caller's, and forgotten here.
        """
        interest = self._by_name.get(name)
        if interest is None:
            interest = self._by_name[name] = Interest(name, now)
            return interest, True
        interest.polled_at = now
        if interest.state is State.ARRIVED:
            del self._by_name[name]
        elif interest.state is State.FAILED and interest.retry_at <= now:
            interest.state = State.WAITING
            return interest, True
        return interest, False

    def arrive(self, interest: Interest[A], arrival: A) -> bool:
        """Its payload came. False: it was given up meanwhile."""
        if interest.state is not State.WAITING:
            return False
        interest.state, interest.arrival = State.ARRIVED, arrival
        return True

    def fail(self, interest: Interest[A], retry_at: float) -> None:
        """It cannot be had now."""
        if interest.state is State.WAITING:
            interest.state, interest.retry_at = State.FAILED, retry_at

    def drop(self, is_meant: Callable[[str], bool]) -> list[Interest[A]]:
        """Give up the interests whose full key is meant."""
        return self._give_up([i for i in self._by_name.values() if is_meant(i.name[0])])

    def drop_unpolled(self, now: float) -> list[Interest[A]]:
        """Give up the interests that nobody has polled for `PATIENCE`."""
        return self._give_up([i for i in self._by_name.values() if now - i.polled_at >= PATIENCE])

    def next_deadline(self) -> float | None:
        """When to look for unpolled ones again; None if there is nothing to look at."""
        return min((i.polled_at + PATIENCE for i in self._by_name.values()), default=None)

    def _give_up(self, interests: list[Interest[A]]) -> list[Interest[A]]:
        for interest in interests:
            del self._by_name[interest.name]
            interest.state = State.OVER
        return interests


def is_of(full: str, name: str, edge: tuple[str, str] | None) -> bool:
    """Whether a full key is that name's, or of a chunk of the request of that name; on that edge if one is given."""
    key, _, its_edge = full.rpartition("@")
    ending = key.removeprefix(f"{name}_{its_edge.partition('_')[0]}_")
    is_named = key == name or (ending != key and ending.isdigit())
    return is_named and (edge is None or its_edge == f"{edge[0]}_{edge[1]}")


def first_of(key: str, stage: str) -> str | None:
    """The request whose first chunk a key is, or None."""
    ending = f"_{stage}_0"
    return key[: -len(ending)] if key.endswith(ending) and len(key) > len(ending) else None


def next_of(key: str, stage: str) -> str | None:
    """The key of the next chunk of the request whose chunk a key is, or None."""
    request, _, number = key.rpartition("_")
    return f"{request}_{int(number) + 1}" if number.isdecimal() and request.endswith(f"_{stage}") else None


def left_of(key: str, edge: tuple[str, str]) -> Callable[[str], bool] | None:
    """Whether a full key is of an earlier request of the same name, if this key is a request's first chunk."""
    request = first_of(key, edge[0])
    if request is None:
        return None
    start, own = f"{request}_{edge[0]}_", f"{key}@{edge[0]}_{edge[1]}"
    return lambda full: full.startswith(start) and full != own and is_of(full, request, edge)
