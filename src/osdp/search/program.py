"""The decision as a mixed-integer program over groups of stages; see [Note: Problem] and [Note: Group].

[Note: Group]
A run of alike stages is one group: how many of them take which shape and option, not which one does. What holds for
every order of a group's stages is kept as a row, what depends on the order is left out, so the program's optimum is a
bound. A group of one stage has all its rows: with such groups only, the program is the problem itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from osdp.search.highs import INFINITY, Answer, Program
from osdp.search.problem import Amount, Problem, Rows, ShapeTable, StageChoice, StageTable, UnitOption, phase

MIB = float(1 << 20)  # bytes are scaled, so that HiGHS's tolerances mean about one byte


@dataclass(frozen=True)
class Group:
    """Stages `first` up to `stop`, all alike."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first


@dataclass
class _Chosen:
    """Columns of one option in one group: how many stages take it, and how many slices they shard."""

    option: UnitOption
    count: int
    sharded: int | None

    def terms(self, amount: Amount, into: dict[int, float], factor: float = 1.0) -> None:
        if amount.base:
            into[self.count] = into.get(self.count, 0.0) + amount.base * factor
        if amount.slope and self.sharded is not None:
            into[self.sharded] = into.get(self.sharded, 0.0) + amount.slope * factor


@dataclass
class _GroupColumns:
    group: Group
    table: StageTable
    shapes: list[int] = field(default_factory=list)  # column of each shape's count
    units: list[list[list[_Chosen]]] = field(default_factory=list)  # shape, unit, option

    def chosen(self) -> Iterator[_Chosen]:
        for units in self.units:
            for options in units:
                yield from options

    def sum_of(self, name: str, factor: float = 1.0 / MIB) -> dict[int, float]:
        terms: dict[int, float] = {}
        for chosen in self.chosen():
            chosen.terms(getattr(chosen.option, name), terms, factor)
        return terms


class Model:
    """Builds the program of a problem over groups, and reads choices out of its solution."""

    def __init__(self, problem: Problem, groups: Sequence[Group], *, scale: float, minimise_peak: bool = False) -> None:
        self.problem, self.scale = problem, scale
        self.program = Program()
        self.groups = [self._columns(group) for group in groups]
        self._peak = self.program.column(cost=1.0) if minimise_peak else None
        self._spanning = [c for columns in self.groups for c in columns.chosen() if c.option.far is not None]
        self._always = self.program.column()
        self._before = [self.program.column(lower=-INFINITY) for _ in range(len(groups) + 1)]
        self._behind = [self.program.column(lower=-INFINITY) for _ in range(len(groups) + 1)]
        self._levels()
        for position in range(len(self.groups)):
            if self.groups[position].group.size == 1:
                self._exact_rows(position)
            else:
                self._average_rows(position)
        self._optimizer_row()
        self._totals()

    # Columns and time

    def _columns(self, group: Group) -> _GroupColumns:
        table = self.problem.stages[group.first]
        columns = _GroupColumns(group, table)
        add = not self.problem.overlap or table.exposed
        for shape in table.shapes:
            plain = len(shape.units) == 1 and all(option.slices == 1 for option in shape.units[0])
            count = self.program.column(upper=group.size, integer=True)
            columns.shapes.append(count)
            units = [[self._option(option, group) for option in options] for options in shape.units]
            columns.units.append(units)
            for options in units:
                # [Constraint] every unit of a chosen shape takes exactly one option
                self.program.equal({count: -1.0, **{chosen.count: 1.0 for chosen in options}}, 0.0)
            if plain and units:
                for chosen in units[0]:
                    self.program.cost[chosen.count] += self._alone(shape, chosen.option, add)
            elif add:
                self._added(shape, count, units)
            else:
                self._side_by_side(shape, count, units)
        # [Constraint] every stage takes exactly one shape
        self.program.equal(dict.fromkeys(columns.shapes, 1.0), float(group.size))
        for chosen in columns.chosen():
            terms: dict[int, float] = {}
            _time_terms(chosen, "step", terms, self.scale)
            for column, value in terms.items():
                self.program.cost[column] += value
        return columns

    def _option(self, option: UnitOption, group: Group) -> _Chosen:
        count = self.program.column(upper=group.size, integer=True)
        if option.slices == 1:
            return _Chosen(option, count, None)
        sharded = self.program.column(upper=group.size * option.slices, integer=True)
        # [Constraint] a split unit shards between one and all of its slices
        self.program.row({sharded: 1.0, count: -1.0}, lower=0.0)
        self.program.row({sharded: -1.0, count: float(option.slices)}, lower=0.0)
        return _Chosen(option, count, sharded)

    def _alone(self, shape: ShapeTable, option: UnitOption, add: bool) -> float:
        """The seconds of a stage whose only unit takes this option: no column is needed to compare the streams."""
        micro = self.problem.accumulation
        seconds = micro * phase(shape.forward_seconds + option.copy.base, option.gather.base, add)
        compute, wires = shape.backward_seconds + option.copy_again.base, option.gather_again.base
        reduced = compute + option.copy_reduce.base, wires + option.reduce.base
        often = (compute, wires) if option.reduce_once else reduced
        return (seconds + (micro - 1) * phase(*often, add) + phase(*reduced, add)) * self.scale

    def _added(self, shape: ShapeTable, count: int, units: list[list[_Chosen]]) -> None:
        micro = self.problem.accumulation
        self.program.cost[count] += micro * (shape.forward_seconds + shape.backward_seconds) * self.scale
        terms: dict[int, float] = {}
        for chosen in (chosen for options in units for chosen in options):
            for name in ("copy", "gather", "copy_again", "gather_again"):
                _time_terms(chosen, name, terms, micro * self.scale)
            times = 1 if chosen.option.reduce_once else micro
            for name in ("copy_reduce", "reduce"):
                _time_terms(chosen, name, terms, times * self.scale)
        for column, value in terms.items():
            self.program.cost[column] += value

    def _side_by_side(self, shape: ShapeTable, count: int, units: list[list[_Chosen]]) -> None:
        """[Constraint] a visit takes no less than its compute, and no less than its communication."""
        micro = self.problem.accumulation
        flat = [chosen for options in units for chosen in options]
        self._visit(micro, shape.forward_seconds, count, flat, ("copy",), ("gather",), once=True)
        again = ("copy_again", "copy_reduce"), ("gather_again", "reduce")
        if micro > 1:
            self._visit(micro - 1, shape.backward_seconds, count, flat, *again, once=False)
        self._visit(1, shape.backward_seconds, count, flat, *again, once=True)

    def _visit(
        self,
        times: int,
        seconds: float,
        count: int,
        flat: list[_Chosen],
        compute: tuple[str, ...],
        wires: tuple[str, ...],
        *,
        once: bool,
    ) -> None:
        slower = self.program.column(cost=float(times))
        for names, base in ((compute, seconds), (wires, 0.0)):
            terms = {slower: -1.0, count: base * self.scale}
            for chosen in flat:
                for name in names:
                    reduces = name in ("reduce", "copy_reduce")
                    if once or not reduces or not chosen.option.reduce_once:
                        _time_terms(chosen, name, terms, self.scale)
            self.program.row(terms, upper=0.0)

    # Memory

    def _within_limit(self, terms: dict[int, float], more: float = 0.0) -> None:
        """[Constraint] these bytes fit; where the peak itself is minimised, they are no more than it."""
        if self._peak is None:
            self.program.row(terms, upper=(self.problem.limit - self.problem.constant) / MIB + more)
        else:
            self.program.row({**terms, self._peak: -1.0}, upper=more)

    def _levels(self) -> None:
        """[Constraint] what stages leave behind adds up: `before` going forward, `behind` going backward."""
        always: dict[int, float] = {self._always: -1.0}
        for position, columns in enumerate(self.groups):
            _merge(always, columns.sum_of("always"))
            before = {self._before[position + 1]: -1.0, self._before[position]: 1.0, **columns.sum_of("between")}
            behind = {self._behind[position]: -1.0, self._behind[position + 1]: 1.0, **columns.sum_of("after")}
            for column, shape in zip(columns.shapes, columns.table.shapes, strict=True):
                before[column] = before.get(column, 0.0) + shape.saved / MIB
                behind[column] = behind.get(column, 0.0) + (shape.saved + shape.freed) / MIB
            self.program.equal(before, 0.0)
            self.program.equal(behind, 0.0)
        self.program.equal(always, 0.0)
        self.program.equal({self._before[0]: 1.0}, 0.0)
        self.program.equal({self._behind[-1]: 1.0}, 0.0)

    def _far(self, stages: range, backward: bool, terms: dict[int, float]) -> None:
        """Units that span stages, at the least that they hold in any of these."""
        last = 2 * len(self.problem.stages) - 1
        for chosen in self._spanning:
            if chosen.option.far is not None:
                visits = [last - stage if backward else stage for stage in stages]
                value = int(chosen.option.far[visits].min())
                if value:
                    terms[chosen.count] = terms.get(chosen.count, 0.0) + value / MIB

    def _exact_rows(self, position: int) -> None:
        """[Constraint] at every row of both visits the bytes alive stay within the limit.

        One row of the program takes one row of every shape, of those that see the same neighbours: only the chosen
        shape's part is not zero, so it says the same as a row for each, and its relaxation cannot hide one shape behind
        another.
        """
        columns = self.groups[position]
        stage = range(columns.group.first, columns.group.stop)
        for backward in (False, True):
            base: dict[int, float] = {self._always: 1.0, self._before[position]: 1.0}
            if backward:
                base[self._behind[position + 1]] = 1.0
                for column, shape in zip(columns.shapes, columns.table.shapes, strict=True):
                    base[column] = shape.saved / MIB
            self._far(stage, backward, base)
            tables = [shape.backward if backward else shape.forward for shape in columns.table.shapes]
            for flags in sorted({flags for rows in tables for flags in _flags(rows)}):
                same = [[row for row, mine in enumerate(_flags(rows)) if mine == flags] for rows in tables]
                for number in range(max(len(rows) for rows in same)):
                    picked = [_picked(rows, alike, number) for rows, alike in zip(tables, same, strict=True)]
                    self._row(dict(base), columns, picked, position, backward, flags)

    def _row(
        self,
        terms: dict[int, float],
        columns: _GroupColumns,
        picked: list[int | None],
        position: int,
        backward: bool,
        flags: tuple[bool, ...],
    ) -> None:
        """One row of each shape; its neighbours are those that rows with these flags see."""
        seen: list[tuple[bool, ...]] = []
        for shape_index, row in enumerate(picked):
            shape = columns.table.shapes[shape_index]
            rows = shape.backward if backward else shape.forward
            seen.append((False, False, False) if row is None else _flags(rows)[row])
            if row is None:
                continue
            z = columns.shapes[shape_index]
            terms[z] = terms.get(z, 0.0) + rows.activations[row] / MIB
            for chosen in (chosen for options in columns.units[shape_index] for chosen in options):
                values = (chosen.option.backward if backward else chosen.option.forward)[row]
                chosen.terms(Amount(int(values[0]), int(values[1])), terms, 1.0 / MIB)
            self._guests(shape, row, backward, terms)
        ahead = position - 1 if backward else position + 1
        wanted = [(ahead, "ahead_again" if backward else "ahead"), (ahead, "cast_again" if backward else "cast")]
        wanted += [(position + 1, "reducing")] if backward else []
        for number, (neighbour, name) in enumerate(wanted):
            if flags[number]:
                self._neighbour(terms, columns, [mine[number] for mine in seen], neighbour, name)
        self._within_limit(terms)

    def _guests(self, shape: ShapeTable, row: int, backward: bool, terms: dict[int, float]) -> None:
        for guest in shape.guests:
            home = next(c for c in self.groups if c.group.first <= guest.stage < c.group.stop)
            tables = guest.backward if backward else guest.forward
            for chosen, values in zip(home.units[0][guest.unit], tables, strict=True):
                chosen.terms(Amount(int(values[row][0]), int(values[row][1])), terms, 1.0 / MIB)

    def _neighbour(
        self, terms: dict[int, float], columns: _GroupColumns, flagged: list[bool], neighbour: int, name: str
    ) -> None:
        """Adds what a neighbour holds at this row; a shape that does not see it is forgiven as much."""
        if not any(flagged) or not 0 <= neighbour < len(self.groups):
            return
        other = self.groups[neighbour]
        if other.group.size > 1:
            return  # which of its stages is the neighbour is open; see [Note: Group]
        _merge(terms, other.sum_of(name))
        most = max((_most(other, shape, name) for shape in range(len(other.shapes))), default=0) / MIB
        for column, sees in zip(columns.shapes, flagged, strict=True):
            if not sees:
                terms[column] = terms.get(column, 0.0) - most

    def _average_rows(self, position: int) -> None:
        """[Constraint] the stages of a group, on average, have room for what they take.

        Each of them must have room at its own place, hence also their average. The others of the group lie before it
        or behind it, and hold at least the smaller of what they would hold in either place; all but one of them are
        neighbours within the group, whose gathers and reductions are seen at some rows.
        """
        self._average(position, False, ())
        self._average(position, False, (("tail", "ahead"),))
        gather, reduction = ("tail", "ahead_again"), ("head", "reducing")
        for seen in ((), (gather,), (reduction,), (gather, reduction)):
            self._average(position, True, seen)

    def _average(self, position: int, backward: bool, seen: tuple[tuple[str, str], ...]) -> None:
        """One such row, at the rows of each stage that see the given kinds of neighbours' buffers."""
        columns, size = self.groups[position], self.groups[position].group.size
        terms: dict[int, float] = {self._always: 1.0, self._before[position]: 1.0}
        if backward:
            terms[self._behind[position + 1]] = 1.0
        self._far(range(columns.group.first, columns.group.stop), backward, terms)
        most = sum(max(_most(columns, shape, name) for shape in range(len(columns.shapes))) for _, name in seen)
        for z, shape, units in zip(columns.shapes, columns.table.shapes, columns.units, strict=True):
            rows = shape.backward if backward else shape.forward
            sees = (
                np.logical_and.reduce([getattr(rows, flag) for flag, _ in seen]) if seen else np.ones(len(rows), bool)
            )
            rest = min(shape.saved, shape.saved + shape.freed) if backward else 0
            need = shape.saved if backward else 0
            options = [chosen for unit in units for chosen in unit]
            if len(units) == 1:  # the highest row of each option
                for chosen in options:
                    highest = _highest(rows, _least(chosen.option, backward), sees, most)
                    pair = rest + (_least_pair(chosen.option) if backward else 0)
                    _merge(terms, {chosen.count: ((need + highest) + (size - 1) * pair) / size / MIB})
                continue
            own = sum(
                (np.min([_least(c.option, backward) for c in unit], axis=0) for unit in units), np.zeros(len(rows))
            )
            _merge(terms, {z: ((need + _highest(rows, own, sees, most)) + (size - 1) * rest) / size / MIB})
            if backward:
                _merge(terms, {c.count: (size - 1) * _least_pair(c.option) / size / MIB for c in options})
        for _, name in seen:
            _merge(terms, columns.sum_of(name, 1.0 / size / MIB))
        self._within_limit(terms, more=most / size / MIB)

    def _optimizer_row(self) -> None:
        terms: dict[int, float] = {self._always: 1.0, self._behind[0]: 1.0}
        for columns in self.groups:
            _merge(terms, columns.sum_of("stepping"))
        self._within_limit(terms)

    def _totals(self) -> None:
        """How many stages of a kind take an option, over all groups: redundant, but a better place to branch."""
        kinds: dict[int, list[_GroupColumns]] = {}
        for columns in self.groups:
            kinds.setdefault(columns.table.alike, []).append(columns)
        for alike in (members for members in kinds.values() if len(members) > 1):
            for chosen in zip(*(list(columns.chosen()) for columns in alike), strict=True):
                total = self.program.column(upper=sum(c.group.size for c in alike), integer=True)
                self.program.equal({total: -1.0, **{c.count: 1.0 for c in chosen}}, 0.0)

    def exclude(self, choice: Sequence[StageChoice]) -> bool:
        """[Constraint] not this choice; says whether that can be said: nothing in it may be split."""
        columns = []
        for group, stage in zip(self.groups, choice, strict=True):
            taken = [group.units[stage.shape][u][o] for u, (o, _) in enumerate(stage.options)]
            if any(chosen.sharded is not None for chosen in taken):
                return False
            columns += [group.shapes[stage.shape], *(chosen.count for chosen in taken)]
        self.program.row(dict.fromkeys(columns, 1.0), upper=len(columns) - 1.0)
        return True

    # Reading a solution

    def read(self, answer: Answer) -> list[list[StageChoice]]:
        """The choices of every group, one for each of its stages; their order within a group is open."""
        assert answer.values is not None
        values = np.rint(answer.values).astype(np.int64)
        return [self._read_group(columns, values) for columns in self.groups]

    def _read_group(self, columns: _GroupColumns, values: np.ndarray) -> list[StageChoice]:
        choices: list[StageChoice] = []
        for shape_index, column in enumerate(columns.shapes):
            stages = int(values[column])
            taken = [_dealt(options, values) for options in columns.units[shape_index]]
            choices += [StageChoice(shape_index, tuple(unit[i] for unit in taken)) for i in range(stages)]
        return choices


def _flags(rows: Rows) -> list[tuple[bool, ...]]:
    """Which neighbours each row sees: the next gather, its issue, the last reduction."""
    return [tuple(map(bool, row)) for row in zip(rows.tail, rows.issue, rows.head, strict=True)]


def _picked(rows: Rows, alike: list[int], number: int) -> int | None:
    """A shape's part in a row of the program: its next row with the same flags, or its highest of any."""
    if alike:
        return alike[min(number, len(alike) - 1)]
    return int(np.argmax(rows.activations)) if len(rows) else None


def _dealt(options: list[_Chosen], values: np.ndarray) -> list[tuple[int, int]]:
    """One unit's options, dealt out to as many stages as take its shape."""
    dealt: list[tuple[int, int]] = []
    for index, chosen in enumerate(options):
        count = int(values[chosen.count])
        if not count:
            continue
        slices = count if chosen.sharded is None else int(values[chosen.sharded])
        share, more = divmod(slices, count)
        dealt += [(index, share + (i < more)) for i in range(count)]
    return dealt


def _time_terms(chosen: _Chosen, name: str, terms: dict[int, float], factor: float) -> None:
    seconds = getattr(chosen.option, name)
    if seconds.base:
        terms[chosen.count] = terms.get(chosen.count, 0.0) + seconds.base * factor
    if seconds.slope and chosen.sharded is not None:
        terms[chosen.sharded] = terms.get(chosen.sharded, 0.0) + seconds.slope * factor


def _merge(into: dict[int, float], terms: dict[int, float]) -> None:
    for column, value in terms.items():
        into[column] = into.get(column, 0.0) + value


def _most(columns: _GroupColumns, shape: int, name: str) -> int:
    """The most that a shape's units can add of one kind of bytes."""
    total = 0
    for options in columns.units[shape]:
        total += max((getattr(c.option, name).at(k) for c in options for k in (1, c.option.slices)), default=0)
    return total


def _least_pair(option: UnitOption) -> int:
    """The least that a unit holds whether its stage lies before or behind; 0 where that depends on its slices."""
    return 0 if option.slices > 1 else min(option.between.base, option.after.base)


def _least(option: UnitOption, backward: bool) -> np.ndarray:
    """The least that an option needs of its own at every row, whatever the number of its sharded slices."""
    table = option.backward if backward else option.forward
    return table[:, 0] + np.minimum(table[:, 1], table[:, 1] * option.slices)


def _highest(rows: Rows, own: np.ndarray, sees: np.ndarray, most: int) -> int:
    """The highest of the rows that see the neighbours; without any, the highest of all less what it might see."""
    if not len(rows):
        return -most
    levels = rows.activations + own
    return int(levels[sees].max()) if sees.any() else int(levels.max()) - most
