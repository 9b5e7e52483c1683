"""Whether a plan makes sense: as a whole, and for a model. `graph`, `verify`, `train` and `parallelize` all ask here.

The types and ranges of single fields are declared in osdp.planfile; this file has what several fields say together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from osdp.errors import UsageError
from osdp.planfile import Plan, PlanUnit, unit_depths
from osdp.recompute import Recompute
from osdp.sharding import MODES, REPLICATE, Scope

if TYPE_CHECKING:
    from osdp.model.graph import ModelGraph

_AGAIN = "plan this model again"


class Held(NamedTuple):
    """A parameter of a model: all its names, several where it is tied, and its shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def check_plan(plan: Plan) -> None:
    """Refuses a plan that no model could run, or that its own cluster cannot."""
    reason = next(
        itertools.chain(_contradictions(plan), _contradictions_of_prediction(plan), _unknown_here(plan)), None
    )
    if reason is not None:
        raise UsageError(f"{reason}; plan again")


def _contradictions(plan: Plan) -> Iterator[str]:
    """Where a plan's fields do not go together, in sentences without a remedy."""
    owners: dict[str, str] = {}
    granularity: dict[str, str] = {}
    recompute: dict[str, Recompute] = {}
    for unit in plan.units:
        yield from _contradictions_of_unit(unit)
        for module in unit.modules:
            if module in owners:
                yield f"module {module!r} is in two units, {owners[module]!r} and {unit.name!r}"
            owners[module] = unit.name
        if unit.block is not None and granularity.setdefault(unit.block, unit.granularity) != unit.granularity:
            yield f"block {unit.block!r} is gathered in two granularities, as in {unit.name!r}"
        if unit.block is not None and recompute.setdefault(unit.block, unit.recompute) != unit.recompute:
            yield f"block {unit.block!r} is recomputed in some of its units but not in all alike, as in {unit.name!r}"
        if unit.recompute is Recompute.SELECTIVE and (unit.name != unit.block or unit.splits > 1):
            yield f"unit {unit.name!r} is a part or in slices, and only whole blocks are recomputed selectively"
    for unit in plan.units if plan.compiled else ():
        if unit.block is not None and unit.name != unit.block:
            yield f"unit {unit.name!r} is a part of block {unit.block!r}, which the plan compiles as a whole"
    planned = sum(unit.parameters for unit in plan.units) + sum(plan.model.uncalled.values())
    if planned != plan.model.parameters:
        yield f"the plan's units hold {planned:,} parameters, but its model has {plan.model.parameters:,}"


def _contradictions_of_unit(unit: PlanUnit) -> Iterator[str]:
    if unit.name != unit.modules[0]:
        yield f"unit {unit.name!r} is not named after its first module, {unit.modules[0]!r}"
    if unit.sharded_splits > unit.splits:
        yield f"unit {unit.name!r} has {unit.sharded_splits} sharded slices but only {unit.splits} slices"
    if unit.sharded_splits == 0 and unit.mode != REPLICATE:
        yield f"unit {unit.name!r} has mode {unit.mode} but no sharded slice"
    if unit.splits > 1 and len(unit.modules) > 1:
        yield f"unit {unit.name!r} has {unit.splits} slices, but only a unit of one module can be split"
    if unit.block is not None and not f"{unit.name}.".startswith(f"{unit.block}."):
        yield f"unit {unit.name!r} is not in its block, {unit.block!r}"
    if unit.recompute and unit.block is None:
        yield f"unit {unit.name!r} is recomputed but in no block"


def _contradictions_of_prediction(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    samples = predicted.samples_per_second * predicted.step_seconds
    if abs(samples - plan.global_batch) > 0.01 * plan.global_batch and (samples or predicted.peak_bytes):
        yield (
            f"the plan predicts {predicted.samples_per_second:.6g} samples/s and steps of {predicted.step_seconds:.6g}"
            f" s, but a step has {plan.global_batch:,} samples"
        )
    if predicted.peak_bytes > predicted.limit_bytes:
        yield f"the plan predicts a peak of {predicted.peak_bytes:,} bytes, but its limit is {predicted.limit_bytes:,}"


def _unknown_here(plan: Plan) -> Iterator[str]:
    """Words that nobody knows, and modes that the plan's cluster has not."""
    from osdp.cost.training import OPTIMIZERS, PRECISIONS
    from osdp.cost.units import modes_for  # here, because it imports osdp.planfile, which calls this

    for what, word, known in (
        ("precision", plan.precision, tuple(PRECISIONS)),
        ("reduce_dtype", plan.reduce_dtype, ("fp32", "bf16")),
        ("optimizer", plan.optimizer, tuple(OPTIMIZERS)),
    ):
        if word not in known:
            yield f"the plan's {what} is {word!r}, but the known ones are {', '.join(known)}"
    modes = modes_for(plan.cluster)
    for unit in plan.units:
        if unit.mode not in MODES:
            yield f"unit {unit.name!r} has the unknown mode {unit.mode!r}; the modes are {', '.join(MODES)}"
        if unit.mode not in modes:
            yield f"unit {unit.name!r} has mode {unit.mode}, but {plan.cluster.word} has only {', '.join(modes)}"
        if unit.two_levels and not (plan.cluster.has_two_levels and unit.sharding.sharded_over is Scope.WORLD):
            yield f"unit {unit.name!r} is exchanged on two levels, which {unit.mode} on {plan.cluster.word} is not"
        if unit.all_reduce_once and not unit.sharding.is_reduced_across:
            yield f"unit {unit.name!r} is all-reduced across nodes once a step, which {unit.mode} is not"
        if unit.all_reduce_once and unit.reduce_once:
            yield f"unit {unit.name!r} is reduced once a step, so it cannot be reduced in the node more often"


def check_alone(plan: Plan) -> None:
    """Refuses a plan for one dimension of a larger layout, where the model is built without the others."""
    if plan.layout.is_larger:
        raise UsageError(
            f"the plan is for the data-parallel dimension of {plan.layout}, which only osdp.parallelize(model, plan,"
            " mesh=...) applies, to a model that is divided so; plan without --tensor and --pipeline for this command"
        )


def check_graph(plan: Plan, graph: ModelGraph) -> None:
    """Refuses a plan that is not for this model, or that calls uncalled what the model calls."""
    check_alone(plan)
    called = {name for stage in graph.stages for each in stage.operators for name in graph.operators[each].parameters}
    wrong = next((name for name in plan.model.uncalled if name in called), None)
    if wrong is not None:
        raise UsageError(f"the plan says that no call reaches {wrong}, but one does; {_AGAIN}")
    parameters = [Held((each.name, *each.aliases), each.shape) for each in graph.parameters.values()]
    splittable = {name for name, operator in graph.operators.items() if operator.split_dim >= 0}
    reason = misfit(plan, parameters, splittable.__contains__)
    if reason is not None:
        raise UsageError(reason)


def misfit(plan: Plan, parameters: Iterable[Held], can_split: Callable[[str], bool]) -> str | None:
    """Why a model is not the one that was planned, in a sentence; None if it is.

    Every parameter must be in exactly one unit. It is in the deepest of those whose modules hold it.
    """
    reason = next(_contradictions(plan), None)
    if reason is not None:
        return f"{reason}; {_AGAIN}"
    units = {module: unit for unit in plan.units for module in unit.modules}
    place = {unit.name: index for index, unit in enumerate(plan.units)}
    numel, depth = dict.fromkeys(place, 0), unit_depths(plan.units)
    found: set[str] = set()
    for parameter in parameters:
        holding = [module for name in parameter.names for module in _above(name) if module in units]
        found.update(holding)
        owner = min((units[m] for m in holding), key=lambda unit: (-depth[unit.name], place[unit.name]), default=None)
        if owner is not None:
            numel[owner.name] += parameter.numel
            if owner.splits > 1 and len(parameter.names) > 1:
                return f"{owner.name} cannot be split: {' and '.join(parameter.names)} are one parameter; {_AGAIN}"
        elif plan.model.uncalled.get(parameter.names[0]) != parameter.numel:
            return f"{parameter.names[0]} has {parameter.numel:,} parameters and is in no unit of the plan; {_AGAIN}"
    for unit in plan.units:
        missing = next((name for name in unit.modules if name not in found), None)
        if missing is not None:
            return f"the plan has a unit for {missing!r}, which the model lacks; {_AGAIN}"
        if numel[unit.name] != unit.parameters:
            return (
                f"{unit.name or 'the model itself'} has {numel[unit.name]:,} parameters but was planned with"
                f" {unit.parameters:,}; {_AGAIN}"
            )
        if unit.splits > 1 and not can_split(unit.name):
            return f"{unit.name} is planned in {unit.splits} slices, and this operator cannot be split; {_AGAIN}"
    return None


def _above(name: str) -> Iterator[str]:
    """The modules that hold a parameter, from its own up to the model itself, which is ''."""
    while name:
        name = name.rpartition(".")[0]
        yield name
