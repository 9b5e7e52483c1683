"""Claim: the search finds what trying every choice finds, on thousands of random small problems."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from random_problems import problems, random_problem

from osdp.search.brute import brute_force, stage_choices
from osdp.search.problem import Problem, evaluate
from osdp.search.solve import relaxed_bound, solve_exactly


def size(problem: Problem) -> float:
    return math.prod(len(list(stage_choices(stage))) for stage in problem.stages)


@settings(max_examples=2500, deadline=None)
@given(problems)
def test_search_equals_brute_force(problem: Problem) -> None:
    if size(problem) > 3000:
        return
    expected = brute_force(problem)
    outcome = solve_exactly(problem)
    if expected is None:
        assert outcome.status == "infeasible"
        assert outcome.choice is None
        return
    assert outcome.status == "optimal"
    assert outcome.choice is not None
    verdict = evaluate(problem, outcome.choice)
    assert verdict.peak <= problem.limit
    assert verdict.seconds == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
    assert outcome.bound <= verdict.seconds * (1 + 1e-9)
    assert relaxed_bound(problem) <= verdict.seconds * (1 + 1e-7) + 1e-9


def test_random_problems_are_neither_all_hopeless_nor_all_idle() -> None:
    problems = [random_problem(seed) for seed in range(300)]
    answers = [brute_force(problem) for problem in problems if size(problem) <= 3000]
    fits = [answer for answer in answers if answer is not None]
    assert len(answers) > 250
    assert 0.2 * len(answers) < len(fits) < 0.9 * len(answers)
