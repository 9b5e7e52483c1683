"""The decision as tables: what every option costs, at one batch size. All bytes are whole numbers.

[Note: Problem]
A step visits the stages forward and then backward. Each stage takes one shape; in that shape each of its units takes
one option. An option of a split unit also takes a number: how many of its slices are sharded; its costs are affine in
that number. At every row of every visit

    constant + always(all) + held between passes(stages before) + gradients and rest(stages after, in backward)
    + activations + own units + what the neighbours' gathers and reductions hold here        <= limit

and at the optimizer likewise. The objective is the step's seconds: compute and communication of each visit added, or
the larger of both where they overlap.
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
    overlap: bool
    accumulation: int = 1


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


def evaluate(problem: Problem, choice: tuple[StageChoice, ...]) -> Verdict:
    """The costs of a choice by plain sums, with no solver: the judge of every answer."""
    stages = len(problem.stages)
    shapes = [table.shapes[c.shape] for table, c in zip(problem.stages, choice, strict=True)]
    taken = [
        [(shape.units[u][o], k) for u, (o, k) in enumerate(c.options)] for shape, c in zip(shapes, choice, strict=True)
    ]

    def total(name: str, stage: int) -> int:
        if not 0 <= stage < stages:
            return 0
        return sum(getattr(option, name).at(k) for option, k in taken[stage])

    base = problem.constant + sum(total("always", i) for i in range(stages))
    far = np.zeros(2 * stages, dtype=np.int64)
    for option, _ in (item for items in taken for item in items):
        if option.far is not None:
            far += option.far
    before = [0]
    for i in range(stages):
        before.append(before[-1] + total("between", i) + shapes[i].saved)
    behind = [0] * (stages + 1)
    for i in range(stages - 1, -1, -1):
        behind[i] = behind[i + 1] + total("after", i) + shapes[i].saved + shapes[i].freed
    peak, over = base + behind[0] + sum(total("stepping", i) for i in range(stages)), set()
    if peak > problem.limit:
        over.update(range(stages))
    for i, shape in enumerate(shapes):
        own = _own(shape, taken, i, choice)
        ahead = (total("ahead", i + 1), total("cast", i + 1), 0)
        again = (total("ahead_again", i - 1), total("cast_again", i - 1), total("reducing", i + 1))
        level = base + before[i] + int(far[i])
        highest = level + _highest(shape.forward, own[0], ahead)
        level = base + before[i] + shape.saved + behind[i + 1] + int(far[2 * stages - 1 - i])
        highest = max(highest, level + _highest(shape.backward, own[1], again))
        peak = max(peak, highest)
        if highest > problem.limit:
            over.add(i)
    return Verdict(_seconds(problem, shapes, taken), peak, tuple(sorted(over)))


def _own(
    shape: ShapeTable, taken: list[list[tuple[UnitOption, int]]], stage: int, choice: tuple[StageChoice, ...]
) -> tuple[IntArray, IntArray]:
    forward, backward = np.zeros(len(shape.forward), np.int64), np.zeros(len(shape.backward), np.int64)
    for option, k in taken[stage]:
        forward += option.forward @ np.array([1, k])
        backward += option.backward @ np.array([1, k])
    for guest in shape.guests:
        o, k = choice[guest.stage].options[guest.unit]
        forward += guest.forward[o] @ np.array([1, k])
        backward += guest.backward[o] @ np.array([1, k])
    return forward, backward


def _highest(rows: Rows, own: IntArray, neighbours: tuple[int, int, int]) -> int:
    if not len(rows):
        return 0
    ahead, cast, reducing = neighbours
    return int((rows.activations + own + ahead * rows.tail + cast * rows.issue + reducing * rows.head).max())


def _seconds(problem: Problem, shapes: list[ShapeTable], taken: list[list[tuple[UnitOption, int]]]) -> float:
    """See [Note: Problem]. Of several micro-batches, the last one carries the reductions that are made once."""
    micro = problem.accumulation
    seconds = 0.0
    for table, shape, options in zip(problem.stages, shapes, taken, strict=True):

        def sums(name: str, once: bool | None = None, options: list[tuple[UnitOption, int]] = options) -> float:
            return sum(getattr(o, name).at(k) for o, k in options if once is None or o.reduce_once == once)

        add = not problem.overlap or table.exposed
        seconds += micro * phase(shape.forward_seconds + sums("copy"), sums("gather"), add)
        compute = shape.backward_seconds + sums("copy_again") + sums("copy_reduce", False)
        wires = sums("gather_again") + sums("reduce", False)
        seconds += (micro - 1) * phase(compute, wires, add)
        seconds += phase(compute + sums("copy_reduce", True), wires + sums("reduce", True), add)
        seconds += sums("step")
    return seconds


def phase(compute: float, communication: float, add: bool) -> float:
    """One visit of one stage: both streams one after the other, or side by side."""
    return compute + communication if add else max(compute, communication)
