"""The stop-watch of all ranks: everybody begins at a barrier, and the slowest rank counts.

[Note: Timing]
An action is run a few times after a warm-up, each time behind a barrier, all ranks at once: ranks that share a machine
get in each other's way here as they do in training. Of every try the slowest rank's seconds count, and of the tries the
median. Where the upper quartile exceeds the lower by more than SPREAD, as many tries are added, twice at most. Short
actions are run several times a try. All ranks see the same numbers, so they decide alike, also on when a part's time is
up: then one try must do.

[Note: Processors]
Four ranks that compute on two CPUs take turns, and which of them is done first is chance: one and the same pass
ended after 60 to 130 ms on single ranks. CPU seconds are steady. So passes that compute and do nothing else
are timed in these, and multiplied by one `clock_factor`: how much longer it takes by the clock until the slowest rank
is done with several steps in a row. On accelerators, which nobody shares, and where a rank computes with several
threads, of which some only wait, passes are timed by the clock.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from osdp.accelerator import DeviceCalls
from osdp.profiling.line_fit import Array
from osdp.training.rank_job import RankJob

SPREAD = 1.5
SHORTEST_TRY_SECONDS = 2e-3
LONG_TRY_SECONDS, MOST_STEPS = 0.15, 5
MOST_CALLS, MOST_TRIES, LEAST_TRIES, MOST_ADDED = 500, 25, 3, 2

Action = Callable[[], object]


class Bench:
    """Times actions on all ranks, in parts that each have a share of `budget_seconds`; see [Note: Timing]."""

    def __init__(self, rank_job: RankJob, *, budget_seconds: float, shares: Mapping[str, float] | None = None) -> None:
        self.world, self.device, self._errand = rank_job.world, rank_job.world.device, rank_job
        self.calls = DeviceCalls(self.device)
        self.budget_seconds = budget_seconds
        self._shares = dict(shares or {})  # of the parts that are still to come
        self.spread_out = self.timed = 0
        self._began = time.monotonic()
        self._passed = self._end = 0.0  # of the slowest rank's clock: equal on all
        self._single = self.device.type == "cpu" and torch.get_num_threads() == 1
        self._computed: list[tuple[float, float]] = []  # of runs: the slowest rank's seconds, by clock and of processor

    @property
    def passed_seconds(self) -> float:
        """Seconds since the beginning, as all ranks know it."""
        return self._passed

    @property
    def late(self) -> bool:
        """Whether this part's time is up; equal on all ranks."""
        return self._passed > self._end

    def begin(self, part: str, what: str) -> float:
        """Begins a part; gives its seconds: its share of the time that is left, or a little where none is."""
        self._errand.say(what)
        self.slowest(0.0)
        left = max(0.1 * self.budget_seconds, self.budget_seconds - self._passed)
        seconds = left * self._shares[part] / sum(self._shares.values())
        del self._shares[part]
        self._end = self._passed + seconds
        return seconds

    def watch(self, what: str) -> None:
        self._errand.watch(what)

    def say(self, what: str) -> None:
        self._errand.say(what)

    def slowest(self, *seconds: float) -> list[float]:
        """The highest of all ranks, number by number."""
        rows = self.world.all_numbers(*seconds, time.monotonic() - self._began)
        *highest, self._passed = (max(column) for column in zip(*rows, strict=True))
        return highest

    def by_clock(self) -> float:
        """The time, once the device is done."""
        self.calls.synchronize()
        return time.perf_counter()

    def by_processor(self) -> float:
        """The time by which passes are timed that only compute; see [Note: Processors]."""
        return time.process_time() if self._single else self.by_clock()

    def computed(self, steps: int, run: Callable[[], Array]) -> Array:
        """The mean of so many runs in a row, which time themselves by processor."""
        self.together()
        began = time.perf_counter()
        found = np.mean([run() for _ in range(steps)], axis=0)
        wall, busy = self.slowest((time.perf_counter() - began) / steps, float(found.sum()))
        self._computed.append((wall, busy))
        return found

    @property
    def clock_factor(self) -> float:
        """By what seconds by processor are multiplied to give those by the clock: the median, by their length."""
        if not self._single or not self._computed:
            return 1.0
        ordered = sorted((wall / busy, busy) for wall, busy in self._computed)
        half = sum(busy for _, busy in ordered) / 2
        passed = itertools.accumulate(busy for _, busy in ordered)
        return next(ratio for (ratio, _), so_far in zip(ordered, passed, strict=True) if so_far >= half)

    def steps_of_a_try(self, once: float) -> int:
        """How many steps are timed in a row, if one takes this rank so many seconds; equal on all ranks."""
        (slowest,) = self.slowest(once)
        return max(1, min(MOST_STEPS, round(LONG_TRY_SECONDS / max(slowest, 1e-7))))

    def seconds(self, action: Action, *, within: float) -> float:
        """Seconds of the action, from tries that take about `within` seconds together."""
        self.watch(self._errand.now)
        action()
        (once,) = self.slowest(self.elapsed(action))
        calls = calls_of_a_try(once)
        tries = 1 if self.late else max(LEAST_TRIES, min(MOST_TRIES, int(within / (once * calls))))
        found = self._tries(action, calls, tries)
        added = 0
        while _spread(found) > SPREAD and added < MOST_ADDED and not self.late:
            found += self._tries(action, calls, tries)
            added += 1
        self.timed += 1
        self.spread_out += _spread(found) > SPREAD
        return statistics.median(found)

    def elapsed(self, action: Action, calls: int = 1) -> float:
        """Seconds of this rank's calls, once they are done on the device."""
        self.calls.synchronize()
        start = self.calls.moment()
        for _ in range(calls):
            action()
        end = self.calls.moment()
        self.calls.synchronize()
        return self.calls.seconds_between(start, end)

    def _tries(self, action: Action, calls: int, tries: int) -> list[float]:
        own = []
        for _ in range(tries):
            self.together()
            own.append(self.elapsed(action, calls) / calls)
        return self.slowest(*own)

    def together(self) -> None:
        """Waits until all ranks are here."""
        dist.barrier()


def calls_of_a_try(once: float) -> int:
    """How often an action is called in a try, if one call takes so many seconds."""
    return max(1, min(MOST_CALLS, int(SHORTEST_TRY_SECONDS / max(once, 1e-7))))


def _spread(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return 1.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high / max(low, 1e-12)
