"""A small mixed-integer program, row by row, handed to HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

from osdp.search.effort import SLOWEST, now

INFINITY = float("inf")


@dataclass
class Program:
    """minimise cost · x within bounds and rows; a row may name a column twice, then its values add up."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    columns: list[Sequence[int] | np.ndarray] = field(default_factory=list)  # of each row
    values: list[Sequence[float] | np.ndarray] = field(default_factory=list)
    _joined: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def column(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = INFINITY, integer: bool = False) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(
        self,
        columns: Sequence[int] | np.ndarray,
        values: Sequence[float] | np.ndarray,
        *,
        lower: float = -INFINITY,
        upper: float = INFINITY,
    ) -> None:
        self.columns.append(columns)
        self.values.append(values)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self._joined = None

    def matrix(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All rows in one pass: where each begins, and the columns and values that are not zero."""
        if self._joined is None:
            width, lengths = len(self.cost), [len(columns) for columns in self.columns]
            place = np.repeat(np.arange(len(lengths)), lengths) * width + np.concatenate(self.columns).astype(np.int64)
            place, back = np.unique(place, return_inverse=True)
            value = np.bincount(back, weights=np.concatenate(self.values), minlength=len(place))
            place, value = place[value != 0], value[value != 0]
            starts = np.searchsorted(place, np.arange(len(lengths) + 1) * width)
            self._joined = starts.astype(np.int32), (place % width).astype(np.int32), value
        return self._joined


@dataclass(frozen=True)
class Answer:
    """What HiGHS says: `bound` is proven, `values` are None where nothing is feasible or the bound sufficed."""

    status: str  # optimal, infeasible, bounded, limit
    objective: float
    bound: float
    nodes: int
    values: np.ndarray | None
    reduced_costs: np.ndarray | None = None  # of a relaxation: what a column costs at least, once it is used


_RELAXATION_SECONDS = 1.0
_SECONDS_PER_COLUMN = 5e-4
_WAYS = (("solver", "choose"), ("presolve", "off"), ("solver", "ipm"))
_TOLERANCES = ("primal_feasibility_tolerance", "mip_feasibility_tolerance")
_OTHER_WAYS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (("presolve", "off"),),
    tuple((name, 1e-7) for name in _TOLERANCES),
)
_INFEASIBLE = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
_EXCEEDED = 1e-6  # of a row: a byte where they are counted in MiB
_DECIDED = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)


def solve(
    program: Program,
    *,
    relaxed: bool = False,
    unused: np.ndarray | None = None,
    enough: float = INFINITY,
    seconds: float = INFINITY,
) -> Answer:
    """Solves to a gap of zero; `relaxed` drops the integrality and so gives a lower bound; `unused` columns are 0.

    It stops as soon as the bound reaches `enough`: then nothing below that exists, and the status is bounded. `seconds`
    are those of [Note: Effort].
    """
    model = as_highs(program, relaxed, unused)
    solver = _decided(model, seconds) if relaxed else _run(model, seconds, enough)
    if solver.getModelStatus() in _INFEASIBLE and not _is_exceeded(program, unused, seconds):
        again = _confirmed(model, seconds, enough)
        solver = solver if again is None else again
    status = solver.getModelStatus()
    info = solver.getInfo()
    if status in _INFEASIBLE:
        return Answer("infeasible", INFINITY, INFINITY, int(info.mip_node_count), None)
    optimal = status == highspy.HighsModelStatus.kOptimal
    has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if has_solution else None
    objective = float(info.objective_function_value) if has_solution else INFINITY
    bound = (objective if optimal else 0.0) if relaxed else float(info.mip_dual_bound)
    if not any(program.integer) and optimal:
        bound = objective
    nodes = 0 if relaxed else max(int(info.mip_node_count), 0)
    if not relaxed and bound >= enough:
        return Answer("bounded", objective, bound, max(int(info.mip_node_count), 0), None)
    costs = np.array(solver.getSolution().col_dual) if relaxed and optimal else None
    return Answer("optimal" if optimal else "limit", objective, bound, nodes, values, costs)


def _run(model: highspy.HighsLp, seconds: float, enough: float, *options: tuple[str, Any]) -> highspy.Highs:
    solver = _solver(seconds)
    for option, value in options:
        solver.setOptionValue(option, value)
    solver.passModel(model)
    deadline = now() + seconds
    if enough < INFINITY or seconds < INFINITY:
        solver.cbMipInterrupt.subscribe(lambda event: _stop_at(event, enough, deadline))
    if seconds < INFINITY:
        solver.cbSimplexInterrupt.subscribe(lambda event: _stop_late(event, deadline))
    solver.run()
    return solver


def _is_exceeded(program: Program, unused: np.ndarray | None, seconds: float) -> bool:
    """[Note: Infeasible] Whether some row that leaves room is exceeded, whatever is chosen.

    HiGHS's presolve calls a few feasible programs infeasible at tolerances of 1e-9, and without presolve it does not
    come to an end on some that are infeasible. So another program is asked by how much rows have to be exceeded at
    least: it has an answer in any case, and its optimum is the proof.
    """
    count = len(program.cost)
    upper = program.upper if unused is None else [0.0 if u else up for u, up in zip(unused, program.upper, strict=True)]
    elastic = Program([0.0] * count, list(program.lower), list(upper), [False] * count)
    excess = elastic.column(cost=1.0)
    rows = zip(program.columns, program.values, program.row_lower, program.row_upper, strict=True)
    for columns, values, lower, most in rows:
        if lower == most:
            elastic.row(columns, values, lower=lower, upper=most)
            continue
        if most < INFINITY:
            elastic.row(np.append(columns, excess), np.append(values, -1.0), upper=most)
        if lower > -INFINITY:
            elastic.row(np.append(columns, excess), np.append(values, 1.0), lower=lower)
    solver = _decided(as_highs(elastic, relaxed=True, unused=None), seconds)
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return optimal and solver.getInfo().objective_function_value > _EXCEEDED


def _confirmed(model: highspy.HighsLp, seconds: float, enough: float) -> highspy.Highs | None:
    """None where a program that was called infeasible is so without presolve and with HiGHS's own tolerances too."""
    for options in _OTHER_WAYS:
        solver = _run(model, seconds, enough, *options)
        if solver.getModelStatus() not in _INFEASIBLE:
            return solver
    return None


def _solver(seconds: float) -> highspy.Highs:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.0)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("mip_heuristic_run_feasibility_jump", False)  # half the time of a small program, for nothing
    for tolerance in _TOLERANCES:  # the default would let a choice pass that exceeds the limit by kilobytes
        solver.setOptionValue(tolerance, 1e-9)
    if seconds < INFINITY:
        solver.setOptionValue("time_limit", SLOWEST * max(seconds, 0.01))  # of the wall clock
    return solver


def _decided(model: highspy.HighsLp, seconds: float) -> highspy.Highs:
    """A relaxation, solved one way or the other: rarely, the simplex method circles, and another way does not."""
    for number, (option, value) in enumerate(_WAYS, start=1):
        patience = number * max(_RELAXATION_SECONDS, _SECONDS_PER_COLUMN * model.num_col_)
        solver = _run(model, min(seconds, patience), INFINITY, (option, value))
        if solver.getModelStatus() in _DECIDED:
            break
    return solver


def _stop_at(event: highspy.HighsCallbackEvent, enough: float, deadline: float) -> None:
    if event.data_in is not None and (event.data_out.mip_dual_bound >= enough or now() >= deadline):
        event.data_in.user_interrupt = True


def _stop_late(event: highspy.HighsCallbackEvent, deadline: float) -> None:
    if event.data_in is not None and now() >= deadline:
        event.data_in.user_interrupt = True


def as_highs(program: Program, relaxed: bool, unused: np.ndarray | None) -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.row_lower)
    model.col_cost_ = np.array(program.cost, dtype=np.float64)
    model.col_lower_ = np.array(program.lower, dtype=np.float64)
    upper = np.array(program.upper, dtype=np.float64)
    model.col_upper_ = upper if unused is None else np.where(unused, 0.0, upper)
    model.row_lower_ = np.array(program.row_lower, dtype=np.float64)
    model.row_upper_ = np.array(program.row_upper, dtype=np.float64)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = program.matrix()
    if not relaxed:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[flag] for flag in program.integer]
    return model
