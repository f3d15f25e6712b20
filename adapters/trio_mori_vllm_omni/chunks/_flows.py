"""What the two halves say to each other. A generation of a request is an object, so that a request id can come back.

Whatever comes from the loop names the object that it is of. Once the scheduler's half has let go of that object, what
still comes of it is dropped: that is the commit barrier, on the scheduler's side. On the loop's side it is the cancel
scope of the object's task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

# Chunks of a request that may have come before the scheduler has taken the first of them. The one that runs, the next
# one, and two for a scheduler that is behind.
AHEAD = 4

# So many are taken before the loop is told: being told costs it as much as the rest of a small chunk's way.
CREDIT_STEP = 2


@attrs.frozen(eq=False)
class Inflow:
    """One life of a request, as it is received.

    Attributes:
        request_id: The scheduler's name for it.
        external_id: The name in the keys.
        source: Where its sender is, as `Connector.take` has it; None: where the configuration says.
    """

    request_id: str
    external_id: str
    source: dict[str, Any] | None = None


@attrs.define(eq=False)
class Outflow:
    """One life of a request, as it is sent.

    Attributes:
        after: The life before it under the same external id, if that may not have ended yet.
        is_cut: Set by the scheduler's half, so that the worker need not build what is queued.
    """

    request_id: str
    external_id: str
    after: Outflow | None = None
    is_cut: bool = False


@attrs.frozen(eq=False)
class Outgoing:
    """One chunk on its way out.

    Attributes:
        build: Calls the model's input processor and makes the payload, or None: nothing is to be sent. In the worker.
        is_terminal: The request ends with it.
    """

    build: Callable[[int], object | None]
    is_terminal: bool


@attrs.frozen
class Arrived:
    """A chunk has come."""

    flow: Inflow
    payload: Any


@attrs.frozen
class Broken:
    """No more chunks come, and why."""

    flow: Inflow
    reason: str


@attrs.frozen
class Ended:
    """A request has been sent to its end; or it never will be, and why."""

    flow: Outflow
    failure: str | None = None


Event = Arrived | Broken | Ended


class Loop(Protocol):
    """The loop's half, as the scheduler's half sees it: calls that only post."""

    def receive(self, flow: Inflow) -> None:
        """Begin to receive; each chunk comes as `Arrived`, in order, and at most `AHEAD` more than were credited."""

    def credit(self, flow: Inflow, count: int) -> None:
        """So many more chunks were taken."""

    def drop(self, flow: Inflow) -> None:
        """It is not wanted any more."""

    def begin(self, flow: Outflow) -> None:
        """Begin to send. When its terminal chunk has gone, or it was cut, or has failed, `Ended` comes."""

    def send(self, flow: Outflow, chunk: Outgoing) -> None:
        """Send a chunk after those before it."""

    def cut(self, flow: Outflow, failure: str | None) -> None:
        """Send no more of it: with a failure, tell the next stage; without, drop also what that has not fetched.

        One that has failed is over already: with a failure, what it was told as stays; without, that is dropped, too.
        Either way what the input processors know of it is cleared.
        """

    def flush(self) -> None:
        """Have carried out what was said since the last time."""

    def events(self) -> list[Event]:
        """What has happened since the last time."""
