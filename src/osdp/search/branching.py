"""Branch and bound over one program, for those on which HiGHS's own takes long.

[Note: Branching]
Options of a stage differ little in cost, so a program has many answers that are nearly as good, and to forbid one
option says little. What decides are sums: how many stages of a kind take a variant, and which variant a stage takes.
Branching begins with those; options come last. Every node is one relaxation, solved by the dual simplex method from
where its parent ended. Nodes with the lowest bound go first, so the bound of the one at the front holds for all. Now
and then a node is rounded off until it is integral, for a choice to compare with.

A node is dropped only where HiGHS says that it cannot beat the best choice, or, asked twice, that it is infeasible.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

from osdp.search.effort import now
from osdp.search.highs import INFINITY, Answer, Program, as_highs

_INTEGRAL = 1e-6
_RELAXATION_SECONDS = 1.0  # for one node, which mostly takes milliseconds
_TOLERANCE = 1e-7  # of a node's rows
_ROUND_OFF_EVERY = 25  # nodes
_FORGET = 0.9  # of the average gain, with each new one
Bounds = dict[int, tuple[float, float]]  # of the columns that were branched on


@dataclass(order=True)
class _Node:
    bound: float
    number: int
    bounds: Bounds = field(compare=False)
    values: np.ndarray = field(compare=False)
    basis: Any = field(compare=False)


@dataclass
class _Gain:
    """By how much the bound rises for each unit that a column is moved down, or up; None until it was tried."""

    down: float | None = None
    up: float | None = None


class Branching:
    """A tree that can be grown further when time was up.

    `levels` are the integer columns, those to branch on first in front. `judge` is told every integral answer; it
    returns the objective that is to be beaten from then on.
    """

    def __init__(
        self,
        program: Program,
        levels: Sequence[Sequence[int]],
        unused: np.ndarray,
        judge: Callable[[np.ndarray], float],
    ) -> None:
        model = as_highs(program, relaxed=True, unused=unused)
        self._levels = [np.array(level, dtype=np.int64) for level in levels if len(level)]
        self._lower, self._upper = np.array(model.col_lower_), np.array(model.col_upper_)
        self._judge = judge
        self._solver = _solver(model)
        self._set: Bounds = {}
        self._gains: dict[int, _Gain] = {}
        self._average = [1.0, 1.0]
        self._open: list[_Node] = []
        self._unsolved = INFINITY  # the least bound of nodes that HiGHS could not solve
        self._made = self._nodes = 0
        self._to_beat = INFINITY
        self._push({}, 0.0, None)

    def grow(self, *, enough: float, seconds: float) -> Answer:
        """Goes on until nothing below `enough`, or below what `judge` says, is left: then the status is bounded.

        It is optimal where the best node is integral and `judge` did not take it; `limit` where time is up.
        """
        deadline, began = now() + seconds, self._nodes
        self._to_beat = enough
        while self._open and self._open[0].bound < self._to_beat:
            if now() >= deadline:
                return Answer("limit", INFINITY, self._bound, self._nodes - began, None)
            node = heapq.heappop(self._open)
            self._nodes += 1
            column = self._fractional(node.values)
            if column is None:
                self._beat(node.values)
                if node.bound < self._to_beat:
                    heapq.heappush(self._open, node)
                    return Answer("optimal", node.bound, self._bound, self._nodes - began, node.values)
                continue
            if self._nodes % _ROUND_OFF_EVERY == 1:
                self._round_off(node, deadline)
            self._branch(node, column)
        if self._unsolved < self._to_beat:
            return Answer("limit", INFINITY, self._bound, self._nodes - began, None)
        return Answer("bounded", INFINITY, self._to_beat, self._nodes - began, None)

    @property
    def _bound(self) -> float:
        return min(self._open[0].bound if self._open else INFINITY, self._unsolved)

    def _beat(self, values: np.ndarray) -> None:
        self._to_beat = min(self._to_beat, self._judge(values))

    def _branch(self, node: _Node, column: int) -> None:
        value = float(node.values[column])
        floor = float(np.floor(value + _INTEGRAL))
        low, high = node.bounds.get(column, (float(self._lower[column]), float(self._upper[column])))
        gain = self._gains.setdefault(column, _Gain())
        for up, sides in ((False, (low, floor)), (True, (floor + 1, high))):
            bound = self._push({**node.bounds, column: sides}, node.bound, node.basis)
            share = floor + 1 - value if up else value - floor
            each = (min(bound, self._to_beat, 2 * node.bound + 1) - node.bound) / max(share, _INTEGRAL)
            self._average[up] = _FORGET * self._average[up] + (1 - _FORGET) * each
            setattr(gain, "up" if up else "down", each)

    def _push(self, bounds: Bounds, least: float, basis: Any) -> float:
        """Solves a node and keeps it if it may beat the best; says its bound."""
        bound, values = self._solved(bounds, basis)
        if values is None and bound < INFINITY:  # not solved: what is known of its parent holds
            self._unsolved = min(self._unsolved, least)
            return least
        if values is not None and bound < self._to_beat:
            self._made += 1
            node = _Node(max(bound, least), self._made, bounds, values, self._solver.getBasis())
            heapq.heappush(self._open, node)
        return bound

    def _solved(self, bounds: Bounds, basis: Any) -> tuple[float, np.ndarray | None]:
        """A node's bound and values; infinite where it is infeasible or too dear, no values where it is open."""
        for column in {*self._set, *bounds}:
            low, high = bounds.get(column, (float(self._lower[column]), float(self._upper[column])))
            self._solver.changeColBounds(column, low, high)
        self._set = bounds
        if basis is not None:
            self._solver.setBasis(basis)
        self._solver.setOptionValue("objective_bound", self._to_beat if self._to_beat < INFINITY else 1e100)
        status = self._run()
        if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kObjectiveBound):
            self._solver.clearSolver()  # infeasible or undecided: once more, from the beginning
            status = self._run()
        if status == highspy.HighsModelStatus.kOptimal:
            values = np.array(self._solver.getSolution().col_value)
            return float(self._solver.getInfo().objective_function_value), values
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound):
            return INFINITY, None
        return 0.0, None

    def _run(self) -> highspy.HighsModelStatus:
        deadline = now() + _RELAXATION_SECONDS

        def stop(event: highspy.HighsCallbackEvent) -> None:
            if event.data_in is not None and now() >= deadline:
                event.data_in.user_interrupt = True

        self._solver.cbSimplexInterrupt.clear()
        self._solver.cbSimplexInterrupt.subscribe(stop)
        self._solver.run()
        return self._solver.getModelStatus()

    def _fractional(self, values: np.ndarray) -> int | None:
        """The column to branch on: of the first level that has a fractional one, that which raises the bound most."""
        for level in self._levels:
            above = values[level] - np.floor(values[level] + _INTEGRAL)
            found = np.nonzero(above > _INTEGRAL)[0].tolist()
            if found:
                return max((self._score(int(level[i]), float(above[i])), -int(level[i])) for i in found)[1] * -1
        return None

    def _score(self, column: int, above: float) -> float:
        gain = self._gains.get(column, _Gain())
        down = (self._average[0] if gain.down is None else gain.down) * above
        up = (self._average[1] if gain.up is None else gain.up) * (1 - above)
        return max(down, _INTEGRAL) * max(up, _INTEGRAL)

    def _round_off(self, node: _Node, deadline: float) -> None:
        """Rounds one column after the other, the nearest to a whole number first, until all are or nothing fits."""
        bounds, values = dict(node.bounds), node.values
        while now() < deadline:
            column = self._nearest(values)
            if column is None:
                self._beat(values)
                return
            whole = float(np.rint(values[column]))
            bounds[column] = whole, whole
            _, rounded = self._solved(bounds, None)
            if rounded is None:
                return
            values = rounded

    def _nearest(self, values: np.ndarray) -> int | None:
        for level in self._levels:
            off = np.abs(values[level] - np.rint(values[level]))
            if np.any(off > _INTEGRAL):
                return int(level[np.argmin(np.where(off > _INTEGRAL, off, INFINITY))])
        return None


def _solver(model: highspy.HighsLp) -> highspy.Highs:
    solver = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "random_seed": 0, "presolve": "off", "solver": "simplex"}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    for tolerance in ("primal_feasibility_tolerance", "dual_feasibility_tolerance"):
        solver.setOptionValue(tolerance, _TOLERANCE)
    solver.passModel(model)
    return solver
