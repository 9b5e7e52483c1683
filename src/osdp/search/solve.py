"""The exact answer to one problem: bound it with groups, judge what comes out, refine the groups until both agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from osdp.search.branching import Branching
from osdp.search.chain import ChainSearch, is_chain
from osdp.search.chain_tables import count_choices
from osdp.search.effort import now
from osdp.search.evaluate import Verdict, evaluate
from osdp.search.groups import LAST_STAGES, arranged, coarse_groups, first_groups, refine, runs_of, tidied
from osdp.search.highs import INFINITY, Answer, solve
from osdp.search.milp import ColumnsOfStages, Group, Model
from osdp.search.polish import Judged, Runs, polished
from osdp.search.problem import SECONDS, TOLERANCE, Problem, StageChoice, VariantTable

_MANY = 40  # single stages in a program that has the rows of all; see [Note: Asked]
_AT_ONCE = 16  # stages whose rows are added at a time
_ROUNDS = 6  # of adding rows to a relaxation
_SMALL = 200  # columns
_FIRST_SECONDS = 2.0  # for each of two relaxations that say which groups to begin with
_POLISHING_SECONDS = 1.0  # for an answer over groups
_SHARES = (1e-4, 1e-3, 1e-2)  # of the relaxation: what columns of a first try may cost above it
_WORTH_A_TRY = 0.75  # of the columns that are needed in the end: a program with more of them takes as long
_QUICK_SECONDS = 1.5  # for HiGHS's own branch and bound; see [Note: Branching] for what comes then
_SAME = 1e-6  # relative: a bound that finer groups raise by less than this is as good without them
_LONG = 50  # choices of all stages: HiGHS may take long for more of them, going stage by stage mostly does not
_FEW_STAGES = 12
_CHAIN_SHARE = 0.8  # of the time goes to that


@dataclass(frozen=True)
class Outcome:
    """The best choice (None: nothing fits, or nothing beats the cutoff), its costs, and the proven bound on seconds.

    Optimal is what no choice beats by more than the gap that was asked for. The bound is no higher than the cutoff.
    """

    choice: tuple[StageChoice, ...] | None
    verdict: Verdict | None
    bound: float
    nodes: int
    status: str  # optimal, infeasible, limit


def relaxed_bound(problem: Problem, *, seconds: float = INFINITY) -> float:
    """A lower bound on the seconds of any choice that fits; infinite where none does."""
    kinds = ColumnsOfStages(problem, _scale(problem), coarse=True)
    groups = coarse_groups(problem)
    answer = relaxed(problem, groups, kinds, first_asked(groups), deadline=now() + seconds)[1]
    return INFINITY if answer.status == "infeasible" else max(answer.bound / kinds.scale, _kernel_seconds(problem))


def _kernel_seconds(problem: Problem) -> float:
    """What the kernels of a step take at least: no choice is faster, whatever it does beside them."""
    kinds = {id(stage.variants): stage.variants for stage in problem.stages}
    least = {key: min(sum(each.seconds for each in s.passes) for s in variants) for key, variants in kinds.items()}
    return problem.accumulation * sum(least[id(stage.variants)] for stage in problem.stages) * (1 - TOLERANCE)


def may_fit(problem: Problem) -> bool:
    """Whether the relaxation fits."""
    kinds, groups = ColumnsOfStages(problem, _scale(problem), coarse=True, timed=False), coarse_groups(problem)
    answer = relaxed(problem, groups, kinds, first_asked(groups), deadline=now() + 60.0)[1]
    return answer.status != "infeasible"


def first_asked(groups: Sequence[Group]) -> set[int] | None:
    """The stages whose rows are in the program from the start: all, unless they are many; see [Note: Asked]."""
    single = [group.first for group in groups if group.size == 1]
    return None if len(single) <= _MANY else set(single[-LAST_STAGES:])


def more_asked(asked: set[int] | None, verdict: Verdict) -> set[int]:
    """Stages that exceed the limit and whose rows are not in the program yet: the worst of them."""
    if asked is None:
        return set()
    worst = sorted(zip(verdict.excess, verdict.over, strict=True), reverse=True)
    return set([stage for _, stage in worst if stage not in asked][:_AT_ONCE])


def relaxed(
    problem: Problem,
    groups: Sequence[Group],
    kinds: ColumnsOfStages,
    asked: set[int] | None,
    *,
    excluded: Sequence[tuple[StageChoice, ...]] = (),
    deadline: float,
) -> tuple[Model, Answer, set[int] | None]:
    """A program, its relaxation and its rows: rows are added where the choice that it leans to exceeds the limit."""
    for rounds in range(_ROUNDS):
        model = Model(problem, groups, kinds=kinds, asked=asked)
        for choice in excluded:
            model.exclude(choice)
        answer = solve(model.program, relaxed=True, seconds=max(deadline - now(), 0.5))
        late = rounds + 1 == _ROUNDS or now() >= deadline
        if asked is None or answer.values is None or late or len(groups) < len(problem.stages):
            break
        more = more_asked(asked, evaluate(problem, model.rounded(answer.values)))
        if not more:
            break
        asked = asked | more
    return model, answer, asked


def solve_exactly(problem: Problem, *, cutoff: float | None = None, seconds: float = INFINITY) -> Outcome:
    """The fastest choice within the limit that beats `cutoff` seconds, with proof; `seconds` bounds the effort."""
    return Search(problem).run(cutoff=cutoff, seconds=seconds)


class Search:
    """Bounds, tries and refines until the best choice meets the bound.

    Every round relaxes the program for a bound and the columns' reduced costs, and solves it without the columns that
    cannot be part of a better choice. When time is up it can be run again: it goes on where it was.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = self.asked = problem
        self.cutoff, self.gap, self.deadline = INFINITY, 0.0, 0.0
        self.scale = _scale(problem)
        self.groups: list[Group] = []  # of the program, which is made when it is needed
        self.rows: set[int] | None = None
        self.best: tuple[tuple[StageChoice, ...], Verdict] | None = None
        self.judged: tuple[StageChoice, ...] = ()
        self.bound, self.nodes = 0.0, 0
        self.decided = True  # whether the last program was solved
        self.proven: Outcome | None = None
        self.chain = ChainSearch(problem, self.scale) if is_long(problem) else None
        self.repeats = 2 * len({stage.alike for stage in problem.stages}) <= len(problem.stages)  # else no sums decide
        self.slow: object = None  # the program on which HiGHS took too long
        self.tree: tuple[object, Branching] | None = None
        self.excluded: list[tuple[StageChoice, ...]] = []  # what HiGHS's tolerance let pass, by a few bytes

    def _first_groups(self) -> list[Group]:
        """As few groups as give the same bound: with more of them a program has many answers that cost the same."""
        coarse, fine = coarse_groups(self.problem), first_groups(self.problem)
        if len(coarse) == len(fine) or first_asked(fine) is not None:
            return fine
        answers = [
            relaxed(self.problem, groups, self.kinds, first_asked(groups), deadline=now() + _FIRST_SECONDS)[1]
            for groups in (coarse, fine)
        ]
        known = all(answer.status == "optimal" for answer in answers)
        return coarse if known and answers[0].bound >= answers[1].bound * (1 - _SAME) else fine

    @cached_property
    def kinds(self) -> ColumnsOfStages:
        return ColumnsOfStages(self.problem, self.scale)

    @property
    def reached(self) -> float:
        """The seconds of the best choice that is known, here or elsewhere."""
        return self.cutoff if self.best is None else min(self.best[1].seconds, self.cutoff)

    @property
    def to_beat(self) -> float:
        """What a choice has to take less than for the search to go on."""
        return self.reached * (1 - self.gap)

    @property
    def left(self) -> float:
        return self.deadline - now()

    def run(self, *, cutoff: float | None = None, gap: float = 0.0, seconds: float = INFINITY) -> Outcome:
        """The fastest choice that beats `cutoff` seconds, as far as it is found and proven in these `seconds`.

        With a `gap` it ends as soon as no choice is faster by more than that share. A later cutoff is no higher than
        those before it: what was proven without a gap is the answer from then on.
        """
        if self.proven is not None:
            return self.proven
        self.cutoff, self.gap = INFINITY if cutoff is None else cutoff, gap
        self.deadline = now() + seconds
        self.nodes = 0
        if self.bound >= self.to_beat * (1 - TOLERANCE):
            return self._done("optimal")
        if self.chain is not None and self._stage_by_stage(self.chain):
            return self._done("optimal")
        if not self.groups:
            self.groups = self._first_groups()
            self.rows = first_asked(self.groups)
        while self.left > 0 or self.chain is None:
            model, relaxation, self.rows = relaxed(
                self.asked, self.groups, self.kinds, self.rows, excluded=self.excluded, deadline=self.deadline
            )
            if relaxation.status == "infeasible" or relaxation.bound / self.scale >= self.to_beat:
                return self._done("optimal")
            self.bound = max(self.bound, relaxation.bound / self.scale)
            if self.best is None and self.rows is not None:
                self._round_off(model, relaxation)
            verdict = self._round(model, relaxation)
            if verdict is None:
                return self._done("optimal")
            if self.best is not None and self.bound >= self.to_beat * (1 - TOLERANCE):
                return self._done("optimal")
            if self.best is None and self.cutoff == INFINITY and verdict.over:
                self._look_lower(max(verdict.excess))
            if self.left <= 0:
                return self._done("limit")
            more = more_asked(self.rows, verdict)
            refined = refine(self.groups, verdict)
            if refined == self.groups and not more and not self._forbid(model, verdict):
                return self._done("optimal" if self.decided else "limit")
            self.groups, self.rows = refined, None if self.rows is None else self.rows | more

        return self._done("limit")

    def _stage_by_stage(self, chain: ChainSearch) -> bool:
        """[Note: Labels] Whether that proves that nothing beats the best; the bound is what it proves else."""
        answer = chain.run(cutoff=self.reached, gap=self.gap, seconds=self.left * _CHAIN_SHARE)
        self.nodes += answer.labels
        if answer.choice is not None:
            self._offer(answer.choice, evaluate(self.problem, answer.choice))
        self.bound = max(self.bound, min(answer.bound, self.to_beat))
        return answer.proven

    def _forbid(self, model: Model, verdict: Verdict) -> bool:
        """The program is the problem itself here: what differs is HiGHS's tolerance. False where nothing differs."""
        over = verdict.peak - self.problem.limit
        if over <= 0:
            return False
        if model.exclude(self.judged):
            self.excluded.append(self.judged)
        else:
            self.asked = replace(self.asked, limit=self.asked.limit - over)
        return True

    def _round(self, model: Model, relaxation: Answer) -> Verdict | None:
        """The program's optimum, judged; None where it proves that nothing beats the best.

        Few columns first: an optimum that costs less than any column that was left out is that of all columns.
        """
        verdict = Verdict(INFINITY, 0)
        for share in _shares(model, relaxation):
            if share < INFINITY and self.slow == self._program:
                continue
            beating = self.to_beat * self.scale * (1 + TOLERANCE) - relaxation.objective
            room = min(beating, share * relaxation.objective)
            unused = None if room == INFINITY else self._dear(model, relaxation, room)
            if room < beating < INFINITY and unused is not None:
                needed = self._dear(model, relaxation, beating)
                if (~unused).sum() > _WORTH_A_TRY * (~needed).sum():
                    continue  # about as many columns as are needed in the end
            room = room if unused is None or unused.any() else beating  # then it has all columns
            enough = self.to_beat * self.scale * (1 - TOLERANCE)
            answer = self._solved(model, unused, enough, all_columns=room == beating)
            self.nodes += answer.nodes
            self.decided = answer.status != "limit"
            if answer.status in ("infeasible", "bounded") and room == beating:
                return None
            if answer.values is not None:
                verdict = self._judge(model, answer)
            whole = answer.objective - relaxation.objective <= room or room == beating
            reached = answer.bound if whole else min(answer.bound, relaxation.objective + room)
            self.bound = max(self.bound, min(reached / self.scale, self.to_beat))
            if (whole and answer.status == "optimal") or self.left <= 0:
                break
            if verdict.over and refine(self.groups, verdict) != self.groups:
                break  # finer groups say more than this program's own optimum would
        return verdict

    def _solved(self, model: Model, unused: np.ndarray | None, enough: float, *, all_columns: bool) -> Answer:
        """By HiGHS's branch and bound if that is quick; else, for a proof over all columns, by our own."""
        if self.slow != self._program:
            seconds = min(self.left, _QUICK_SECONDS) if self.repeats else self.left
            answer = solve(model.program, unused=unused, enough=enough, seconds=seconds)
            if answer.status != "limit":
                return answer
            self.slow = self._program
            if not all_columns or self.left <= 0:
                return answer
            if answer.values is not None:
                self._judge(model, answer)
        if self.tree is None or self.tree[0] != self._program:
            levels = model.levels()
            without = np.zeros(len(model.program.cost), bool)
            if unused is not None:
                without[: len(unused)] = unused
            tree = Branching(model.program, levels, without, lambda values: self._compared(model, values))
            self.tree = self._program, tree
        enough = min(enough, self.to_beat * self.scale * (1 - TOLERANCE))
        return self.tree[1].grow(enough=enough, seconds=self.left)

    @property
    def _program(self) -> object:
        """What says which program is solved."""
        rows = None if self.rows is None else frozenset(self.rows)
        return tuple(self.groups), rows, self.asked.limit, len(self.excluded)

    def _compared(self, model: Model, values: np.ndarray) -> float:
        """Judges an integral answer of the tree; says what is to be beaten from then on."""
        self._judge(model, Answer("limit", INFINITY, 0.0, 0, values))
        return self.to_beat * self.scale * (1 - TOLERANCE)

    def _round_off(self, model: Model, relaxation: Answer) -> None:
        """A first choice of many single stages: the one that a relaxation leans to, with a limit that it meets."""
        limit, rows = self.asked.limit, self.rows
        for _ in range(_ROUNDS):
            if relaxation.values is None or len(self.groups) < len(self.problem.stages):
                return
            choice = model.rounded(relaxation.values)
            verdict = evaluate(self.problem, choice)
            self._offer(choice, verdict)
            if verdict.peak <= self.problem.limit:
                return
            limit -= verdict.peak - self.problem.limit
            lower = replace(self.asked, limit=limit)
            model, relaxation, rows = relaxed(lower, self.groups, self.kinds, rows, deadline=self.deadline)

    def _look_lower(self, excess: int) -> None:
        """A first choice: what exceeds the limit is tried again with a limit that is lower by as much."""
        limit, rows = self.asked.limit, self.rows
        for share in (1e-4, 1e-3, 1e-3, 1e-2, 1e-2, 1e-2):
            limit -= excess
            lower = replace(self.asked, limit=limit)
            model, relaxation, rows = relaxed(lower, self.groups, self.kinds, rows, deadline=self.deadline)
            if relaxation.values is None:
                return
            unused = self._dear(model, relaxation, share * relaxation.objective)
            answer = solve(model.program, unused=unused, seconds=min(1.0, self.left))
            if answer.values is not None:
                self.nodes += answer.nodes
                excess = max(self._judge(model, answer).peak - self.problem.limit, 0)
            if self.best is not None or self.left <= 0:
                return

    def _dear(self, model: Model, relaxation: Answer, room: float) -> np.ndarray:
        """Columns that cost more than `room` above the relaxation as soon as they are used."""
        if relaxation.reduced_costs is None or relaxation.values is None:
            return np.zeros(len(model.program.cost), dtype=bool)
        dear = (relaxation.reduced_costs > room) & (relaxation.values < 0.5)
        return dear & np.array(model.program.integer)

    def _judge(self, model: Model, answer: Answer) -> Verdict:
        choice, verdict = arranged(self.problem, self.groups, model.read(answer), enough=self.problem.limit)
        self.judged = choice
        self._offer(choice, verdict)
        if verdict.seconds < self.reached and len(self.groups) < len(self.problem.stages):
            self._polish(choice)
        return verdict

    def _polish(self, choice: tuple[StageChoice, ...]) -> None:
        """Looks for a choice near this one that fits, and beats the best."""
        runs = [Group(first, stop) for first, stop in runs_of(self.problem)]
        taken = [choice[group.first : group.stop] for group in runs]

        def arrange(choices: Runs) -> Judged:
            return arranged(self.problem, runs, choices, enough=self.problem.limit)

        found = polished(self.problem, taken, arrange, deadline=now() + min(self.left, _POLISHING_SECONDS))
        if found is not None:
            self._offer(*found)

    def _offer(self, choice: tuple[StageChoice, ...], verdict: Verdict) -> None:
        if verdict.peak <= self.problem.limit and verdict.seconds < self.reached:
            self.best = choice, verdict

    def _done(self, status: str) -> Outcome:
        outcome = self._outcome(status)
        if status == "optimal":
            self.bound = max(self.bound, outcome.bound)
            self.proven = None if self.gap else outcome
        return outcome

    def _outcome(self, status: str) -> Outcome:
        if self.best is None and status == "limit" and self.cutoff == INFINITY:
            self._offer(*lowest_peak(self.problem))
        if self.best is None:
            bound = self.to_beat if status == "optimal" else self.bound
            return Outcome(None, None, bound, self.nodes, "infeasible" if status == "optimal" else status)
        choice, verdict = tidied(self.problem, *self.best)
        bound = min(verdict.seconds, self.to_beat) if status == "optimal" else self.bound
        return Outcome(choice, verdict, bound, self.nodes, status)


def is_long(problem: Problem) -> bool:
    """Whether going through the stages one by one is quicker than HiGHS.

    That takes more than a few choices, and few stages, or few kinds of them: of alike ones only sums are told apart.
    """
    kinds = {id(stage.variants): stage for stage in problem.stages}
    counts = {key: count_choices(stage) for key, stage in kinds.items()}
    many = sum(counts[id(stage.variants)] for stage in problem.stages) > _LONG
    few = len(problem.stages) <= _FEW_STAGES or 2 * len(kinds) <= len(problem.stages)
    return many and few and is_chain(problem)


def _shares(model: Model, relaxation: Answer) -> tuple[float, ...]:
    """What columns may cost above the relaxation, try by try; a small program is not worth more than two."""
    if relaxation.reduced_costs is None:
        return (INFINITY,)
    return (*(_SHARES if len(model.program.cost) > _SMALL else _SHARES[-1:]), INFINITY)


def lowest_peak(problem: Problem, *, seconds: float = 5.0) -> tuple[tuple[StageChoice, ...], Verdict]:
    """A choice that needs as little memory as any, whatever its seconds; of very many stages, nearly so."""
    groups = first_groups(problem)
    kinds, rows = ColumnsOfStages(problem, _scale(problem), coarse=True, timed=False), first_asked(groups)
    if rows is not None:
        return _nearly_lowest(problem, groups, kinds, rows)
    model = Model(problem, groups, kinds=kinds, minimise_peak=True)
    answer = solve(model.program, seconds=seconds)
    if answer.values is None:
        answer = solve(model.program, seconds=60.0)
    return arranged(problem, groups, model.read(answer))


def _nearly_lowest(
    problem: Problem, groups: list[Group], kinds: ColumnsOfStages, rows: set[int]
) -> tuple[tuple[StageChoice, ...], Verdict]:
    """The best of what relaxations lean to, with rows added where those are highest."""
    groups = [Group(stage, stage + 1) for stage in range(groups[0].first, groups[-1].stop)]
    best: tuple[tuple[StageChoice, ...], Verdict] | None = None
    for _ in range(_ROUNDS):
        model = Model(problem, groups, kinds=kinds, asked=rows, minimise_peak=True)
        answer = solve(model.program, relaxed=True)
        if answer.values is None:
            break
        choice = model.rounded(answer.values)
        verdict = evaluate(problem, choice)
        if best is None or verdict.peak < best[1].peak:
            best = choice, verdict
        rows = rows | more_asked(rows, evaluate(replace(problem, limit=verdict.peak * 99 // 100), choice))
    if best is None:
        choice = model.rounded(np.zeros(len(model.program.cost)))
        best = choice, evaluate(problem, choice)
    return best


def _scale(problem: Problem) -> float:
    """Seconds are scaled to a step of about a thousand, so that a gap of zero means what it says."""
    kinds = {id(stage.variants): stage.variants for stage in problem.stages}
    least = {key: min(map(_least_seconds, variants)) for key, variants in kinds.items()}
    return 1000.0 / max(sum(least[id(stage.variants)] for stage in problem.stages) * problem.accumulation, 1e-9)


def _least_seconds(variant: VariantTable) -> float:
    """About what a stage takes at least: its kernels, and the quickest option of each unit."""
    options = (min(sum(getattr(o, name).at(1) for name in SECONDS) for o in unit) for unit in variant.units)
    return sum(stage.seconds for stage in variant.passes) + sum(options)
