"""The watch of a sender's process: while that lives it can write here, and what it may write to is not free."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from ._errors import SHORTAGES, ConnectorClosed, DescriptorRefused
from ._events import PEER_ENDED
from ._log_limit import LogLimit
from ._offers import find_offer
from ._protocol import wire
from .abc import Engine, EnginePeer

logger = logging.getLogger("trio_mori.receiver")


class ProcessWatch:
    """Waits for the ends of a sender's processes: one for each incarnation that was welcome.

    Attributes:
        followed: The incarnations whose end is yet to come: have they said that they close?
    """

    def __init__(
        self,
        engine: Engine,
        nursery: trio.Nursery,
        *,
        address: str,
        log_limit: LogLimit,
        on_end: Callable[[bytes], object],
    ) -> None:
        """Stores what it is given.

        Args:
            log_limit: For what the sender, whoever that is, can have said any number of times.
            on_end: Called when an incarnation can write here no more.
        """
        self.followed: dict[bytes, bool] = {}
        self._engine = engine
        self._nursery = nursery
        self._address = address
        self._log_limit = log_limit
        self._on_end = on_end

    def recognise(self, welcome: wire.Welcome) -> EnginePeer | None:
        """The sender's process, as our engine sees it; None if its end cannot be proven.

        Raises:
            DescriptorRefused: for now, for this process is short of something.
        """
        for member in self._engine.members:
            theirs = find_offer(welcome.offers, member.name)
            if theirs is None or member.name != welcome.chosen:
                continue
            try:
                return self._engine.add_peer_of(member, theirs)
            except (DescriptorRefused, ConnectorClosed) as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORTAGES:
                    raise
                # It can write here all the same: what it leaves unanswered stays in quarantine.
                if self._log_limit.admits():
                    logger.warning("the sender %s cannot be watched: %s", self._address, error)
        return None

    def follow(self, epoch: bytes, peer: EnginePeer) -> None:
        """Wait for the end of this incarnation, in the nursery."""
        self.followed[epoch] = False
        self._nursery.start_soon(self._wait_end, epoch, peer)

    def note_leaving(self, epoch: bytes) -> None:
        """It has said that it closes."""
        if epoch in self.followed:
            self.followed[epoch] = True

    async def _wait_end(self, epoch: bytes, peer: EnginePeer) -> None:
        await self._engine.wait_fenced(peer)
        # One of this process has not taken that along when it closed.
        has_closed = self.followed.pop(epoch, False)
        end = "which closed, can write here no more" if has_closed else "its process has ended"
        logger.info("sender %s: %s", self._address, end, extra={"event": PEER_ENDED, "peer": self._address})
        self._engine.drop_peer(peer)
        self._on_end(epoch)
