"""The decision as tables: what every option costs, at one batch size. All bytes are whole numbers.

[Note: Problem]
A step visits the stages forward and then backward. Each stage takes one shape; in that shape each of its units takes
one option. An option of a split unit also takes a number: how many of its slices are sharded; its costs are affine in
that number. At every row of every visit

    constant + always(all) + held between passes(stages before) + gradients and rest(stages after, in backward)
    + activations + own units + what the neighbours' gathers and reductions hold here        <= limit

and at the optimizer likewise. The objective is the step's seconds: compute and communication of each visit added, or
the larger of both where they overlap, or a mixture where they do in part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class UnitOption:
    """One option of one unit. `key` names it to whoever made the table; `slices` bounds the number of sharded ones.

    Bytes: `always`, `between` the unit's passes, `after` its backward, in the optimizer (`stepping`); `ahead` and
    `ahead_again` are its gather's buffer in the visit before it, `cast` and `cast_again` what is added at the moment
    of issue; `reducing` its reduction's buffer in the visit after. Rows of its own visits: `forward`, `backward`
    ([row, base or slope]). `far` replaces between and after for a unit that spans stages: bytes in every visit.
    Seconds on the communication stream (`gather`, `gather_again`, `reduce`), and of copies on the compute stream.
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
    step: Seconds = NO_SECONDS
    reduce_once: bool = False

    @property
    def counts(self) -> range:
        """The numbers of sharded slices to choose from."""
        return range(1, self.slices + 1)


@dataclass(frozen=True)
class Guest:
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
    forward_seconds: float
    backward_seconds: float
    guests: tuple[Guest, ...] = ()


@dataclass(frozen=True)
class StageTable:
    """A stage; equal `alike` numbers mean interchangeable stages. `exposed` communication never overlaps."""

    shapes: tuple[ShapeTable, ...]
    alike: int
    exposed: bool = False


@dataclass(frozen=True)
class Problem:
    stages: tuple[StageTable, ...]
    constant: int
    limit: int
    overlap: float
    accumulation: int = 1

    def overlap_of(self, table: StageTable) -> float:
        return 0.0 if table.exposed else float(self.overlap)


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


class _Taken:
    """A stage with a choice made: its sums, whatever lies around it."""

    def __init__(self, problem: Problem, table: StageTable, choice: StageChoice) -> None:
        self.shape = shape = table.shapes[choice.shape]
        self.options = [(shape.units[u][o], k) for u, (o, k) in enumerate(choice.options)]
        self.totals = {name: sum(getattr(o, name).at(k) for o, k in self.options) for name in _TOTALS}
        self.own = np.zeros(len(shape.forward), np.int64), np.zeros(len(shape.backward), np.int64)
        for option, k in self.options:
            for own, table_rows in zip(self.own, (option.forward, option.backward), strict=True):
                own += table_rows[:, 0] + k * table_rows[:, 1]
        self.far = [option.far for option, _ in self.options if option.far is not None]
        self.seconds = _seconds(problem, table, shape, self.options)
        self._highest: dict[tuple[int, ...], int] = {}

    def highest(self, backward: bool, neighbours: tuple[int, int, int], guests: IntArray | None) -> int:
        """The highest row of a visit, relative to its start."""
        key = backward, *neighbours
        if guests is None and key in self._highest:
            return self._highest[key]
        rows = self.shape.backward if backward else self.shape.forward
        if not len(rows):
            return 0
        ahead, cast, reducing = neighbours
        level = rows.activations + self.own[backward] + ahead * rows.tail + cast * rows.issue + reducing * rows.head
        if guests is not None:
            return int((level + guests).max())
        self._highest[key] = int(level.max())
        return self._highest[key]


_NONE = dict.fromkeys(_TOTALS, 0)


def evaluate(problem: Problem, choice: tuple[StageChoice, ...]) -> Verdict:
    """The costs of a choice by plain sums, with no solver: the judge of every answer."""
    stages = len(problem.stages)
    known: dict[object, _Taken] = {}  # stages with the same tables and the same choice cost the same
    taken = []
    for table, stage in zip(problem.stages, choice, strict=True):
        key = id(table.shapes), table.exposed, stage
        if key not in known:
            known[key] = _Taken(problem, table, stage)
        taken.append(known[key])
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
        guests = _guests(t.shape, choice)
        level = base + before[i] + spans[i]
        highest = level + t.highest(False, (right["ahead"], right["cast"], 0), guests[0])
        level = base + before[i] + t.shape.saved + behind[i + 1] + spans[2 * stages - 1 - i]
        again = left["ahead_again"], left["cast_again"], right["reducing"]
        highest = max(highest, level + t.highest(True, again, guests[1]))
        peak = max(peak, highest)
        if highest > problem.limit:
            excess[i] = max(highest - problem.limit, excess.get(i, 0))
    over = tuple(sorted(excess))
    return Verdict(sum(t.seconds for t in taken), peak, over, tuple(excess[i] for i in over))


def _guests(shape: ShapeTable, choice: tuple[StageChoice, ...]) -> tuple[IntArray | None, IntArray | None]:
    """What units of other stages hold in this one's visits."""
    if not shape.guests:
        return None, None
    forward, backward = np.zeros(len(shape.forward), np.int64), np.zeros(len(shape.backward), np.int64)
    for guest in shape.guests:
        o, k = choice[guest.stage].options[guest.unit]
        forward += guest.forward[o] @ np.array([1, k])
        backward += guest.backward[o] @ np.array([1, k])
    return forward, backward


def _seconds(problem: Problem, table: StageTable, shape: ShapeTable, options: list[tuple[UnitOption, int]]) -> float:
    """See [Note: Problem]. Of several micro-batches, the last one carries the reductions that are made once."""
    micro, overlap = problem.accumulation, problem.overlap_of(table)

    def sums(name: str, once: bool | None = None) -> float:
        return sum(getattr(o, name).at(k) for o, k in options if once is None or o.reduce_once == once)

    seconds = micro * phase(shape.forward_seconds + sums("copy"), sums("gather"), overlap)
    compute = shape.backward_seconds + sums("copy_again") + sums("copy_reduce", False)
    wires = sums("gather_again") + sums("reduce", False)
    seconds += (micro - 1) * phase(compute, wires, overlap)
    seconds += phase(compute + sums("copy_reduce", True), wires + sums("reduce", True), overlap)
    return seconds + sums("step")


def phase(compute: float, communication: float, overlap: float) -> float:
    """One visit of one stage: both streams side by side as far as they overlap, one after the other for the rest."""
    return overlap * max(compute, communication) + (1 - overlap) * (compute + communication)
