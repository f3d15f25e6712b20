"""Why calls were refused: each kind said once in the log, and all of them counted for `health`."""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger("trio_mori.vllm_omni")


class Reasons:
    """The caller of a connector sees False or None; this is where it finds out why. Thread-safe."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._lock = threading.Lock()
        self._seen: dict[str, dict[str, Any]] = {}

    def note(self, call: str, error: BaseException) -> None:
        """A call was refused because of this error."""
        kind = f"{call}: {type(error).__name__}"
        with self._lock:
            first = kind not in self._seen
            entry = self._seen.setdefault(kind, {"count": 0})
            entry["count"] += 1
            entry["last"] = str(error)
        if first:
            logger.warning(
                "stage %d: %s (%s). Further ones are counted in health()['refusals'] and not logged", self._stage,
                error, kind,
            )  # fmt: skip

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Count and last text by kind, such as ``put: NoRoom``."""
        with self._lock:
            return {kind: dict(entry) for kind, entry in self._seen.items()}
