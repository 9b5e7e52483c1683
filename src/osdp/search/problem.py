"""The decision as tables: what every option costs, at one batch size. All bytes are whole numbers.

[Note: Problem]
A step visits the stages forward and then backward. Each stage takes one shape; in that shape each of its units takes
one option. An option of a split unit also takes a number: how many of its slices are sharded; its costs are affine in
that number. At every row of every visit

    constant + always(all) + held between passes(stages before) + gradients and rest(stages after, in backward)
    + activations + own units + what the neighbours' gathers and reductions hold here        <= limit

and at the optimizer likewise. The objective is the step's seconds: those of its two streams (see [Note: Streams] in
osdp.search.streams) where they overlap, the sum of all operations where they do not, and a mixture where they overlap
in part.

[Note: Micro-batches]
Of several micro-batches the last one carries what is reduced once a step: all of a reduction, its all-reduce across
nodes, or nothing. So there are two kinds of them, OFTEN and LAST. The streams meet at the end of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osdp.search.streams import Act, Matrix, Op, StagePass, end, followed, matrix, start

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Amount:
    """base + slope · sharded slices; slope is 0 where nothing is split."""

    base: int = 0
    slope: int = 0

    def at(self, sharded: int) -> int:
        return self.base + self.slope * sharded


@dataclass(frozen=True)
class Seconds:
    """base + slope · sharded slices, in seconds."""

    base: float = 0.0
    slope: float = 0.0

    def at(self, sharded: int) -> float:
        return self.base + self.slope * sharded


NO_BYTES = Amount()
NO_SECONDS = Seconds()
OFTEN, LAST = False, True  # see [Note: Micro-batches]
REDUCED = ("reduce", "copy_reduce", "slice_reduce", "slice_wires_reduce")  # in every micro-batch
REDUCED_LAST = tuple(f"{name}_last" for name in REDUCED)  # what the last one takes beyond that
SECONDS = (
    *("gather", "gather_again", "reduce", "copy", "copy_again", "copy_reduce", "slice_run", "slice_rest"),
    *("slice_run_again", "slice_rest_again", "slice_reduce", "slice_wires", "slice_wires_reduce", "step"),
    *REDUCED_LAST,
)


@dataclass(frozen=True)
class UnitOption:
    """One option of one unit. `key` names it to whoever made the table; `slices` bounds the number of sharded ones.

    Bytes: `always`, `between` the unit's passes, `after` its backward, in the optimizer (`stepping`); `ahead` and
    `ahead_again` are its gather's buffer in the visit before it, `cast` and `cast_again` what is added at the moment
    of issue; `reducing` its reduction's buffer in the visit after. Rows of its own visits: `forward`, `backward`
    ([row, base or slope]). `far` replaces between and after for a unit that spans stages: bytes in every visit.
    Seconds on the communication stream: `gather`, `gather_again` and `reduce`, of split units one slice's; and of
    copies on the compute stream. Slices take turns: `slice_run` is what forward takes before the last one of them,
    waits included, `slice_rest` what its kernels then take less; `slice_reduce` is added to backward where slices are
    reduced. `slice_wires` and `slice_wires_reduce` are the other slices' collectives, which hide in these. What ends in
    `_last` comes on top in the last micro-batch.
    """

    key: object
    forward: IntArray
    backward: IntArray
    slices: int = 1
    always: Amount = NO_BYTES
    between: Amount = NO_BYTES
    after: Amount = NO_BYTES
    stepping: Amount = NO_BYTES
    ahead: Amount = NO_BYTES
    cast: Amount = NO_BYTES
    ahead_again: Amount = NO_BYTES
    cast_again: Amount = NO_BYTES
    reducing: Amount = NO_BYTES
    far: IntArray | None = None
    gather: Seconds = NO_SECONDS
    gather_again: Seconds = NO_SECONDS
    reduce: Seconds = NO_SECONDS
    copy: Seconds = NO_SECONDS
    copy_again: Seconds = NO_SECONDS
    copy_reduce: Seconds = NO_SECONDS
    slice_run: Seconds = NO_SECONDS
    slice_rest: Seconds = NO_SECONDS
    slice_run_again: Seconds = NO_SECONDS
    slice_rest_again: Seconds = NO_SECONDS
    slice_reduce: Seconds = NO_SECONDS
    slice_wires: Seconds = NO_SECONDS
    slice_wires_reduce: Seconds = NO_SECONDS
    reduce_last: Seconds = NO_SECONDS
    copy_reduce_last: Seconds = NO_SECONDS
    slice_reduce_last: Seconds = NO_SECONDS
    slice_wires_reduce_last: Seconds = NO_SECONDS
    step: Seconds = NO_SECONDS
    parts: tuple[tuple[UnitOption, int], ...] = ()  # of units that choose together: each one's option and its slices

    def of(self, part: int, sharded: int) -> tuple[UnitOption, int]:
        """The option of one unit of those that choose together, or of the only one."""
        return self.parts[part] if self.parts else (self, sharded)

    @property
    def differs_last(self) -> bool:
        """Whether the last micro-batch takes longer than the others."""
        return any(getattr(self, name) != NO_SECONDS for name in REDUCED_LAST)

    @property
    def counts(self) -> range:
        """The numbers of sharded slices to choose from."""
        return range(1, self.slices + 1)


@dataclass(frozen=True)
class CrossStageUnit:
    """A unit of another stage that is used in this one: its rows here, option by option."""

    stage: int
    unit: int
    forward: tuple[IntArray, ...]
    backward: tuple[IntArray, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of one visit. `activations` is relative to the visit's start, which is a row too: one is not negative.

    `tail` marks rows at which the next stage's gather is under way, `issue` those at which it is issued, `head` those
    at which the last stage's reduction is.
    """

    activations: IntArray
    tail: NDArray[np.bool_]
    issue: NDArray[np.bool_]
    head: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.activations)


@dataclass(frozen=True)
class ShapeTable:
    """A stage in one shape. `saved` is what its forward leaves behind, `freed` the change over its backward."""

    key: object
    units: tuple[tuple[UnitOption, ...], ...]
    forward: Rows
    backward: Rows
    saved: int
    freed: int
    forward_pass: StagePass
    backward_pass: StagePass
    cross_stage_units: tuple[CrossStageUnit, ...] = ()
    is_block: bool = True
    is_whole: bool = True  # a block that is gathered in one piece, or no block

    @property
    def passes(self) -> tuple[StagePass, StagePass]:
        return self.forward_pass, self.backward_pass


@dataclass(frozen=True)
class StageTable:
    """A stage; equal `alike` numbers mean interchangeable stages."""

    shapes: tuple[ShapeTable, ...]
    alike: int


@dataclass(frozen=True)
class Problem:
    stages: tuple[StageTable, ...]
    constant: int
    limit: int
    overlap: float
    accumulation: int = 1
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # stages that were judged before

    @cached_property
    def micro_batches(self) -> list[tuple[bool, int]]:
        """The kinds of micro-batches, and how many of each there are; see [Note: Micro-batches]."""
        once = self.accumulation > 1 and any(o.differs_last for s in self._shapes() for u in s.units for o in u)
        return [(OFTEN, self.accumulation - 1), (LAST, 1)] if once else [(LAST, self.accumulation)]

    def _shapes(self) -> Sequence[ShapeTable]:
        kinds = {id(stage.shapes): stage.shapes for stage in self.stages}
        return [shape for shapes in kinds.values() for shape in shapes]


@dataclass(frozen=True)
class StageChoice:
    """The shape of a stage and, for each of its units, the option and the number of sharded slices."""

    shape: int
    options: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Verdict:
    """What a choice costs: the step's seconds, the highest bytes, and the visits that exceed the limit."""

    seconds: float
    peak: int
    over: tuple[int, ...] = field(default=())  # stages whose rows exceed the limit
    excess: tuple[int, ...] = field(default=())  # by how many bytes each of them does


_TOTALS = ("always", "between", "after", "stepping", "ahead", "cast", "ahead_again", "cast_again", "reducing")


OtherStagesUnits = dict[
    tuple[int, int], tuple[UnitOption, int]
]  # other stages' units that act in one, with what they chose


class _Taken:
    """A stage with a choice made: its sums, whatever lies around it."""

    def __init__(self, table: StageTable, choice: StageChoice) -> None:
        self.shape = shape = table.shapes[choice.shape]
        self.options = [(shape.units[u][o], k) for u, (o, k) in enumerate(choice.options)]
        self.totals = {name: sum(getattr(o, name).at(k) for o, k in self.options) for name in _TOTALS}
        self.own = np.zeros(len(shape.forward), np.int64), np.zeros(len(shape.backward), np.int64)
        for option, k in self.options:
            for own, table_rows in zip(self.own, (option.forward, option.backward), strict=True):
                own += table_rows[:, 0] + k * table_rows[:, 1]
        self.far = [option.far for option, _ in self.options if option.far is not None]
        self.step_seconds = sum(o.step.at(k) for o, k in self.options)
        self._highest: dict[tuple[int, ...], int] = {}
        self._matrices: dict[object, Matrix] = {}

    def matrix(self, backward: bool, last: bool, cross_stage_units: OtherStagesUnits) -> Matrix:
        """A pass's matrix, with the options of other stages' units that act in it."""
        stage = self.shape.passes[backward]
        others = tuple(
            (unit, id(cross_stage_units[unit][0]), cross_stage_units[unit][1]) for unit in units_of_other_stages(stage)
        )
        key = backward, last, others
        if key not in self._matrices:

            def seconds(op: Op) -> float:
                return op.seconds + (self._seconds(op.unit, op.names, last, cross_stage_units) if op.names else 0.0)

            self._matrices[key] = matrix(stage, seconds)
        return self._matrices[key]

    def serial_seconds(self, last: bool, cross_stage_units: OtherStagesUnits, passes: Sequence[bool]) -> float:
        """Of all that these passes of a micro-batch do in this stage, one after the other."""
        kernels = sum(self.shape.passes[backward].seconds for backward in passes)
        found = serial_counts(self.shape, passes).items()
        return kernels + sum(
            times * self._seconds(unit, (name,), last, cross_stage_units) for (unit, name), times in found
        )

    def _seconds(
        self, unit: int | tuple[int, int], names: Sequence[str], last: bool, cross_stage_units: OtherStagesUnits
    ) -> float:
        if not isinstance(unit, int):
            option, k = cross_stage_units[unit]
        elif len(self.options) == 1:
            option, k = self.options[0][0].of(unit, self.options[0][1])
        else:
            option, k = self.options[unit]
        return option_seconds(option, k, names, last)

    def highest(self, backward: bool, neighbours: tuple[int, int, int], cross_stage_units: IntArray | None) -> int:
        """The highest row of a visit, relative to its start."""
        key = backward, *neighbours
        if cross_stage_units is None and key in self._highest:
            return self._highest[key]
        rows = self.shape.backward if backward else self.shape.forward
        if not len(rows):
            return 0
        ahead, cast, reducing = neighbours
        level = rows.activations + self.own[backward] + ahead * rows.tail + cast * rows.issue + reducing * rows.head
        if cross_stage_units is not None:
            return int((level + cross_stage_units).max())
        self._highest[key] = int(level.max())
        return self._highest[key]


_NONE = dict.fromkeys(_TOTALS, 0)


def evaluate(problem: Problem, choice: tuple[StageChoice, ...]) -> Verdict:
    """The costs of a choice by plain sums, with no solver: the judge of every answer."""
    stages = len(problem.stages)
    taken = []
    for table, stage in zip(problem.stages, choice, strict=True):
        key = id(table.shapes), stage  # stages with the same tables and the same choice cost the same
        if key not in problem.known:
            problem.known[key] = _Taken(table, stage)
        taken.append(problem.known[key])
    totals = [t.totals for t in taken]
    base = problem.constant + sum(t["always"] for t in totals)
    far = np.zeros(2 * stages, dtype=np.int64)
    for line in (line for t in taken for line in t.far):
        far += line
    before = [0]
    for t in taken:
        before.append(before[-1] + t.totals["between"] + t.shape.saved)
    behind = [0] * (stages + 1)
    for i in range(stages - 1, -1, -1):
        behind[i] = behind[i + 1] + totals[i]["after"] + taken[i].shape.saved + taken[i].shape.freed
    peak, excess = base + behind[0] + sum(t["stepping"] for t in totals), {}
    if peak > problem.limit:
        excess = dict.fromkeys(range(stages), peak - problem.limit)
    spans = far.tolist()
    for i, t in enumerate(taken):
        left = totals[i - 1] if i else _NONE
        right = totals[i + 1] if i + 1 < stages else _NONE
        cross_stage_units = _cross_stage_units(t.shape, choice)
        level = base + before[i] + spans[i]
        highest = level + t.highest(False, (right["ahead"], right["cast"], 0), cross_stage_units[0])
        level = base + before[i] + t.shape.saved + behind[i + 1] + spans[2 * stages - 1 - i]
        again = left["ahead_again"], left["cast_again"], right["reducing"]
        highest = max(highest, level + t.highest(True, again, cross_stage_units[1]))
        peak = max(peak, highest)
        if highest > problem.limit:
            excess[i] = max(highest - problem.limit, excess.get(i, 0))
    over = tuple(sorted(excess))
    return Verdict(_step_seconds(problem, taken), peak, over, tuple(excess[i] for i in over))


def _cross_stage_units(shape: ShapeTable, choice: tuple[StageChoice, ...]) -> tuple[IntArray | None, IntArray | None]:
    """What units of other stages hold in this one's visits."""
    if not shape.cross_stage_units:
        return None, None
    forward, backward = np.zeros(len(shape.forward), np.int64), np.zeros(len(shape.backward), np.int64)
    for guest in shape.cross_stage_units:
        o, k = choice[guest.stage].options[guest.unit]
        forward += guest.forward[o] @ np.array([1, k])
        backward += guest.backward[o] @ np.array([1, k])
    return forward, backward


def option_seconds(option: UnitOption, sharded: int, names: Sequence[str], last: bool) -> float:
    """What an option takes of some kinds of seconds in a micro-batch."""
    return sum(getattr(option, name).at(sharded) for name in names if last or name not in REDUCED_LAST)


_SERIAL = (
    *("gather", "gather_again", "reduce", "copy", "copy_again", "copy_reduce"),
    *("reduce_last", "copy_reduce_last"),
)
_SERIAL_SLICES = ("slice_wires", "slice_wires_reduce", "slice_wires_reduce_last")


def serial_counts(
    shape: ShapeTable, passes: Sequence[bool] = (False, True)
) -> Counter[tuple[int | tuple[int, int], str]]:
    """How often each kind of a unit's seconds occurs in a micro-batch, if nothing ran side by side.

    Then no slice waits for another: what they send is added.
    """
    counts: Counter[tuple[int | tuple[int, int], str]] = Counter()
    for stage in (shape.passes[backward] for backward in passes):
        if stage.pending >= 0:
            counts[stage.pending, stage.pending_name] += 1
        taking = (op for op in stage.ops if op.act is not Act.WAIT)
        counts.update((op.unit, name) for op in taking for name in op.names if name in _SERIAL)
    if True not in passes:  # slices are counted with backward
        return counts
    count = len(shape.units[0][0].parts) or len(shape.units) if shape.units else 0
    counts.update((unit, name) for unit in range(count) for name in _SERIAL_SLICES)
    return counts


def units_of_other_stages(stage: StagePass) -> list[tuple[int, int]]:
    """Units of other stages that act in a pass."""
    return list(dict.fromkeys(op.unit for op in stage.ops if not isinstance(op.unit, int)))


def _step_seconds(problem: Problem, taken: Sequence[_Taken]) -> float:
    """See [Note: Problem]."""
    seconds = sum(t.step_seconds for t in taken)
    for last, times in problem.micro_batches:
        seconds += times * _micro_batch_seconds(problem, taken, last, (False, True))
    return seconds


def _micro_batch_seconds(problem: Problem, taken: Sequence[_Taken], last: bool, passes: Sequence[bool]) -> float:
    cross_stage_units = {
        unit: taken[unit[0]].options[unit[1]]
        for t in taken
        for stage in t.shape.passes
        for unit in units_of_other_stages(stage)
    }
    seconds = 0.0
    if problem.overlap > 0:
        clocks = start()
        for backward in passes:
            for t in reversed(taken) if backward else taken:
                clocks = followed(clocks, t.matrix(backward, last, cross_stage_units))
        seconds += problem.overlap * end(clocks)
    if problem.overlap < 1:
        seconds += (1 - problem.overlap) * sum(t.serial_seconds(last, cross_stage_units, passes) for t in taken)
    return seconds


def forward_seconds(problem: Problem, choice: tuple[StageChoice, ...]) -> float:
    """The forward of one micro-batch alone."""
    taken = [_Taken(table, stage) for table, stage in zip(problem.stages, choice, strict=True)]
    return _micro_batch_seconds(problem, taken, LAST, (False,))
