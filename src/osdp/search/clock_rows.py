"""The clocks of a kind of stage as rows of the program; see [Note: Clocks] in osdp.search.streams.

[Note: Clock rows]
A row of a single stage says that a clock behind a pass comes after a clock before it by at least the entry of the
pass's matrix: a sum over the columns, as each choice has an entry of its own. Where units choose for themselves the
entry is a maximum over paths of sums; a column stands for each maximum.

For a group, whose order is open, what holds in every order is kept: a path that stays on one clock takes the sum of the
entries, and one that changes over takes at least as much as the least change. Only blocks' pace needs more: between two
blocks k and l the streams take the longer of computing k and gathering l, and neither of two sums can say so. `pace`
gives each choice the time that it takes behind the quickest block there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from osdp.search.evaluate import option_seconds, units_of_other_stages
from osdp.search.problem import MicroBatch, UnitOption
from osdp.search.streams import CLOCKS, COMPUTE, Matrix, Op, matrices, passed

if TYPE_CHECKING:
    from osdp.search.stage_columns import Column, StageColumns, Terms

Which = tuple[bool, MicroBatch]  # of a step's passes: backward, and in which kind of micro-batch


@dataclass(frozen=True)
class Entry:
    """From one clock to another: what it takes, and for groups the least by which it exceeds staying on either."""

    before: int
    behind: int
    terms: Terms
    least_over_before: float | None
    least_over_behind: float | None


@dataclass(frozen=True)
class Pace:
    """See [Note: Clock rows]: what each column takes, and what is between that and the clock of the computation."""

    terms: Terms
    least_behind: float  # from the pace to the computation behind the last stage
    most_before: float  # from the computation before the first stage to the pace


class _Symbols:
    """Clocks as sums over columns. A maximum is a column of its own, or its longer side where a bound is enough."""

    def __init__(self, kind: StageColumns, number: int, micro: MicroBatch) -> None:
        self._kind, self._number, self._micro = kind, number, micro
        self._shares: Terms = {}
        if kind.coarse:  # columns as they would be if all options of a unit were taken alike
            for unit in range(len(kind.units[number])):
                options = kind.option_columns(number, unit)
                for count, sharded in options:
                    self._shares[count] = 1 / len(options)
                    if sharded is not None:
                        self._shares[sharded] = 1 / len(options)
            if len(kind.units[number]) > 1:
                self._shares |= dict.fromkeys(kind.variants[number], 1.0)

    def _likely(self, terms: Terms) -> float:
        return sum(seconds * self._shares.get(key, 0.1) for key, seconds in terms.items())

    def plus(self, value: Terms, op: Op) -> Terms:
        found = dict(value)
        more = [self._kind.kernel_terms(self._number, op.seconds)]
        if op.names:
            more.append(self._kind.option_terms(self._number, op.unit, op.names, self._micro))
        for terms in more:
            for key, seconds in terms.items():
                found[key] = found.get(key, 0.0) + seconds
        return found

    def awaited(self, value: Terms, op: Op) -> Terms | None:
        """The value where the unit's option gathers something, else too little to matter."""
        gathered = self._kind.option_terms(self._number, op.unit, op.names, self._micro)
        columns = {key for key, _ in self._kind.option_columns(self._number, op.unit)}
        if not gathered:
            return None
        if columns <= set(gathered):
            return value
        if self._kind.coarse:
            return None
        late = self._kind.latest
        found = dict(value)
        for column in self._kind.variants[self._number]:
            found[column] = found.get(column, 0.0) - late
        for key in columns & set(gathered):
            found[key] = found.get(key, 0.0) + late
        return found

    def maximum(self, left: Terms, right: Terms) -> Terms:
        keys: set[Column] = {*left, *right}
        if all(left.get(key, 0.0) >= right.get(key, 0.0) for key in keys):
            return left
        if all(left.get(key, 0.0) <= right.get(key, 0.0) for key in keys):
            return right
        if self._kind.coarse:
            return max(left, right, key=self._likely)
        column = self._kind.column(integer=False)
        self._kind.at_least(column, left)
        self._kind.at_least(column, right)
        return {column: 1.0}


class ClockRows:
    """The entries of all passes of a kind; `matrices` has those of the columns that are a stage's whole choice."""

    def __init__(self, kind: StageColumns) -> None:
        self._kind = kind
        self.matrices: dict[int, list[Matrix]] = {}
        self.entries: dict[Which, list[Entry]] = {}
        self.paces: dict[Which, Pace | None] = {}
        self._plain = [self._is_plain(number) for number in range(len(kind.table.variants))]
        for micro, _ in kind.problem.micro_batches:
            for backward in (False, True):
                which = backward, micro
                numbers = self._matrices(which)
                self.entries[which] = self._entries(which, numbers)
                self.paces[which] = _pace(numbers) if all(self._plain) else None

    @property
    def _symbolic_shapes(self) -> list[int]:
        return [number for number, plain in enumerate(self._plain) if not plain]

    def _is_plain(self, number: int) -> bool:
        """Whether a column is the whole choice of the stage: one unit, nothing split, no other stage's unit in it."""
        units = self._kind.units[number]
        cross_stage_units = any(units_of_other_stages(stage) for stage in self._kind.table.variants[number].passes)
        return len(units) == 1 and all(chosen.sharded is None for chosen in units[0]) and not cross_stage_units

    def _matrices(self, which: Which) -> dict[int, Matrix]:
        """The matrices of columns that are a whole choice, scaled."""
        backward, micro = which
        found: dict[int, Matrix] = {}
        for number, variant in enumerate(self._kind.table.variants):
            stage = variant.passes[backward]
            if not self._plain[number]:
                continue
            chosen = self._kind.units[number][0]
            options = [each.option for each in chosen]
            known: dict[object, float] = {}
            together = matrices(stage, lambda op, o=options, k=known: _seconds(op, o, micro, k), len(options))
            together *= self._kind.scale
            for each, one in zip(chosen, together, strict=True):
                found[each.count] = one
                self.matrices.setdefault(each.count, []).append(one)
        return found

    def _entries(self, which: Which, numbers: dict[int, Matrix]) -> list[Entry]:
        table = np.stack(list(numbers.values())) if numbers else np.full((0, CLOCKS, CLOCKS), -np.inf)
        symbols = [self._symbolic(number, which) for number in self._symbolic_shapes]
        entries = []
        for before in range(CLOCKS):
            for behind in range(CLOCKS):
                column = table[:, before, behind]
                found = [each[before][behind] for each in symbols]
                if not np.isfinite(column).any() and all(terms is None for terms in found):
                    continue
                late = self._kind.latest  # where a choice has no such path, the row must say nothing
                terms: Terms = {key: float(max(v, -late)) for key, v in zip(numbers, column, strict=True) if v}
                for number, more in zip(self._symbolic_shapes, found, strict=True):
                    terms |= dict.fromkeys(self._kind.variants[number], -late) if more is None else more
                always = np.isfinite(column).all() and not symbols
                over = [
                    float((column - table[:, a, a]).min()) if always and np.isfinite(table[:, a, a]).all() else None
                    for a in (before, behind)
                ]
                entries.append(Entry(before, behind, terms, *over))
        return entries

    def _symbolic(self, number: int, which: Which) -> list[list[Terms | None]]:
        """For each clock before a pass, all clocks behind it."""
        backward, micro = which
        stage = self._kind.table.variants[number].passes[backward]
        symbols = _Symbols(self._kind, number, micro)
        return [
            passed(stage, [{} if clock == given else None for clock in range(CLOCKS)], symbols)
            for given in range(CLOCKS)
        ]


def _seconds(op: Op, options: Sequence[UnitOption], micro: MicroBatch, known: dict[object, float]) -> Matrix:
    """What an operation takes in each of the options that are a stage's whole choice; many have parts in common."""
    if not op.names:
        return np.full((len(options), 1), op.seconds)
    assert isinstance(op.unit, int)
    taken = []
    for option in options:
        part, sharded = option.of(op.unit, 1)
        key = id(part), sharded, op.names
        if key not in known:
            known[key] = option_seconds(part, sharded, op.names, micro)
        taken.append(known[key])
    return op.seconds + np.array(taken)[:, None]


def _pace(numbers: dict[int, Matrix]) -> Pace | None:
    """See [Note: Clock rows]. A pass takes at least what entering it and leaving it take, each by itself."""
    if not numbers:
        return None
    table = np.stack(list(numbers.values()))
    if not np.isfinite(table[:, COMPUTE, COMPUTE]).all():
        return None
    entering = table[:, :, COMPUTE] - table[:, COMPUTE, COMPUTE][:, None]  # from every clock, beside COMPUTE's
    with np.errstate(invalid="ignore"):
        leaving = np.where(np.isfinite(entering)[:, :, None], table - entering[:, :, None], np.inf).min(axis=1)
    least = leaving.min(axis=0)
    usable = np.isfinite(least)
    paces = (least[usable] + entering[:, usable]).max(axis=1)
    terms: Terms = {key: float(pace) for key, pace in zip(numbers, paces, strict=True)}
    return Pace(terms, float(least[COMPUTE]), float(paces.max()))
