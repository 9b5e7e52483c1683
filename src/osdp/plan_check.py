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
    from osdp.cluster import Cluster
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
    prefetch: dict[str, int] = {}
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
        if unit.block is not None and prefetch.setdefault(unit.block, unit.prefetch) != unit.prefetch:
            yield f"block {unit.block!r} has two depths of prefetch, as in {unit.name!r}"
        if unit.recompute is Recompute.SELECTIVE and (unit.name != unit.block or unit.splits > 1):
            yield f"unit {unit.name!r} is a part or in slices, and only whole blocks are recomputed selectively"
        if unit.experts and (unit.splits > 1 or len(unit.modules) > 1):
            yield f"unit {unit.name!r} has experts over a dimension of their own, and is not one whole module"
    if any(unit.experts for unit in plan.units) != (plan.layout.expert > 1):
        yield f"the plan has experts over {plan.layout.expert} ranks, and its units say otherwise"
    if plan.cluster.devices_per_node % plan.layout.expert:
        yield f"experts over {plan.layout.expert} ranks do not divide the devices of a node of {plan.cluster.word}"
    yield from _contradictions_of_buckets(plan)
    for unit in plan.units if plan.compiled else ():
        if unit.block is not None and unit.name != unit.block:
            yield f"unit {unit.name!r} is a part of block {unit.block!r}, which the plan compiles as a whole"
        if unit.recompute is Recompute.ON_HOST:
            yield f"unit {unit.name!r} has its input on the host, and inputs of compiled blocks are on the device"
    planned = sum(unit.parameters for unit in plan.units) + sum(plan.model.uncalled.values())
    if planned != plan.model.parameters:
        yield f"the plan's units hold {planned:,} parameters, but its model has {plan.model.parameters:,}"


def _contradictions_of_buckets(plan: Plan) -> Iterator[str]:
    """See [Note: Joined reductions] in osdp.cost.buckets."""
    units = {unit.name: unit for unit in plan.units}
    for unit in plan.units:
        if unit.reduced_with is None:
            continue
        other = units.get(unit.reduced_with)
        if other is None or other is unit or other.reduced_with is not None:
            yield f"unit {unit.name!r} is reduced with {unit.reduced_with!r}, which makes no all-reduce of its own"
        elif any(each.splits > 1 or each.mode != REPLICATE for each in (unit, other)):
            yield f"units {unit.name!r} and {other.name!r} are reduced together, which only whole replicas are"
        elif unit.experts or other.experts:
            yield f"units {unit.name!r} and {other.name!r} are reduced together, which units of experts are not"
        elif unit.reduce_once != other.reduce_once:
            yield f"units {unit.name!r} and {other.name!r} are reduced together, but one of them once a step"
    if plan.buckets and not plan.cluster.engine.reduces_before_waiting:
        yield f"the plan joins reductions, which the engine {plan.cluster.engine.name} does not"


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
    if unit.prefetch > 1 and (unit.block is None or unit.granularity != "operators"):
        yield f"unit {unit.name!r} prefetches two units, which only blocks that are gathered by operators do"
    if unit.prefetch > 1 and unit.splits > 1:
        yield f"unit {unit.name!r} has {unit.splits} slices and prefetches two units, which do not go together"
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
    if predicted.host_peak_bytes > predicted.host_limit_bytes:
        yield (
            f"the plan predicts {predicted.host_peak_bytes:,} bytes on the host, but its limit is"
            f" {predicted.host_limit_bytes:,}"
        )


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
    holders = {unit.name: _held_by(plan, unit) for unit in plan.units}
    is_whole = plan.optimizer in OPTIMIZERS and OPTIMIZERS[plan.optimizer].is_whole
    for unit in plan.units:
        if unit.splits > 1 and is_whole:
            yield f"unit {unit.name!r} has {unit.splits} slices, and {plan.optimizer} steps whole operators only"
        if unit.mode not in MODES:
            yield f"unit {unit.name!r} has the unknown mode {unit.mode!r}; the modes are {', '.join(MODES)}"
        cluster = holders[unit.name]
        modes = modes_for(cluster)
        if unit.mode not in modes:
            yield f"unit {unit.name!r} has mode {unit.mode}, but {cluster.word} has only {', '.join(modes)}"
        if unit.experts and unit.offload:
            yield f"unit {unit.name!r} has experts over a dimension of their own, which are not held on the host"
        if unit.two_levels and not (cluster.has_two_levels and unit.sharding.sharded_over is Scope.WORLD):
            yield f"unit {unit.name!r} is exchanged on two levels, which {unit.mode} on {cluster.word} is not"
        if unit.all_reduce_once and not unit.sharding.is_reduced_across:
            yield f"unit {unit.name!r} is all-reduced across nodes once a step, which {unit.mode} is not"
        if unit.all_reduce_once and unit.reduce_once:
            yield f"unit {unit.name!r} is reduced once a step, so it cannot be reduced in the node more often"
        if unit.offload:
            yield from _contradictions_of_host(plan, unit)
        if unit.recompute is Recompute.ON_HOST and not plan.cluster.can_offload:
            yield (
                f"unit {unit.name!r} has its block's input on the host, but nothing is known of the host of"
                f" {plan.cluster.word}"
            )
        if unit.gather_once and not (unit.sharding.is_kept and unit.splits == 1):
            how = unit.mode if unit.splits == 1 else "a unit in slices"
            yield f"unit {unit.name!r} is gathered once a step, which {how} is not: only whole units that are kept are"


def _held_by(plan: Plan, unit: PlanUnit) -> Cluster:
    """The ranks that share a unit or have copies of it."""
    from osdp.cost.units import with_same_experts  # here, because it imports osdp.planfile

    return with_same_experts(plan.cluster, plan.layout.expert) if unit.experts else plan.cluster


def _contradictions_of_host(plan: Plan, unit: PlanUnit) -> Iterator[str]:
    """Why a unit cannot be held on the host; see `can_offload` in osdp.cost.offload."""
    if not unit.sharding.is_sharded or unit.sharding.is_sharded_anew or unit.splits > 1:
        slices = f" in {unit.splits} slices" if unit.splits > 1 else ""
        yield f"unit {unit.name!r} is on the host, where {unit.mode}{slices} cannot be held"
    if unit.reduce_once or unit.all_reduce_once or unit.gather_once or unit.two_levels:
        yield f"unit {unit.name!r} is on the host, and its collectives are not those of every micro-batch in one step"
    from osdp.cost.offload import may_step_on_host
    from osdp.cost.training import OPTIMIZERS, PRECISIONS, Training  # here, as they import osdp.planfile

    known = plan.precision in PRECISIONS and plan.optimizer in OPTIMIZERS
    if known and not may_step_on_host(Training.of(plan.precision, plan.optimizer)):
        yield f"unit {unit.name!r} is on the host, where {plan.optimizer} in {plan.precision} does not step"
    if not plan.cluster.can_offload:
        yield f"unit {unit.name!r} is on the host, but nothing is known of the host of {plan.cluster.word}"


def check_alone(plan: Plan) -> None:
    """Refuses a plan for one dimension of a larger layout, where the model is built without the others."""
    if plan.layout.is_larger:
        raise UsageError(
            f"the plan is for the data-parallel dimension of {plan.layout}, which only osdp.parallelize(model, plan,"
            " mesh=...) applies, to a model that is divided so; plan without --tensor, --pipeline and --expert for this"
            " command"
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
