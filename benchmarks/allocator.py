"""Peak memory by the allocator's own account: torch's profiler reports every allocation and every free on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_above_start(run: Callable[[], object]) -> int:
    """The most bytes that are allocated while `run` runs, beyond those that were when it began."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak
