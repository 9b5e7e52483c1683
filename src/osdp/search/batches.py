"""The best batch size, by branch and bound over intervals of it.

[Note: Interval]
More samples need more memory and take fewer seconds each. So for all batch sizes from `low` to `high`, the memory of
`low` together with the seconds of `high` gives a bound on the seconds per sample. The interval with the best bound is
halved until it is a single batch size, which is then solved exactly; what cannot beat that is never looked at.

[Note: Nearly optimal]
A gain of GAIN is less than what the time model is off by, and to prove that none is left takes much less time. So the
batch size of the best baseline is improved up to that; what is left of the first part of the time goes to a proof
without a gap. From then on what cannot beat the best plan by GAIN is left out, and so it is of large batch sizes, whose
rates hardly differ, from the start. The stated bound counts all that was left out.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from osdp.search.effort import now
from osdp.search.evaluate import Verdict, evaluate
from osdp.search.highs import INFINITY
from osdp.search.narrow import Part, narrowed, parts_of, widened
from osdp.search.problem import Problem, StageChoice
from osdp.search.solve import Outcome, Search, may_fit, relaxed_bound

MakeProblem = Callable[[int, int], Problem]  # (batch of the memory, batch of the seconds)
Shown = Callable[[int, int, int, float], None]  # batch, batch sizes solved and to come, seconds per sample of the best
Bounds = dict[tuple[int, int, int], float]  # seconds per sample: number of a candidate, lowest and highest batch size
BOUNDING_SECONDS = 10.0
LARGE, GAIN = 32, 1e-3  # see [Note: Nearly optimal]
EXACT_SHARE = 0.25  # of the time goes to a proof without a gap
PART_SHARE = 1 / 16  # of the time at most goes to each part of the space; see [Note: Narrower] in osdp.search.narrow
FIRST_SHARE = 0.25  # of the time goes to the batch size of the best baseline, before others are looked at


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


def _found(candidate: Candidate, batch: int, choice: tuple[StageChoice, ...], verdict: Verdict) -> Found:
    each = verdict.seconds / (batch * candidate.accumulation)
    return Found(candidate, batch, choice, verdict, each, each, 0, 0.0, 0, "optimal")


def judged(candidate: Candidate, batch: int, choice: tuple[StageChoice, ...]) -> Found | None:
    """A choice at a batch size, by its costs alone; None where it does not fit."""
    problem = candidate.make(batch, batch)
    verdict = evaluate(problem, choice)
    return _found(candidate, batch, choice, verdict) if verdict.peak <= problem.limit else None


def _improved(found: Found, search: Search, *, seconds: float, gap: float = 0.0) -> Found:
    """The best choice at the same batch size, as far as it is found in these seconds: bounds are compared with it."""
    outcome = search.run(cutoff=found.verdict.seconds, gap=gap, seconds=seconds)
    if outcome.choice is None or outcome.verdict is None:
        return found
    return _found(found.candidate, found.batch, outcome.choice, outcome.verdict)


def _solved(search: Search, cutoff: float | None, *, exactly: float, left: float) -> Outcome:
    """The best choice at a batch size: first without a gap, then with that of [Note: Nearly optimal]."""
    outcome = search.run(cutoff=cutoff, seconds=min(exactly, left)) if exactly > 0 else None
    if outcome is not None and (outcome.status != "limit" or exactly >= left):
        return outcome
    again = search.run(cutoff=cutoff, gap=GAIN, seconds=left - max(exactly, 0.0))
    return again if outcome is None else replace(again, nodes=again.nodes + outcome.nodes)


def smaller_batch(found: Found, seconds_per_sample: float, *, seconds: float) -> Found:
    """The same with the smallest batch size whose plan takes no more than these seconds a sample, as good as it gets.

    A choice that fits also does with fewer samples, so the one that was found says which size that is; then the best
    choice at that size is taken.
    """

    def is_quick(batch: int) -> bool:
        tried = judged(found.candidate, batch, found.choice)
        return tried is not None and tried.seconds_per_sample <= seconds_per_sample

    low = found.candidate.low
    size = low + bisect_left(range(low, found.batch), True, key=is_quick)
    if size == found.batch:
        return found
    same = judged(found.candidate, size, found.choice)
    assert same is not None
    better = _improved(same, Search(same.candidate.make(size, size)), seconds=seconds / 2, gap=GAIN)
    return smaller_batch(better, seconds_per_sample, seconds=seconds / 2)  # its choice may allow for fewer still


def _larger_batch(found: Found) -> Found:
    """The same choice at the largest batch size at which it fits: seconds per sample never grow with it."""
    low, high = found.batch, found.candidate.high
    exceeds = bisect_left(
        range(low + 1, high + 1), True, key=lambda b: judged(found.candidate, b, found.choice) is None
    )
    larger = judged(found.candidate, low + exceeds, found.choice)
    return found if larger is None or larger.seconds_per_sample >= found.seconds_per_sample else larger


def largest_batch(make: MakeProblem, *, most: int, seconds: float = BOUNDING_SECONDS) -> int:
    """The largest batch size whose relaxation fits, or when time is up one that none exceeds; 0 where none fits."""
    deadline = now() + seconds

    def fits(batch: int) -> bool:
        return may_fit(make(batch, batch))

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1 and now() < deadline:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high - 1


Seed = tuple[Candidate, int, tuple[StageChoice, ...]]  # a choice at a batch size, known before the search


def search_batches(
    candidates: list[Candidate], *, seconds: float, seeds: Sequence[Seed] = (), progress: Shown | None = None
) -> Found | None:
    """The fastest plan per sample over all candidates; None where nothing fits. See [Note: Interval].

    No seed that fits is faster than what is found, and no plan of a part of the space that is found in the part's
    share of the time. When time is up, the first plan found at the smallest batch sizes that are left does, if there
    is none yet.
    """
    began, wall = now(), time.monotonic()
    known = [found for seed in seeds if (found := judged(*seed)) is not None]
    best = min(known, key=lambda found: found.seconds_per_sample, default=None)
    if best is not None:
        best = _larger_batch(best)
    bounds: Bounds = {}
    for part in parts_of(candidates[0].make(candidates[0].low, candidates[0].low)) if candidates else ():
        few = _Intervals(candidates, best, bounds, part=part)
        few.run(seconds=seconds * PART_SHARE)
        best = few.best
    search = _Intervals(candidates, best, bounds, progress=progress)
    search.run(seconds=seconds - (now() - began), exactly=seconds * EXACT_SHARE, first=seconds * FIRST_SHARE)
    return None if search.best is None else replace(search.answer(search.best), seconds=time.monotonic() - wall)


class _Intervals:
    """Branch and bound over intervals of batch sizes, from a plan to be beaten; see [Note: Interval].

    With a `part`, only that of the space is searched; bounds are of all of it, and hold for each part too.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        best: Found | None,
        bounds: Bounds,
        *,
        part: Part | None = None,
        progress: Shown | None = None,
    ) -> None:
        self.candidates, self.best = list(candidates), best
        self._bounds, self._part, self._progress = bounds, part, progress
        self._queue: list[tuple[float, int, int, int]] = []
        self._searches: dict[tuple[int, int], Search] = {}  # of batch sizes that were begun
        self._unproven, self._nodes, self._solved = INFINITY, 0, 0

    def run(self, *, seconds: float, exactly: float = 0.0, first: float = 0.0) -> None:
        """Goes on for this time: of it `exactly` for a proof without a gap, `first` to improve what is known."""
        began = now()
        if self._part is not None:  # a little at least is known of it, however long bounds take
            known = self.best
            number = 0 if known is None else self.candidates.index(known.candidate)
            self._solve(number, self.candidates[number].low if known is None else known.batch, left=seconds / 2)
        for number, candidate in enumerate(self.candidates):
            self._push(number, candidate.low, candidate.high)
        # which sizes may be best is known before most time goes to one of them
        while self._queue and self._queue[0][2] < self._queue[0][3] and now() - began < seconds / 2:
            self._split(*heapq.heappop(self._queue)[1:])
        if self.best is not None and first > 0:
            number = self.candidates.index(self.best.candidate)
            self.best = _improved(self.best, self._search(number, self.best.batch), seconds=first, gap=GAIN)
        while self._queue:
            bound, number, low, high = heapq.heappop(self._queue)
            best = INFINITY if self.best is None else self.best.seconds_per_sample
            if bound >= best:
                break
            spent = now() - began
            if bound >= best * (1 - GAIN) and (low >= LARGE or exactly <= spent):
                self._unproven = min(self._unproven, bound)
            elif spent < seconds and low < high:
                self._split(number, low, high)
            else:
                if spent >= seconds:
                    self._unproven = min(self._unproven, bound)
                    if self.best is not None:
                        break
                self._solve(number, low, exactly=exactly - spent, left=max(seconds - spent, 1.0))

    def _push(self, number: int, low: int, high: int) -> None:
        candidate = self.candidates[number]
        if (number, low, high) not in self._bounds:
            bound = relaxed_bound(candidate.make(low, high)) / (high * candidate.accumulation)
            self._bounds[number, low, high] = bound
        if self._bounds[number, low, high] < INFINITY:
            heapq.heappush(self._queue, (self._bounds[number, low, high], number, low, high))

    def _split(self, number: int, low: int, high: int) -> None:
        self._push(number, low, (low + high) // 2)
        self._push(number, (low + high) // 2 + 1, high)

    def _search(self, number: int, batch: int) -> Search:
        if (number, batch) not in self._searches:
            problem = self.candidates[number].make(batch, batch)
            self._searches[number, batch] = Search(problem if self._part is None else narrowed(problem, self._part))
        return self._searches[number, batch]

    def _solve(self, number: int, batch: int, *, exactly: float = 0.0, left: float) -> None:
        """The best choice at one batch size, or what is known of it when time is up."""
        candidate = self.candidates[number]
        samples = batch * candidate.accumulation
        cutoff = None if self.best is None else self.best.seconds_per_sample * samples
        outcome = _solved(self._search(number, batch), cutoff, exactly=exactly, left=left)
        self._nodes, self._solved = self._nodes + outcome.nodes, self._solved + 1
        if cutoff is None or outcome.bound < cutoff:
            self._unproven = min(self._unproven, outcome.bound / samples)
        if outcome.status != "limit":
            del self._searches[number, batch]  # it will not be asked again
        if outcome.choice is not None and outcome.verdict is not None:
            choice = outcome.choice
            if self._part is not None:
                choice = widened(candidate.make(batch, batch), self._part, choice)
            found = _found(candidate, batch, choice, outcome.verdict)
            if self.best is None or found.seconds_per_sample < self.best.seconds_per_sample:
                self.best = found
        if self._progress is not None:
            each = INFINITY if self.best is None else self.best.seconds_per_sample
            self._progress(batch, self._solved, len(self._queue), each)

    def answer(self, best: Found) -> Found:
        """The best plan with its proof."""
        bound = min(self._unproven, best.seconds_per_sample)
        share = bound / best.seconds_per_sample
        status = "optimal" if share >= 1 - 1e-9 else "nearly optimal" if share >= 1 - GAIN - 1e-9 else "time limit"
        return replace(best, bound=bound, nodes=self._nodes, solved=self._solved, status=status)
