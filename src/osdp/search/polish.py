"""A choice that a program over groups gave, made to fit and then as quick as moves of single stages make it.

A program over groups leaves the order of alike stages open, so its answer mostly exceeds the limit by a little. Moves
exchange the choice of one stage for one that another stage of its run has; each is judged by its whole cost. Nothing
is proven here: the result is an answer to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from osdp.search.effort import now
from osdp.search.evaluate import Verdict
from osdp.search.problem import Problem, StageChoice

Judged = tuple[tuple[StageChoice, ...], Verdict]
Runs = Sequence[Sequence[StageChoice]]  # the choices of every run of alike stages, in any order
Arrange = Callable[[Runs], Judged]


def polished(problem: Problem, runs: Runs, arrange: Arrange, *, deadline: float) -> Judged | None:
    """The best choice that moves lead to from this one; None where they do not lead below the limit in time."""
    best = arrange(runs)
    while now() < deadline:
        found: tuple[float, Runs, Judged] | None = None
        for moved in _moves(runs):
            judged = arrange(moved)
            rank = _rank(problem, best[1], judged[1])
            if rank is not None and (found is None or rank < found[0]):
                found = rank, moved, judged
            if now() >= deadline:
                break
        if found is None:
            break
        _, runs, best = found
    return best if best[1].peak <= problem.limit else None


def _rank(problem: Problem, now: Verdict, moved: Verdict) -> float | None:
    """How good a move is, the least being the best; None where it helps nothing."""
    if now.peak <= problem.limit:
        better = moved.peak <= problem.limit and moved.seconds < now.seconds * (1 - 1e-9)
        return moved.seconds if better else None
    won = min(now.peak - moved.peak, now.peak - problem.limit)  # more than what is missing is of no use
    return (moved.seconds - now.seconds) / won if won > 0 else None


def _moves(runs: Runs) -> Iterator[Runs]:
    """Every exchange of one stage's choice for another one that its run has."""
    for number, run in enumerate(runs):
        kinds = sorted(set(run), key=lambda choice: (choice.variant, choice.options))
        for old in kinds:
            for new in kinds:
                if old is not new:
                    moved = list(run)
                    moved[moved.index(old)] = new
                    yield [*runs[:number], moved, *runs[number + 1 :]]
