"""The two streams of a step, stage by stage: operations in issue order, and what they do to the streams' clocks.

[Note: Streams]
Computation runs on one stream, collectives on another, each in the order in which it was issued. A collective begins
when the stream before it is free and the computation has come to where it is issued; computation waits where it needs
what was gathered, and a reduction where the one before it is not done. At the end of a micro-batch both streams meet.
Every clock is a maximum of sums of durations, so the time of a step is linear in the choices but for maxima.

[Note: Clocks]
What one pass of a stage leaves to the next are five clocks. A gather may be under way for a unit of a later stage,
whose choice says how long it takes. Hence clocks come in pairs: without that gather, and with it less its duration.
Where two gathers are under way for that stage, one begins where the other ends, and both are that gather.

    COMPUTE, COMPUTE_PENDING   how far the computation has come
    GATHER                     when the pending gather begins
    WIRE, WIRE_PENDING         when the last collective is done

A pass turns the five clocks it is given into five new ones; the entry (a, b) of its matrix says by how much clock b
comes after clock a at least. Choices that need no more durations than another one's are never slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

COMPUTE, COMPUTE_PENDING, GATHER, WIRE, WIRE_PENDING = range(5)
CLOCKS = 5
NEVER = float("-inf")
Matrix = NDArray[np.float64]  # [from, to]


class Act(IntEnum):
    RUN = 0  # computes
    ISSUE = 1  # puts a gather on the wire
    ISSUE_NEXT = 2  # puts the gathers of a later stage's units on the wire
    WAIT = 3  # computation waits for a unit's gather, if its option has one; `names` says which
    WAIT_REDUCED = 4  # computation waits for the last reduction
    REDUCE = 5  # puts a reduction on the wire


class Op(NamedTuple):
    """One operation. `names` are the fields of the unit's option whose seconds it takes, `seconds` comes on top.

    `unit` is the number of one of the stage's own units, or (stage, number) of another stage's; -1 where none acts.
    """

    act: Act
    unit: int | tuple[int, int] = -1
    names: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class StagePass:
    """One pass of a stage; `pending` are own units whose gathers an earlier stage put on the wire, in that order."""

    ops: tuple[Op, ...] = ()
    pending: tuple[int, ...] = ()
    pending_names: tuple[str, ...] = ("gather",)  # fields of their options, as in `Op.names`

    @property
    def seconds(self) -> float:
        """Of its kernels."""
        return sum(op.seconds for op in self.ops)


V = TypeVar("V")


class Algebra(Protocol[V]):
    """Clocks as values of some kind; None stands for never, as `awaited` is where a unit's option gathers nothing."""

    def maximum(self, left: V, right: V) -> V: ...

    def plus(self, value: V, op: Op) -> V: ...

    def awaited(self, value: V, op: Op) -> V | None: ...


class _Streams(Generic[V]):
    """The clocks while a pass's operations are gone through; pairs are (without, with) the pending gather."""

    def __init__(self, algebra: Algebra[V], clocks: Sequence[V | None]) -> None:
        self._algebra = algebra
        self.compute: list[V | None] = [clocks[COMPUTE], clocks[COMPUTE_PENDING]]
        self.gather = clocks[GATHER]
        self.wire: list[V | None] = [clocks[WIRE], clocks[WIRE_PENDING]]
        self._gathered: dict[object, list[V | None]] = {}
        self._reduced = list(self.wire)

    def _max(self, left: V | None, right: V | None) -> V | None:
        if left is None or right is None:
            return right if left is None else left
        return self._algebra.maximum(left, right)

    def _both(self, left: Sequence[V | None], right: Sequence[V | None]) -> list[V | None]:
        return [self._max(a, b) for a, b in zip(left, right, strict=True)]

    def _plus(self, pair: Sequence[V | None], op: Op) -> list[V | None]:
        return [None if value is None else self._algebra.plus(value, op) for value in pair]

    def resolve(self, ops: Sequence[Op]) -> None:
        """The pending gathers are of units of this stage: now it is known how long they take."""
        arrived = [self.gather]
        for op in ops:
            arrived = self._plus(arrived, op)
            self._gathered[op.unit] = [arrived[0], None]
        for pair in (self.compute, self.wire):
            behind = [pair[1]]
            for op in ops:
                behind = self._plus(behind, op)
            pair[:] = [self._max(pair[0], behind[0]), None]
        self.wire[0] = self._max(self.wire[0], arrived[0])
        self.gather = None
        self._reduced = list(self.wire)

    def run(self, op: Op) -> None:
        if op.act is Act.RUN:
            self.compute = self._plus(self.compute, op)
        elif op.act is Act.ISSUE:
            self.wire = self._plus(self._both(self.compute, self.wire), op)
            self._gathered[op.unit] = self.wire
        elif op.act is Act.ISSUE_NEXT:
            self.gather = self._max(self.compute[0], self.wire[0])
            self.wire = [self.wire[0], self.gather]
            self._reduced = [self._reduced[0], None]
        elif op.act is Act.WAIT:
            arrived = self._gathered.get(op.unit, self.wire)
            arrived = [None if value is None else self._algebra.awaited(value, op) for value in arrived]
            self.compute = self._both(self.compute, arrived)
        elif op.act is Act.WAIT_REDUCED:
            self.compute = self._both(self.compute, self._reduced)
        else:
            self.wire = self._reduced = self._plus(self._both(self.compute, self.wire), op)

    def clocks(self) -> list[V | None]:
        return [*self.compute, self.gather, *self.wire]


def passed(stage: StagePass, clocks: Sequence[V | None], algebra: Algebra[V]) -> list[V | None]:
    """The clocks after a pass."""
    streams = _Streams(algebra, clocks)
    if stage.pending:
        streams.resolve([Op(Act.ISSUE, unit, stage.pending_names) for unit in stage.pending])
    for op in stage.ops:
        streams.run(op)
    return streams.clocks()


class _Vectors:
    """Clocks as vectors: by how much each comes after the clocks that were given, at least. One or many choices."""

    def __init__(self, seconds: Callable[[Op], Any]) -> None:
        self._seconds = seconds

    def maximum(self, left: Matrix, right: Matrix) -> Matrix:
        return np.maximum(left, right)

    def plus(self, value: Matrix, op: Op) -> Matrix:
        return value + self._seconds(op)

    def awaited(self, value: Matrix, op: Op) -> Matrix | None:
        gathered = self._seconds(op) > 0
        return np.where(gathered, value, NEVER) if np.any(gathered) else None


_NEVER = np.full(CLOCKS, NEVER)
_GIVEN = [np.where(np.arange(CLOCKS) == clock, 0.0, NEVER) for clock in range(CLOCKS)]


def matrix(stage: StagePass, seconds: Callable[[Op], float]) -> Matrix:
    """A pass as a matrix; `seconds` says what an operation takes."""
    clocks = passed(stage, _GIVEN, _Vectors(seconds))
    return np.stack([_NEVER if clock is None else clock for clock in clocks], axis=1)


def matrices(stage: StagePass, seconds: Callable[[Op], Matrix], choices: int) -> Matrix:
    """A pass in many choices, [choice, from, to]; `seconds` has a row for each of them."""
    clocks = passed(stage, _GIVEN, _Vectors(seconds))
    whole = [np.broadcast_to(_NEVER if clock is None else clock, (choices, CLOCKS)) for clock in clocks]
    return np.stack(whole, axis=2)


def followed(clocks: Any, step: Matrix) -> Any:
    """The clocks after a pass with this matrix."""
    return (clocks[:, None] + step).max(axis=0)


def start() -> Matrix:
    """The clocks at the start of a micro-batch: nothing is under way."""
    return np.array([0.0, NEVER, NEVER, 0.0, NEVER])


def end(clocks: Matrix) -> float:
    """When both streams are done; nothing is pending at the end of a step."""
    return float(max(clocks[COMPUTE], clocks[WIRE]))
