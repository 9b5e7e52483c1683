"""What is left of a plan where a target cannot express all of it, and what that costs by the same cost model.

Nothing is searched anew: every unit gets the nearest that the target has. Where that needs more memory than there is,
the micro-batch becomes smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from osdp.cost.graph import step_graph_of
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan, PlanUnit
from osdp.recompute import Recompute
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE, ShardingMode

# Of each mode the nearest that holds no more memory between steps.
NEAREST = {REPLICATE: KEEP, FREE_TO_NODE: FREE, KEEP_IN_NODE: KEEP, FREE_IN_NODE: FREE, KEEP: KEEP, FREE: FREE}


@dataclass(frozen=True)
class Degraded:
    """A plan as a target runs it: what was lost, in sentences, and what is predicted of the rest."""

    plan: Plan
    lost: tuple[str, ...]
    samples_per_second: float
    peak_bytes: int

    @property
    def fits(self) -> bool:
        limit = self.plan.predicted.limit_bytes  # 0 in a plan that nobody priced
        return limit == 0 or self.peak_bytes <= limit


Change = Callable[[Plan], tuple[Plan, str | None]]


def degraded(plan: Plan, graph: ModelGraph, changes: Sequence[Change]) -> Degraded:
    """The plan after these changes, at the largest micro-batch up to its own that fits."""
    lost = []
    for change in changes:
        plan, sentence = change(plan)
        if sentence is not None:
            lost.append(sentence)
    found = _priced(plan, graph, lost)
    low, high = 1, plan.batch_size  # of these, high does not fit
    if not found.fits and high > 1:
        best = _priced(replace(plan, batch_size=1), graph, lost)
        while best.fits and high - low > 1:
            middle = (low + high) // 2
            tried = _priced(replace(plan, batch_size=middle), graph, lost)
            low, high, best = (middle, high, tried) if tried.fits else (low, middle, best)
        found = best
        if best.fits:
            sentence = (
                f"without that the micro-batch of {plan.batch_size} does not fit: it is {best.plan.batch_size} here"
            )
            found = replace(best, lost=(*best.lost, sentence))
    return found


def _priced(plan: Plan, graph: ModelGraph, lost: Sequence[str]) -> Degraded:
    step = step_graph_of(plan, graph)
    return Degraded(plan, tuple(lost), plan.global_batch / step.time().total, step.timeline().peak_bytes)


def _with(plan: Plan, units: Sequence[PlanUnit]) -> Plan:
    return replace(plan, units=tuple(units))


# ---- what may get lost


def without_slices(plan: Plan) -> tuple[Plan, str | None]:
    split = [unit for unit in plan.units if unit.splits > 1]
    units = [replace(u, splits=1, sharded_splits=0 if u.mode == REPLICATE else 1) for u in plan.units]
    said = f"{_units(len(split))} in slices ({_few(split)}): gathered whole" if split else None
    return _with(plan, units), said


def without_two_levels(plan: Plan) -> tuple[Plan, str | None]:
    own = [unit for unit in plan.units if unit.two_levels]
    said = f"collectives in two steps, through the node and across, of {_units(len(own))}" if own else None
    return _with(plan, [replace(unit, two_levels=False) for unit in plan.units]), said


def without_inputs_on_host(plan: Plan) -> tuple[Plan, str | None]:
    there = {unit.block for unit in plan.units if unit.recompute is Recompute.ON_HOST}
    units = [replace(u, recompute=Recompute.FULL) if u.block in there and u.block else u for u in plan.units]
    count = f"{len(there)} block" if len(there) == 1 else f"{len(there)} blocks"
    said = f"the inputs of {count} on the host: they are on the device" if there else None
    return _with(plan, units), said


def without_chunked_loss(plan: Plan) -> tuple[Plan, str | None]:
    chunks = plan.loss_chunks
    said = f"the loss in {chunks} chunks: whole logits are held (osdp.losses.chunk_loss divides it)"
    return replace(plan, loss_chunks=1), said if chunks > 1 else None


def without_compile(plan: Plan) -> tuple[Plan, str | None]:
    return replace(plan, compiled=False), "compiled blocks: they run eager" if plan.compiled else None


def without_host(plan: Plan) -> tuple[Plan, str | None]:
    there = [unit for unit in plan.units if unit.offload]
    said = f"{_units(len(there))} on the host: they are on the device" if there else None
    return _with(plan, [replace(unit, offload=False) for unit in plan.units]), said


def without_joined_reductions(plan: Plan) -> tuple[Plan, str | None]:
    joined = sum(len(names) for names in plan.buckets.values())
    said = f"{_units(joined)} reduced in {plan.all_reduces}: each is reduced by itself" if joined else None
    return _with(plan, [replace(unit, reduced_with=None) for unit in plan.units]), said


def without_late_reductions(plan: Plan) -> tuple[Plan, str | None]:
    late = [unit for unit in plan.units if unit.reduce_once or unit.all_reduce_once]
    said = f"one reduction a step of {_units(len(late))}: every micro-batch is reduced" if late else None
    return _with(plan, [replace(unit, reduce_once=False, all_reduce_once=False) for unit in plan.units]), said


def without_lasting_gathers(plan: Plan) -> tuple[Plan, str | None]:
    own = [unit for unit in plan.units if unit.gather_once]
    said = f"one gather a step of {_units(len(own))}: every micro-batch gathers" if own else None
    return _with(plan, [replace(unit, gather_once=False) for unit in plan.units]), said


def all_late_reductions(plan: Plan) -> tuple[Plan, str | None]:
    if plan.accumulation == 1:
        return plan, None
    early = [unit for unit in plan.units if not unit.reduce_once]
    said = (
        f"a reduction in each micro-batch of {_units(len(early))}: whole gradients are held instead" if early else None
    )
    return _with(plan, [replace(unit, reduce_once=True, all_reduce_once=False) for unit in plan.units]), said


def whole_blocks(plan: Plan) -> tuple[Plan, str | None]:
    """One unit a block, freed where any part of it was."""
    units: dict[str, PlanUnit] = {}
    merged = 0
    for unit in plan.units:
        if unit.block is None:
            units[unit.name] = unit
        elif unit.block not in units:
            units[unit.block] = replace(unit, name=unit.block, modules=(unit.block,), granularity="whole", prefetch=1)
        else:
            merged += 1
            have = units[unit.block]
            mode = have.mode if NEAREST[unit.sharding] == NEAREST[have.sharding] else FREE
            names = ("reduce_once", "all_reduce_once", "gather_once")
            late = {name: getattr(have, name) and getattr(unit, name) for name in names}
            late["all_reduce_once"] &= ShardingMode(mode).is_reduced_across
            late["gather_once"] &= ShardingMode(mode).is_kept
            units[unit.block] = replace(have, mode=mode, **late, parameters=have.parameters + unit.parameters)
    deep = any(unit.prefetch > 1 for unit in plan.units)
    ahead = ", and prefetches one unit instead of two" if deep else ""
    said = f"{_units(merged)} within blocks: a block is gathered whole{ahead}" if merged else None
    return _with(plan, list(units.values())), said


def keep_or_free(plan: Plan) -> tuple[Plan, str | None]:
    others = [unit for unit in plan.units if NEAREST[unit.sharding] != unit.mode]
    names = sorted({f"{unit.mode} becomes {NEAREST[unit.sharding]}" for unit in others})
    said = f"the modes of {_units(len(others))} ({', '.join(names)})" if others else None
    return _with(plan, [_held(unit, NEAREST[unit.sharding]) for unit in plan.units]), said


def recompute_all_or_none(plan: Plan) -> tuple[Plan, str | None]:
    blocks = {unit.block: unit.recompute for unit in plan.units if unit.block is not None}
    again = Recompute.FULL if any(blocks.values()) else Recompute.NONE
    others = [block for block, own in blocks.items() if own is not again]
    said = f"recompute of single blocks: all {len(blocks)} are recomputed, {len(others)} more" if others else None
    units = [replace(unit, recompute=Recompute.NONE if unit.block is None else again) for unit in plan.units]
    return _with(plan, units), said


def blocks_in(mode: str, *, as_blocks: str | None) -> Change:
    """Every block in one mode, and of the rest, which Accelerate keeps, one unit too: that of the input embedding."""

    def change(plan: Plan) -> tuple[Plan, str | None]:
        units = [
            _held(unit, mode if unit.block is not None or unit.modules == (as_blocks,) else KEEP) for unit in plan.units
        ]
        changed = [own for own, before in zip(units, plan.units, strict=True) if own.mode != before.mode]
        rest = [own for own in changed if own.block is None and own.mode == KEEP]
        kept = f", and Accelerate keeps {_few(rest)} from forward to backward" if rest and mode != KEEP else ""
        said = (
            f"a mode for each unit: all blocks are {mode}{kept}; {_units(len(changed))} differ from the plan"
            if changed
            else None
        )
        return _with(plan, units), said

    return change


def _held(unit: PlanUnit, mode: str) -> PlanUnit:
    across = unit.all_reduce_once and ShardingMode(mode).is_reduced_across
    sharded = 0 if mode == REPLICATE else max(1, unit.sharded_splits)
    stays = unit.gather_once and ShardingMode(mode).is_kept
    return replace(unit, mode=mode, sharded_splits=sharded, all_reduce_once=across, gather_once=stays)


def _units(number: int) -> str:
    return f"{number} unit" if number == 1 else f"{number} units"


def _few(units: Sequence[PlanUnit]) -> str:
    names = [unit.name for unit in units]
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
