"""The scheduler's half of the adapter: what comes before and after each schedule, and what ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSet
from typing import Any

import attrs

from ._flows import Ended, Loop
from ._parking import Parking, Statuses
from ._prompt import Prompts, TalkerWindow
from ._reading import Commit, Reading, external_id_of
from ._records import Flag, FlagSet, Receptions, Watermarks
from ._writing import Writing


@attrs.frozen
class Stage:
    """What a stage is.

    Attributes:
        receives: Whether the connector feeds it.
        window: Streams that may be active at once; 0: all.
        talker: How streaming prompts are kept.
    """

    number: int
    receives: bool
    window: int
    max_running: int
    talker: TalkerWindow = attrs.field(factory=TalkerWindow)


class Desk:
    """Used from one thread, which it never keeps waiting.

    Attributes:
        arrived: Requests that have got a chunk since the queues were looked at.
        receptions: What is known of requests that receive, by request id.
    """

    def __init__(
        self,
        stage: Stage,
        loop: Loop,
        statuses: Statuses,
        commit: Commit,
        rebuild: Callable[..., bool],
        clock: Callable[[], float],
        *,
        is_alive: Callable[[Any], bool],
        has_consumer: Callable[[Any], bool],
    ) -> None:
        """Put together.

        Args:
            commit: Gives a chunk to its request.
            rebuild: Changes a request's streaming prompt.
            clock: Of the waits for a chunk.
            is_alive: Whether the scheduler may still end a request.
            has_consumer: Whether a request goes on to a next stage.
        """
        self.stage = stage
        self.receptions = Receptions()
        self.arrived: MutableSet[str] = FlagSet(self.receptions, Flag.ARRIVED)
        self.reading = Reading(self.receptions, loop, commit, clock, arrived=lambda name: self.arrived.add(name))
        self.writing = Writing(loop)
        self.watermarks = Watermarks(self.writing.records)
        self.prompts = Prompts(stage.talker, rebuild, receives=stage.receives)
        self.parking = Parking(
            self.receptions, statuses, self.reading.want, clock, window=stage.window, max_running=stage.max_running
        )
        self._loop = loop
        self._is_alive = is_alive
        self._has_consumer = has_consumer

    @property
    def is_fed(self) -> bool:
        """Whether there is a stage before this one whose chunks it takes."""
        return self.stage.receives and self.stage.number != 0

    def flag_set(self, flag: Flag) -> FlagSet:
        """The requests that have a flag."""
        return FlagSet(self.receptions, flag)

    def sort_events(self) -> None:
        """File what the loop has to tell."""
        for event in self._loop.events():
            if isinstance(event, Ended):
                self.writing.sort(event)
            else:
                self.reading.sort(event)

    # --- a tick -------------------------------------------------------------------------------------------

    def take_out(self, waiting: Any, running: list[Any], live: Mapping[str, Any] | None) -> None:
        """Before scheduling: give requests what has come, and take those that wait out of the queues."""
        self.sort_events()
        if not self.is_fed:
            return
        if live is not None:
            for request_id in self.parking.purge(live):
                self.forget_received(request_id)
        self.reading.commit_due()
        for record in self.parking.take_out(waiting, running, self.arrived):
            request = record.request if live is None else live.get(record.request_id)
            if request is None or record.prompt is None:
                continue
            try:
                if self.prompts.apply(record, request):
                    record.flags.add(Flag.REPLACED)
            except ValueError as error:  # the chunk is consumed: there is nothing that could be tried again
                self.reading.fail(record.request_id, str(error))
        self.parking.settle(waiting, running, self.flag_set(Flag.REPLACED))
        self._loop.flush()

    def put_back(self, waiting: Any, running: list[Any], live: Mapping[str, Any] | None) -> None:
        """After scheduling: put back what was taken out, but for requests that were freed meanwhile."""
        if self.stage.receives:
            for request_id in self.parking.put_back(waiting, running, live):
                self.forget_received(request_id)

    def note_scheduled(self, new: Iterable[str], cached: Iterable[str]) -> None:
        """These requests run: they wait for the next chunk from now on."""
        for request_id in new:
            record = self.receptions.get(request_id)
            if record is None:
                continue
            record.flags.discard(Flag.READY)
            if Flag.REPLACED in record.flags:
                record.flags.discard(Flag.REPLACED)
                self.watermarks.pop(record.external_id, None)
        for request_id in cached:
            record = self.receptions.get(request_id)
            if record is not None:
                record.flags.discard(Flag.READY)

    def want(self, request: Any) -> None:
        """Have the next chunk of a request received."""
        if self.is_fed:
            self.reading.want(self.receptions.of(request.request_id), request)
            self._loop.flush()

    # --- ends ---------------------------------------------------------------------------------------------

    def finish(self, request_ids: Iterable[str], requests: Mapping[str, Any], *, failed: bool) -> None:
        """The scheduler ends requests. What has failed is passed on to the next stage, with the reason."""
        self.sort_events()
        owned = self.parking.owned()
        for request_id in dict.fromkeys(request_ids):
            request, record = requests.get(request_id), self.receptions.get(request_id)
            is_alive = request is not None and self._is_alive(request)
            if is_alive and record is not None and record.origin is not None and request_id in owned:
                requests[request_id].status, record.origin = record.origin, None
            external_id = self.external_id(request_id) if request is None else external_id_of(request)
            reason = None
            if failed:
                why = None if record is None else record.failure
                reason = f"stage {self.stage.number}: {why or 'the request failed there'}"
            was_sent = self.writing.is_sending(external_id)
            self.writing.forget(external_id, reason)
            if reason is not None and is_alive and not was_sent and self._has_consumer(request):
                self.writing.tell(request_id, external_id, reason)
            self.parking.discard(request_id)
            self.reading.forget(request_id)
        self._loop.flush()

    def forget_received(self, request_id: str) -> None:
        """Nothing of a request is committed from now on. Idempotent."""
        self.parking.discard(request_id)
        self.reading.forget(request_id)
        self._loop.flush()

    def forget_sent(self, external_id: str) -> None:
        """Nothing of a request is sent from now on, but for what is queued before a terminal chunk. Idempotent."""
        self.sort_events()
        self.writing.forget(external_id)
        self._loop.flush()

    def external_id(self, request_id: str) -> str:
        """The name of a request in keys, as far as it is known."""
        record = self.receptions.get(request_id)
        return request_id if record is None else record.external_id
