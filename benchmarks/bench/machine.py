"""Where it was measured, and a line of figures for whoever watches."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .environments import ROOT


def load() -> float:
    return round(os.getloadavg()[0], 2)


def described() -> dict[str, Any]:
    """What a reader has to know to compare."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "processor": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "not a checkout",
        "date": time.strftime("%Y-%m-%d"),
        "load_before": load(),
    }


def shown(microseconds: float) -> str:
    """With three digits, in the unit that fits."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    if microseconds >= 1e3:
        return f"{microseconds / 1e3:.3g} ms" if microseconds < 1e5 else f"{microseconds / 1e3:.0f} ms"
    return f"{microseconds:.3g} us"


def one_line_each(case: dict[str, Any]) -> Iterator[str]:
    """Medians over the rounds."""
    names = {name: None for found in case["rounds"] for name in found}
    for name in names:
        turns = [found[name] for found in case["rounds"] if name in found]
        if "idle_ms" in turns[0]:
            parts = [
                f"{role} {statistics.median(t['idle_ms'][role] for t in turns):.1f} ms/10 s"
                for role in ("send", "receive")
            ]
        else:
            middle = {key: statistics.median(t[key] for t in turns) for key in turns[0] if key != "peak_mb"}
            parts = [f"p50 {shown(middle['p50_us'])}", f"p99 {shown(middle['p99_us'])}"]
            if "put_p50_us" in middle:
                parts.append(f"put {shown(middle['put_p50_us'])}")
            if "cpu_us" in middle:
                parts.append(f"cpu {shown(middle['cpu_us'])}")
            if "rate" in middle:
                parts.append(f"{middle['rate']:.0f}/s")
        yield f"{name:22} {'  '.join(parts)}"
