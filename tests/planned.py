"""Plans made by hand for tests: any mode, split, recompute and granularity, whether or not it would be chosen.

And what a model that runs one holds, put together again: to compare it with a model that runs in a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from small_models import captured
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp.answer import plan_units, uncalled_parameters
from osdp.cluster import Cluster
from osdp.cost.layout import Variant, Variants
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.model.graph import ModelGraph
from osdp.planfile import Depth, Plan, PlanUnit, unpriced_plan
from osdp.recompute import Recompute
from osdp.runtime.split import SplitOperator
from osdp.sharding import REPLICATE, Scope


def how(recompute: bool | Recompute) -> Recompute:
    """Tests that know two ways say True for full."""
    if isinstance(recompute, Recompute):
        return recompute
    return Recompute.FULL if recompute else Recompute.NONE


def plan_by_hand(
    model: str | ModelGraph,
    world: str,
    *,
    modes: Sequence[str],
    granularity: str = WHOLE,
    recompute: Sequence[bool | Recompute] = (False,),
    splits: Sequence[tuple[int, int]] = ((1, 1),),
    precision: str = "fp32",
    reduce_dtype: str = "fp32",
    optimizer: str = "adamw",
    batch_size: int = 2,
    accumulation: int = 1,
    reduce_once: Sequence[bool] = (False,),
    all_reduce_once: Sequence[bool] = (False,),
    gather_once: Sequence[bool] = (False,),
    two_levels: Sequence[bool] = (True, False),
    prefetch: Sequence[Depth] = (1,),
    device: str = "CPU",
) -> Plan:
    """Modes, and (slices, sharded slices) of what can be split, go round over the units; over the blocks recompute and,
    where they are gathered by operators, `prefetch`.

    `two_levels` goes round over the units that are sharded over several nodes, `all_reduce_once` over those that are
    sharded within nodes and not reduced once, `gather_once` over those that are kept and not in slices.
    """
    graph = captured(model, "bf16" if precision != "fp32" else "fp32", device) if isinstance(model, str) else model
    variants, again, depth = Variants(graph), cycle(recompute), cycle(prefetch)
    chosen = []
    for index, stage in enumerate(variants.graph.stages):
        known = {variant.granularity for variant in variants.of(index)}
        wanted = next(g for g in (granularity, WHOLE, OPERATORS) if g in known)
        variant = Variant(wanted, how(next(again) if stage.is_block else any(recompute)))
        selective = variant.recompute is Recompute.SELECTIVE
        if selective and variant not in variants.of(index):  # parts of blocks, and what lies outside them
            variant = Variant(wanted, Recompute.FULL)
        if stage.is_block and wanted == OPERATORS:
            variant = replace(variant, prefetch=next(depth))
            assert variant.prefetch == 1 or variant in variants.of(index), f"{stage.name} cannot prefetch two units"
        chosen.append(variant)
    layout = variants.layout(chosen)
    mode, split, once, two = cycle(modes), cycle(splits), cycle(reduce_once), cycle(two_levels)
    across, stays = cycle(all_reduce_once), cycle(gather_once)
    cluster = Cluster.parse(f"{world}x{device}")
    units = []
    for unit in plan_units(layout, [Option(next(mode), reduce_once=next(once)) for _ in layout.units]):
        planned = next(each for each in layout.units if each.name == unit.name)
        slices, sharded = next(split) if planned.split_dim >= 0 and len(unit.modules) == 1 else (1, 1)
        on_two = cluster.has_two_levels and unit.sharding.sharded_over is Scope.WORLD and next(two)
        sharded = sharded if unit.mode == REPLICATE else max(1, sharded)
        late = unit.sharding.is_reduced_across and not unit.reduce_once and next(across)
        held = {"splits": slices, "sharded_splits": sharded}
        gathered = unit.sharding.is_kept and slices == 1 and next(stays)
        units.append(replace(unit, **held, two_levels=on_two, all_reduce_once=late, gather_once=gathered))
    uncalled = uncalled_parameters(graph, layout)
    return _plan(graph.name, cluster, units, precision, reduce_dtype, optimizer, batch_size, accumulation, uncalled)


def plan_of_units(
    model: nn.Module,
    world: str,
    modes: Mapping[tuple[str, ...], str],
    *,
    recompute: Sequence[str] = (),
    precision: str = "fp32",
    reduce_dtype: str = "fp32",
) -> Plan:
    """A plan for a model that is not captured: units by the names of their modules, in the order of forward."""
    modules = dict(model.named_modules())
    held: dict[tuple[str, ...], int] = {}
    taken: set[nn.Parameter] = set()
    for names in sorted(modes, key=lambda names: -max(name.count(".") + bool(name) for name in names)):
        own = {p for name in names for p in modules[name].parameters()} - taken
        taken |= own
        held[names] = sum(parameter.numel() for parameter in own)
    units = [
        PlanUnit(
            name=names[0],
            modules=names,
            block=names[0] if names[0] in recompute else None,
            mode=mode,
            splits=1,
            sharded_splits=1,
            recompute=how(names[0] in recompute),
            reduce_once=False,
            two_levels=False,
            parameters=held[names],
        )
        for names, mode in modes.items()
    ]
    return _plan(type(model).__name__, Cluster.parse(f"{world}xCPU"), units, precision, reduce_dtype, "sgd", 1, 1)


def _plan(
    name: str,
    cluster: Cluster,
    units: Sequence[PlanUnit],
    precision: str,
    reduce_dtype: str,
    optimizer: str,
    batch_size: int,
    accumulation: int,
    uncalled: Mapping[str, int] | None = None,
) -> Plan:
    return unpriced_plan(
        name,
        units,
        cluster,
        precision=precision,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        batch_size=batch_size,
        accumulation=accumulation,
        uncalled=uncalled,
    )


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as the plain model has it, by its first name there. A collective for each that is sharded."""
    return {name: _joined([p.detach() for p in parts], dim) for name, parts, dim in _parts(model)}


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, likewise; None where there is none, in no slice of it."""
    found: dict[str, Tensor | None] = {}
    for name, parts, dim in _parts(model):
        gradients = [part.grad for part in parts if part.grad is not None]
        assert len(gradients) in (0, len(parts)), f"{name}: {len(gradients)} of {len(parts)} slices have a gradient"
        found[name] = _joined(gradients, dim) if gradients else None
    return found


def _parts(model: nn.Module) -> list[tuple[str, list[nn.Parameter], int]]:
    parts: dict[str, tuple[list[nn.Parameter], int]] = {}
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        operator = owner.rpartition(".slices.")[0]
        split = model.get_submodule(operator) if operator else None
        if isinstance(split, SplitOperator):
            dim = split.weight_dim if parameter.ndim > 1 else 0
            parts.setdefault(f"{operator}.{key}", ([], dim))[0].append(parameter)
        else:
            parts[name] = ([parameter], 0)
    return [(name, *found) for name, found in parts.items()]


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return torch.cat(whole, dim) if len(whole) > 1 else whole[0].clone()
