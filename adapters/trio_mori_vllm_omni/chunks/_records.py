"""One record per request on each side. The sets and dictionaries that vllm-omni knows are views of them."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, MutableSet
from typing import Any

import attrs

from ._flows import Arrived, Broken, Inflow, Outflow


class Flag(enum.Enum):
    """What vllm-omni keeps a set of requests for."""

    ARRIVED = enum.auto()  # a chunk was committed, and the queues have not been looked at since
    READY = enum.auto()  # it may be scheduled
    EXHAUSTED = enum.auto()  # its last chunk was committed
    SEGMENT_ENDED = enum.auto()  # the last chunk of its segment was
    REPLACED = enum.auto()  # its prompt is a new one
    ACTIVE = enum.auto()  # it is in the window of active streams


@attrs.frozen
class PromptUpdate:
    """A chunk of an AR stage, until its request is ready: only then its token counts belong together.

    Attributes:
        is_extension: It goes on with a prompt that is there.
        was_resumable: What the request was before this chunk.
    """

    payload: dict[str, Any]
    is_extension: bool
    was_resumable: bool


@attrs.frozen
class Condition:
    """The last condition that the Talker was given."""

    length: int
    number: int


@attrs.define(eq=False)
class Reception:
    """A request of this stage that receives.

    Attributes:
        request: As the scheduler made it; None until it was seen in a queue.
        flow: Its life; None before the first chunk was wanted.
        is_wanted: The scheduler waits for a chunk.
        received: Chunks that were committed.
        uncredited: Of these, those that the loop was not told of.
        early: What has come and was not committed.
        origin: The status that it had when it was parked.
        waiting_since: When it began to wait for the present chunk.
        failure: Why it cannot go on.
    """

    request_id: str
    request: Any = None
    flow: Inflow | None = None
    is_wanted: bool = False
    received: int = 0
    uncredited: int = 0
    early: deque[Arrived | Broken] = attrs.field(factory=deque)
    flags: set[Flag] = attrs.field(factory=set)
    origin: Any = None
    waiting_since: float | None = None
    prompt: PromptUpdate | None = None
    condition: Condition | None = None
    failure: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether it waits for no chunk: of this segment, or at all."""
        return Flag.EXHAUSTED in self.flags or Flag.SEGMENT_ENDED in self.flags

    @property
    def external_id(self) -> str:
        """The name in the keys."""
        return self.request_id if self.flow is None else self.flow.external_id


@attrs.define(eq=False)
class Dispatch:
    """A request of this stage that sends, by its external id.

    Attributes:
        flow: Its life; None: nothing was sent yet.
        watermark: Tokens that were confirmed when its last chunk was queued.
        segment: The first segment whose chunks are not late; None: whichever comes.
        is_ended: Its terminal chunk is queued.
        failure: Why it cannot be sent.
    """

    flow: Outflow | None = None
    watermark: int = 0
    segment: int | None = None
    is_ended: bool = False
    failure: str | None = None


class Receptions(dict[str, Reception]):
    """By request id."""

    def of(self, request_id: str) -> Reception:
        """The request's record, made if there is none."""
        record = self.get(request_id)
        if record is None:
            record = self[request_id] = Reception(request_id)
        return record


class FlagSet(MutableSet[str]):
    """The requests that have a flag, as a set."""

    def __init__(self, records: Receptions, flag: Flag) -> None:
        self._records = records
        self._flag = flag

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return set(it)

    def __contains__(self, request_id: object) -> bool:
        record = self._records.get(request_id)  # type: ignore[call-overload]
        return record is not None and self._flag in record.flags

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, record in self._records.items() if self._flag in record.flags])

    def __len__(self) -> int:
        return sum(self._flag in record.flags for record in self._records.values())

    def add(self, value: str) -> None:
        """Set it."""
        self._records.of(value).flags.add(self._flag)

    def discard(self, value: str) -> None:
        """Clear it."""
        record = self._records.get(value)
        if record is not None:
            record.flags.discard(self._flag)

    def __repr__(self) -> str:
        return repr(set(self))


class Watermarks(MutableMapping[str, int]):
    """The watermarks of the requests that send, as a dictionary."""

    def __init__(self, records: dict[str, Dispatch]) -> None:
        self._records = records

    def __getitem__(self, external_id: str) -> int:
        return self._records[external_id].watermark

    def __setitem__(self, external_id: str, watermark: int) -> None:
        self._records.setdefault(external_id, Dispatch()).watermark = watermark

    def __delitem__(self, external_id: str) -> None:
        self._records[external_id].watermark = 0

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, record in self._records.items() if record.watermark])

    def __len__(self) -> int:
        return sum(bool(record.watermark) for record in self._records.values())
