"""Ticks, arrivals, aborts, preemptions, segments, ids that come back and deadlines in any order, against a model.

The model is a list per life of a request: what was delivered for it, and how much of that has run. Order is kept,
nothing runs twice, nothing is lost, nobody comes back, and in the end all records are gone.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from chunk_fakes import Request, Rig, Status, codes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trio_mori_vllm_omni.chunks._flows import AHEAD, Arrived, Inflow, Outflow, Outgoing
from trio_mori_vllm_omni.chunks._marks import failed_terminal
from trio_mori_vllm_omni.chunks._records import Flag
from trio_mori_vllm_omni.chunks._writing import Offer, Verdict

NAMES = st.sampled_from("abc")
ANY = st.integers(0, 5)  # one of those that there are
LIMIT = 10.0


@attrs.define(eq=False)
class Life:
    """What one life of a request was sent, and what of it has run.

    Attributes:
        due: What its prompt has to be in its next steps.
        waits_since: At the earliest, it has waited for its present chunk since then.
        is_over: No more is sent.
        reason: Why it cannot go on, once all before it has run.
    """

    request: Request
    due: list[list[int]] = attrs.field(factory=list)
    given: int = 0
    ran: int = 0
    waits_since: float = 0.0
    is_over: bool = False
    reason: str | None = None


@attrs.define(eq=False)
class Sent:
    """What one life of a request was queued."""

    flow: Outflow
    chunks: list[Outgoing] = attrs.field(factory=list)
    is_ended: bool = False
    is_left: bool = False


class DeskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.counter = 0
        self.lives: dict[str, Life] = {}
        self.late: list[Inflow] = []
        self.sent: list[Sent] = []
        self.sending: dict[str, Sent] = {}
        self.confirmed: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.in_tick = False

    def parked(self) -> list[str]:
        return sorted(self.rig.desk.parking.owned() & set(self.lives))

    def fed(self) -> list[str]:
        """The requests for which something may be delivered."""
        return [name for name in sorted(self.lives) if self.can_deliver(name) is not None]

    @initialize(window=st.sampled_from([0, 0, 1, 2]), limit=st.integers(1, 4))
    def begin(self, window: int, limit: int) -> None:
        self.rig = Rig(window=window, max_running=limit)
        self.window = window

    # --- the scheduler ------------------------------------------------------------------------------------

    @precondition(lambda self: not self.in_tick)
    @rule(name=NAMES)
    def add(self, name: str) -> None:
        if name not in self.lives:
            self.lives[name] = Life(self.rig.add(name, resumable=True), waits_since=self.rig.now)

    @precondition(lambda self: not self.in_tick)
    @rule()
    def begin_tick(self) -> None:
        self.rig.begin()
        self.in_tick = True
        self.take_failures()

    @precondition(lambda self: self.in_tick)
    @rule()
    def end_tick(self) -> None:
        ready = self.rig.desk.flag_set(Flag.READY)
        queued = [each for each in (*self.rig.waiting, *self.rig.running) if each.request_id in ready]
        for request in queued:
            life = self.lives[request.request_id]
            assert request is life.request
            assert request.prompt_token_ids == life.due[life.ran]
            life.ran += 1
            life.waits_since = self.rig.now
        assert sorted(self.rig.end()) == sorted(request.request_id for request in queued)
        self.in_tick = False

    @rule()
    def run_ticks(self) -> None:
        """Until nothing can go on: what was delivered has run, but where a request is held up."""
        for _ in range(12):
            if self.in_tick:
                self.end_tick()
            else:
                self.begin_tick()

    @precondition(lambda self: self.lives)
    @rule(at=ANY, failed=st.booleans())
    def finish_one(self, at: int, failed: bool) -> None:
        """Also between the two halves of a tick."""
        self.finish(sorted(self.lives)[at % len(self.lives)], failed)

    @precondition(lambda self: self.lives and not self.in_tick)
    @rule(at=ANY)
    def start_anew(self, at: int) -> None:
        """A request ends, and another one has its name; what was under way for the old one may still come."""
        name = sorted(self.lives)[at % len(self.lives)]
        self.finish(name, False)
        self.add(name)
        self.begin_tick()

    def finish(self, name: str, failed: bool) -> None:
        if name in self.lives:
            life = self.lives.pop(name)
            self.note_late(name)
            self.rig.abort(name, failed=failed)
            assert life.request.status is not Status.WAITING_FOR_CHUNK or not self.in_tick
            self.leave(name)
            self.failed.pop(name, None)

    @precondition(lambda self: self.in_tick and self.parked())
    @rule(at=ANY)
    def free(self, at: int) -> None:
        """The scheduler drops a request without a word."""
        name = self.parked()[at % len(self.parked())]
        del self.lives[name], self.rig.requests[name]
        self.note_late(name)
        self.failed.pop(name, None)

    @precondition(lambda self: not self.in_tick)
    @rule(name=NAMES)
    def preempt(self, name: str) -> None:
        life = self.lives.get(name)
        if life is not None and life.request in self.rig.running:
            self.rig.running.remove(life.request)
            if life.request.status is Status.RUNNING:
                life.request.status = Status.PREEMPTED
            self.rig.waiting.prepend_requests([life.request])

    @rule(name=NAMES, tokens=st.integers(0, 1))
    def have_in_flight(self, name: str, tokens: int) -> None:
        if name in self.lives:
            self.lives[name].request.num_in_flight_tokens = tokens

    @rule(name=NAMES)
    def resume_segment(self, name: str) -> None:
        self.rig.desk.flag_set(Flag.SEGMENT_ENDED).discard(name)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.rig.now += seconds
        for name in self.rig.desk.reading.take_stalled(LIMIT):
            life = self.lives.get(name)
            assert life is None or self.rig.now - life.waits_since > LIMIT
            # Nobody is given up whose chunk is there, but for those that no tick has looked at.
            assert life is None or self.in_tick or life.ran == life.given or self.has_not_looked(name)
            if life is not None:
                self.finish(name, failed=True)

    def has_not_looked(self, name: str) -> bool:
        record = self.rig.desk.receptions[name]
        return bool(record.early) or Flag.ARRIVED in record.flags or bool(self.rig.loop._events)

    def take_failures(self) -> None:
        for name, reason in self.rig.desk.reading.take_failures().items():
            life = self.lives[name]
            assert reason == life.reason
            assert life.ran == life.given
            assert name not in self.failed
            self.failed[name] = reason

    # --- the stage before ---------------------------------------------------------------------------------

    def can_deliver(self, name: str) -> Life | None:
        life, record = self.lives.get(name), self.rig.desk.receptions.get(name)
        if life is None or record is None or record.flow is None or life.is_over:
            return None
        credit = self.rig.loop.receiving[record.flow]
        return life if life.given - credit < AHEAD else None

    @precondition(lambda self: self.fed())
    @rule(at=ANY, kind=st.sampled_from(["data", "data", "data", "segment", "end", "empty end", "failed", "broken"]))
    def deliver(self, at: int, kind: str) -> None:
        name = self.fed()[at % len(self.fed())]
        life = self.lives[name]
        loop = self.rig.loop
        if kind == "broken":
            life.is_over, life.reason = True, "PeerLost: gone"
            loop.break_off(name, life.reason)
            return
        if kind == "failed":
            life.is_over, life.reason = True, "stage 0: it failed"
            loop.deliver(name, failed_terminal(life.reason))
            return
        self.counter += 1
        tokens = [] if kind == "empty end" else [self.counter]
        life.is_over = kind in ("end", "empty end")
        loop.deliver(name, codes(*tokens, finished=life.is_over, segment=kind == "segment"))
        life.due.append(tokens)
        life.given += 1

    def note_late(self, name: str) -> None:
        record = self.rig.desk.receptions.get(name)
        if record is not None and record.flow is not None:
            self.late.append(record.flow)

    @precondition(lambda self: self.late)
    @rule(at=ANY)
    def deliver_late(self, at: int) -> None:
        """A chunk of a life that has ended, which was under way then."""
        self.rig.loop._events.append(Arrived(self.late[-1 - at % len(self.late)], codes(-1)))

    # --- the stage after ----------------------------------------------------------------------------------

    @rule(name=NAMES, kind=st.sampled_from(["data", "data", "again", "segment", "end"]))
    def offer(self, name: str, kind: str) -> None:
        writing = self.rig.desk.writing
        self.confirmed[name] = max(self.confirmed.get(name, 0) + (-1 if kind == "again" else 2), 0)
        chunk = Outgoing(lambda number: None, kind == "end")
        offer = Offer(name, name, self.confirmed[name], 0, False, kind == "end", kind == "segment")
        before = self.sending.get(name)
        verdict = writing.offer(offer, chunk)
        if verdict is not Verdict.SEND:
            assert before is not None
            assert verdict is (Verdict.AFTER_END if before.is_ended else Verdict.SENT_BEFORE)
            return
        flow = writing.records[name].flow
        assert flow is not None
        if before is None:
            before = self.sending[name] = Sent(flow)
            self.sent.append(before)
        assert before.flow is flow
        assert not before.is_ended
        before.chunks.append(chunk)
        before.is_ended = kind == "end"

    @rule(name=NAMES)
    def clean_up(self, name: str) -> None:
        self.rig.desk.forget_sent(name)
        self.leave(name)

    def leave(self, name: str) -> None:
        sent = self.sending.pop(name, None)
        self.confirmed.pop(name, None)
        if sent is not None:
            sent.is_left = True
            assert (sent.flow in self.rig.loop.cuts) is not sent.is_ended

    @rule(at=st.integers(0, 20))
    def end_a_flow(self, at: int) -> None:
        """The loop is through with a life that was cut, or whose end was queued."""
        ending = [flow for flow in self.rig.loop.sending if flow in self.rig.loop.cuts or self.has_end(flow)]
        if ending:
            self.end(ending[at % len(ending)])

    def has_end(self, flow: Outflow) -> bool:
        chunks = self.rig.loop.sending[flow]
        return bool(chunks) and chunks[-1].is_terminal

    def end(self, flow: Outflow) -> None:
        loop = self.rig.loop
        for sent in self.sent:
            if sent.flow is flow:
                assert loop.sending[flow] == sent.chunks
        del loop.sending[flow]
        loop.cuts.pop(flow, None)
        loop.end(flow)
        self.rig.desk.sort_events()
        present = self.sending.get(flow.external_id)
        if present is not None and present.flow is flow:
            del self.sending[flow.external_id]
            self.confirmed.pop(flow.external_id, None)

    # --- at any time --------------------------------------------------------------------------------------

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        rig: Any = getattr(self, "rig", None)
        if rig is None:
            return
        places = [request.request_id for request in (*rig.waiting, *rig.running)]
        places += [request.request_id for request in rig.desk.parking._everyone()]
        assert len(places) == len(set(places))
        assert set(places) >= set(self.lives)
        assert self.in_tick or set(places) == set(self.lives)
        if self.in_tick:
            held = {request.request_id for request in (*rig.waiting, *rig.running)}
            assert all(rig.requests[name].status is not Status.WAITING_FOR_CHUNK for name in held)
        assert self.in_tick or set(rig.desk.receptions) <= set(self.lives)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        if self.in_tick:
            self.end_tick()
        for name in list(self.lives):
            self.finish(name, failed=False)
        for name in "abc":
            self.clean_up(name)
        for flow in list(self.rig.loop.sending):
            self.end(flow)
        self.rig.tick()
        self.rig.assert_nothing_is_left()
        assert not self.rig.desk.writing._leaving
        assert not self.rig.desk.reading._due


TestDesk = pytest.mark.filterwarnings("ignore")(DeskMachine.TestCase)
TestDesk.settings = settings(stateful_step_count=50)
