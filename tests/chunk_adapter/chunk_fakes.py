"""Requests, queues and a loop for the scheduler's half of the chunk adapter: no trio, no vllm, no clock."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import attrs
from trio_mori_vllm_omni.chunks._commit import commit_for_ar, commit_for_generation
from trio_mori_vllm_omni.chunks._desk import Desk, Stage
from trio_mori_vllm_omni.chunks._flows import Arrived, Broken, Ended, Event, Inflow, Outflow, Outgoing
from trio_mori_vllm_omni.chunks._parking import Statuses
from trio_mori_vllm_omni.chunks._prompt import TalkerWindow
from trio_mori_vllm_omni.chunks._records import Flag


class Status(enum.Enum):
    """As vllm's `RequestStatus`."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    WAITING_FOR_CHUNK = enum.auto()
    PREEMPTED = enum.auto()


STATUSES = Statuses(
    waiting=Status.WAITING,
    running=Status.RUNNING,
    waiting_for_chunk=Status.WAITING_FOR_CHUNK,
    preempted=Status.PREEMPTED,
)


@attrs.define(eq=False)
class Request:
    """What the adapter touches of a request."""

    request_id: str
    external_req_id: str | None = None
    status: Status = Status.WAITING
    resumable: bool = False
    additional_information: Any = None
    model_intermediate_buffer: Any = None
    prompt_token_ids: list[int] = attrs.field(factory=lambda: [0])
    num_prompt_tokens: int = 1
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    payload_sender_info: Any = None


class WaitingQueue(deque[Any]):
    """As vllm's first-come-first-served queue."""

    def add_request(self, request: Any) -> None:
        self.append(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        self.extendleft(requests)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        leaving = set(requests)
        kept = [request for request in self if request not in leaving]
        self.clear()
        self.extend(kept)


class FakeLoop:
    """Notes what it is told, and tells what a test says."""

    def __init__(self) -> None:
        self.receiving: dict[Inflow, int] = {}  # credit given back
        self.dropped: list[Inflow] = []
        self.sending: dict[Outflow, list[Outgoing]] = {}
        self.cuts: dict[Outflow, str | None] = {}
        self._events: list[Event] = []

    def receive(self, flow: Inflow) -> None:
        assert flow not in self.receiving
        self.receiving[flow] = 0

    def credit(self, flow: Inflow, count: int) -> None:
        self.receiving[flow] += count

    def drop(self, flow: Inflow) -> None:
        self.dropped.append(flow)

    def begin(self, flow: Outflow) -> None:
        assert flow not in self.sending
        self.sending[flow] = []

    def send(self, flow: Outflow, chunk: Outgoing) -> None:
        self.sending[flow].append(chunk)

    def cut(self, flow: Outflow, failure: str | None) -> None:
        assert flow in self.sending
        self.cuts[flow] = failure

    def flush(self) -> None:
        pass

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # --- what the test says -------------------------------------------------------------------------------

    def flow_of(self, external_id: str) -> Inflow:
        """The present life of a request that is received."""
        return next(f for f in reversed(self.receiving) if f.external_id == external_id and f not in self.dropped)

    def deliver(self, external_id: str, payload: Any) -> None:
        self._events.append(Arrived(self.flow_of(external_id), payload))

    def deliver_late(self, flow: Inflow, payload: Any) -> None:
        """For a life that may be over."""
        self._events.append(Arrived(flow, payload))

    def break_off(self, external_id: str, reason: str) -> None:
        self._events.append(Broken(self.flow_of(external_id), reason))

    def end(self, flow: Outflow, failure: str | None = None) -> None:
        self._events.append(Ended(flow, failure))


class Rig:
    """A scheduler with nothing but queues, the desk, and a clock that a test sets."""

    def __init__(self, *, window: int = 0, max_running: int = 8, ar: bool = False, talker: Any = None) -> None:
        self.now = 0.0
        self.loop = FakeLoop()
        self.rebuilt: list[dict[str, Any]] = []
        self.desk = Desk(
            Stage(1, receives=True, window=window, max_running=max_running, talker=talker or TalkerWindow()),
            self.loop,
            STATUSES,
            commit_for_ar if ar else partial(commit_for_generation, refresh=lambda request: None),
            self._rebuild,
            lambda: self.now,
            is_alive=lambda request: True,
            has_consumer=lambda request: True,
        )
        self.waiting = WaitingQueue()
        self.running: list[Any] = []
        self.requests: dict[str, Request] = {}
        self.ran: list[tuple[str, Any]] = []

    def _rebuild(self, payload: dict[str, Any], request: Any, **arguments: Any) -> bool:
        self.rebuilt.append(arguments)
        return bool(payload["meta"].get("replace_streaming_prompt"))

    def add(self, name: str, **fields: Any) -> Request:
        request = self.requests[name] = Request(name, **fields)
        self.waiting.add_request(request)
        return request

    def begin(self) -> None:
        """The first part of a tick: what is ready is in the queues."""
        self.desk.take_out(self.waiting, self.running, self.requests)

    def end(self) -> list[str]:
        """The second part: what is ready runs, and the queues are as before. Returns what ran."""
        ready = self.desk.flag_set(Flag.READY)
        new = [request for request in self.waiting if request.request_id in ready]
        cached = [request for request in self.running if request.request_id in ready]
        for request in new:
            self.waiting.remove(request)
            request.status = Status.RUNNING
            self.running.append(request)
        for request in (*new, *cached):
            self.ran.append((request.request_id, request.additional_information))
        self.desk.note_scheduled([r.request_id for r in new], [r.request_id for r in cached])
        self.desk.put_back(self.waiting, self.running, self.requests)
        return [request.request_id for request in (*new, *cached)]

    def tick(self) -> list[str]:
        self.begin()
        return self.end()

    def abort(self, name: str, *, failed: bool = False) -> None:
        self.desk.finish([name], self.requests, failed=failed)
        request = self.requests.pop(name)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)

    @property
    def names(self) -> list[str]:
        return [request.request_id for request in (*self.waiting, *self.running)]

    def assert_nothing_is_left(self) -> None:
        desk = self.desk
        assert not desk.receptions
        assert not desk.writing.records
        assert not desk.parking.owned()
        assert not desk.reading.failures


def codes(*tokens: int, finished: bool = False, segment: bool = False, **meta: Any) -> dict[str, Any]:
    """A chunk of a generation stage."""
    marks = {"finished": finished, "is_segment_finished": segment, **meta}
    return {"codes": {"audio": list(tokens)}, "meta": marks}
