"""One kind of stage as columns and rows: what a stage's choice adds to the program, wherever the stage lies.

Alike stages share it, so it is made once for all of them. What only rows of the memory need is made when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from osdp.search.highs import INFINITY
from osdp.search.problem import FloatArray, Problem, Rows, ShapeTable, StageTable, UnitOption, phase

MIB = float(1 << 20)  # bytes are scaled, so that HiGHS's tolerances mean about one byte
_BYTES = ("always", "between", "after", "stepping", "ahead", "cast", "ahead_again", "cast_again", "reducing")
Flags = tuple[bool, ...]  # which neighbours a row sees: the next gather, its issue, the last reduction


@dataclass(frozen=True)
class Chosen:
    """Columns of one option: how many stages take it, and how many slices they shard."""

    option: UnitOption
    count: int
    sharded: int | None


@dataclass(frozen=True)
class ExactRow:
    """One row of every shape, by column; `picked` says which, `sees` which neighbours each of them sees."""

    flags: Flags
    values: list[float]
    picked: tuple[int | None, ...]
    sees: tuple[Flags, ...]


class Kind:
    """The columns of a stage, their costs, and the rows between them; for a group, bounds times its size."""

    def __init__(self, table: StageTable, problem: Problem, scale: float) -> None:
        self.table, self.scale, self.micro = table, scale, problem.accumulation
        self.overlap = problem.overlap_of(table)
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.units: list[list[list[Chosen]]] = []  # shape, unit, option
        self.shapes: list[list[int]] = []  # the columns whose sum is a shape's count
        for shape in table.shapes:
            self._shape(shape)
        # [Constraint] every stage takes exactly one shape
        self._row(dict.fromkeys((c for columns in self.shapes for c in columns), 1.0), 1.0, 1.0)
        self._vectors: dict[str, FloatArray] = {}
        self._mosts: dict[str, int] = {}
        self._exact: dict[bool, list[ExactRow]] = {}
        self._averages: dict[object, tuple[list[float], float]] = {}
        self._lines: dict[str, list[float]] = {}

    def __len__(self) -> int:
        return len(self.cost)

    def chosen(self) -> Iterator[Chosen]:
        for units in self.units:
            for options in units:
                yield from options

    # Columns and time

    def _column(self, cost: float = 0.0, upper: float = INFINITY, integer: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def _row(self, terms: dict[int, float], lower: float, upper: float) -> None:
        self.rows.append((terms, lower, upper))

    def _shape(self, shape: ShapeTable) -> None:
        alone = len(shape.units) == 1  # then its options' counts add up to the shape's, which needs no column
        columns = [] if alone else [self._column(upper=1.0)]
        units = [[self._option(option) for option in options] for options in shape.units]
        self.units.append(units)
        for options in units if not alone else []:
            # [Constraint] every unit of a chosen shape takes exactly one option
            self._row({columns[0]: -1.0, **{chosen.count: 1.0 for chosen in options}}, 0.0, 0.0)
        self.shapes.append(columns or [chosen.count for chosen in units[0]])
        plain = alone and all(chosen.sharded is None for chosen in units[0])
        for options in units:
            for chosen in options:
                self._time_terms(chosen, ("step",), self.cost, self.scale)
        if plain:
            for chosen in units[0]:
                self.cost[chosen.count] += self._alone(shape, chosen.option)
        else:
            if self.overlap < 1:
                self._added(shape, self.shapes[-1], units, 1 - self.overlap)
            if self.overlap > 0:
                self._side_by_side(shape, self.shapes[-1], units, self.overlap)
        for options in units:
            self._drop_beaten(options, plain)

    def _option(self, option: UnitOption) -> Chosen:
        count = self._column(upper=1.0)
        if option.slices == 1:
            return Chosen(option, count, None)
        sharded = self._column(upper=float(option.slices))
        # [Constraint] a split unit shards between one and all of its slices
        self._row({sharded: 1.0, count: -1.0}, 0.0, INFINITY)
        self._row({sharded: -1.0, count: float(option.slices)}, 0.0, INFINITY)
        return Chosen(option, count, sharded)

    def _time_terms(
        self, chosen: Chosen, names: Sequence[str], into: list[float] | dict[int, float], factor: float
    ) -> None:
        for name in names:
            seconds = getattr(chosen.option, name)
            if seconds.base:
                into[chosen.count] += seconds.base * factor
            if seconds.slope and chosen.sharded is not None:
                into[chosen.sharded] += seconds.slope * factor

    def _alone(self, shape: ShapeTable, option: UnitOption) -> float:
        """The seconds of a stage whose only unit takes this option: no column is needed to compare the streams."""
        seconds = self.micro * phase(shape.forward_seconds + option.copy.base, option.gather.base, self.overlap)
        compute, wires = shape.backward_seconds + option.copy_again.base, option.gather_again.base
        reduced = compute + option.copy_reduce.base, wires + option.reduce.base
        often = (compute, wires) if option.reduce_once else reduced
        return (seconds + (self.micro - 1) * phase(*often, self.overlap) + phase(*reduced, self.overlap)) * self.scale

    def _added(self, shape: ShapeTable, columns: list[int], units: list[list[Chosen]], part: float) -> None:
        scale = self.scale * part
        for column in columns:
            self.cost[column] += self.micro * (shape.forward_seconds + shape.backward_seconds) * scale
        for chosen in (chosen for options in units for chosen in options):
            often = ("copy", "gather", "copy_again", "gather_again")
            self._time_terms(chosen, often, self.cost, self.micro * scale)
            times = 1 if chosen.option.reduce_once else self.micro
            self._time_terms(chosen, ("copy_reduce", "reduce"), self.cost, times * scale)

    def _side_by_side(self, shape: ShapeTable, columns: list[int], units: list[list[Chosen]], part: float) -> None:
        """[Constraint] a visit takes no less than its compute, and no less than its communication."""
        flat = [chosen for options in units for chosen in options]
        again = (("copy_again", "copy_reduce"), ("gather_again", "reduce"))
        visits = [(self.micro, shape.forward_seconds, (("copy",), ("gather",)), True)]
        visits += [(self.micro - 1, shape.backward_seconds, again, False)] if self.micro > 1 else []
        visits += [(1, shape.backward_seconds, again, True)]
        for times, seconds, streams, once in visits:
            slower = self._column(cost=times * part, integer=False)
            for names, base in zip(streams, (seconds, 0.0), strict=True):
                terms = dict.fromkeys([slower, *columns, *self._columns(flat)], 0.0)
                terms[slower] = -1.0
                for column in columns:
                    terms[column] += base * self.scale
                for chosen in flat:
                    here = [n for n in names if once or "reduce" not in n or not chosen.option.reduce_once]
                    self._time_terms(chosen, here, terms, self.scale)
                self._row(terms, -INFINITY, 0.0)

    @staticmethod
    def _columns(flat: Sequence[Chosen]) -> Iterator[int]:
        for chosen in flat:
            yield chosen.count
            if chosen.sharded is not None:
                yield chosen.sharded

    def _drop_beaten(self, options: Sequence[Chosen], plain: bool) -> None:
        """Options that another one of the unit beats, or equals, in all bytes and seconds need not be chosen."""
        rivals = [c for c in options if c.sharded is None and c.option.far is None]
        if len(rivals) < 2:
            return
        needs = np.array([self._needs(c, plain) for c in rivals])
        beats = np.all(needs[:, None] <= needs[None], axis=2).tolist()
        for index, chosen in enumerate(rivals):
            # of equal ones the first stays
            if any(beats[o][index] and (o < index or not beats[index][o]) for o in range(len(rivals)) if o != index):
                self.upper[chosen.count] = 0.0

    def _needs(self, chosen: Chosen, plain: bool) -> list[float]:
        option = chosen.option
        if plain:
            times = [self.cost[chosen.count]]
        else:
            last = option.copy_reduce.base, option.reduce.base
            often = (0.0, 0.0) if option.reduce_once else last
            again = option.copy_again.base, option.gather_again.base
            times = [option.copy.base, option.gather.base, option.step.base]
            times += [again[0] + last[0], again[1] + last[1], again[0] + often[0], again[1] + often[1]]
        held = [getattr(option, name).base for name in _BYTES]
        return [*times, *held, *option.forward[:, 0].tolist(), *option.backward[:, 0].tolist()]

    # Bytes by column, in MiB

    def vector(self, name: str) -> FloatArray:
        """What each column holds of one kind of bytes; `before` and `behind` with what its shape leaves behind."""
        if name not in self._vectors:
            values = [0.0] * len(self)
            kind = {"before": "between", "behind": "after"}.get(name, name)
            for chosen in self.chosen():
                amount = getattr(chosen.option, kind)
                values[chosen.count] += amount.base
                if chosen.sharded is not None:
                    values[chosen.sharded] += amount.slope
            for columns, shape in zip(self.shapes, self.table.shapes, strict=True):
                left = {"before": shape.saved, "behind": shape.saved + shape.freed}.get(name, 0)
                for column in columns if left else ():
                    values[column] += left
            self._vectors[name] = np.array(values) / MIB
        return self._vectors[name]

    def line(self, name: str) -> list[float]:
        """The same as a list: short rows are quicker to join that way."""
        if name not in self._lines:
            self._lines[name] = self.vector(name).tolist()
        return self._lines[name]

    def most(self, name: str) -> int:
        """The most that a stage can hold of one kind of bytes."""
        if name not in self._mosts:
            self._mosts[name] = max(
                sum(
                    max((getattr(c.option, name).at(k) for c in options for k in (1, c.option.slices)), default=0)
                    for options in units
                )
                for units in self.units
            )
        return self._mosts[name]

    @cached_property
    def spanning(self) -> list[Chosen]:
        return [chosen for chosen in self.chosen() if chosen.option.far is not None]

    def exact(self, backward: bool) -> list[ExactRow]:
        """Rows of a visit for a single stage; they meet only where they see the same neighbours.

        One row of the program takes one row of every shape: only the chosen shape's part is not zero, so it says the
        same as a row for each, and its relaxation cannot hide one shape behind another.
        """
        if backward not in self._exact:
            tables = [shape.backward if backward else shape.forward for shape in self.table.shapes]
            parts = [self._part(number, backward) for number in range(len(tables))]
            flags = [flags_of(rows) for rows in tables]
            found = []
            for wanted in sorted({each for mine in flags for each in mine}):
                same = [[row for row, each in enumerate(mine) if each == wanted] for mine in flags]
                for number in range(max(len(rows) for rows in same)):
                    picked = tuple(_picked(rows, alike, number) for rows, alike in zip(tables, same, strict=True))
                    values = np.sum([part[row] for part, row in zip(parts, picked, strict=True) if row is not None], 0)
                    sees = tuple(
                        (False,) * 3 if row is None else mine[row] for mine, row in zip(flags, picked, strict=True)
                    )
                    found.append(ExactRow(wanted, values.tolist(), picked, sees))
            self._exact[backward] = found if any(shape.guests for shape in self.table.shapes) else _highest_of(found)
        return self._exact[backward]

    def _part(self, number: int, backward: bool) -> FloatArray:
        """A shape's rows, by column: its activations and what its options hold there."""
        shape = self.table.shapes[number]
        rows = shape.backward if backward else shape.forward
        part = np.zeros((len(rows), len(self)))
        part[:, self.shapes[number]] = (rows.activations + (shape.saved if backward else 0))[:, None]
        for chosen in (chosen for options in self.units[number] for chosen in options):
            table = chosen.option.backward if backward else chosen.option.forward
            part[:, chosen.count] += table[:, 0]
            if chosen.sharded is not None:
                part[:, chosen.sharded] += table[:, 1]
        return part / MIB

    def average(self, size: int, backward: bool, seen: tuple[tuple[str, str], ...]) -> tuple[list[float], float]:
        """What the stages of a group need on average, at rows that see these neighbours; and what that forgives."""
        key = size, backward, seen
        if key not in self._averages:
            self._averages[key] = self._average(size, backward, seen)
        return self._averages[key]

    def _average(self, size: int, backward: bool, seen: tuple[tuple[str, str], ...]) -> tuple[list[float], float]:
        most = sum(self.most(name) for _, name in seen)
        values = np.zeros(len(self))
        for columns, shape, units in zip(self.shapes, self.table.shapes, self.units, strict=True):
            rows = shape.backward if backward else shape.forward
            sees = np.ones(len(rows), bool)
            for flag, _ in seen:
                sees &= getattr(rows, flag)
            rest = min(shape.saved, shape.saved + shape.freed) if backward else 0
            need = shape.saved if backward else 0
            if len(units) == 1:  # the highest row of each option
                for chosen in units[0]:
                    highest = _highest(rows, _least(chosen.option, backward), sees, most)
                    pair = rest + (_least_pair(chosen.option) if backward else 0)
                    values[chosen.count] += need + highest + (size - 1) * pair
                continue
            least = [np.min([_least(c.option, backward) for c in unit], axis=0) for unit in units]
            highest = _highest(rows, sum(least, np.zeros(len(rows))), sees, most)
            values[columns] += need + highest + (size - 1) * rest
            for chosen in (chosen for unit in units for chosen in unit) if backward else ():
                values[chosen.count] += (size - 1) * _least_pair(chosen.option)
        values /= size * MIB
        for _, name in seen:
            values += self.vector(name) / size
        return values.tolist(), most / size / MIB


def _highest_of(rows: list[ExactRow]) -> list[ExactRow]:
    """Without rows that another one, which sees the same neighbours, exceeds or equals in every column."""
    values = np.array([row.values for row in rows])
    below = np.all(values[:, None] <= values[None], axis=2).tolist()
    return [
        row
        for i, row in enumerate(rows)
        if not any(
            below[i][j] and other.sees == row.sees and other.flags == row.flags and (j < i or not below[j][i])
            for j, other in enumerate(rows)
            if j != i
        )
    ]


def flags_of(rows: Rows) -> list[Flags]:
    """Which neighbours each row sees."""
    return list(zip(rows.tail.tolist(), rows.issue.tolist(), rows.head.tolist(), strict=True))


def _picked(rows: Rows, alike: list[int], number: int) -> int | None:
    """A shape's part in a row of the program: its next row with the same flags, or its highest of any."""
    if alike:
        return alike[min(number, len(alike) - 1)]
    return int(np.argmax(rows.activations)) if len(rows) else None


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
