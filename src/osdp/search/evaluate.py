"""What a choice costs: the highest peak over all rows, and the step's seconds; see [Note: Problem]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from osdp.search.problem import (
    BYTES,
    NO_SECONDS,
    IntArray,
    MicroBatch,
    Problem,
    StageChoice,
    StageTable,
    UnitOption,
    VariantTable,
)
from osdp.search.streams import Act, Matrix, Op, StagePass, end, followed, matrix, start


@dataclass(frozen=True)
class Verdict:
    """What a choice costs: the step's seconds, the highest bytes, and the passes that exceed the limit.

    A choice that exceeds the host's limit has a peak above the device's by at least as much.
    """

    seconds: float
    peak: int
    over: tuple[int, ...] = field(default=())  # stages whose rows exceed the limit
    excess: tuple[int, ...] = field(default=())  # by how many bytes each of them does


_NONE = dict.fromkeys(BYTES, 0)
_SERIAL = (
    *("gather", "gather_again", "reduce", "copy", "copy_again", "copy_reduce"),
    *("gather_first", "copy_first", "reduce_last", "copy_reduce_last"),
)
_SERIAL_SLICES = ("slice_wires", "slice_wires_reduce", "slice_wires_reduce_last")
# Other stages' units that act in one, with what they chose.
OtherStagesUnits = dict[tuple[int, int], tuple[UnitOption, int]]


class TakenStage:
    """A stage with a choice made: its sums, whatever lies around it."""

    def __init__(self, table: StageTable, choice: StageChoice) -> None:
        self.variant = variant = table.variants[choice.variant]
        self.options = [(variant.units[u][o], k) for u, (o, k) in enumerate(choice.options)]
        self.totals = {name: sum(getattr(o, name).at(k) for o, k in self.options) for name in BYTES}
        self.totals["host"] += variant.host
        self.own = np.zeros(len(variant.forward), np.int64), np.zeros(len(variant.backward), np.int64)
        for option, k in self.options:
            for own, table_rows in zip(self.own, (option.forward, option.backward), strict=True):
                own += table_rows[:, 0] + k * table_rows[:, 1]
        self.far = [option.far for option, _ in self.options if option.far is not None]
        self.step_seconds = sum(o.step.at(k) for o, k in self.options)
        self._highest: dict[tuple[int, ...], int] = {}
        self._matrices: dict[object, Matrix] = {}

    def matrix(self, backward: bool, micro: MicroBatch, cross_stage_units: OtherStagesUnits) -> Matrix:
        """A pass's matrix, with the options of other stages' units that act in it."""
        stage = self.variant.passes[backward]
        others = tuple(
            (unit, id(cross_stage_units[unit][0]), cross_stage_units[unit][1]) for unit in units_of_other_stages(stage)
        )
        key = backward, micro, others
        if key not in self._matrices:

            def seconds(op: Op) -> float:
                return op.seconds + (self._seconds(op.unit, op.names, micro, cross_stage_units) if op.names else 0.0)

            self._matrices[key] = matrix(stage, seconds)
        return self._matrices[key]

    def serial_seconds(self, micro: MicroBatch, cross_stage_units: OtherStagesUnits, passes: Sequence[bool]) -> float:
        """Of all that these passes of a micro-batch do in this stage, one after the other."""
        kernels = sum(self.variant.passes[backward].seconds for backward in passes)
        found = serial_counts(self.variant, passes).items()
        return kernels + sum(
            times * self._seconds(unit, (name,), micro, cross_stage_units) for (unit, name), times in found
        )

    def _seconds(
        self,
        unit: int | tuple[int, int],
        names: Sequence[str],
        micro: MicroBatch,
        cross_stage_units: OtherStagesUnits,
    ) -> float:
        if not isinstance(unit, int):
            option, k = cross_stage_units[unit]
        elif len(self.options) == 1:
            option, k = self.options[0][0].of(unit, self.options[0][1])
        else:
            option, k = self.options[unit]
        return option_seconds(option, k, names, micro)

    def highest(self, backward: bool, neighbours: tuple[int, int, int], cross_stage_units: IntArray | None) -> int:
        """The highest row of a pass, relative to its start."""
        key = backward, *neighbours
        if cross_stage_units is None and key in self._highest:
            return self._highest[key]
        rows = self.variant.backward if backward else self.variant.forward
        if not len(rows):
            return 0
        ahead, cast, reducing = neighbours
        level = rows.activations + self.own[backward] + ahead * rows.tail + cast * rows.issue + reducing * rows.head
        if cross_stage_units is not None:
            return int((level + cross_stage_units).max())
        self._highest[key] = int(level.max())
        return self._highest[key]

    def highest_each(
        self, backward: bool, neighbours: Sequence[tuple[int, int, int]], cross_stage_units: IntArray | None
    ) -> IntArray:
        """The highest row of a pass for each of many neighbours."""
        rows = self.variant.backward if backward else self.variant.forward
        if not len(rows):
            return np.zeros(len(neighbours), np.int64)
        level = rows.activations + self.own[backward]
        if cross_stage_units is not None:
            level = level + cross_stage_units
        held = np.array(neighbours, np.int64) @ np.stack([rows.tail, rows.issue, rows.head]).astype(np.int64)
        return (held + level).max(axis=1)


def evaluate(problem: Problem, choice: tuple[StageChoice, ...]) -> Verdict:
    """The costs of a choice by plain sums, with no solver: the judge of every answer."""
    stages = len(problem.stages)
    taken = []
    for table, stage in zip(problem.stages, choice, strict=True):
        key = id(table.variants), stage  # stages with the same tables and the same choice cost the same
        if key not in problem.known:
            problem.known[key] = TakenStage(table, stage)
        taken.append(problem.known[key])
    totals = [t.totals for t in taken]
    base = problem.constant + sum(t["always"] for t in totals)
    far = np.zeros(2 * stages, dtype=np.int64)
    for line in (line for t in taken for line in t.far):
        far += line
    before = [0]
    for t in taken:
        before.append(before[-1] + t.totals["between"] + t.variant.saved)
    behind = [0] * (stages + 1)
    for i in range(stages - 1, -1, -1):
        behind[i] = behind[i + 1] + totals[i]["after"] + taken[i].variant.saved + taken[i].variant.freed
    peak, excess = base + behind[0] + sum(t["stepping"] for t in totals) + problem.stepping, {}
    if peak > problem.limit:
        excess = dict.fromkeys(range(stages), peak - problem.limit)
    spans = far.tolist()
    for i, t in enumerate(taken):
        left = totals[i - 1] if i else _NONE
        right = totals[i + 1] if i + 1 < stages else _NONE
        cross_stage_units = _cross_stage_units(t.variant, choice)
        level = base + before[i] + spans[i]
        highest = level + t.highest(False, (right["ahead"], right["cast"], 0), cross_stage_units[0])
        level = base + before[i] + t.variant.saved + behind[i + 1] + spans[2 * stages - 1 - i]
        again = left["ahead_backward"], left["cast_backward"], right["reducing"]
        highest = max(highest, level + t.highest(True, again, cross_stage_units[1]))
        peak = max(peak, highest)
        if highest > problem.limit:
            excess[i] = max(highest - problem.limit, excess.get(i, 0))
    beyond = 0 if problem.host_limit is None else sum(t["host"] for t in totals) - problem.host_limit
    if beyond > 0:  # no less wrong than what exceeds the device's memory
        peak = max(peak, problem.limit + beyond)
    over = tuple(sorted(excess))
    return Verdict(_step_seconds(problem, taken), peak, over, tuple(excess[i] for i in over))


def _cross_stage_units(
    variant: VariantTable, choice: tuple[StageChoice, ...]
) -> tuple[IntArray | None, IntArray | None]:
    """What units of other stages hold in this one's passes."""
    return rows_of_other_stages(
        variant, {(each.stage, each.unit): choice[each.stage].options[each.unit] for each in variant.cross_stage_units}
    )


def rows_of_other_stages(
    variant: VariantTable, taken: Mapping[tuple[int, int], tuple[int, int]]
) -> tuple[IntArray | None, IntArray | None]:
    """The same; `taken` are the options and sharded slices of these units."""
    if not variant.cross_stage_units:
        return None, None
    forward, backward = np.zeros(len(variant.forward), np.int64), np.zeros(len(variant.backward), np.int64)
    for guest in variant.cross_stage_units:
        o, k = taken[guest.stage, guest.unit]
        forward += guest.forward[o] @ np.array([1, k])
        backward += guest.backward[o] @ np.array([1, k])
    return forward, backward


def option_seconds(option: UnitOption, sharded: int, names: Sequence[str], micro: MicroBatch) -> float:
    """What an option takes of some kinds of seconds in a micro-batch."""
    found = 0.0
    for name in _taken(micro, tuple(names)):
        seconds = getattr(option, name)
        if seconds is not NO_SECONDS:  # as most are
            found += seconds.at(sharded)
    return found


@cache
def _taken(micro: MicroBatch, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(micro.takes(names))


def serial_counts(
    variant: VariantTable, passes: Sequence[bool] = (False, True)
) -> Counter[tuple[int | tuple[int, int], str]]:
    """How often each kind of a unit's seconds occurs in a micro-batch, if nothing ran side by side.

    Then no slice waits for another: what they send is added.
    """
    counts: Counter[tuple[int | tuple[int, int], str]] = Counter()
    for stage in (variant.passes[backward] for backward in passes):
        counts.update((unit, name) for unit in stage.pending for name in stage.pending_names)
        taking = (op for op in stage.ops if op.act is not Act.WAIT)
        counts.update((op.unit, name) for op in taking for name in op.names if name in _SERIAL)
    if True not in passes:  # slices are counted with backward
        return counts
    count = len(variant.units[0][0].parts) or len(variant.units) if variant.units else 0
    counts.update((unit, name) for unit in range(count) for name in _SERIAL_SLICES)
    return counts


def units_of_other_stages(stage: StagePass) -> list[tuple[int, int]]:
    """Units of other stages that act in a pass."""
    return list(dict.fromkeys(op.unit for op in stage.ops if not isinstance(op.unit, int)))


def _step_seconds(problem: Problem, taken: Sequence[TakenStage]) -> float:
    """See [Note: Problem]."""
    seconds = sum(t.step_seconds for t in taken)
    for micro, times in problem.micro_batches:
        seconds += times * _micro_batch_seconds(problem, taken, micro, (False, True))
    return seconds


def _micro_batch_seconds(
    problem: Problem, taken: Sequence[TakenStage], micro: MicroBatch, passes: Sequence[bool]
) -> float:
    cross_stage_units = {
        unit: taken[unit[0]].options[unit[1]]
        for t in taken
        for stage in t.variant.passes
        for unit in units_of_other_stages(stage)
    }
    seconds = 0.0
    if problem.overlap > 0:
        clocks = start()
        for backward in passes:
            for t in reversed(taken) if backward else taken:
                clocks = followed(clocks, t.matrix(backward, micro, cross_stage_units))
        seconds += problem.overlap * end(clocks)
    if problem.overlap < 1:
        seconds += (1 - problem.overlap) * sum(t.serial_seconds(micro, cross_stage_units, passes) for t in taken)
    return seconds


def forward_seconds(problem: Problem, choice: tuple[StageChoice, ...]) -> float:
    """The forward of one micro-batch, on average over a step's."""
    taken = [TakenStage(table, stage) for table, stage in zip(problem.stages, choice, strict=True)]
    kinds = problem.micro_batches
    return sum(n * _micro_batch_seconds(problem, taken, kind, (False,)) for kind, n in kinds) / problem.accumulation
