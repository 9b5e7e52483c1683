"""One kind of stage as columns and rows: what a stage's choice adds to the program, wherever the stage lies.

Alike stages share it, so it is made once for all of them. What only rows of the memory need is made when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from osdp.search.clock_rows import ClockRows
from osdp.search.evaluate import option_seconds, serial_counts
from osdp.search.highs import INFINITY
from osdp.search.problem import (
    BYTES,
    TAKEN_TOGETHER,
    FloatArray,
    MicroBatch,
    Problem,
    Rows,
    StageTable,
    UnitOption,
    VariantTable,
)

MIB = float(1 << 20)  # bytes are scaled, so that HiGHS's tolerances mean about one byte
Flags = tuple[bool, ...]  # which neighbours a row sees: the next gather, its issue, the last reduction


@dataclass(frozen=True)
class Chosen:
    """Columns of one option: how many stages take it, and how many slices they shard."""

    option: UnitOption
    count: int
    sharded: int | None


@dataclass(frozen=True)
class ExactRow:
    """One row of every variant, by column; `picked` says which, `sees` which neighbours each of them sees."""

    flags: Flags
    values: list[float]
    picked: tuple[int | None, ...]
    sees: tuple[Flags, ...]


Column = int | tuple[int, int, int, bool]  # of the kind; or of another stage's unit: stage, unit, option, sharded
Terms = dict[Column, float]


class StageColumns:
    """The columns of a stage, their costs, and the rows between them; for a group, bounds times its size."""

    def __init__(
        self, table: StageTable, problem: Problem, scale: float, latest: float, *, coarse: bool, timed: bool = True
    ) -> None:
        self.table, self.scale, self.problem, self.latest, self.coarse = table, scale, problem, latest, coarse
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[Terms, float, float]] = []
        self.units: list[list[list[Chosen]]] = []  # variant, unit, option
        self.variants: list[list[int]] = []  # the columns whose sum is a variant's count
        for variant in table.variants:
            self._variant(variant)
        # [Constraint] every stage takes exactly one variant
        self._row(dict.fromkeys((c for columns in self.variants for c in columns), 1.0), 1.0, 1.0)
        self.foreign_cost: Terms = {}
        if problem.overlap < 1:
            self._serial_cost()
        self.clocks = ClockRows(self) if problem.overlap > 0 and timed else None
        for units in self.units:
            for options in units:
                self._drop_beaten(options, len(units) == 1)
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

    def column(self, cost: float = 0.0, upper: float = INFINITY, integer: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def _row(self, terms: Mapping[Column, float], lower: float, upper: float) -> None:
        self.rows.append((dict(terms), lower, upper))

    def at_least(self, column: int, terms: Terms) -> None:
        """[Constraint] a column is no less than these terms."""
        self._row({**{key: -value for key, value in terms.items()}, column: 1.0}, 0.0, INFINITY)

    def _variant(self, variant: VariantTable) -> None:
        alone = len(variant.units) == 1  # then its options' counts add up to the variant's, which needs no column
        columns: list[int] = [] if alone else [self.column(upper=1.0)]
        units = [[self._option(option) for option in options] for options in variant.units]
        self.units.append(units)
        for options in units if not alone else []:
            # [Constraint] every unit of a chosen variant takes exactly one option
            terms: Terms = {columns[0]: -1.0, **{chosen.count: 1.0 for chosen in options}}
            self._row(terms, 0.0, 0.0)
        self.variants.append(columns if columns else [chosen.count for chosen in units[0]])
        for chosen in (chosen for options in units for chosen in options):
            self.cost[chosen.count] += chosen.option.step.base * self.scale
            if chosen.sharded is not None:
                self.cost[chosen.sharded] += chosen.option.step.slope * self.scale

    def _option(self, option: UnitOption) -> Chosen:
        count = self.column(upper=1.0)
        if option.slices == 1:
            return Chosen(option, count, None)
        sharded = self.column(upper=float(option.slices))
        # [Constraint] a split unit shards between one and all of its slices
        self._row({sharded: 1.0, count: -1.0}, 0.0, INFINITY)
        self._row({sharded: -1.0, count: float(option.slices)}, 0.0, INFINITY)
        return Chosen(option, count, sharded)

    def kernel_terms(self, number: int, seconds: float) -> Terms:
        """The seconds of kernels, if this variant is taken."""
        return {column: seconds * self.scale for column in self.variants[number]} if seconds else {}

    def option_terms(self, number: int, unit: int | tuple[int, int], names: Sequence[str], micro: MicroBatch) -> Terms:
        """The seconds that a unit's options take of some kinds."""
        found: Terms = {}
        for option, count, sharded in self._columns_of(number, unit):
            if option.parts:
                assert isinstance(unit, int)
                found[count] = option_seconds(*option.parts[unit], names, micro) * self.scale
                continue
            wanted = micro.takes(names)
            base, slope = (sum(getattr(getattr(option, n), each) for n in wanted) for each in ("base", "slope"))
            if base:
                found[count] = base * self.scale
            if slope and sharded is not None:
                found[sharded] = slope * self.scale
        return found

    def option_columns(self, number: int, unit: int | tuple[int, int]) -> list[tuple[Column, Column | None]]:
        return [(count, sharded) for _, count, sharded in self._columns_of(number, unit)]

    def _columns_of(
        self, number: int, unit: int | tuple[int, int]
    ) -> Iterator[tuple[UnitOption, Column, Column | None]]:
        if isinstance(unit, int):
            units = self.units[number]
            yield from ((c.option, c.count, c.sharded) for c in units[unit if len(units) > 1 else 0])
            return
        stage, index = unit
        for o, option in enumerate(self.problem.stages[stage].variants[0].units[index]):
            yield option, (stage, index, o, False), (stage, index, o, True) if option.slices > 1 else None

    def _serial_cost(self) -> None:
        """What a step takes of all operations one after the other, as far as nothing overlaps."""
        for micro, times in self.problem.micro_batches:
            part = times * (1 - self.problem.overlap)
            for number, variant in enumerate(self.table.variants):
                kernels = sum(stage.seconds for stage in variant.passes)
                parts = [self.kernel_terms(number, part * kernels)]
                for (unit, name), count in serial_counts(variant).items():
                    terms = self.option_terms(number, unit, (name,), micro)
                    parts.append({key: part * count * value for key, value in terms.items()})
                for key, value in (item for terms in parts for item in terms.items()):
                    if isinstance(key, int):
                        self.cost[key] += value
                    else:
                        self.foreign_cost[key] = self.foreign_cost.get(key, 0.0) + value

    def _drop_beaten(self, options: Sequence[Chosen], alone: bool) -> None:
        """Options that another one of the unit beats, or equals, in all bytes and seconds need not be chosen."""
        rivals = [c for c in options if c.sharded is None and c.option.far is None]
        if len(rivals) < 2:
            return
        needs = np.array([self._needs(c, alone) for c in rivals])
        beats = np.all(needs[:, None] <= needs[None], axis=2).tolist()
        for index, chosen in enumerate(rivals):
            # of equal ones the first stays
            if any(beats[o][index] and (o < index or not beats[index][o]) for o in range(len(rivals)) if o != index):
                self.upper[chosen.count] = 0.0

    def _needs(self, chosen: Chosen, alone: bool) -> list[float]:
        option = chosen.option
        matrices = self.clocks.matrices.get(chosen.count) if alone and self.clocks is not None else None
        if matrices is not None:
            times = [self.cost[chosen.count], *np.concatenate(matrices).ravel().tolist()]
        else:
            times = [
                sum(getattr(option, name).base for name in micro.takes(names))
                for names in TAKEN_TOGETHER
                for micro, _ in self.problem.micro_batches
            ]
        held = [getattr(option, name).base for name in BYTES]
        return [*times, *held, *option.forward[:, 0].tolist(), *option.backward[:, 0].tolist()]

    # Bytes by column, in MiB

    def vector(self, name: str) -> FloatArray:
        """What each column holds of one kind of bytes; `before` and `behind` with what its variant leaves behind."""
        if name not in self._vectors:
            values = [0.0] * len(self)
            kind = {"before": "between", "behind": "after"}.get(name, name)
            for chosen in self.chosen():
                amount = getattr(chosen.option, kind)
                values[chosen.count] += amount.base
                if chosen.sharded is not None:
                    values[chosen.sharded] += amount.slope
            for columns, variant in zip(self.variants, self.table.variants, strict=True):
                left = {"before": variant.saved, "behind": variant.saved + variant.freed, "host": variant.host}.get(
                    name, 0
                )
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
        """Rows of a pass for a single stage; they meet only where they see the same neighbours.

        One row of the program takes one row of every variant: only the chosen one's part is not zero, so it says the
        same as a row for each, and its relaxation cannot hide one variant behind another.
        """
        if backward not in self._exact:
            tables = [variant.backward if backward else variant.forward for variant in self.table.variants]
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
            self._exact[backward] = (
                found if any(variant.cross_stage_units for variant in self.table.variants) else _highest_of(found)
            )
        return self._exact[backward]

    def _part(self, number: int, backward: bool) -> FloatArray:
        """A variant's rows, by column: its activations and what its options hold there."""
        variant = self.table.variants[number]
        rows = variant.backward if backward else variant.forward
        part = np.zeros((len(rows), len(self)))
        part[:, self.variants[number]] = (rows.activations + (variant.saved if backward else 0))[:, None]
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
        for columns, variant, units in zip(self.variants, self.table.variants, self.units, strict=True):
            rows = variant.backward if backward else variant.forward
            sees = np.ones(len(rows), bool)
            for flag, _ in seen:
                sees &= getattr(rows, flag)
            rest = min(variant.saved, variant.saved + variant.freed) if backward else 0
            need = variant.saved if backward else 0
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
    if not rows:  # a pass without kernels: nothing before the first block has a gradient
        return []
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
    """A variant's part in a row of the program: its next row with the same flags, or its highest of any."""
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
