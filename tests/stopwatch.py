"""How long something takes, whatever else the machine does."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class Stopwatch:
    """Counts from now on, but not for as long as this process's most delayed thread was ready and had no processor."""

    def __init__(self) -> None:
        self._delays = _delays()
        self._stolen = _stolen()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """So far."""
        passed = time.monotonic() - self._began
        delayed = [delay - self._delays.get(thread, 0.0) for thread, delay in _delays().items()]
        return passed - max(delayed, default=0.0) - (_stolen() - self._stolen)


def _delays() -> dict[str, float]:
    """For how long each thread was ready to run, and did not; libzmq's threads, too."""
    delays = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            delays[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return delays


def _stolen() -> float:
    """For how long a processor was given to other virtual machines by the host, on average."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK") / os.sysconf("SC_NPROCESSORS_ONLN")
