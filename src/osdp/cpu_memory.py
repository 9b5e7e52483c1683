"""What torch allocates on the CPU, which has no counters of its own: by the profiler's account."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def peak_above_start(run: Callable[[], object]) -> int:
    """The most bytes that are allocated on the CPU while `run` runs, beyond those that were when it began."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints a line whenever it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()  # type: ignore[missing-attribute]
        peak = max(peak, level)
    return peak
