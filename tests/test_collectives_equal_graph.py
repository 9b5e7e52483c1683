"""Claim: on real gloo ranks, every rank issues the collectives of the planned graph, in order and to the byte.

Also where a module is called several times.
"""

from __future__ import annotations

from typing import Any

import pytest
from odd_models import Model, Returning, Twice, built, data, odd_graph
from planned import plan_by_hand
from ranks import run_ranks

import osdp
from osdp.cost.graph import step_graph_of
from osdp.cost.schedule import CollectiveRecord
from osdp.cost.units import OPERATORS, WHOLE
from osdp.planfile import Plan
from osdp.runtime.collective_recorder import recording
from osdp.sharding import FREE, FREE_IN_NODE, FREE_TO_NODE, KEEP, KEEP_IN_NODE, REPLICATE

EVERY_MODE = (FREE, KEEP, REPLICATE, FREE_TO_NODE, FREE_IN_NODE, KEEP_IN_NODE)
PLANS: tuple[dict[str, Any], ...] = (
    {"granularity": WHOLE, "precision": "bf16"},
    {"granularity": OPERATORS, "recompute": (True, False)},
    {"granularity": OPERATORS, "splits": ((3, 2), (2, 2), (4, 1))},
    {"granularity": WHOLE, "accumulation": 3, "reduce_once": (True, False)},
    {"granularity": OPERATORS, "accumulation": 3, "all_reduce_once": (True, True, False), "splits": ((1, 1), (3, 2))},
)


CALLED_AGAIN: tuple[tuple[type[Model], dict[str, Any]], ...] = (
    (Twice, {"granularity": OPERATORS, "recompute": (True, False)}),
    (Twice, {"granularity": OPERATORS, "splits": ((2, 2),)}),
    (Returning, {"accumulation": 2, "reduce_once": (True, False)}),
)


def issued(kinds: list[type[Model]], plans: list[Plan]) -> list[list[CollectiveRecord]]:
    """What this rank issues in one training step of each plan."""
    found = []
    for kind, plan in zip(kinds, plans, strict=True):
        model = osdp.parallelize(built(kind), plan)
        batch = data(2, seed=0)
        with recording(plan.cluster.devices_per_node) as step:
            for tokens, targets in osdp.accumulate(model, [batch] * plan.accumulation):
                model(tokens, targets).backward()
        found.append(step.issued)
    return found


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
