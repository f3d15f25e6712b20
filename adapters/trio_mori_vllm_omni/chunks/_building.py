"""The worker's part of sending: chunks are built in the order in which they were offered, and handed to the loop.

A life of a request is known here from its begin until its terminal chunk, its failure, or its cut. With each of these
what the input processors know of it is cleared: in this order, so that it cannot be that of its next life.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from ._flows import Outflow, Outgoing
from ._mailbox import Mailbox

# What is built goes to the loop when nothing more is to be built, and after so many seconds at the latest. A loop that
# is woken earlier takes the interpreter from the worker, and gives it back, again and again while a step is built.
HELD = 0.001

# While chunks take longer to be built, each goes at once: it need not wait for the next one. A plain one takes 50 us.
QUICK = 0.00025


@attrs.frozen
class Built:
    """A chunk that is ready to be put.

    Attributes:
        planned: As the wire puts it; None: there is nothing to put.
        failure: Why it could not be built.
    """

    planned: object | None
    is_terminal: bool
    failure: str | None = None


class Building:
    """In the worker.

    Args:
        hand_over: Given what was built, in the loop.
        forget: Clears what the input processors know of a request.
        clock: Of what is held back.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        hand_over: Callable[[Outflow, Built], None],
        forget: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._mailbox = mailbox
        self._hand_over = hand_over
        self._forget = forget
        self._clock = clock
        self._flush_at: float | None = None  # None: nothing is held back
        self._pace = 0.0  # seconds for a chunk, the longest of the last few
        self._numbers: dict[Outflow, int] = {}  # chunks that were built

    def begin(self, flow: Outflow, then: Callable[[], None]) -> None:
        """A life of a request begins; `then` begins it in the loop."""
        self._numbers[flow] = 0
        self.pass_on(then)

    def build(self, flow: Outflow, chunk: Outgoing) -> None:
        """Build a chunk, unless its request was cut or has failed."""
        number = self._numbers.get(flow)
        if number is None or flow.is_cut:
            return
        began = self._clock()
        try:
            built = Built(chunk.build(number), chunk.is_terminal)
        except Exception as error:  # noqa: BLE001 - raised again in the task that sends
            built = Built(None, False, f"{type(error).__name__}: {error}")
        self._pace = max(self._clock() - began, 0.75 * self._pace)
        if chunk.is_terminal or built.failure is not None:
            self._end(flow)
        elif built.planned is None:
            self._flush_if_due()
            return
        else:
            self._numbers[flow] = number + 1
        self.pass_on(partial(self._hand_over, flow, built))

    def cut(self, flow: Outflow, then: Callable[[], None]) -> None:
        """A request ends; `then` ends it in the loop."""
        self._end(flow)
        self.pass_on(then)

    def pass_on(self, command: Callable[[], None]) -> None:
        """Have something done in the loop, after what was built before; soon, or with the next `flush`."""
        self._mailbox.put(command)
        if self._flush_at is None:
            self._flush_at = self._clock() + HELD
        self._flush_if_due()

    def flush(self) -> None:
        """There is nothing more to build for now."""
        self._flush_at = None
        self._mailbox.flush()

    def _flush_if_due(self) -> None:
        if self._flush_at is not None and (self._pace > QUICK or self._clock() >= self._flush_at):
            self.flush()

    def _end(self, flow: Outflow) -> None:
        if self._numbers.pop(flow, None) is not None:
            self._forget(flow.external_id)
