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
from osdp.search.problem import Problem, StageChoice
from osdp.search.solve import Outcome, Search, is_long, may_fit, relaxed_bound, solve_exactly

MakeProblem = Callable[[int, int], Problem]  # (batch of the memory, batch of the seconds)
BOUNDING_SECONDS = 10.0
LARGE, GAIN = 32, 1e-3  # see [Note: Nearly optimal]
EXACT_SHARE = 0.25  # of the time goes to a proof without a gap
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


def _best_whole(
    candidate: Candidate, batch: int, found: Found | None, *, cutoff: float | None, seconds: float
) -> Found | None:
    """The best with every block gathered whole, if it beats what was found: a small problem, mostly close to it."""
    problem = candidate.make(batch, batch)
    kinds = {id(stage.variants): stage.variants for stage in problem.stages}
    numbers = {key: [n for n, variant in enumerate(variants) if variant.is_whole] for key, variants in kinds.items()}
    if not all(numbers.values()):
        return found
    kept = {key: tuple(variants[n] for n in numbers[key]) for key, variants in kinds.items()}
    stages = tuple(replace(stage, variants=kept[id(stage.variants)]) for stage in problem.stages)
    outcome = solve_exactly(replace(problem, stages=stages, known={}), cutoff=cutoff, seconds=seconds)
    if outcome.choice is None:
        return found
    choice = tuple(
        replace(taken, variant=numbers[id(stage.variants)][taken.variant])
        for stage, taken in zip(problem.stages, outcome.choice, strict=True)
    )
    better = judged(candidate, batch, choice)
    if better is None or (found is not None and better.seconds_per_sample >= found.seconds_per_sample):
        return found
    return better


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


def _sizes(candidate: Candidate) -> list[int]:
    """Batch sizes over all of a candidate's, each twice the one before, the largest first."""
    sizes = [candidate.high]
    while sizes[-1] > candidate.low:
        sizes.append(max(candidate.low, sizes[-1] // 2))
    return sizes


def _first_look(
    candidates: Sequence[Candidate], best: Found | None, *, looked_at: set[tuple[int, int]], seconds: float
) -> Found | None:
    """The best of quick tries with whole blocks at few batch sizes: what time runs out on is not left without a plan.

    Which batch size is best is hardly known before any has been solved, and the first one that is may take all time.
    """
    deadline = now() + seconds
    tries = [(c, batch) for c in candidates for batch in _sizes(c) if (id(c), batch) not in looked_at]
    for number, (candidate, batch) in enumerate(tries):
        left = deadline - now()
        if left <= 0:
            break
        cutoff = None if best is None else best.seconds_per_sample * batch * candidate.accumulation
        best = _best_whole(candidate, batch, best, cutoff=cutoff, seconds=left / (len(tries) - number))
    return best


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
    candidates: list[Candidate],
    *,
    seconds: float,
    seeds: Sequence[Seed] = (),
    progress: Callable[[int, int, int, float], None] | None = None,
) -> Found | None:
    """The fastest plan per sample over all candidates; None where nothing fits. See [Note: Interval].

    No seed that fits is faster than what is found. When time is up, the first plan found at the smallest batch sizes
    that are left does, if there is none yet.
    """
    began, wall = now(), time.monotonic()
    queue: list[tuple[float, int, int, int]] = []
    best: Found | None = None
    for seed in seeds:
        found = judged(*seed)
        if found is not None and (best is None or found.seconds_per_sample < best.seconds_per_sample):
            best = found
    searches: dict[tuple[int, int], Search] = {}  # of batch sizes that were begun

    def search(candidate: Candidate, batch: int) -> Search:
        key = id(candidate), batch
        if key not in searches:
            searches[key] = Search(candidate.make(batch, batch))
        return searches[key]

    looked_at: set[tuple[int, int]] = set()
    if best is not None:
        best = _larger_batch(best)
        looked_at.add((id(best.candidate), best.batch))
        if not is_long(best.candidate.make(best.batch, best.batch)):  # else going stage by stage is as quick
            first = best.candidate, best.batch, best
            best = _best_whole(*first, cutoff=best.verdict.seconds, seconds=seconds * FIRST_SHARE / 2)
    best = _first_look(candidates, best, looked_at=looked_at, seconds=seconds * FIRST_SHARE / 2)
    unproven, nodes, solved = INFINITY, 0, 0

    def push(number: int, low: int, high: int) -> None:
        candidate = candidates[number]
        bound = relaxed_bound(candidate.make(low, high)) / (high * candidate.accumulation)
        if bound < INFINITY:
            heapq.heappush(queue, (bound, number, low, high))

    def split(number: int, low: int, high: int) -> None:
        push(number, low, (low + high) // 2)
        push(number, (low + high) // 2 + 1, high)

    for number, candidate in enumerate(candidates):
        push(number, candidate.low, candidate.high)
    # which sizes may be best is known before most time goes to one of them
    while queue and queue[0][2] < queue[0][3] and now() - began < seconds / 2:
        split(*heapq.heappop(queue)[1:])
    if best is not None:
        best = _improved(best, search(best.candidate, best.batch), seconds=seconds * FIRST_SHARE, gap=GAIN)
    while queue:
        bound, number, low, high = heapq.heappop(queue)
        candidate = candidates[number]
        if best is not None and bound >= best.seconds_per_sample:
            break
        spent = now() - began
        left, exactly = seconds - spent, seconds * EXACT_SHARE - spent
        is_enough = best is not None and bound >= best.seconds_per_sample * (1 - GAIN)
        if is_enough and (low >= LARGE or exactly <= 0):
            unproven = min(unproven, bound)
            continue
        if left <= 0:
            unproven = min(unproven, bound)
            if best is not None:
                break
        elif low < high:
            split(number, low, high)
            continue
        samples = low * candidate.accumulation
        cutoff = None if best is None else best.seconds_per_sample * samples
        outcome = _solved(search(candidate, low), cutoff, exactly=exactly, left=max(left, 1.0))
        nodes, solved = nodes + outcome.nodes, solved + 1
        if cutoff is None or outcome.bound < cutoff:
            unproven = min(unproven, outcome.bound / samples)
        if outcome.status != "limit":
            del searches[id(candidate), low]  # it will not be asked again
        if outcome.choice is not None and outcome.verdict is not None:
            each = outcome.verdict.seconds / samples
            if best is None or each < best.seconds_per_sample:
                best = _found(candidate, low, outcome.choice, outcome.verdict)
        if progress is not None:
            progress(low, solved, len(queue), INFINITY if best is None else best.seconds_per_sample)
    if best is None:
        return None
    bound = min(unproven, best.seconds_per_sample)
    share = bound / best.seconds_per_sample
    status = "optimal" if share >= 1 - 1e-9 else "nearly optimal" if share >= 1 - GAIN - 1e-9 else "time limit"
    return replace(best, bound=bound, nodes=nodes, seconds=time.monotonic() - wall, solved=solved, status=status)
