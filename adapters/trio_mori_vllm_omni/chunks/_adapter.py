"""The face that vllm-omni's schedulers and input processors see, in the place of `OmniChunkTransferAdapter`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from vllm.v1.request import RequestStatus

from trio_mori import ConnectorClosed

from ._inside import Inside, create_connector, segment_of
from ._reading import external_id_of
from ._records import Flag
from ._writing import Offer

logger = logging.getLogger("trio_mori.chunk_adapter")


class TrioChunkTransferAdapter:
    """Chunks between a scheduler and its neighbours. All methods are the scheduler's thread's; none of them waits.

    What is not a method here is used by name in vllm-omni: the sets and `requests_num_chunks_sent` by schedulers, the
    dictionaries by input processors, which see them from the adapter's worker thread only.

    Attributes:
        connector: The stage's connector.
        receives_chunks: Whether the stage is fed by the connector, rather than by the orchestrator.
        config: The model's configuration.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        create_connector: Callable[[Any], Any] = create_connector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the stage's connector, and begin.

        Args:
            create_connector: Makes it of the model's configuration; by default, as vllm-omni does.
            clock: Of the waits for a chunk.

        Raises:
            ConfigError: the stage's connector is not ours.
            others: as making it.
        """
        self.config = vllm_config.model_config
        self.scheduler_max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.connector = create_connector(self.config)
        inside = Inside(self, clock)
        desk, books = inside.desk, inside.books
        self._inside = inside
        self._desk = desk
        self.receives_chunks = desk.stage.receives
        self.model_mode = inside.mode
        self.custom_process_next_stage_input_func = inside.processing.function
        self.upstream_exhausted_requests = desk.flag_set(Flag.EXHAUSTED)
        self.segment_finished_requests = desk.flag_set(Flag.SEGMENT_ENDED)
        self.requests_with_ready_chunks = desk.flag_set(Flag.READY)
        self.replaced_streaming_prompt_ids = desk.flag_set(Flag.REPLACED)
        self.requests_num_chunks_sent = desk.watermarks
        self.put_req_chunk = books.put_req_chunk
        self.ramp_chunk_count = books.ramp_chunk_count
        self.request_payload = books.request_payload
        self.code_prompt_token_ids = books.code_prompt_token_ids
        self._adaptive_states = books.adaptive_states
        self._pending_streaming_prefills = books.pending_streaming_prefills
        self._entered = inside.enter()

    # --- a tick of the scheduler --------------------------------------------------------------------------

    def process_pending_chunks(
        self, waiting_queue: Any, running_queue: list[Any], *, scheduler_requests: dict[str, Any] | None = None
    ) -> None:
        """Before scheduling: give requests what has come, and take those that wait out of the queues."""
        self._desk.take_out(waiting_queue, running_queue, scheduler_requests)

    def restore_queues(
        self, waiting_queue: Any, running_queue: list[Any], scheduler_requests: dict[str, Any] | None = None
    ) -> None:
        """After scheduling: put back what was taken out, but for requests that were freed meanwhile."""
        self._desk.put_back(waiting_queue, running_queue, scheduler_requests)

    def postprocess_scheduler_output(self, scheduler_output: Any, requests: dict[str, Any] | None = None) -> None:
        """Requests that were scheduled are not ready any more; with `requests`, attach what came for running ones."""
        if not self._desk.is_fed:
            return
        if requests is not None:
            self.attach_cached_additional_information(scheduler_output, requests)
        cached = scheduler_output.scheduled_cached_reqs
        new = [each.req_id for each in scheduler_output.scheduled_new_reqs or ()]
        self._desk.note_scheduled(new, cached.req_ids if cached else ())

    @staticmethod
    def attach_cached_additional_information(scheduler_output: Any, requests: dict[str, Any]) -> None:
        """Give the model runner what came for requests that it has already."""
        cached = getattr(scheduler_output, "scheduled_cached_reqs", None)
        if not cached:
            return
        if not hasattr(cached, "additional_information"):
            cached.additional_information = {}
        for request_id in cached.req_ids:
            request = requests.get(request_id) if request_id else None
            info = getattr(request, "additional_information", None)
            cached.additional_information[request_id] = info
            if info:
                requests[request_id].additional_information = None

    def load_async(self, request: Any) -> None:
        """Have the next chunk of a request received."""
        self._desk.want(request)

    def is_done_receiving_chunks(self, request_id: str) -> bool:
        """Whether a request waits for no chunk, of this segment or at all. It may still be running."""
        record = self._desk.receptions.get(request_id)
        return record is not None and record.is_done

    def update_streaming_prompt_for_condition(
        self, payload_data: dict[str, Any], request: Any, *, update_prompt: bool
    ) -> bool | None:
        """See `Prompts.take_condition`."""
        record = self._desk.receptions.of(request.request_id)
        return self._desk.prompts.take_condition(record, payload_data, request, extends=update_prompt)

    @property
    def num_running_waiting_for_chunk(self) -> int:
        """Running requests that are taken out now."""
        return len(self._desk.parking.running)

    @property
    def waiting_for_chunk_waiting_requests(self) -> Any:
        """What is taken out of the waiting queue now."""
        return self._desk.parking.waiting

    @property
    def waiting_for_chunk_running_requests(self) -> Any:
        """What is taken out of the running queue now."""
        return self._desk.parking.running

    @property
    def _held_non_active(self) -> Any:
        return self._desk.parking.held

    # --- sending ------------------------------------------------------------------------------------------

    def save_async(
        self,
        multimodal_output: dict[str, Any] | None = None,
        request: Any = None,
        is_segment_finished: bool = False,
        new_token_ids: Iterable[int] | None = None,
        confirmed_num_computed_tokens: int | None = None,
        segment_generation: int | None = None,
        force_request_finished: bool = False,
    ) -> None:
        """Queue what a step of a request produced for the next stage.

        Args:
            is_segment_finished: A segment of a streaming input ends with it, and the request may go on.
            new_token_ids: Of this step.
            confirmed_num_computed_tokens: As of the step, if the request has changed since.
            segment_generation: Number of the segment, if the request has gone on to the next one.
            force_request_finished: The request ends with it, whatever its status says.
        """
        self._desk.sort_events()
        external_id = external_id_of(request)
        if not self._desk.writing.is_sending(external_id) and not self._inside.has_consumer(request):
            return
        confirmed, segment = confirmed_num_computed_tokens, segment_generation
        offer = Offer(
            request_id=request.request_id,
            external_id=external_id,
            confirmed=self._confirmed_num_computed_tokens(request) if confirmed is None else confirmed,
            segment=segment_of(request) if segment is None else int(segment),
            counts_segments=getattr(request, "_omni_segment_generation", None) is not None,
            is_terminal=force_request_finished or (request.is_finished() and not request.resumable),
            ends_segment=is_segment_finished,
        )
        self._inside.offer(offer, multimodal_output, request, new_token_ids or ())

    @staticmethod
    def _confirmed_num_computed_tokens(request: Any) -> int:
        """Tokens that are computed for good: asynchronous scheduling counts some ahead of their time."""
        ahead = int(getattr(request, "num_output_placeholders", 0) or 0)
        return max(0, int(getattr(request, "num_computed_tokens", 0)) - ahead)

    def has_active_sender(self, external_req_id: str) -> bool:
        """Whether something of a request was queued for the next stage, which is owed an end of it."""
        self._desk.sort_events()
        return self._desk.writing.is_sending(external_req_id)

    # --- failures -----------------------------------------------------------------------------------------

    def collect_failed_send_request_ids(self) -> dict[str, str]:
        """Requests that could not be sent since the last time, and why. The next stage has been told."""
        self._desk.sort_events()
        return self._desk.writing.take_failures()

    def collect_failed_receive_request_ids(self) -> dict[str, str]:
        """Requests that cannot go on since the last time, and why."""
        return self._desk.reading.take_failures()

    def collect_timed_out_request_ids(self, timeout_s: float) -> set[str]:
        """Requests that have waited for one chunk for longer than this."""
        return self._desk.reading.take_stalled(timeout_s)

    def record_send_failure(self, request_id: str | None, reason: str) -> None:
        """Have a request reported as one that could not be sent."""
        if request_id:
            self._desk.writing.failures.setdefault(request_id, reason)

    def record_receive_failure(self, request_id: str, reason: str) -> None:
        """Have a request reported as one that cannot go on."""
        self._desk.reading.fail(request_id, reason)

    # --- ends ---------------------------------------------------------------------------------------------

    def finish_requests(
        self, request_ids: Any, finished_status: Any, requests: dict[str, Any] | None = None
    ) -> list[tuple[str, int]]:
        """The scheduler ends requests: all, if `request_ids` is None. One that failed is passed on as failed."""
        known = requests or {}
        if request_ids is None:
            request_ids = tuple(known)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        self._desk.finish(request_ids, known, failed=finished_status == RequestStatus.FINISHED_ERROR)
        return []

    def cleanup(self, request_id: str, external_req_id: str | None = None) -> None:
        """Drop what is known of a request. Idempotent, as the two below."""
        external_id = external_req_id or self._desk.external_id(request_id)
        self._desk.forget_received(request_id)
        self._desk.forget_sent(external_id)

    def cleanup_receiver(self, request_id: str) -> None:
        """Drop what is known of a request that is received. Nothing of it is committed from now on."""
        self._desk.forget_received(request_id)

    def cleanup_sender(self, external_req_id: str) -> None:
        """Drop what is known of a request that is sent. A terminal chunk that is queued still goes out."""
        self._desk.forget_sent(external_req_id)

    def shutdown(self) -> None:
        """End everything, then close the connector. Idempotent; nothing runs afterwards."""
        with suppress(ConnectorClosed):
            try:
                self._entered.leave()
            except TimeoutError:
                logger.warning("stage %d: an input processor does not return, and is left", self._desk.stage.number)
        self.connector.close()

    # --- what is left over, by the names of the stock adapter ----------------------------------------------

    @property
    def _finished_load_reqs(self) -> Any:
        return self._desk.arrived

    @_finished_load_reqs.setter
    def _finished_load_reqs(self, names: Any) -> None:
        self._desk.arrived = names  # whoever measures puts a set with a clock here

    @property
    def get_req_chunk(self) -> dict[str, int]:
        """Chunks that each request was given."""
        return {name: each.received for name, each in self._desk.receptions.items() if each.flow is not None}

    @property
    def _registered_load_entries(self) -> dict[str, Any]:
        return {name: each.flow for name, each in self._desk.receptions.items() if each.is_wanted}

    @property
    def _sender_tokens(self) -> dict[str, Any]:
        self._desk.sort_events()
        return {name: each.flow for name, each in self._desk.writing.records.items() if each.flow is not None}

    _pending_load_reqs = _registered_load_entries
    _pending_save_reqs = _sender_tokens
