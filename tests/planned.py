"""Plans made by hand for tests: any mode, split, recompute and granularity, whether or not it would be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from small_models import captured

from osdp.api import plan_units
from osdp.cluster import Cluster
from osdp.cost.layout import Shape, Shapes
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.planfile import PLAN_VERSION, Certificate, Plan, PlanModel, Predicted


def plan_by_hand(
    model: str,
    world: str,
    *,
    modes: Sequence[str],
    granularity: str = WHOLE,
    recompute: Sequence[bool] = (False,),
    splits: Sequence[tuple[int, int]] = ((1, 1),),
    precision: str = "fp32",
    reduce_dtype: str = "fp32",
    optimizer: str = "adamw",
    batch_size: int = 2,
    accumulation: int = 1,
    reduce_once: Sequence[bool] = (False,),
) -> Plan:
    """Modes, and (slices, sharded slices) of what can be split, go round over the units, recompute over the blocks."""
    shapes, again = Shapes(captured(model, "bf16" if precision != "fp32" else "fp32")), cycle(recompute)
    chosen = []
    for index, stage in enumerate(shapes.graph.stages):
        known = {shape.granularity for shape in shapes.of(index)}
        wanted = next(g for g in (granularity, WHOLE, OPERATORS) if g in known)
        chosen.append(Shape(wanted, next(again) if stage.is_block else any(recompute)))
    layout = shapes.layout(chosen)
    mode, split, once = cycle(modes), cycle(splits), cycle(reduce_once)
    units = []
    for unit in plan_units(layout, [Option(next(mode), reduce_once=next(once)) for _ in layout.units]):
        planned = next(each for each in layout.units if each.name == unit.name)
        slices, sharded = next(split) if planned.split_dim >= 0 and len(unit.modules) == 1 else (1, 1)
        units.append(replace(unit, splits=slices, sharded_splits=sharded))
    return Plan(
        version=PLAN_VERSION,
        model=PlanModel(model, 0, None),
        cluster=Cluster.parse(f"{world}xCPU"),
        precision=precision,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        batch_size=batch_size,
        accumulation=accumulation,
        predicted=Predicted(0.0, 0.0, 0, 0, 0, "", {}, {}),
        certificate=Certificate("none", 0.0, 0.0, 0, 0.0, 0, 0),
        baselines=(),
        units=tuple(units),
    )
