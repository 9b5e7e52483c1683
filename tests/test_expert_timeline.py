"""Claim: what a plan with experts over a dimension of their own holds is, to the byte, what the real FSDP2 allocates.

As tests/test_timeline_equals_fsdp2.py says it of other plans: one rank of a fake world runs a divided Mixtral, its
tokens spread evenly, and the timeline has the local variants, the copies of a dispatch and the units' own ranks. One
thing is not in a trace: FSDP2 casts the weights of tokens' experts as it enters a unit of experts, here 64 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle

import pytest
import torch
from architectures import tiny
from planned import how
from selection import one_in
from test_timeline_equals_fsdp2 import SCALARS, differences, predicted, rows_of

from osdp.answer import plan_units
from osdp.cluster import Cluster
from osdp.cost.layout import Variant, Variants
from osdp.cost.outer import Clock, with_expert_collectives
from osdp.cost.timeline import build_timeline
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.experts import local_experts
from osdp.model.capture import capture
from osdp.model.graph import ModelGraph
from osdp.model.runs import watched
from osdp.model.structure import own_blocks
from osdp.planfile import OuterLayout, unpriced_plan
from osdp.runtime.dryrun import dry_run
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, KEEP_IN_NODE, REPLICATE
from osdp.training.optimizer import optimizer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")

BATCH = 2
WEIGHTS = 2 * 8 * 2 * 2  # of two samples of eight tokens, two experts each, in bf16


@dataclass(frozen=True)
class Case:
    """Experts over so many `ranks`; modes of the other units and of the experts."""

    ranks: int
    modes: tuple[str, ...]
    experts: tuple[str, ...]
    world: str = "1x4"
    granularity: str = WHOLE
    recompute: tuple[bool, ...] = (False,)
    device: str = "A100-80GB"
    accumulation: int = 1
    across_once: bool = False
    known: int = 0  # bytes by which a segment is off, of a Mixtral by operators that is not divided too


@cache
def with_experts(ranks: int, on: str) -> ModelGraph:
    cluster, model = Cluster.parse(f"1x{2 * ranks}x{on}"), tiny("mixtral")
    local = model.build_on_meta()
    chosen = local_experts(local, ranks)
    graph = capture(local, model.inputs, loss=model.loss, name="mixtral", compute_dtype="bf16", device=cluster.device)
    assert chosen() == {f"model.layers.{index}.mlp.experts": 2 for index in range(2)}
    return with_expert_collectives(graph, chosen(), ranks, Clock(cluster, cluster))


BY_OPERATORS = Case(2, (KEEP, FREE, REPLICATE), (FREE, REPLICATE), granularity=OPERATORS)
CASES = {
    "free": Case(2, (FREE,), (FREE,)),
    "mixed": Case(2, (KEEP, FREE, REPLICATE), (KEEP, FREE), recompute=(True, False)),
    "all": Case(4, (FREE, KEEP), (REPLICATE,), recompute=(True,)),
    "operators": replace(BY_OPERATORS, recompute=(False, True), known=1024 + WEIGHTS),
    "nodes": Case(2, (FREE_IN_NODE, FREE), (FREE_IN_NODE, KEEP_IN_NODE), world="2x4"),
    "across": Case(2, (FREE,), (KEEP_IN_NODE, FREE_IN_NODE), world="2x4", accumulation=2, across_once=True),
    "CPU": Case(2, (KEEP, FREE, REPLICATE), (FREE, KEEP), device="CPU"),
    "CPU nodes": Case(2, (FREE_IN_NODE, KEEP), (KEEP_IN_NODE, FREE), world="2x4", device="CPU", accumulation=2),
}


@pytest.mark.parametrize("case", one_in(2, CASES.values(), ids=[*CASES]))
def test_a_rank_holds_what_the_timeline_says(case: Case) -> None:
    graph, cluster = with_experts(case.ranks, case.device), Cluster.parse(f"{case.world}x{case.device}")
    variants, again, chosen = Variants(graph), cycle(case.recompute), []
    for stage in graph.stages:
        granularity = case.granularity if stage.is_block else OPERATORS
        chosen.append(Variant(granularity, how(next(again) if stage.is_block else any(case.recompute))))
    layout = variants.layout(chosen)
    others, experts, options = cycle(case.modes), cycle(case.experts), []
    for unit in layout.units:
        mode = next(others if unit.experts == 1 else experts)
        options.append(Option(mode, all_reduce_once=case.across_once and mode.is_reduced_across))
    training = replace(Training.of("bf16", "adamw", None), accumulation=case.accumulation)
    timeline = build_timeline(layout, options, BATCH, training, cluster)
    plan = unpriced_plan(
        "mixtral",
        plan_units(layout, options),
        cluster,
        precision="bf16",
        reduce_dtype="fp32",
        optimizer="adamw",
        batch_size=BATCH,
        accumulation=case.accumulation,
    )
    plan = replace(plan, layout=OuterLayout(expert=case.ranks))
    assert sum(unit.experts for unit in plan.units) == 2
    model = tiny("mixtral")
    with torch.device("meta"):
        names = list(watched(plain := model.build(), own_blocks(plain)))
    run = dry_run(
        model.build,
        model.inputs,
        plan,
        loss=model.loss,
        watched=lambda module: {name: module.get_submodule(name) for name in names},
        optimizer=partial(optimizer_of, "adamw", lr=1e-3),
    )
    rows, optimizer = rows_of(run.trace, case.accumulation)
    expected, stepping = predicted(timeline)
    assert [row.mark for row in rows] == [mark for mark, _ in expected]
    assert differences(rows, expected, allowed=SCALARS + WEIGHTS + case.known) == []
    assert stepping == pytest.approx(optimizer.allocated, abs=SCALARS + case.known)
