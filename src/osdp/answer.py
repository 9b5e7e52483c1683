"""The search's answer as a plan: what is stated of its step, of its proof, of its model and of each unit."""

from __future__ import annotations

from collections.abc import Sequence

from osdp.cluster import Cluster
from osdp.cost.graph import StepGraph
from osdp.cost.layout import Layout, Variant
from osdp.cost.units import OPERATORS, Option
from osdp.model.graph import ModelGraph
from osdp.planfile import Certificate, PlanModel, PlanUnit, Predicted
from osdp.search.batches import Found
from osdp.sharding import REPLICATE


def predicted_of(step: StepGraph) -> Predicted:
    cluster, training, timeline, time = step.cluster, step.training, step.timeline(), step.time()
    samples = step.batch * training.accumulation
    return Predicted(
        step_seconds=time.total,
        samples_per_second=samples * cluster.world_size / time.total,
        mfu=step.layout.graph.flops_at(step.batch)
        * training.accumulation
        / (time.total * cluster.device.peak_flops[training.precision.compute_dtype]),
        peak_bytes=timeline.peak_bytes,
        limit_bytes=cluster.limit_bytes,
        reserve_bytes=sum(cluster.reserve.values()),
        peak_at=str(timeline.peak),
        memory_parts=timeline.peak.parts,
        time_parts={
            "compute": time.compute,
            "copies": time.copies,
            "exposed communication": time.exposed_communication,
            "optimizer": time.optimizer,
            "hidden communication": time.hidden_communication,
        },
        host_peak_bytes=(on_host := step.host_bytes()),
        host_limit_bytes=cluster.host_limit_bytes if on_host else 0,
        idle_pool_bytes=0 if cluster.device.is_cpu else timeline.idle_pool_bytes,
    )


def certificate_of(found: Found, cluster: Cluster, options: int) -> Certificate:
    bound = cluster.world_size / found.bound
    rate = cluster.world_size / found.seconds_per_sample
    return Certificate(
        status=found.status,
        bound=bound,
        gap=max(0.0, 1 - rate / bound),
        fastest_samples_per_second=rate,
        fastest_batch_size=found.batch,
        nodes=found.nodes,
        seconds=found.seconds,
        batches_searched=found.solved,
        options=options,
    )


def plan_model(graph: ModelGraph, layout: Layout) -> PlanModel:
    return PlanModel(
        name=graph.name,
        parameters=graph.num_parameters,
        seq_len=graph.seq_len,
        uncalled=uncalled_parameters(graph, layout),
        trained=sum(each.numel for each in graph.parameters.values() if each.trainable),
        sample_elements=graph.sample_elements,
        assumptions=graph.assumptions,
        unused=graph.unused,
    )


def uncalled_parameters(graph: ModelGraph, layout: Layout) -> dict[str, int]:
    """The parameters that are in no unit, because no call reaches them; see `PlanModel`."""
    held = {parameter.name for unit in layout.units for parameter in unit.parameters}
    return {name: parameter.numel for name, parameter in graph.parameters.items() if name not in held}


def plan_units(layout: Layout, options: Sequence[Option]) -> tuple[PlanUnit, ...]:
    """The plan's units, in the order in which forward enters them."""
    variants = {staged.stage.name: staged.variant for staged in layout.staged if staged.stage.is_block}
    outside = Variant(OPERATORS)
    rows = sorted(
        zip(layout.units, options, layout.places, strict=True),
        key=lambda row: (row[2].enter is None, row[2].enter or 0),
    )
    return tuple(
        PlanUnit(
            name=unit.name,
            modules=unit.modules,
            block=unit.block,
            mode=option.mode,
            splits=option.slices,
            sharded_splits=0 if option.mode == REPLICATE else option.sharded,
            recompute=variants.get(unit.block or "", outside).recompute,
            reduce_once=option.reduce_once,
            two_levels=option.two_levels,
            parameters=unit.numel,
            all_reduce_once=option.all_reduce_once,
            gather_once=option.gather_once,
            granularity=variants.get(unit.block or "", outside).granularity,
            prefetch=variants.get(unit.block or "", outside).prefetch,
            offload=option.offload,
            reduced_with=option.reduced_with,
            experts=unit.experts > 1,
        )
        for unit, option, _ in rows
    )
