"""The best batch size, by branch and bound over intervals of it.

[Note: Interval]
More samples need more memory and take fewer seconds each. So for all batch sizes from `low` to `high`, the memory of
`low` together with the seconds of `high` gives a bound on the seconds per sample. The interval with the best bound is
halved until it is a single batch size, which is then solved exactly; what cannot beat that is never looked at.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from osdp.search.highs import INFINITY
from osdp.search.problem import Problem, StageChoice, Verdict
from osdp.search.solve import relaxed_bound, solve_exactly

MakeProblem = Callable[[int, int], Problem]  # (batch of the memory, batch of the seconds)
MOST_SAMPLES = 1 << 16
BOUNDING_SECONDS = 10.0


@dataclass(frozen=True)
class Candidate:
    """A family of problems, one for each micro-batch from `low` to `high`; `key` names it to whoever made it."""

    key: object
    make: MakeProblem
    accumulation: int
    low: int
    high: int


@dataclass(frozen=True)
class Found:
    """The best plan over all batch sizes; `bound` is in seconds per sample of one device, like `seconds_per_sample`."""

    candidate: Candidate
    batch: int
    choice: tuple[StageChoice, ...]
    verdict: Verdict
    seconds_per_sample: float
    bound: float
    nodes: int
    seconds: float
    solved: int
    status: str


def largest_batch(make: MakeProblem, *, seconds: float = BOUNDING_SECONDS) -> int:
    """The largest batch size whose relaxation fits, or when time is up one that none exceeds; 0 where none fits."""
    deadline = time.monotonic() + seconds

    def fits(batch: int) -> bool:
        return relaxed_bound(make(batch, batch)) < INFINITY

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > 1 and time.monotonic() < deadline:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high - 1


def search_batches(
    candidates: list[Candidate], *, seconds: float, progress: Callable[[int, int, int, float], None] | None = None
) -> Found | None:
    """The fastest plan per sample over all candidates; None where nothing fits. See [Note: Interval].

    When time is up, the first plan found at the smallest batch sizes that are left does, if there is none yet.
    """
    began = time.monotonic()
    queue: list[tuple[float, int, int, int]] = []
    best: Found | None = None
    unproven, nodes, solved = INFINITY, 0, 0

    def push(number: int, low: int, high: int) -> None:
        candidate = candidates[number]
        bound = relaxed_bound(candidate.make(low, high)) / (high * candidate.accumulation)
        if bound < INFINITY:
            heapq.heappush(queue, (bound, number, low, high))

    for number, candidate in enumerate(candidates):
        push(number, candidate.low, candidate.high)
    while queue:
        bound, number, low, high = heapq.heappop(queue)
        candidate = candidates[number]
        if best is not None and bound >= best.seconds_per_sample:
            break
        left = seconds - (time.monotonic() - began)
        if left <= 0:
            unproven = min(unproven, bound)
            if best is not None:
                break
        elif low < high:
            middle = (low + high) // 2
            push(number, low, middle)
            push(number, middle + 1, high)
            continue
        samples = low * candidate.accumulation
        cutoff = None if best is None else best.seconds_per_sample * samples
        outcome = solve_exactly(candidate.make(low, low), cutoff=cutoff, seconds=max(left, 1.0))
        nodes, solved = nodes + outcome.nodes, solved + 1
        if outcome.status == "limit":
            unproven = min(unproven, outcome.bound / samples)
        if outcome.choice is not None and outcome.verdict is not None:
            each = outcome.verdict.seconds / samples
            if best is None or each < best.seconds_per_sample:
                best = Found(candidate, low, outcome.choice, outcome.verdict, each, each, 0, 0.0, 0, "optimal")
        if progress is not None:
            progress(low, solved, len(queue), INFINITY if best is None else best.seconds_per_sample)
    if best is None:
        return None
    bound = min(unproven, best.seconds_per_sample)
    status = "optimal" if bound >= best.seconds_per_sample * (1 - 1e-9) else "time limit"
    return replace(best, bound=bound, nodes=nodes, seconds=time.monotonic() - began, solved=solved, status=status)
