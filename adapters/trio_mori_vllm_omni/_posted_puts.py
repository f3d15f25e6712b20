"""Small puts that return before the loop has come to them.

A put that waits for the loop's answer costs the calling thread two changes of threads, and in a process that computes
each of them may take 5 ms. What is posted here gets no answer, so that there must be none but yes.

*Why a put cannot be refused later.* Its key is nobody's: nothing lies under it, and who puts under it meanwhile finds
it here and asks the loop. There is much more room than all that is posted takes; should it be in pieces that are too
small, the payload waits for a larger one. It also waits if the address of the stage, which this one had, is another
one's by then. What ends it all the same, a close or an address that is kept, is in `health()["refusals"]`.

*Why none is put over a later one.* Before the loop does anything else about puts it catches up with what was taken: the
thread that is to wake it for that may have been halted before it could. So whatever else there is to do about puts, and
has no answer, has its place among them (`then`): a clean-up drops what was put before it, and nothing that comes after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import attrs
import trio

from trio_mori import Connector as Core
from trio_mori import KeyBusy, NoRoom, NotReady, Plan, TrioMoriError

from ._interests import is_of
from ._reasons import Reasons

# A smaller payload is copied in the loop, with all else that a put does there: that takes 20 us, and to wake the loop
# once more takes 50 to 100. Not from a GPU: its queue would have to be waited for.
COPIED_IN_LOOP = 128 * 1024

# Puts that the loop has not come to yet; whoever puts more waits for it.
MAX_POSTED = 32

_Post = Callable[[Callable[[], object]], None]


@attrs.define(eq=False)
class Put:
    """What `put` was called with.

    Attributes:
        replaces: A request whose unread chunks on this edge are of an earlier life.
    """

    from_stage: str
    to_stage: str
    key: str
    plan: Plan
    replaces: str | None

    @property
    def edge(self) -> tuple[str, str]:
        """The two stages."""
        return self.from_stage, self.to_stage

    @property
    def full(self) -> str:
        """The full key."""
        return f"{self.key}@{self.from_stage}_{self.to_stage}"


class PostedPuts:
    """In the loop but where it says so."""

    def __init__(self, put_nowait: Callable[[Put], object], nursery: trio.Nursery, reasons: Reasons) -> None:
        """Store.

        Args:
            put_nowait: Puts at once, or refuses. It must not catch up.
            nursery: For those that wait for room.
        """
        self._put_nowait = put_nowait
        self._nursery = nursery
        self._reasons = reasons
        self._taken: dict[str, Put] = {}  # those that the loop has not ended, by full key
        self._queue: deque[Callable[[], object]] = deque()
        self._is_posted = False
        self._late: dict[str, trio.CancelScope] = {}  # those that wait after all

    def post(self, post: _Post, core: Core, put: Put) -> bool:
        """Take a small payload, if nothing can be said against it. In any thread. Returns whether it was taken.

        Args:
            core: The sender, which listens.

        Raises:
            UnsupportedPayload, KeyRefused: as `Connector.put_nowait`.
            ConnectorClosed: the loop has ended.
        """
        if len(self._taken) >= MAX_POSTED or self._taken.setdefault(put.full, put) is not put:
            return False
        is_posted = False
        try:
            if not core.has_place(*put.edge, put.key, 2 * COPIED_IN_LOOP * len(self._taken)):
                return False
            self._queue.append(partial(self._put_one, core, attrs.evolve(put, plan=put.plan.own())))
            is_posted = True
        finally:
            if not is_posted:
                del self._taken[put.full]
        self._wake(post)
        return True

    def then(self, post: _Post, what: Callable[[], object]) -> None:
        """Have something done after what was posted before, and before what is posted later. In any thread.

        Args:
            what: Must not raise, nor catch up.

        Raises:
            ConnectorClosed: the loop has ended.
        """
        self._queue.append(what)
        self._wake(post)

    def _wake(self, post: _Post) -> None:
        if not self._is_posted:
            self._is_posted = True
            post(self._carry_out)

    def check_free(self, put: Put) -> None:
        """See that nothing that was taken before waits for room under its key.

        Raises:
            KeyBusy: something does.
        """
        if put.full in self._late:
            raise KeyBusy(
                f"put of {put.key!r} refused: the payload that was put before waits for room; put again later"
            )

    def drop(self, name: str, edge: tuple[str, str] | None) -> None:
        """Give up those that wait for room, of a key or a request, on one edge or on all."""
        for full, scope in self._late.items():
            if is_of(full, name, edge):
                scope.cancel()

    def _carry_out(self) -> None:
        self._is_posted = False  # first: what comes from now on is posted anew, or found here
        self.catch_up()

    def catch_up(self) -> None:
        """Do all that was posted until now."""
        while self._queue:
            self._queue.popleft()()

    def _put_one(self, core: Core, put: Put) -> None:
        is_late = False
        try:
            self._put_nowait(put)
        except (NoRoom, NotReady):  # NotReady: the stage's address was given to another instance meanwhile
            scope = self._late[put.full] = trio.CancelScope()
            self._nursery.start_soon(self._put_late, core, put, scope)
            is_late = True
        except TrioMoriError as error:  # closed meanwhile: put has returned already
            self._reasons.note("put", error)
        finally:
            if not is_late:
                del self._taken[put.full]

    async def _put_late(self, core: Core, put: Put, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await core.put(*put.edge, put.key, put.plan)
            if scope.cancel_called:  # as there was room for it
                core.cleanup_nowait(put.key, *put.edge)
        except TrioMoriError as error:
            self._reasons.note("put", error)
        finally:
            del self._taken[put.full], self._late[put.full]
