"""Claims: the search finds what trying every choice finds, on 500 random small problems; on 2,000 in `make test-slow`.

Also where rows enter the program only once they are exceeded, where HiGHS's branch and bound gives up at once and
ours does all, and where stages are gone through one by one, with few labels at a time and coarse grids too. When time
is up it still gives a choice that fits, no slower than the best of the small parts of its space that come first, and a
bound that no choice beats.
"""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import example, given, settings
from random_problems import random_blocks, random_problem, seeds

from osdp.search import batches, chain, highs, solve
from osdp.search.batches import Candidate, search_batches
from osdp.search.brute import brute_force, stage_choices
from osdp.search.chain import ChainSearch, is_chain
from osdp.search.effort import SLOWEST, now
from osdp.search.evaluate import evaluate
from osdp.search.highs import Answer, Program
from osdp.search.narrow import narrowed, parts_of
from osdp.search.problem import Problem
from osdp.search.solve import Outcome, relaxed_bound, solve_exactly


def size(problem: Problem) -> float:
    return math.prod(len(list(stage_choices(stage))) for stage in problem.stages)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
@settings(max_examples=250)
@given(seed=seeds)
@example(seed=2191353)  # no kernels take any time
@example(seed=181176149)  # a clock that is never in the best choice
def test_search_equals_brute_force(part: int, seed: int) -> None:
    problem = random_problem(seed)
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


@pytest.mark.parametrize("seed", range(300))
def test_rows_added_when_exceeded_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(seed)
    if size(problem) > 1500:
        return
    monkeypatch.setattr(solve, "_MANY", 0)
    monkeypatch.setattr(solve, "_AT_ONCE", 1)
    expected, outcome = brute_force(problem), solve_exactly(problem)
    assert (outcome.verdict is None) == (expected is None)
    if expected is not None and outcome.verdict is not None:
        assert outcome.verdict.seconds == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
        assert relaxed_bound(problem) <= expected[1] * (1 + 1e-7) + 1e-9


def gives_up(program: Program, *, relaxed: bool = False, **limits: float) -> Answer:
    """HiGHS's branch and bound, if every program took it too long."""
    return highs.solve(program, relaxed=True, **limits) if relaxed else Answer("limit", math.inf, 0.0, 0, None)


def test_an_infeasible_program_is_known_where_other_ways_of_solving_it_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(highs, "_OTHER_WAYS", ((("presolve", "off"), ("simplex_iteration_limit", 0)),))
    fits = []
    for seed in range(60):
        problem = random_problem(seed)
        if size(problem) <= 1500:
            fits.append(relaxed_bound(problem) < math.inf)
            assert fits[-1] or brute_force(problem) is None
    assert fits.count(False) > 5


def test_our_branch_and_bound_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "solve", gives_up)
    problems = [problem for seed in range(5000, 5100) if size(problem := random_problem(seed)) <= 1000]
    assert sum(grown(problem) for problem in problems) > 20


@pytest.mark.parametrize("ours", [False, True])
def test_blocks_in_two_shapes(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if ours:
        monkeypatch.setattr(solve, "solve", gives_up)
    used = sum(grown(random_blocks(seed)) for seed in range(200, 206))
    assert (used > 2) == ours


def grown(problem: Problem) -> bool:
    """Compares the search with brute force; says whether our own branch and bound was at work."""
    expected, search = brute_force(problem), solve.Search(problem)
    outcome = search.run()
    assert (outcome.verdict is None) == (expected is None)
    if expected is not None and outcome.verdict is not None:
        assert outcome.status == "optimal"
        assert outcome.verdict.seconds == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
    return search.tree is not None


@pytest.mark.parametrize(("widths", "cells", "priced"), [((1, 3, 100_000), 17, 1), (chain._WIDTHS, 1 << 15, 3)])
def test_stage_by_stage_finds_the_same(
    widths: tuple[int, ...], cells: int, priced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_WIDTHS", widths)
    monkeypatch.setattr(chain, "_CELLS", cells)
    monkeypatch.setattr(chain, "_PRICED", priced)
    problems = [random_problem(seed) for seed in range(7000, 7250)] + [random_blocks(seed) for seed in range(8)]
    fitting = [by_stages(problem) for problem in problems if size(problem) <= 1000 and is_chain(problem)]
    assert 15 < sum(fitting) < len(fitting)


def by_stages(problem: Problem) -> bool:
    """Compares going through the stages one by one with brute force; says whether anything fits."""
    expected = brute_force(problem)
    answer = ChainSearch(problem, solve._scale(problem)).run(cutoff=math.inf, seconds=math.inf)
    assert answer.proven
    assert (answer.choice is None) == (expected is None)
    if expected is None or answer.choice is None:
        return False
    verdict = evaluate(problem, answer.choice)
    assert verdict.peak <= problem.limit
    assert verdict.seconds == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
    below = ChainSearch(problem, solve._scale(problem)).run(cutoff=expected[1] * (1 - 1e-7), seconds=math.inf)
    assert below.proven
    assert below.choice is None
    return True


def test_long_problems_go_stage_by_stage_and_what_is_left_over_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "_LONG", 0)
    monkeypatch.setattr(chain, "_WIDTHS", (1, 2))  # too few labels for most proofs
    problems = [random_problem(seed) for seed in range(7000, 7040)]
    searches = [(problem, solve.Search(problem)) for problem in problems if size(problem) <= 1500]
    for problem, search in searches:
        expected, outcome = brute_force(problem), search.run()
        assert (outcome.verdict is None) == (expected is None)
        if expected is not None and outcome.verdict is not None:
            assert outcome.status == "optimal"
            assert outcome.verdict.seconds == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
    assert any(search.chain is not None for _, search in searches)


def test_stage_by_stage_without_time_has_an_honest_bound() -> None:
    for seed in range(7000, 7040):
        problem = random_problem(seed)
        expected = brute_force(problem) if size(problem) <= 1000 and is_chain(problem) else None
        if expected is not None:
            answer = ChainSearch(problem, solve._scale(problem)).run(cutoff=math.inf, seconds=0.0)
            assert answer.bound <= expected[1] * (1 + 1e-9)


@pytest.mark.parametrize("long", [0, 1 << 60])
def test_with_a_gap_nothing_is_faster_by_more_than_that(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "_LONG", long)
    gap, ended_early = 0.2, 0
    for seed in range(7000, 7060):
        problem = random_problem(seed)
        if size(problem) > 1000:
            continue
        expected, outcome = brute_force(problem), solve.Search(problem).run(gap=gap)
        assert (outcome.verdict is None) == (expected is None)
        if expected is not None and outcome.verdict is not None:
            assert outcome.status == "optimal"
            assert outcome.verdict.peak <= problem.limit
            assert outcome.verdict.seconds * (1 - gap) <= outcome.bound * (1 + 1e-9)
            assert outcome.bound <= expected[1] * (1 + 1e-9)
            ended_early += outcome.bound < expected[1] * (1 - 1e-6)
    assert ended_early > 5


def test_after_its_first_part_a_search_leaves_out_what_gains_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "EXACT_SHARE", 0.0)
    monkeypatch.setattr(batches, "GAIN", 0.2)
    statuses = set()
    for seed in range(7000, 7060):
        problem = random_problem(seed)
        expected = brute_force(problem) if size(problem) <= 1000 else None
        if expected is not None:
            found = search_batches([Candidate(seed, lambda *_, p=problem: p, 1, 1, 1)], seconds=60.0)
            assert found is not None
            assert found.bound <= expected[1] * (1 + 1e-9) <= found.seconds_per_sample * (1 + 2e-9)
            assert found.seconds_per_sample * 0.8 <= found.bound * (1 + 1e-9)
            statuses.add(found.status)
    assert "nearly optimal" in statuses <= {"optimal", "nearly optimal"}


@pytest.mark.parametrize("many", [0, 40])
def test_without_time_there_is_a_choice_and_an_honest_bound(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "_MANY", many)
    fitting = 0
    for seed in range(60):
        problem = random_problem(seed)
        expected = brute_force(problem) if size(problem) <= 1500 else None
        if expected is None:
            continue
        found = search_batches([Candidate(seed, lambda *_, p=problem: p, 1, 1, 1)], seconds=0.0)
        assert found is not None
        assert found.verdict.peak <= problem.limit
        assert found.bound <= expected[1] * (1 + 1e-9) <= found.seconds_per_sample * (1 + 2e-9)
        fitting += 1
    assert fitting > 15


class NoTime(solve.Search):
    """A search that time ends at once, unless its problem is a part of another one."""

    whole: Problem

    def run(self, **limits: float | None) -> Outcome:
        return Outcome(None, None, 0.0, 0, "limit") if self.problem is self.whole else super().run(**limits)


def test_without_time_nothing_in_the_parts_that_come_first_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "Search", NoTime)
    monkeypatch.setattr(batches, "GAIN", 0.0)
    faster, smaller = 0, set()
    for seed in range(9000, 9040):
        problem = random_problem(seed)
        if size(problem) > 1000:
            continue
        monkeypatch.setattr(NoTime, "whole", problem, raising=False)
        found = search_batches([Candidate(seed, lambda *_, p=problem: p, 1, 1, 1)], seconds=60.0)
        for part in parts_of(problem):
            expected = brute_force(narrowed(problem, part))
            if expected is not None:
                assert found is not None
                assert found.verdict.peak <= problem.limit
                assert found.seconds_per_sample <= expected[1] * (1 + 1e-9)
                smaller.add(part)
        whole = brute_force(problem)
        faster += whole is not None and (found is None or found.seconds_per_sample > whole[1] * (1 + 1e-6))
    assert faster  # else the parts would say nothing
    assert len(smaller) == 2


def test_random_problems_are_neither_all_hopeless_nor_all_idle() -> None:
    problems = [random_problem(seed) for seed in range(100)]
    answers = [brute_force(problem) for problem in problems if size(problem) <= 3000]
    fits = [answer for answer in answers if answer is not None]
    assert len(answers) > 80
    assert 0.2 * len(answers) < len(fits) < 0.9 * len(answers)


def test_effort_is_cpu_time_and_at_least_a_quarter_of_the_wall_clock() -> None:
    effort, cpu, wall = now(), time.process_time(), time.monotonic()
    time.sleep(0.2)
    slept, used, passed = now() - effort, time.process_time() - cpu, time.monotonic() - wall
    assert passed / SLOWEST * 0.99 <= slept <= passed / SLOWEST + used + 0.01
    effort, cpu = now(), time.process_time()
    while time.process_time() - cpu < 0.1:
        pass
    assert now() - effort >= 0.1
