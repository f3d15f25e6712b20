"""What the adapter is made of, put together for one stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus
from vllm_omni.distributed.omni_connectors.adapter import construct_next_stage_streaming_input_prompt
from vllm_omni.distributed.omni_connectors.transfer_adapter import chunk_transfer_adapter
from vllm_omni.distributed.omni_connectors.utils.config import stage_receives_chunks

from trio_mori import ConfigError

from .._sync import SyncConnector
from ._commit import commit_for_ar, commit_for_generation
from ._courier import Courier
from ._desk import Desk, Stage
from ._flows import Outgoing
from ._parking import Statuses
from ._processing import Books, Processing, Step, has_consumer, snapshot
from ._prompt import TalkerWindow
from ._wire import ConnectorWire
from ._writing import Offer, Verdict

logger = logging.getLogger("trio_mori.chunk_adapter")

# For what is queued and what is at work, when the adapter is shut down; and for beginning.
CLOSE_LIMIT = 3.0

STATUSES = Statuses(
    waiting=RequestStatus.WAITING,
    running=RequestStatus.RUNNING,
    waiting_for_chunk=RequestStatus.WAITING_FOR_CHUNK,
    preempted=RequestStatus.PREEMPTED,
)


class Inside:
    """Both halves of an adapter.

    Attributes:
        desk: The scheduler's half.
        mode: ``ar`` or ``generation``.
    """

    def __init__(self, adapter: Any, clock: Callable[[], float]) -> None:
        """Put together.

        Args:
            adapter: What input processors are given; has its connector and its configuration.
            clock: Of the waits for a chunk, and of what the worker holds back.

        Raises:
            ConfigError: its connector is not ours.
        """
        connector, config = adapter.connector, adapter.config
        if not isinstance(connector, SyncConnector):
            name = type(connector).__name__
            connector.close()
            raise ConfigError(
                f"the chunk adapter of trio_mori needs its connector, and this stage has a {name}: name "
                "TrioMoriConnector in the deploy file, or unset TRIO_MORI_CHUNK_ADAPTER",
                key="name",
                value=name,
            )
        self.mode = getattr(config, "worker_type", None) or "ar"
        self.books = Books()
        self.processing = Processing(adapter, self.books, getattr(config, "custom_process_next_stage_input_func", None))
        self._portal = connector.home.portal
        receives = stage_receives_chunks(config)
        self._sends = self.processing.function is not None or not receives
        self._wire = ConnectorWire(connector, sends=self._sends)
        self._loop = Courier(connector.home.post, self._wire, self.processing.forget, clock)
        stage = Stage(
            number=connector.stage_id,
            receives=receives,
            window=_window_of(config, adapter.scheduler_max_num_seqs),
            max_running=adapter.scheduler_max_num_seqs,
            talker=TalkerWindow.of(config),
        )
        self.desk = Desk(
            stage,
            self._loop,
            STATUSES,
            commit_for_ar if self.mode == "ar" else partial(commit_for_generation, refresh=_refresh_prompt),
            construct_next_stage_streaming_input_prompt,
            clock,
            is_alive=_is_alive,
            has_consumer=self.has_consumer,
        )

    def enter(self) -> Any:
        """Begin. Returns what `Portal.enter` does."""
        return self._portal.enter(self._loop.open, timeout=CLOSE_LIMIT, what="the chunk adapter")

    def has_consumer(self, request: Any) -> bool:
        """Whether a request goes on to a next stage.

        There is none behind a stage that receives and makes nothing of it, nor for a request that ends here.
        """
        return self._sends and has_consumer(request, self.desk.stage.number)

    def offer(self, offer: Offer, output: Any, request: Any, tokens: Iterable[int]) -> None:
        """Queue what a step produced, if it is to be sent."""
        step = Step(
            output=output,
            request=request if self.processing.function is None else snapshot(request),
            external_id=offer.external_id,
            tokens=tuple(int(token) for token in tokens),
            is_terminal=offer.is_terminal,
            ends_segment=offer.ends_segment,
        )
        verdict = self.desk.writing.offer(offer, Outgoing(partial(self._build, step), offer.is_terminal))
        if verdict is not Verdict.SEND:
            logger.debug("a chunk of %s is not sent: %s, %s", offer.external_id, verdict.name, offer)
        self._loop.flush()

    def _build(self, step: Step, number: int) -> object | None:
        payload = self.processing.build(step, number)
        return None if payload is None else self._wire.planned(payload)


def create_connector(model_config: Any) -> Any:
    """As vllm-omni's own adapter does."""
    return chunk_transfer_adapter.OmniChunkTransferAdapter.create_connector(model_config)


def _window_of(model_config: Any, max_running: int) -> int:
    """How many streams may be active at once; 0: all."""
    window = int(getattr(model_config, "active_stream_window", 0) or 0)
    limit = int(getattr(model_config, "max_num_seqs", max_running) or 0)
    return min(window, limit if limit > 0 else max_running) if window > 0 else 0


def _refresh_prompt(request: Any) -> None:
    """Bring what a request says of its prompt up to date."""
    request.num_prompt_tokens = len(request.prompt_token_ids)
    if getattr(request, "prefill_stats", None) is None:
        request.prefill_stats = PrefillStats()


def _is_alive(request: Any) -> bool:
    """Whether the scheduler may still end it: one that can be resumed is not over when its segment is."""
    return not request.is_finished() or bool(request.resumable and request.status == RequestStatus.FINISHED_STOPPED)


def segment_of(request: Any) -> int:
    """The segment of a streaming input that a request is at."""
    try:
        return int(getattr(request, "_omni_segment_generation", 0))
    except (TypeError, ValueError):
        return 0
