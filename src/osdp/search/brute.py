"""The oracle for tests: every choice there is, judged one by one."""

from __future__ import annotations

from itertools import product

from osdp.search.chain_tables import stage_choices
from osdp.search.evaluate import evaluate
from osdp.search.problem import Problem, StageChoice


def brute_force(problem: Problem) -> tuple[tuple[StageChoice, ...], float] | None:
    """The fastest choice within the limit and its seconds; None where nothing fits."""
    best: tuple[tuple[StageChoice, ...], float] | None = None
    for choice in product(*(list(stage_choices(stage)) for stage in problem.stages)):
        verdict = evaluate(problem, choice)
        if verdict.peak <= problem.limit and (best is None or verdict.seconds < best[1]):
            best = choice, verdict.seconds
    return best
