"""The search's clock: processor time, so that a busy machine gives nearly the same plan as an idle one.

[Note: Effort]
HiGHS computes in this process, on one thread. What it has done therefore follows from the process's CPU time, however
many other processes share the machine. A search that is starved must end too: the clock runs at a quarter of the wall
clock's pace at least.
"""

from __future__ import annotations

import time

SLOWEST = 4.0  # wall seconds that count as one second of effort, at most


class _Effort:
    """Adds up what passes between two readings: CPU seconds, or the wall's by SLOWEST where those are more."""

    def __init__(self) -> None:
        self._cpu, self._wall, self._seconds = time.process_time(), time.monotonic(), 0.0

    def __call__(self) -> float:
        cpu, wall = time.process_time(), time.monotonic()
        self._seconds += max(cpu - self._cpu, (wall - self._wall) / SLOWEST)
        self._cpu, self._wall = cpu, wall
        return self._seconds


now = _Effort()  # the effort so far; only differences mean something
