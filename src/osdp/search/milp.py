"""The decision as a mixed-integer program over groups of stages; see [Note: Problem], [Note: Group], [Note: Asked].

[Note: Group]
A run of alike stages is one group: how many of them take which variant and option, not which one does. What holds for
every order of a group's stages is kept as a row, what depends on the order is left out, so the program's optimum is a
bound. A group of one stage has all its rows: with such groups only, the program is the problem itself.

[Note: Asked]
Of a thousand distinct stages few are where memory runs out. Rows of a stage enter the program only once a choice has
exceeded the limit there: until then they are left out, which again makes the optimum a bound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from osdp.search.clock_rows import Which
from osdp.search.highs import INFINITY, Answer, Program
from osdp.search.problem import SECONDS, FloatArray, MicroBatch, Problem, StageChoice, StageTable
from osdp.search.stage_columns import MIB, Chosen, Column, ExactRow, StageColumns, Terms
from osdp.search.streams import COMPUTE, WIRE

_Part = tuple[Sequence[int], Sequence[float]]  # of a row: columns, and their values
_GATHER, _REDUCTION = ("tail", "ahead_backward"), ("head", "reducing")
_SEEN = (  # of the average rows: in which pass, and which neighbours' buffers
    (False, ()),
    (False, (("tail", "ahead"),)),
    (True, ()),
    (True, (_GATHER,)),
    (True, (_REDUCTION,)),
    (True, (_GATHER, _REDUCTION)),
)


@dataclass(frozen=True)
class Group:
    """Stages `first` up to `stop`, all alike."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first


_ABSENT = -1


@dataclass
class _Clocks:
    """The columns of the clocks between two passes; None is the start of the step."""

    columns: dict[int, int | None]
    pace: int | None


class ColumnsOfStages:
    """The kinds of stages of one problem: made once, for all programs over it.

    `coarse` ones are for bounds: they have fewer columns. Without `timed` a program only asks whether anything fits.
    """

    def __init__(self, problem: Problem, scale: float, *, coarse: bool = False, timed: bool = True) -> None:
        self.timed = timed
        self.scale = scale
        latest = _STAGES_LATE * max(map(_most_seconds, {id(s.variants): s for s in problem.stages}.values())) * scale
        found: dict[int, StageColumns] = {}
        self.of_stage: list[StageColumns] = []
        for table in problem.stages:
            key = id(table.variants)
            if key not in found:
                found[key] = StageColumns(table, problem, scale, latest, coarse=coarse, timed=timed)
            self.of_stage.append(found[key])


_STAGES_LATE = 4  # a clock is never this many stages before another one of the same place


def _most_seconds(stage: StageTable) -> float:
    """More than what a stage takes in any choice, if nothing ran side by side."""
    found = 1e-9
    for variant in stage.variants:
        kernels = sum(each.seconds for each in variant.passes)
        most = (
            max(sum(abs(getattr(o, name).at(k)) for name in SECONDS for k in {1, o.slices}) for o in unit)
            for unit in variant.units
        )
        found = max(found, kernels + 2 * sum(most))
    return found


class Model:
    """Builds the program of a problem over groups, and reads choices out of its solution.

    `asked` are the single stages whose rows it has (all, where None); see [Note: Asked].
    """

    def __init__(
        self,
        problem: Problem,
        groups: Sequence[Group],
        *,
        kinds: ColumnsOfStages,
        asked: Collection[int] | None = None,
        minimise_peak: bool = False,
    ) -> None:
        self.problem, self.groups = problem, groups
        self.kinds = [kinds.of_stage[group.first] for group in groups]
        self.starts = np.cumsum([0, *(len(kind) for kind in self.kinds)])
        self.program = Program()
        self._columns(minimise_peak)
        self._peak = self.program.column(cost=1.0) if minimise_peak else None
        self._always = self.program.column()
        self._spanning = [(p, c) for p, kind in enumerate(self.kinds) for c in kind.spanning]
        rows = [p for p, group in enumerate(groups) if asked is None or group.size > 1 or group.first in asked]
        self._before, self._behind = self._levels(rows)
        for position in rows:
            if groups[position].size == 1:
                self._exact_rows(position)
            else:
                self._average_rows(position)
        # [Constraint] the optimizer's bytes fit
        stepping = self._vector("stepping").tolist()
        parts = [(range(len(stepping)), stepping), self._held(self._behind[0])]
        self._within_limit(parts, -problem.stepping / MIB)
        self._host()
        self._totals()
        if not minimise_peak and problem.overlap > 0 and kinds.timed:
            for micro, times in problem.micro_batches:
                self._clocks(micro, times * problem.overlap)

    # Time

    def _clocks(self, micro: MicroBatch, cost: float) -> None:
        """[Constraint] the two streams of a micro-batch go through all passes; see [Note: Clock rows]."""
        clocks = _Clocks({COMPUTE: None, WIRE: None}, None)
        order = range(len(self.groups))
        for backward in (False, True):
            previous: StageColumns | None = None
            for position in reversed(order) if backward else order:
                if previous is not None and previous is not self.kinds[position]:
                    self._leave_run(clocks, previous, (backward, micro))
                clocks = self._pass(position, (backward, micro), clocks)
                previous = self.kinds[position]
            if previous is not None:
                self._leave_run(clocks, previous, (backward, micro))
            clocks.pace = None
        done = self.program.column(cost=cost)
        for clock in (COMPUTE, WIRE):
            self._after(done, clocks.columns.get(clock, _ABSENT), [])

    def _pass(self, position: int, which: Which, before: _Clocks) -> _Clocks:
        kind, size, start = self.kinds[position], self.groups[position].size, int(self.starts[position])
        assert kind.clocks is not None
        behind = _Clocks({}, None)
        entries = [entry for entry in kind.clocks.entries[which] if entry.before in before.columns]
        for clock in {entry.behind for entry in entries}:
            # only these two are there in every choice; the others may be never, which is before the start
            behind.columns[clock] = self.program.column(lower=0.0 if clock in (COMPUTE, WIRE) else -INFINITY)
        same = {entry.before: entry.terms for entry in entries if entry.before == entry.behind}
        for entry in entries:
            column, given = behind.columns[entry.behind], before.columns[entry.before]
            if size == 1 or entry.before == entry.behind:
                self._after(column, given, self._placed(start, entry.terms))
                continue
            stays = (entry.before, entry.least_over_before), (entry.behind, entry.least_over_behind)
            for clock, over in stays:
                if over is not None and clock in same:
                    self._after(column, given, self._placed(start, same[clock]), over)
        pace = kind.clocks.paces[which]
        if pace is not None and COMPUTE in before.columns:
            given = before.pace
            if given is None:
                given = self.program.column(lower=-INFINITY)
                self._after(given, before.columns[COMPUTE], [], -pace.most_before)
            behind.pace = self.program.column(lower=-INFINITY)
            self._after(behind.pace, given, self._placed(start, pace.terms))
        return behind

    def _leave_run(self, clocks: _Clocks, kind: StageColumns, which: Which) -> None:
        """The computation behind a run of alike stages comes after their pace."""
        pace = kind.clocks.paces[which] if kind.clocks is not None else None
        if pace is not None and clocks.pace is not None and clocks.columns.get(COMPUTE) is not None:
            self._after(clocks.columns[COMPUTE], clocks.pace, [], pace.least_behind)
        clocks.pace = None

    def _placed(self, start: int, terms: Terms) -> list[tuple[int, float]]:
        return [(self._column(start, column), value) for column, value in terms.items()]

    def _after(self, column: int | None, given: int | None, terms: list[tuple[int, float]], more: float = 0.0) -> None:
        """[Constraint] a clock comes after a given one (None: the start) by at least these terms."""
        if given == _ABSENT or column is None:
            return
        columns = [column, *([] if given is None else [given]), *(each for each, _ in terms)]
        values = [1.0, *([] if given is None else [-1.0]), *(-value for _, value in terms)]
        self.program.row(columns, values, lower=more)

    def _columns(self, minimise_peak: bool) -> None:
        """[Constraint] within every group, what its kind of stage says, as often as it has stages."""
        program, sizes = self.program, [float(group.size) for group in self.groups]
        foreign: list[tuple[int, float]] = []
        for kind, size, start in zip(self.kinds, sizes, self.starts[:-1].tolist(), strict=True):
            program.cost += [0.0] * len(kind) if minimise_peak else kind.cost
            program.upper += kind.upper if size == 1 else [size * upper if upper else 0.0 for upper in kind.upper]
            program.integer += kind.integer
            for terms, lower, upper in kind.rows:
                columns = [self._column(start, column) for column in terms]
                program.row(columns, list(terms.values()), lower=lower and lower * size, upper=upper and upper * size)
            for key, cost in kind.foreign_cost.items() if not minimise_peak else ():
                foreign.append((self._column(start, key), cost))
        program.lower += [0.0] * len(program.cost)
        for column, cost in foreign:
            program.cost[column] += cost

    def _column(self, start: int, column: Column) -> int:
        """The program's column of a kind's, whose first is at `start`; or that of another stage's unit."""
        if isinstance(column, int):
            return start + column
        stage, unit, option, sharded = column
        home = next(p for p, group in enumerate(self.groups) if group.first <= stage < group.stop)
        chosen = self.kinds[home].units[0][unit][option]
        assert self.groups[home].size == 1 and (chosen.sharded is not None or not sharded)
        return int(self.starts[home]) + (chosen.sharded if sharded and chosen.sharded is not None else chosen.count)

    def _vector(self, name: str, first: int = 0, stop: int | None = None) -> FloatArray:
        return np.concatenate([kind.vector(name) for kind in self.kinds[first:stop]] or [np.zeros(0)])

    def _span(self, position: int) -> range:
        return range(int(self.starts[position]), int(self.starts[position + 1]))

    # Memory

    def _within_limit(self, parts: Sequence[_Part], more: float = 0.0) -> None:
        """[Constraint] these bytes fit; where the peak itself is minimised, they are no more than it."""
        columns, values = [self._always], [1.0]
        for names, amounts in parts:
            columns += names
            values += amounts
        if self._peak is None:
            upper = (self.problem.limit - self.problem.constant) / MIB + more
        else:
            columns.append(self._peak)
            values.append(-1.0)
            upper = more
        self.program.row(columns, values, upper=upper)

    def _host(self) -> None:
        """[Constraint] what stages take on the host fits there: a sum, whatever their order."""
        values = self._vector("host")
        if self.problem.host_limit is not None and values.any():
            self.program.row(np.arange(len(values)), values, upper=self.problem.host_limit / MIB)

    @staticmethod
    def _held(column: int | None) -> _Part:
        return ([], []) if column is None else ([column], [1.0])

    def _levels(self, rows: Sequence[int]) -> tuple[dict[int, int | None], dict[int, int | None]]:
        """[Constraint] what stages leave behind adds up: `before` going forward, `behind` going backward.

        Columns are only where rows need them; None stands for nothing at all.
        """
        count = len(self.groups)
        everything = np.arange(self.starts[-1])
        self.program.row(
            np.append(everything, self._always), np.append(self._vector("always"), -1.0), lower=0.0, upper=0.0
        )
        before: dict[int, int | None] = {0: None}
        behind: dict[int, int | None] = {count: None}
        last = 0
        for position in sorted(set(rows) - {0}):
            before[position] = self._sum("before", last, position, before[last])
            last = position
        last = count
        for position in sorted({0, *(p + 1 for p in rows)} - {count}, reverse=True):
            behind[position] = self._sum("behind", position, last, behind[last])
            last = position
        return before, behind

    def _sum(self, name: str, first: int, stop: int, more: int | None) -> int:
        """A column for what the groups from `first` up to `stop` leave behind, and what another column says."""
        column = self.program.column(lower=-INFINITY)
        span = np.arange(self.starts[first], self.starts[stop])
        others, ones = self._held(more)
        values = [self._vector(name, first, stop), [-1.0], ones]
        self.program.row(np.concatenate([span, [column], others]), np.concatenate(values), lower=0.0, upper=0.0)
        return column

    def _far(self, stages: range, backward: bool) -> _Part:
        """Units that span stages, at the least that they hold in any of these."""
        last = 2 * len(self.problem.stages) - 1
        stage_passes = [last - stage if backward else stage for stage in stages] if self._spanning else []
        columns = [int(self.starts[position]) + chosen.count for position, chosen in self._spanning]
        return columns, [
            float(c.option.far[stage_passes].min()) / MIB for _, c in self._spanning if c.option.far is not None
        ]

    def _exact_rows(self, position: int) -> None:
        """[Constraint] at every row of both passes the bytes alive stay within the limit."""
        kind, group = self.kinds[position], self.groups[position]
        own = self._span(position)
        for backward in (False, True):
            base: list[_Part] = [
                self._held(self._before[position]),
                self._far(range(group.first, group.stop), backward),
            ]
            if backward:
                base.append(self._held(self._behind[position + 1]))
            ahead = position - 1 if backward else position + 1
            wanted = [
                (ahead, "ahead_backward" if backward else "ahead"),
                (ahead, "cast_backward" if backward else "cast"),
            ]
            wanted += [(position + 1, "reducing")] if backward else []
            for row in kind.exact(backward):
                parts = [*base, (own, row.values), *self._cross_stage_units(kind, row, backward)]
                for number, (neighbour, name) in enumerate(wanted):
                    if row.flags[number]:
                        parts += self._neighbour(position, row, number, neighbour, name)
                self._within_limit(parts)

    def _cross_stage_units(self, kind: StageColumns, row: ExactRow, backward: bool) -> list[_Part]:
        parts: list[_Part] = []
        for variant, picked in zip(kind.table.variants, row.picked, strict=True):
            for guest in variant.cross_stage_units if picked is not None else ():
                home = next(p for p, g in enumerate(self.groups) if g.first <= guest.stage < g.stop)
                start = int(self.starts[home])
                tables = guest.backward if backward else guest.forward
                for chosen, values in zip(self.kinds[home].units[0][guest.unit], tables, strict=True):
                    parts.append(([start + chosen.count], [float(values[picked][0]) / MIB]))
                    if chosen.sharded is not None:
                        parts.append(([start + chosen.sharded], [float(values[picked][1]) / MIB]))
        return parts

    def _neighbour(self, position: int, row: ExactRow, number: int, neighbour: int, name: str) -> list[_Part]:
        """What a neighbour holds at this row; a variant that does not see it is forgiven as much."""
        if not 0 <= neighbour < len(self.groups) or self.groups[neighbour].size > 1:
            return []  # which stage of a larger group is the neighbour is open; see [Note: Group]
        other, start = self.kinds[neighbour], int(self.starts[position])
        blind = [
            start + column
            for columns, sees in zip(self.kinds[position].variants, row.sees, strict=True)
            for column in columns
            if not sees[number]
        ]
        return [(self._span(neighbour), other.line(name)), (blind, [-other.most(name) / MIB] * len(blind))]

    def _average_rows(self, position: int) -> None:
        """[Constraint] the stages of a group, on average, have room for what they take.

        Each of them must have room at its own place, hence also their average. The others of the group lie before it
        or behind it, and hold at least the smaller of what they would hold in either place; all but one of them are
        neighbours within the group, whose gathers and reductions are seen at some rows.
        """
        group = self.groups[position]
        own = self._span(position)
        for backward, seen in _SEEN:
            values, more = self.kinds[position].average(group.size, backward, seen)
            parts: list[_Part] = [(own, values), self._held(self._before[position])]
            parts.append(self._far(range(group.first, group.stop), backward))
            if backward:
                parts.append(self._held(self._behind[position + 1]))
            self._within_limit(parts, more)

    def _totals(self) -> None:
        """How many stages of a kind take an option, over all groups: redundant, but a better place to branch."""
        kinds: dict[int, list[int]] = {}
        for position, group in enumerate(self.groups):
            kinds.setdefault(self.problem.stages[group.first].alike, []).append(position)
        for alike in (members for members in kinds.values() if len(members) > 1):
            stages = sum(self.groups[position].size for position in alike)
            for chosen in self.kinds[alike[0]].chosen():
                self._sum_column([int(self.starts[position]) + chosen.count for position in alike], stages)

    def levels(self) -> list[list[int]]:
        """The integer columns in the order in which to branch on them; columns for sums are added to the program.

        First how many stages of a kind take a variant, and how many of each group do; then options over all groups.
        """
        of_kind: dict[tuple[int, int], list[int]] = {}
        own = [column for column in range(int(self.starts[-1])) if self.program.integer[column]]
        totals = [n for n, flag in enumerate(self.program.integer) if flag and n >= self.starts[-1]]
        for position, (group, kind) in enumerate(zip(self.groups, self.kinds, strict=True)):
            for number, columns in enumerate(kind.variants) if len(kind.variants) > 1 else ():
                start, alike = int(self.starts[position]), self.problem.stages[group.first].alike
                taken = self._sum_column([start + column for column in columns], group.size)
                of_kind.setdefault((alike, number), []).append(taken)
        variants = [column for columns in of_kind.values() for column in columns]
        for (alike, _), columns in of_kind.items():
            stages = sum(group.size for group in self.groups if self.problem.stages[group.first].alike == alike)
            variants += [self._sum_column(columns, stages)] if len(columns) > 1 else []
        return [variants, totals, own]

    def _sum_column(self, columns: Sequence[int], most: int) -> int:
        total = self.program.column(upper=float(most), integer=True)
        self.program.row([*columns, total], [1.0] * len(columns) + [-1.0], lower=0.0, upper=0.0)
        return total

    def exclude(self, choice: Sequence[StageChoice]) -> bool:
        """[Constraint] not this choice; says whether that can be said: nothing in it may be split, no group open."""
        if len(self.groups) != len(choice):
            return False
        columns = []
        for kind, start, stage in zip(self.kinds, self.starts[:-1].tolist(), choice, strict=True):
            taken = [kind.units[stage.variant][u][o] for u, (o, _) in enumerate(stage.options)]
            if any(chosen.sharded is not None for chosen in taken):
                return False
            columns += [start + c for c in kind.variants[stage.variant]] if len(taken) != 1 else []
            columns += [start + chosen.count for chosen in taken]
        self.program.row(columns, [1.0] * len(columns), upper=len(columns) - 1.0)
        return True

    # Reading a solution

    def read(self, answer: Answer) -> list[list[StageChoice]]:
        """The choices of every group, one for each of its stages; their order within a group is open."""
        assert answer.values is not None
        values = np.rint(answer.values).astype(np.int64).tolist()
        return [
            self._read_group(kind, values[start : start + len(kind)])
            for kind, start in zip(self.kinds, self.starts[:-1].tolist(), strict=True)
        ]

    def rounded(self, values: np.ndarray) -> tuple[StageChoice, ...]:
        """The choice that a relaxation of single stages leans to most."""
        choices = []
        for kind, start in zip(self.kinds, self.starts[:-1].tolist(), strict=True):
            shares = values[start : start + len(kind)].tolist()
            variant = max(range(len(kind.variants)), key=lambda s, k=kind, v=shares: sum(v[c] for c in k.variants[s]))
            choices.append(StageChoice(variant, tuple(_leaning(options, shares) for options in kind.units[variant])))
        return tuple(choices)

    def _read_group(self, kind: StageColumns, values: list[int]) -> list[StageChoice]:
        choices: list[StageChoice] = []
        for variant_index, columns in enumerate(kind.variants):
            stages = sum(values[column] for column in columns)
            taken = [_dealt(options, values) for options in kind.units[variant_index]] if stages else []
            choices += [StageChoice(variant_index, tuple(unit[i] for unit in taken)) for i in range(stages)]
        return choices


def _leaning(options: Sequence[Chosen], shares: Sequence[float]) -> tuple[int, int]:
    index = max(range(len(options)), key=lambda o: shares[options[o].count])
    chosen = options[index]
    if chosen.sharded is None or shares[chosen.count] <= 0:
        return index, chosen.option.slices if chosen.sharded is not None else 1
    return index, min(max(round(shares[chosen.sharded] / shares[chosen.count]), 1), chosen.option.slices)


def _dealt(options: Sequence[Chosen], values: Sequence[int]) -> list[tuple[int, int]]:
    """One unit's options, dealt out to as many stages as take its variant."""
    dealt: list[tuple[int, int]] = []
    for index, chosen in enumerate(options):
        count = values[chosen.count]
        if not count:
            continue
        slices = count if chosen.sharded is None else values[chosen.sharded]
        share, more = divmod(slices, count)
        dealt += [(index, share + (i < more)) for i in range(count)]
    return dealt
