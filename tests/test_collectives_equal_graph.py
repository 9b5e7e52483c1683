"""Claim: on real gloo ranks, every rank issues the collectives of the planned graph, in order and to the byte.

Also where a module is called several times, and where two units are gathered ahead, on both engines.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from odd_models import Model, Returning, Twice, built, data, odd_graph
from planned import plan_by_hand
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import osdp
from osdp.cost.graph import step_graph_of
from osdp.cost.schedule import CollectiveRecord
from osdp.cost.time_model import ALL_GATHER, ALL_REDUCE
from osdp.cost.units import OPERATORS, WHOLE
from osdp.engine import ASYNC_GLOO, STOCK, Engine
from osdp.planfile import Plan
from osdp.runtime.collective_recorder import Recording, recording
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE

EVERY_MODE = (FREE, KEEP, REPLICATE, FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE)
PLANS: tuple[dict[str, Any], ...] = (
    {"granularity": WHOLE, "precision": "bf16"},
    {"granularity": OPERATORS, "recompute": (True, False)},
    {"granularity": OPERATORS, "splits": ((3, 2), (2, 2), (4, 1))},
    {"granularity": WHOLE, "accumulation": 3, "reduce_once": (True, False)},
    {"granularity": OPERATORS, "accumulation": 3, "all_reduce_once": (True, True, False), "splits": ((1, 1), (3, 2))},
    {"granularity": OPERATORS, "accumulation": 3, "gather_once": (True, True, False), "all_reduce_once": (True,)},
)


CALLED_AGAIN: tuple[tuple[type[Model], dict[str, Any]], ...] = (
    (Twice, {"granularity": OPERATORS, "recompute": (True, False)}),
    (Twice, {"granularity": OPERATORS, "splits": ((2, 2),)}),
    (Returning, {"accumulation": 2, "reduce_once": (True, False)}),
    (Returning, {"accumulation": 2, "gather_once": (True,)}),
)


class Watching(TorchDispatchMode):
    """Shows a recording the collectives that FSDP2 itself issues; see [Note: CollectiveRecord]."""

    def __init__(self, step: Recording) -> None:
        super().__init__()
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._step.seen(func, args)
        return func(*args, **(kwargs or {}))


def issued(kinds: list[type[Model]], plans: list[Plan], engine: Engine | None = None) -> list[list[CollectiveRecord]]:
    """What this rank issues in one training step of each plan."""
    found = []
    for kind, plan in zip(kinds, plans, strict=True):
        model = osdp.parallelize(built(kind), plan, engine=engine)
        batch = data(2, seed=0)
        stock = engine == STOCK
        with recording(plan.cluster.devices_per_node) as step, Watching(step) if stock else nullcontext():
            for tokens, targets in osdp.accumulate(model, [batch] * plan.accumulation):
                model(tokens, targets).backward()
        # the ranks of the stock engine agree on unused gradients with an all-reduce, which is no part of a plan
        found.append([each for each in step.issued if not (stock and each.kind == ALL_REDUCE)])
    return found


@pytest.mark.parametrize("engine", [ASYNC_GLOO, STOCK], ids=lambda engine: engine.name)
def test_every_rank_issues_two_units_ahead_where_that_is_planned(engine: Engine) -> None:
    """Recomputed and not, next to blocks that do not: the order differs from that of depth one, nothing else does."""
    model, shallow, deep = odd_graph(Model), [], []
    for changes in ({"recompute": (True, False)}, {"modes": (FREE, KEEP), "recompute": (False, True)}):
        for depth, plans in (((1,), shallow), ((2,), deep), ((1, 2), deep)):
            wanted = {"modes": (FREE,), "granularity": OPERATORS, "prefetch": depth} | changes
            plan = plan_by_hand(model, "2", **wanted)
            cluster = replace(plan.cluster, engine_name=engine.name)
            plans.append(replace(plan, cluster=cluster))
    orders = [[each.record for each in step_graph_of(plan, model).collectives()] for plan in deep]
    before = [[each.record for each in step_graph_of(plan, model).collectives()] for plan in shallow for _ in range(2)]
    assert [sorted(order) for order in orders] == [sorted(order) for order in before]
    assert all(order != other for order, other in zip(orders, before, strict=True))
    for rank, steps in enumerate(run_ranks(2, issued, [Model] * len(deep), deep, engine)):
        assert steps == orders, rank
        assert all(steps)


@pytest.mark.parametrize("engine", [ASYNC_GLOO, STOCK], ids=lambda engine: engine.name)
def test_what_is_gathered_once_is_gathered_by_the_first_micro_batch_alone(engine: Engine) -> None:
    model, plans = odd_graph(Model), []
    for changes in ({"modes": (KEEP,)}, {"modes": (FREE, KEEP), "granularity": OPERATORS, "recompute": (True, False)}):
        plan = plan_by_hand(model, "2", accumulation=3, gather_once=(True, True, False), **changes)
        plans.append(replace(plan, cluster=replace(plan.cluster, engine_name=engine.name)))
    graphs = [step_graph_of(plan, model) for plan in plans]
    for plan, graph in zip(plans, graphs, strict=True):
        gathers = Counter(each.unit for each in graph.collectives() if each.kind == ALL_GATHER)
        for unit in plan.units:
            assert gathers[unit.name] == (1 if unit.gather_once else 3 if unit.mode == KEEP else 6), unit
    for rank, steps in enumerate(run_ranks(2, issued, [Model] * len(plans), plans, engine)):
        assert steps == [[each.record for each in graph.collectives()] for graph in graphs], rank


@pytest.mark.parametrize("world", ["2x2", "3"])
def test_every_rank_issues_what_is_planned(world: str) -> None:
    modes = EVERY_MODE if world == "2x2" else (FREE, KEEP, REPLICATE)
    cases = [*((Model, changes) for changes in PLANS), *CALLED_AGAIN]
    kinds = [kind for kind, _ in cases]
    models = {kind: odd_graph(kind) for kind in kinds}
    plans = [plan_by_hand(models[kind], world, modes=modes, **changes) for kind, changes in cases]
    graphs = [step_graph_of(plan, models[kind]) for kind, plan in zip(kinds, plans, strict=True)]
    assert {unit.two_levels for plan in plans for unit in plan.units} == ({True, False} if world == "2x2" else {False})
    for rank, steps in enumerate(run_ranks(plans[0].cluster.world_size, issued, kinds, plans)):
        for graph, found in zip(graphs, steps, strict=True):
            assert found == [each.record for each in graph.collectives()], rank
            assert found
