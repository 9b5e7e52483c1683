"""The exact answer to one problem: bound it with groups, judge what comes out, refine the groups until both agree."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from osdp.search.highs import INFINITY, Answer, solve
from osdp.search.problem import Problem, StageChoice, Verdict, evaluate
from osdp.search.program import Group, Model

_TOLERANCE = 1e-9  # relative: what two sums of the same seconds in another order may differ by
_LAST = 3  # stages at the end of a run that are looked at one by one from the start: the peak is mostly there


@dataclass(frozen=True)
class Outcome:
    """The best choice (None: nothing fits, or nothing beats the cutoff), its costs, and the proven bound on seconds."""

    choice: tuple[StageChoice, ...] | None
    verdict: Verdict | None
    bound: float
    nodes: int
    status: str  # optimal, infeasible, limit


def first_groups(problem: Problem) -> list[Group]:
    """Each run of alike stages: its first by itself, then ever smaller groups towards its end, the last ones alone."""
    groups: list[Group] = []
    for first, stop in _runs(problem):
        sizes = [1] * _LAST
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
    for first, stop in _runs(problem):
        edges = sorted({first, first + 1, max(first + 1, stop - 1), stop})
        groups += [Group(a, b) for a, b in pairwise(edges)]
    return groups


def _runs(problem: Problem) -> Iterator[tuple[int, int]]:
    first = 0
    for _, run in groupby(problem.stages, key=lambda stage: stage.alike):
        stop = first + len(list(run))
        yield first, stop
        first = stop


def relaxed_bound(problem: Problem) -> float:
    """A lower bound on the seconds of any choice that fits; infinite where none does."""
    scale = _scale(problem)
    answer = solve(Model(problem, coarse_groups(problem), scale=scale).program, relaxed=True)
    return INFINITY if answer.status == "infeasible" else answer.bound / scale


def solve_exactly(problem: Problem, *, cutoff: float | None = None, seconds: float = INFINITY) -> Outcome:
    """The fastest choice within the limit that beats `cutoff` seconds, with proof; `seconds` bounds the effort."""
    return _Search(problem, cutoff, seconds).run()


class _Search:
    """Bounds, tries and refines until the best choice meets the bound.

    Every round relaxes the program for a bound and the columns' reduced costs, looks for a good choice among the cheap
    columns, and solves the program without the columns that cannot be part of a better one.
    """

    def __init__(self, problem: Problem, cutoff: float | None, seconds: float) -> None:
        self.problem = self.asked = problem
        self.cutoff = INFINITY if cutoff is None else cutoff
        self.deadline = time.monotonic() + seconds
        self.scale = _scale(problem)
        self.best: tuple[tuple[StageChoice, ...], Verdict] | None = None
        self.judged: tuple[StageChoice, ...] = ()
        self.bound, self.nodes = 0.0, 0
        self.excluded: list[tuple[StageChoice, ...]] = []  # what HiGHS's tolerance let pass, by a few bytes

    @property
    def to_beat(self) -> float:
        return self.cutoff if self.best is None else min(self.best[1].seconds, self.cutoff)

    def run(self) -> Outcome:
        groups = first_groups(self.problem)
        while True:
            model = Model(self.asked, groups, scale=self.scale)
            for choice in self.excluded:
                model.exclude(choice)
            relaxation = solve(model.program, relaxed=True)
            if relaxation.status == "infeasible" or relaxation.bound / self.scale >= self.to_beat:
                return self._done("optimal")
            self.bound = max(self.bound, relaxation.bound / self.scale)
            if self.to_beat == INFINITY:
                self._look_among_cheap(model, groups, relaxation)
            verdict = self._round(model, groups, relaxation)
            if verdict is None:
                return self._done("optimal")
            if self.best is not None and self.best[1].seconds <= self.bound * (1 + _TOLERANCE):
                return self._done("optimal")
            if time.monotonic() >= self.deadline:
                return self._done("limit")
            refined = refine(groups, verdict)
            if refined == groups:  # the program is the problem itself: what differs is HiGHS's tolerance
                over = verdict.peak - self.problem.limit
                if over <= 0:
                    return self._done("optimal")
                if model.exclude(self.judged):
                    self.excluded.append(self.judged)
                else:
                    self.asked = replace(self.asked, limit=self.asked.limit - over)
            groups = refined

    def _round(self, model: Model, groups: list[Group], relaxation: Answer) -> Verdict | None:
        """One exact solve of the program; None where it proves that nothing beats the best."""
        unused = None
        if self.to_beat < INFINITY:
            room = self.to_beat * self.scale * (1 + _TOLERANCE) - relaxation.objective
            unused = self._dear(model, relaxation, room)
        enough = self.to_beat * self.scale * (1 - _TOLERANCE)
        answer = solve(model.program, unused=unused, enough=enough, seconds=self.deadline - time.monotonic())
        self.nodes += answer.nodes
        if answer.status in ("infeasible", "bounded"):
            return None
        self.bound = max(self.bound, min(answer.bound / self.scale, self.to_beat))
        if answer.values is None:
            return Verdict(INFINITY, 0)
        return self._judge(model, groups, answer)

    def _look_among_cheap(self, model: Model, groups: list[Group], relaxation: Answer) -> None:
        """A first choice from few columns, so that the exact solve can drop most of the others.

        What exceeds the limit for the order of its stages is tried again with a limit that is lower by as much.
        """
        limit = self.asked.limit
        for share in (1e-4, 1e-4, 1e-3, 1e-3, 1e-2, 1e-2, 1e-2, 1e-2):
            if limit < self.asked.limit:
                model = Model(replace(self.asked, limit=limit), groups, scale=self.scale)
                relaxation = solve(model.program, relaxed=True)
                if relaxation.status == "infeasible":
                    return
            unused = self._dear(model, relaxation, share * relaxation.objective)
            answer = solve(model.program, unused=unused, seconds=min(1.0, self.deadline - time.monotonic()))
            if answer.values is not None:
                self.nodes += answer.nodes
                limit -= max(self._judge(model, groups, answer).peak - self.problem.limit, 0)
            if self.best is not None or time.monotonic() >= self.deadline:
                return

    def _dear(self, model: Model, relaxation: Answer, room: float) -> np.ndarray:
        """Columns that cost more than `room` above the relaxation as soon as they are used."""
        if relaxation.reduced_costs is None or relaxation.values is None:
            return np.zeros(len(model.program.cost), dtype=bool)
        dear = (relaxation.reduced_costs > room) & (relaxation.values < 0.5)
        return dear & np.array(model.program.integer)

    def _judge(self, model: Model, groups: list[Group], answer: Answer) -> Verdict:
        choice, verdict = arranged(self.problem, groups, model.read(answer))
        self.judged = choice
        if verdict.peak <= self.problem.limit and verdict.seconds < self.to_beat:
            self.best = choice, verdict
        return verdict

    def _done(self, status: str) -> Outcome:
        if self.best is None:
            bound = INFINITY if status == "optimal" else self.bound
            return Outcome(None, None, bound, self.nodes, "infeasible" if status == "optimal" else status)
        choice, verdict = tidied(self.problem, *self.best)
        bound = verdict.seconds if status == "optimal" else self.bound
        return Outcome(choice, verdict, bound, self.nodes, status)


def lowest_peak(problem: Problem, *, seconds: float = 5.0) -> tuple[tuple[StageChoice, ...], Verdict]:
    """A choice that needs as little memory as any, whatever its seconds."""
    groups = first_groups(problem)
    model = Model(problem, groups, scale=0.0, minimise_peak=True)
    answer = solve(model.program, seconds=seconds)
    if answer.values is None:
        answer = solve(model.program, seconds=60.0)
    return arranged(problem, groups, model.read(answer))


def _scale(problem: Problem) -> float:
    """Seconds are scaled to a step of about a thousand, so that a gap of zero means what it says."""
    seconds = sum(min(s.forward_seconds + s.backward_seconds for s in stage.shapes) for stage in problem.stages)
    return 1000.0 / max(seconds * problem.accumulation, 1e-9)


def arranged(
    problem: Problem, groups: Sequence[Group], choices: Sequence[Sequence[StageChoice]]
) -> tuple[tuple[StageChoice, ...], Verdict]:
    """Gives every group's choices an order: the one of a few with the lowest peak."""
    best: tuple[tuple[StageChoice, ...], Verdict] | None = None
    for key in (_need, lambda table, c: -_need(table, c)):
        ordered: list[StageChoice] = []
        for group, members in zip(groups, choices, strict=True):
            table = problem.stages[group.first]
            ordered += sorted(members, key=lambda c, table=table, key=key: (key(table, c), c.shape, c.options))
        verdict = evaluate(problem, tuple(ordered))
        if best is None or verdict.peak < best[1].peak:
            best = tuple(ordered), verdict
        if all(group.size == 1 for group in groups):
            break
    assert best is not None
    return best


def tidied(
    problem: Problem, choice: tuple[StageChoice, ...], verdict: Verdict
) -> tuple[tuple[StageChoice, ...], Verdict]:
    """The same choices with equal ones side by side in every run, where that fits: easier to read, no slower."""
    runs = list(_runs(problem))
    for sign in (1, -1):
        ordered: list[StageChoice] = []
        for first, stop in runs:
            table = problem.stages[first]
            ordered += sorted(choice[first:stop], key=lambda c, t=table, s=sign: (s * _need(t, c), c.shape, c.options))
        again = evaluate(problem, tuple(ordered))
        if again.peak <= problem.limit and again.seconds <= verdict.seconds * (1 + _TOLERANCE):
            return tuple(ordered), again
    return choice, verdict


def _need(table: object, choice: StageChoice) -> int:
    """How much a stage needs while it runs backward: those that need most go first, where least is held."""
    shape = table.shapes[choice.shape]  # type: ignore[attr-defined]
    own = np.array(shape.backward.activations)
    for options, (o, k) in zip(shape.units, choice.options, strict=True):
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
