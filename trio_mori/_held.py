"""What passes between the loop and a thread: memory claimed for a put, a payload that came. None of it is ever lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

from ._arrival import Arrival, StockArrival
from ._errors import ConnectorClosed, Misuse
from ._portal import Portal
from ._staging import Reservation
from ._statistics import Receipt

T = TypeVar("T")


class Held(Generic[T]):
    """What is the loop's and a thread's for a moment. Whoever loses it, by whatever exception, gives it back."""

    def __init__(self, portal: Portal, value: T, give_back: Callable[[], object]) -> None:
        self.value = value
        self._portal = portal
        self._give_back = give_back
        self._is_settled = False

    def settle(self) -> T:
        """It is dealt with otherwise. In the loop."""
        self._is_settled = True
        return self.value

    def _drop(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._give_back()

    def __enter__(self) -> T:
        return self.value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            with suppress(ConnectorClosed):
                self._portal.post(self._drop)

    def __del__(self) -> None:
        if not self._is_settled:
            with suppress(ConnectorClosed, Misuse):
                self._portal.post(self._drop)


def publish(held: Held[Reservation]) -> Receipt:
    """The payload is in place, and goes to whoever gets it. In the loop."""
    return held.settle().publish()


def finish(held: Held[Arrival | StockArrival]) -> None:
    """The payload is the caller's. In the loop."""
    # Closed in the meantime: the value is the caller's all the same. That the sender keeps the payload is what becomes
    # of any acknowledgement that is lost.
    with suppress(ConnectorClosed):
        held.settle().finish()
