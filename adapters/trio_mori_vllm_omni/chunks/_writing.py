"""The scheduler's half of sending: which chunks go out, in which life of a request, and what becomes of the rest.

A chunk is queued once: a preempted request computes tokens again whose chunks were sent, and a segment that was ended
may still deliver a frame. Two marks tell these apart: the tokens that were confirmed with the last chunk, and the
number of the segment.
"""

from __future__ import annotations

import enum
import logging

import attrs

from ._flows import Ended, Loop, Outflow, Outgoing
from ._records import Dispatch

logger = logging.getLogger("trio_mori.chunk_adapter")


@attrs.frozen
class Offer:
    """A chunk that the scheduler has for the next stage.

    Attributes:
        confirmed: Tokens of the request that are computed for good.
        segment: The segment that it is of.
        counts_segments: The request itself counts them, so that the next one will have the next number.
    """

    request_id: str
    external_id: str
    confirmed: int
    segment: int
    counts_segments: bool
    is_terminal: bool
    ends_segment: bool


class Verdict(enum.Enum):
    """What becomes of an offered chunk."""

    SEND = enum.auto()
    LATE_SEGMENT = enum.auto()  # of a segment that was ended
    SENT_BEFORE = enum.auto()  # computed again after a preemption
    AFTER_END = enum.auto()  # the terminal chunk is queued
    FAILED = enum.auto()  # the request cannot be sent any more


def judge(record: Dispatch, offer: Offer) -> Verdict:
    """Whether a chunk goes out. Changes nothing."""
    if record.segment is not None and offer.segment < record.segment:
        return Verdict.LATE_SEGMENT
    if record.failure is not None:
        return Verdict.FAILED
    if record.is_ended:
        return Verdict.AFTER_END
    if not offer.ends_segment and offer.confirmed < record.watermark:
        return Verdict.SENT_BEFORE
    return Verdict.SEND


class Writing:
    """What a stage sends.

    Attributes:
        records: By external id.
        failures: Requests that could not be sent, and why; taken by `take_failures`.
    """

    def __init__(self, loop: Loop) -> None:
        self.records: dict[str, Dispatch] = {}
        self.failures: dict[str, str] = {}
        self._loop = loop
        # Lives that were let go of before the loop was through with them, by external id: the next one comes after.
        self._leaving: dict[str, Outflow] = {}

    def offer(self, offer: Offer, chunk: Outgoing) -> Verdict:
        """Queue a chunk, or say why not."""
        record = self.records.get(offer.external_id)
        if record is None:
            record = self.records[offer.external_id] = Dispatch()
        verdict = judge(record, offer)
        if verdict is Verdict.LATE_SEGMENT:
            return verdict
        record.segment = offer.segment
        if verdict is Verdict.FAILED and offer.is_terminal:
            self.forget(offer.external_id, record.failure)  # of which the next stage was told, or is being told
        if verdict is not Verdict.SEND:
            return verdict
        if record.flow is None:
            record.flow = Outflow(offer.request_id, offer.external_id, self._leaving.get(offer.external_id))
            self._loop.begin(record.flow)
        record.is_ended = offer.is_terminal
        record.watermark = offer.confirmed
        if offer.ends_segment:
            record.watermark = 0
            if offer.counts_segments:
                record.segment = offer.segment + 1
        self._loop.send(record.flow, chunk)
        return verdict

    def sort(self, event: Ended) -> None:
        """A life of a request has ended in the loop."""
        flow = event.flow
        if self._leaving.get(flow.external_id) is flow:
            del self._leaving[flow.external_id]
        record = self.records.get(flow.external_id)
        is_present = record is not None and record.flow is flow
        if event.failure is not None:
            self.failures.setdefault(flow.request_id, event.failure)
            if is_present and record is not None and not record.is_ended:
                record.failure = event.failure  # until its terminal chunk, or its clean-up
                return
        if is_present:
            del self.records[flow.external_id]

    def is_sending(self, external_id: str) -> bool:
        """Whether something of a request was queued, and it was not cleaned up since."""
        record = self.records.get(external_id)
        return record is not None and record.flow is not None

    def forget(self, external_id: str, failure: str | None = None) -> None:
        """A request has ended here. Idempotent.

        A terminal chunk that is queued still goes out, after all before it. Without one, nothing more is sent: with a
        failure the next stage is told of it; otherwise it is ended from outside, too, and what it has not fetched goes.
        """
        record = self.records.pop(external_id, None)
        if record is None or record.flow is None:
            return
        if record.failure is None:
            self._leaving[external_id] = record.flow
        if not record.is_ended:
            record.flow.is_cut = True
            self._loop.cut(record.flow, failure)

    def tell(self, request_id: str, external_id: str, failure: str) -> None:
        """Tell the next stage that a request has failed of which nothing was sent."""
        flow = Outflow(request_id, external_id, self._leaving.get(external_id))
        self._leaving[external_id] = flow
        self._loop.begin(flow)
        self._loop.cut(flow, failure)

    def take_failures(self) -> dict[str, str]:
        """The requests that could not be sent since the last time, and why."""
        failures, self.failures = self.failures, {}
        return failures
