"""Groups of equal stages: which a program begins with, how answers over them are put in order, how they are refined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from osdp.search.evaluate import Verdict, evaluate
from osdp.search.milp import Group
from osdp.search.problem import TOLERANCE, Problem, StageChoice

LAST_STAGES = 3  # stages at the end of a run that are looked at one by one from the start: the peak is mostly there


def first_groups(problem: Problem) -> list[Group]:
    """Each run of alike stages: its first by itself, then ever smaller groups towards its end, the last ones alone."""
    groups: list[Group] = []
    for first, stop in runs_of(problem):
        sizes = [1] * LAST_STAGES
        while sum(sizes) < stop - first - 1:
            sizes.append(sizes[-1] * 2)
        at, cut = stop, []
        for size in sizes:
            if at - size > first + 1:
                cut.append(Group(at - size, at))
                at -= size
        cut += [Group(first + 1, at)] if at > first + 1 else []
        groups += [Group(first, first + 1), *reversed(cut)]
    return groups


def coarse_groups(problem: Problem) -> list[Group]:
    """Each run of alike stages in at most three: its first, its last, and all between."""
    groups: list[Group] = []
    for first, stop in runs_of(problem):
        edges = sorted({first, first + 1, max(first + 1, stop - 1), stop})
        groups += [Group(a, b) for a, b in pairwise(edges)]
    return groups


def runs_of(problem: Problem) -> Iterator[tuple[int, int]]:
    first = 0
    for _, run in groupby(problem.stages, key=lambda stage: stage.alike):
        stop = first + len(list(run))
        yield first, stop
        first = stop


def arranged(
    problem: Problem, groups: Sequence[Group], choices: Sequence[Sequence[StageChoice]], *, enough: int = 0
) -> tuple[tuple[StageChoice, ...], Verdict]:
    """Gives every group's choices an order: of a few that with the lowest peak, or the first within `enough` bytes."""
    best: tuple[tuple[StageChoice, ...], Verdict] | None = None
    for key in (_need, lambda table, c: -_need(table, c)):
        ordered: list[StageChoice] = []
        for group, members in zip(groups, choices, strict=True):
            table = problem.stages[group.first]
            needs = {c: key(table, c) for c in set(members)}
            ordered += sorted(members, key=lambda c, needs=needs: (needs[c], c.variant, c.options))
        verdict = evaluate(problem, tuple(ordered))
        if best is None or verdict.peak < best[1].peak:
            best = tuple(ordered), verdict
        if best[1].peak <= enough or all(group.size == 1 for group in groups):
            break
    assert best is not None
    return best


def tidied(
    problem: Problem, choice: tuple[StageChoice, ...], verdict: Verdict
) -> tuple[tuple[StageChoice, ...], Verdict]:
    """The same choices with equal ones side by side in every run, where that fits: easier to read, no slower."""
    runs = list(runs_of(problem))
    for sign in (1, -1):
        ordered: list[StageChoice] = []
        for first, stop in runs:
            table = problem.stages[first]
            needs = {c: sign * _need(table, c) for c in set(choice[first:stop])}
            ordered += sorted(choice[first:stop], key=lambda c, needs=needs: (needs[c], c.variant, c.options))
        if tuple(ordered) == choice:
            return choice, verdict
        again = evaluate(problem, tuple(ordered))
        if again.peak <= problem.limit and again.seconds <= verdict.seconds * (1 + TOLERANCE):
            return tuple(ordered), again
    return choice, verdict


def _need(table: object, choice: StageChoice) -> int:
    """How much a stage needs while it runs backward: those that need most go first, where least is held."""
    variant = table.variants[choice.variant]  # type: ignore[attr-defined]
    own = np.array(variant.backward.activations)
    for options, (o, k) in zip(variant.units, choice.options, strict=True):
        own = own + options[o].backward @ np.array([1, k])
    return -int(own.max()) if len(own) else 0


def refine(groups: Sequence[Group], verdict: Verdict) -> list[Group]:
    """Splits the groups around the stages that exceed the limit; without any, every group."""
    wanted = {stage + d for stage in verdict.over for d in (-1, 0, 1)}
    refined: list[Group] = []
    for group in groups:
        inside = [stage for stage in range(group.first, group.stop) if stage in wanted]
        if group.size == 1 or (wanted and not inside):
            refined.append(group)
            continue
        cuts = {group.first, (group.first + group.stop) // 2, group.stop}
        for stage in (inside[:2] + inside[-2:]) if inside else []:
            cuts.update((stage, stage + 1))
        edges = sorted(cuts)
        refined += [Group(a, b) for a, b in pairwise(edges)]
    return refined
