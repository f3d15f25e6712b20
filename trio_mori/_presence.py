"""Whether a sender is there, for how long it has not been, and what is said if it stays away or another one answers."""

from __future__ import annotations

import logging
from math import inf

import trio

from ._config import ConnectorConfig
from ._events import OTHER_STAGE, SENDER_ABSENT

logger = logging.getLogger("trio_mori.receiver")

# Seconds for which a sender may be absent while gets wait for it before that is said. One that starts beside its
# receiver imports torch for two or three. It is looked at with each heartbeat, so that nobody is woken for it: with the
# default interval it is said after 3 to 8 s.
PATIENCE = 3.0


class Presence:
    """What a receiver knows of the presence of one sender, which begins absent.

    Attributes:
        last_heard: When it last said something; infinite while it is not expected to.
    """

    def __init__(self, config: ConnectorConfig, address: str) -> None:
        self.last_heard = inf
        self._config = config
        self._address = address
        self._absent_since = trio.current_time()  # inf while it is there
        self._was_there = False
        self._absence_told = False
        self._stage_told = -1  # which was not the one that this side gets from

    def came(self) -> None:
        """It is there, and known."""
        self._absent_since, self._was_there, self._absence_told = inf, True, False

    def left(self, now: float) -> None:
        """The connection to it broke, or it was not there anyhow."""
        self._absent_since = min(self._absent_since, now)

    def make_up(self, late: float, now: float) -> None:
        """Count neither silence nor absence for so many seconds, in which this side heard nobody."""
        if self.last_heard < inf:
            self.last_heard = min(self.last_heard + late, now)
        if self._absent_since < inf:
            self._absent_since = min(self._absent_since + late, now)

    def absent_for(self, now: float) -> float:
        """Seconds; none while it is there."""
        return max(now - self._absent_since, 0.0)

    def is_missed(self, now: float) -> bool:
        """Whether it has been absent for so long that whoever waits for it should know, and does not yet."""
        return not self._absence_told and now - self._absent_since >= PATIENCE

    def tell_absence(self, now: float, *, waiting: int, is_connected: bool) -> None:
        """Say once, until it is there, that so many gets wait for it in vain."""
        self._absence_told = True
        if is_connected:
            what = "somebody listens there, and has not answered as a sender does"
        else:
            what = "nobody there has taken a connection" + (" since it was lost" if self._was_there else "")
        seconds = self.absent_for(now)
        extra = {"event": SENDER_ABSENT, "peer": self._address, "seconds": seconds, "count": waiting}
        logger.warning(
            "%s for the sender %s, which has been dialled for %.0f s: %s; it is dialled on. Is the sender "
            "running, and is this its address and port (sender_host, sender_zmq_port, or update_sender_info)?",
            "1 get waits" if waiting == 1 else f"{waiting} gets wait",
            self._address,
            seconds,
            what,
            extra=extra,
        )

    def tell_stage(self, stage: int) -> None:
        """Say if another stage answers than this connector's edge comes from: what it waits for may never be put."""
        expected = self._config.from_stage
        if expected is None or expected in (stage, self._config.stage_id) or stage in (-1, self._stage_told):
            return
        self._stage_told = stage
        logger.warning(
            "the sender %s serves stage %d, and this connector is to get from stage %d (from_stage): a get waits for "
            "ever if that stage does not put here; compare sender_host and sender_zmq_port with the stages' ports",
            self._address,
            stage,
            expected,
            extra={"event": OTHER_STAGE, "peer": self._address, "stage": stage},
        )
