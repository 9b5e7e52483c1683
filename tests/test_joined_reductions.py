"""Claims: replicas whose reductions are joined train as a single process, and cost what the planner says.

- on real ranks, on both engines, with several micro-batches, unused parameters and clipping, training is that of one
  process; a checkpoint of a plan without joined reductions loads into one with them;
- every rank issues the collectives that the plan's graph has, and the timeline is FSDP2's memory to the byte;
- the rule joins only what runs so, and a plan is joined where that is faster and fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from architectures import graph_of
from odd_models import (
    Adapters,
    Model,
    Repeated,
    TiedThrice,
    Twice,
    UnusedBeside,
    UnusedGradients,
    built,
    data,
    odd_graph,
)
from planned import plan_by_hand, whole_gradients, whole_parameters
from ranks import run_ranks
from selection import one_in
from small_models import captured
from test_collectives_equal_graph import issued
from test_runtime import by_both_engines, decaying
from test_timeline_equals_fsdp2 import BATCH, SCALARS, Case, differences, laid_out, measured, plan_of, predicted
from test_training_is_exact import check
from trained import Trained, close, same, sgd, train

import osdp
from osdp.cluster import Cluster
from osdp.cost.buckets import can_join, joined
from osdp.cost.graph import step_graph_of, training_of
from osdp.cost.tables import Rules
from osdp.cost.timeline import build_timeline
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS
from osdp.engine import STOCK, Engine
from osdp.errors import UsageError
from osdp.model.graph import ModelGraph
from osdp.plan_check import check_plan
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.sharding import FREE, KEEP, REPLICATE

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor.*")
ALL = 1 << 40


def with_joined(plan: Plan, graph: ModelGraph, nbytes: int = ALL) -> Plan:
    step = step_graph_of(plan, graph)
    options = joined(step.layout, step.options, nbytes, training_of(plan))
    names = {unit.name: option.reduced_with for unit, option in zip(step.layout.units, options, strict=True)}
    return replace(plan, units=tuple(replace(unit, reduced_with=names[unit.name]) for unit in plan.units))


def joined_plans(name: str, world: str) -> list[Plan]:
    """All replicas in one reduction and in several; sharded units and slices between; several micro-batches."""
    graph = graph_of(name)
    few = 3 * max(unit.parameters for unit in plan_by_hand(graph, world, modes=(REPLICATE,)).units)
    ways: list[tuple[int, dict[str, object]]] = [
        (ALL, {"modes": (REPLICATE,), "recompute": (True, False)}),
        (few, {"modes": (REPLICATE,), "granularity": OPERATORS}),
        (ALL, {"modes": (REPLICATE, REPLICATE, FREE), "granularity": OPERATORS, "splits": ((1, 1), (1, 1), (3, 2))}),
        (ALL, {"modes": (REPLICATE, REPLICATE, REPLICATE, KEEP), "accumulation": 3}),
        (ALL, {"modes": (REPLICATE,), "accumulation": 3, "reduce_once": (True, True, True, False)}),
    ]
    plans = [with_joined(plan_by_hand(graph, world, **changes), graph, nbytes) for nbytes, changes in ways]  # type: ignore[arg-type]
    assert all(plan.buckets for plan in plans)
    assert any(len(plan.buckets) > 1 for plan in plans)
    return plans


@pytest.mark.parametrize(("name", "world"), [("gpt", "2x2"), ("t5", "2"), ("mixtral", "2")])
def test_training_is_that_of_a_single_process(name: str, world: str) -> None:
    check(name, world, joined_plans(name, world))


def test_the_stock_engine_runs_the_same_plans() -> None:
    """It reduces every unit by itself."""
    check("gpt", "2x2", joined_plans("gpt", "2x2"), STOCK)


def odd_runs(kinds: Sequence[type[Model]], plans: Sequence[Plan], engine: Engine) -> list[Trained]:
    """Each kind of model under its plan, under an optimizer that decays what has a gradient."""
    found = []
    for kind, plan in zip(kinds, plans, strict=True):
        model = osdp.parallelize(built(kind), plan, engine=engine)
        found.append(train(model, decaying, times=plan.accumulation))
    return found


@by_both_engines
def test_what_is_unused_called_often_or_tied_is_exact(engine: Engine) -> None:
    """Bucket members without gradients, left late, or left again."""
    kinds: list[type[Model]] = [UnusedGradients, UnusedGradients, UnusedBeside, Repeated, Twice, TiedThrice, Adapters]
    plans = []
    for number, kind in enumerate(kinds):
        accumulation = 2 if number == 1 else 1
        way = {"modes": (REPLICATE,), "granularity": OPERATORS, "accumulation": accumulation}
        plans.append(with_joined(plan_by_hand(odd_graph(kind), "2", **way), odd_graph(kind)))
    assert all(plan.buckets for plan in plans)
    truth = [train(built(kind), decaying) for kind in kinds]
    for runs in run_ranks(2, odd_runs, kinds, plans, engine):
        for run, true in zip(runs, truth, strict=True):
            same(run, true)


@by_both_engines
def test_clipping_equals_the_single_processes(engine: Engine) -> None:
    graph = odd_graph(Model)
    plan = with_joined(plan_by_hand(graph, "2x2", modes=(REPLICATE, REPLICATE, FREE), granularity=OPERATORS), graph)
    model, (tokens, targets) = built(Model), data(4, seed=0)
    model(tokens, targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    for found, gradients in run_ranks(4, clipped, plan, engine):
        assert found == pytest.approx(norm, rel=1e-5)
        for name, parameter in model.named_parameters():
            own, true = gradients[name], parameter.grad
            assert own is not None and true is not None
            close(own, true, name)


def clipped(plan: Plan, engine: Engine) -> tuple[float, dict[str, torch.Tensor | None]]:
    model = osdp.parallelize(built(Model), plan, engine=engine)
    tokens, targets = (each.chunk(4)[dist.get_rank()] for each in data(4, seed=0))
    model(tokens, targets).backward()
    return osdp.clip_grad_norm_(model.parameters(), 0.01).item(), whole_gradients(model)


def saved(plan: Plan, folder: Path) -> None:
    model = osdp.parallelize(built(Model), plan)
    optimizer = sgd(model.parameters())
    one_step(model, optimizer, seed=0)
    osdp.save_checkpoint(folder, model, optimizer, step=1)


def resumed(plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    model = osdp.parallelize(built(Model), plan)
    optimizer = sgd(model.parameters())
    osdp.load_checkpoint(folder, model, optimizer)
    one_step(model, optimizer, seed=1)
    return whole_parameters(model)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    tokens, targets = (each.chunk(ranks)[rank] for each in data(4, seed=seed))
    model(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpoint_without_joined_reductions_loads_into_a_plan_with_them(tmp_path: Path) -> None:
    graph = odd_graph(Model)
    plain = plan_by_hand(graph, "2", modes=(REPLICATE, FREE))
    run_ranks(2, saved, plain, tmp_path)
    model = built(Model)
    optimizer = sgd(model.parameters())
    for seed in (0, 1):
        one_step(model, optimizer, seed=seed)
    for world in ("2", "2x2"):
        plan = with_joined(plan_by_hand(graph, world, modes=(REPLICATE,)), graph)
        assert plan.buckets
        for found in run_ranks(plan.cluster.world_size, resumed, plan, tmp_path):
            for name, parameter in model.named_parameters():
                close(found[name], parameter.detach(), name)


@pytest.mark.parametrize("world", ["2x2", "3"])
def test_every_rank_issues_what_is_planned(world: str) -> None:
    graph = odd_graph(Model)
    ways = ({}, {"modes": (REPLICATE, FREE), "splits": ((2, 1),)}, {"accumulation": 2}, {"recompute": (True, False)})
    modes = {"modes": (REPLICATE, REPLICATE, REPLICATE, KEEP), "granularity": OPERATORS}
    plans = [with_joined(plan_by_hand(graph, world, **modes | way), graph) for way in ways]
    steps = [step_graph_of(plan, graph) for plan in plans]
    apart = [step_graph_of(plan_by_hand(graph, world, **modes | way), graph) for way in ways]
    assert any(plan.buckets for plan in plans)
    for step, before in zip(steps, apart, strict=True):
        now, then = step.collectives(), before.collectives()
        assert sum(each.nbytes for each in now) == sum(each.nbytes for each in then)
    for found in run_ranks(plans[0].cluster.world_size, issued, [Model] * len(plans), plans):
        assert found == [[each.record for each in step.collectives()] for step in steps]


CASES = [
    Case((REPLICATE,), device="CPU", precision="fp32", world="1x2"),
    Case((REPLICATE,), device="CPU", precision="bf16", reduce_dtype="fp32"),
    Case((REPLICATE,), device="CPU", precision="fp32", recompute=(True, False), granularity=OPERATORS),
    Case((REPLICATE, REPLICATE, REPLICATE, FREE, KEEP), device="CPU", precision="fp32", granularity=OPERATORS),
    Case((REPLICATE,), model="gpt-uneven", device="CPU", precision="fp32", world="1x3"),
    Case((REPLICATE,), device="CPU", precision="fp32", accumulation=2),
    Case(
        (REPLICATE, REPLICATE, FREE), model="llama", device="CPU", precision="fp32", accumulation=2, recompute=(True,)
    ),
]


@pytest.mark.parametrize("nbytes", [ALL, 1 << 14], ids=["all", "some"])
@pytest.mark.parametrize("case", one_in(2, CASES, ids=str))
def test_the_timeline_equals_fsdp2(case: Case, nbytes: int) -> None:
    layout, options = laid_out(case)
    options = joined(layout, options, nbytes, case.training)
    timeline = build_timeline(layout, options, BATCH, case.training, case.cluster)
    expected, optimizer_bytes = predicted(timeline)
    rows, optimizer = measured(case, plan_of(case, layout, options))
    assert not differences(rows, expected, SCALARS)
    assert abs(optimizer_bytes - max(optimizer.allocated, optimizer.at_mark)) <= SCALARS


def test_a_plan_is_joined_where_that_is_faster_and_fits() -> None:
    """What is stated is what runs; the search's own figures stay those of units reduced by themselves."""
    graph, training = captured("gpt", "fp32", "CPU"), Training.of("fp32", "adamw", "fp32")
    cluster = Cluster.parse("2x2xCPU")
    apart_, plan = (plan_graph(graph, cluster, training, Rules(), batch=BATCH, join=join) for join in (False, True))
    assert plan.buckets
    assert not apart_.buckets
    step = step_graph_of(plan, graph)
    assert plan.predicted.step_seconds == pytest.approx(step.seconds) == pytest.approx(step.time().total)
    assert plan.predicted.peak_bytes == step.timeline().peak_bytes <= cluster.limit_bytes
    assert plan.predicted.step_seconds < apart_.predicted.step_seconds
    assert plan.certificate.bound == pytest.approx(apart_.certificate.bound)
    assert all(plan.predicted.samples_per_second >= each.samples_per_second * (1 - 1e-9) for each in plan.baselines)
    assert Plan.from_dict(plan.to_dict()) == plan

    least = apart_.predicted.peak_bytes
    tight = replace(cluster, memory_bytes=least + cluster.total_bytes - cluster.limit_bytes)
    fitted = plan_graph(graph, tight, training, Rules(), batch=BATCH)
    assert fitted.predicted.peak_bytes <= least


def test_the_stock_engine_and_casts_join_nothing() -> None:
    graph = captured("gpt", "bf16", "CPU")
    stock = replace(Cluster.parse("2x2xCPU"), engine_name=STOCK.name)
    for cluster, reduce_dtype in ((stock, "fp32"), (Cluster.parse("2x2xCPU"), "bf16")):
        training = Training.of("bf16", "adamw", reduce_dtype)
        assert not can_join(training, cluster)
        assert not plan_graph(graph, cluster, training, Rules(), batch=BATCH).buckets


def test_plans_that_join_what_cannot_be_joined_are_refused() -> None:
    graph = odd_graph(Model)
    plan = with_joined(plan_by_hand(graph, "2", modes=(REPLICATE,)), graph)
    (name, members), *_ = plan.buckets.items()
    first, units = members[0], {unit.name: unit for unit in plan.units}

    def changed(**changes: object) -> Plan:
        other = {first: replace(units[first], **changes)}  # type: ignore[arg-type]
        return replace(plan, units=tuple(other.get(unit.name, unit) for unit in plan.units))

    check_plan(plan)
    for wrong, said in (
        (changed(reduced_with="nobody"), "makes no all-reduce of its own"),
        (changed(mode="free", sharded_splits=1), "only whole replicas"),
        (changed(reduce_once=True), "one of them once a step"),
        (replace(plan, cluster=replace(plan.cluster, engine_name=STOCK.name)), "the engine fsdp2 does not"),
    ):
        with pytest.raises(UsageError, match=said):
            check_plan(wrong)
    last = [unit.name for unit in plan.units if unit.name != name][-1]
    order = replace(plan, units=tuple(replace(u, reduced_with=last if u.name == name else None) for u in plan.units))
    with pytest.raises(UsageError, match="does not come right after"):
        step_graph_of(order, graph)
