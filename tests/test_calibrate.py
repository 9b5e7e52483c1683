"""Claim: measured steps of different plans tell which part of a profile is wrong, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
from small_models import captured

from osdp.cluster import Cluster, TimedOptimizer
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.tuning.calibrate import Factors, MeasuredStep, calibrate, corrected

CLUSTER = replace(
    Cluster.parse("4xCPU"),
    overlap=0.5,
    collective_overhead_seconds=2e-5,
    optimizers=(TimedOptimizer("adamw", 5e-6, 1e-9),),
)
WAYS = [(mode, batch) for mode in ("replicate", "keep", "free") for batch in (1, 256)]


@cache
def plan_of(mode: str, batch: int) -> Plan:
    rules = Rules(modes=(mode,), split=False, recompute=(Recompute.NONE,))
    return plan_graph(captured("gpt", "fp32"), CLUSTER, Training.of("fp32"), rules, batch=batch)


def seconds_of(plan: Plan, cluster: Cluster) -> float:
    return step_graph_of(replace(plan, cluster=cluster), captured("gpt", "fp32")).time().total


def steps(truth: Factors, ways: Sequence[tuple[str, int]] = WAYS) -> list[MeasuredStep]:
    """What a cluster would measure whose parts are so much slower than it says."""
    there = corrected(CLUSTER, truth)
    return [MeasuredStep(partial(seconds_of, plan_of(*way)), seconds_of(plan_of(*way), there)) for way in ways]


@pytest.mark.parametrize(
    "truth", [Factors(), Factors(compute=1.8), Factors(communication=1.6), Factors(1.5, 0.7, 1.2, 0.9)], ids=str
)
def test_steps_of_different_plans_find_what_is_slow(truth: Factors) -> None:
    found = calibrate(CLUSTER, steps(truth))
    for each in steps(truth):
        assert each.predict(corrected(CLUSTER, found)) == pytest.approx(each.seconds, rel=0.02)
    assert found.communication / found.compute == pytest.approx(truth.communication / truth.compute, rel=0.15)


def test_one_step_is_explained_by_all_parts_a_little() -> None:
    measured = steps(Factors(2.0, 2.0, 2.0, 2.0), WAYS[:1])
    found = calibrate(CLUSTER, measured)
    assert measured[0].predict(corrected(CLUSTER, found)) == pytest.approx(measured[0].seconds, rel=0.02)
    assert max(found.compute, found.communication, found.host, found.optimizer) > 1.2


def test_a_profile_that_is_right_is_not_changed() -> None:
    found = calibrate(CLUSTER, steps(Factors()))
    assert [found.compute, found.communication, found.host, found.optimizer] == pytest.approx([1.0] * 4)
