"""The scheduler's half of receiving: which chunks are wanted, what has come, and what is given to requests when.

A chunk is given to its request in the scheduler's own thread, and only while nothing of the request runs: then its
token counts are of one moment. The order is that of the keys, for the loop delivers in it and `early` keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ._flows import CREDIT_STEP, Arrived, Broken, Inflow, Loop
from ._marks import failure_of
from ._records import Reception, Receptions

logger = logging.getLogger("trio_mori.chunk_adapter")

# Gives a chunk to its request; returns whether there is something to schedule now.
Commit = Callable[[Reception, dict[str, Any], int], bool]


class Reading:
    """What a stage receives. `records` is shared with the queues' side, in the same thread.

    Attributes:
        failures: Requests that cannot go on, and why; taken by `take_failures`.
        reclaimed: Chunks that came after their request had ended, and were dropped.
    """

    def __init__(
        self,
        records: Receptions,
        loop: Loop,
        commit: Commit,
        clock: Callable[[], float],
        *,
        arrived: Callable[[str], None],
    ) -> None:
        """Store.

        Args:
            clock: Of the stalls; read here only.
            arrived: Called with each request that has something to schedule.
        """
        self.failures: dict[str, str] = {}
        self.reclaimed = 0
        self._records = records
        self._loop = loop
        self._commit = commit
        self._clock = clock
        self._arrived = arrived
        # Those that may have something to commit in the next tick.
        self._due: dict[Reception, None] = {}

    # --- a tick -------------------------------------------------------------------------------------------

    def sort(self, event: Arrived | Broken) -> None:
        """File what has come, or drop it if its request has ended meanwhile."""
        record = self._records.get(event.flow.request_id)
        if record is None or record.flow is not event.flow:
            if isinstance(event, Arrived):
                self.reclaimed += 1
                logger.info("a chunk of %s came after its request had ended, and was dropped", event.flow.external_id)
            return
        record.early.append(event)
        if record.is_wanted:
            self._due[record] = None

    def commit_due(self) -> None:
        """Give requests what has come for them. At the begin of a tick."""
        due, self._due = self._due, {}
        for record in due:
            if record.is_wanted:
                self._commit_next(record)

    def want(self, record: Reception, request: Any) -> None:
        """A request waits for its next chunk: commit it if it is here and nothing of the request runs, else soon."""
        record.request = request
        if record.is_wanted:
            return
        record.is_wanted = True
        if record.flow is None:
            record.flow = Inflow(request.request_id, external_id_of(request), source_of(request))
            self._loop.receive(record.flow)
        if not record.early:
            return
        if request.num_in_flight_tokens:
            self._due[record] = None
        else:
            self._commit_next(record)

    def _commit_next(self, record: Reception) -> None:
        while record.early:
            event = record.early.popleft()
            if isinstance(event, Broken):
                self.fail(record.request_id, event.reason)
                return
            number = record.received
            record.received += 1
            self._credit(record)
            reason = failure_of(event.payload)
            if reason is not None:
                self.fail(record.request_id, reason)
                return
            if event.payload and self._commit(record, event.payload, number):
                record.is_wanted = False
                self._arrived(record.request_id)
                return

    def _credit(self, record: Reception) -> None:
        record.uncredited += 1
        if record.uncredited >= CREDIT_STEP and record.flow is not None:
            self._loop.credit(record.flow, record.uncredited)
            record.uncredited = 0

    # --- ends ---------------------------------------------------------------------------------------------

    def fail(self, request_id: str, reason: str) -> None:
        """A request cannot go on: the scheduler is told in its next look. The first reason counts."""
        self.failures.setdefault(request_id, reason)
        record = self._records.get(request_id)
        if record is not None:
            record.failure = record.failure or reason
            record.waiting_since = None

    def take_failures(self) -> dict[str, str]:
        """The requests that have failed since the last time, and why."""
        failures, self.failures = self.failures, {}
        return failures

    def take_stalled(self, limit: float) -> set[str]:
        """The requests that have waited for one chunk for more than `limit` seconds; 0: for as long as they like."""
        if limit <= 0:
            return set()
        now = self._clock()
        stalled = set()
        for request_id, record in self._records.items():
            if record.waiting_since is not None and now - record.waiting_since > limit:
                record.waiting_since = None
                record.failure = record.failure or f"no chunk came for {limit:g} s"
                stalled.add(request_id)
        return stalled

    def forget(self, request_id: str) -> None:
        """A request has ended here. From now on nothing that comes for it is committed. Idempotent."""
        record = self._records.pop(request_id, None)
        self.failures.pop(request_id, None)
        if record is None:
            return
        self._due.pop(record, None)
        self.reclaimed += sum(isinstance(event, Arrived) for event in record.early)
        if record.flow is not None:
            self._loop.drop(record.flow)


def external_id_of(request: Any) -> str:
    """The name of a request in keys."""
    return str(getattr(request, "external_req_id", None) or request.request_id)


def source_of(request: Any) -> dict[str, Any] | None:
    """Where the orchestrator says that a request's sender is."""
    known = getattr(request, "payload_sender_info", None)
    if not isinstance(known, dict) or not known.get("host") or not known.get("zmq_port"):
        return None
    return {"source_host": str(known["host"]), "source_port": int(known["zmq_port"])}
