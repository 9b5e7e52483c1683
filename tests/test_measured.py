"""Claim: timed stages and optimizers replace the model's own figures, and the search stays exact with them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import captured

from osdp.cluster import Cluster, TimedOptimizer, TimedStage
from osdp.cluster.measured import at_least, between
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import UsageError
from osdp.planning import plan_graph
from osdp.recompute import Recompute

TIMES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=5)
RULES = Rules(split=False)


def settling(cluster: Cluster, batches: tuple[int, ...]) -> Cluster:
    """The GPT's stages timed at these batches, at a rate that improves up to about eight samples, as CPUs' does."""
    graph, found = captured("gpt", "fp32"), {}
    each = [(0.035 * batch + 0.08 * (1 - math.exp(-batch / 2.5))) / len(graph.stages) for batch in batches]
    for stage in graph.stages:
        for trace in _traces(stage):
            passes = 3 if trace is stage.recomputed else 2
            back = tuple(passes * seconds for seconds in each)
            found.setdefault(trace.signature, TimedStage(trace.signature, stage.name, batches, tuple(each), back))
    return replace(cluster, stages=tuple(found.values()))


def timed(cluster: Cluster, model: str, **curve: tuple[float, ...]) -> Cluster:
    """The cluster with every stage of a model timed alike at batches 1, 2 and 4."""
    traces = {trace.signature: stage.name for stage in captured(model, "fp32").stages for trace in _traces(stage)}
    stages = [TimedStage(signature, name, (1, 2, 4), curve["f"], curve["b"]) for signature, name in traces.items()]
    return replace(cluster, stages=tuple(stages))


def _traces(stage):
    return [trace for trace in (stage.plain, stage.recomputed, stage.selective) if trace is not None]


@given(TIMES, st.integers(1, 40), st.integers(0, 40))
def test_no_batch_of_an_interval_is_below_its_bound(seconds: list[float], low: int, more: int) -> None:
    batches = tuple(1 << index for index in range(len(seconds)))
    bound = at_least(batches, tuple(seconds), low, low + more) / (low + more)
    rates = [between(batches, tuple(seconds), size) / size for size in range(low, low + more + 1)]
    assert min(rates) == pytest.approx(bound, rel=1e-9)


def test_times_lie_on_lines_between_the_measured_batches() -> None:
    batches, seconds = (1, 2, 4), (1.0, 3.0, 4.0)
    assert [between(batches, seconds, batch) for batch in (1, 2, 3, 4, 6)] == [1.0, 3.0, 3.5, 4.0, 5.0]


def test_beyond_the_largest_batch_a_sample_takes_no_longer_than_there() -> None:
    # the line between the last two is steeper than the times themselves: noise, which would grow with the distance
    assert between((1, 2, 4), (2.0, 3.0, 8.0), 24) == pytest.approx(48.0)
    assert between((1, 2, 4), (2.0, 3.0, 5.0), 24) == pytest.approx(25.0)


def test_a_step_takes_what_was_timed() -> None:
    model, training = captured("gpt", "fp32"), Training.of("fp32")
    plain = replace(Cluster.parse("2xCPU"), memory_bytes=1 << 30)
    cluster = timed(plain, "gpt", f=(1.0, 2.0, 4.0), b=(3.0, 6.0, 12.0))
    cluster = replace(cluster, optimizers=(TimedOptimizer("adamw", 0.5, 1e-30),))
    found = plan_graph(model, cluster, training, replace(RULES, recompute=(Recompute.NONE,)), batch=2)
    time = step_graph_of(found, model).time()
    assert time.compute == pytest.approx(len(model.stages) * 8.0)
    assert time.optimizer == pytest.approx(0.5 * len(model.parameters))


def test_the_best_batch_is_found_though_larger_ones_are_slower_per_sample() -> None:
    """Beyond what a cache holds, seconds grow faster than samples: the bound over an interval must allow for it."""
    model, training = captured("gpt", "fp32"), Training.of("fp32")
    cluster = replace(Cluster.parse("2xCPU"), memory_bytes=1 << 26)
    cluster = timed(cluster, "gpt", f=(1.0, 1.5, 9.0), b=(1.0, 1.5, 9.0))
    found = plan_graph(model, cluster, training, RULES, join=False)
    assert found.certificate.status == "optimal"
    each = {batch: plan_graph(model, cluster, training, RULES, batch=batch, join=False) for batch in (1, 2, 3, 4)}
    best = max(each, key=lambda batch: each[batch].predicted.samples_per_second)
    assert (found.batch_size, best) == (2, 2)
    assert found.predicted.samples_per_second == pytest.approx(each[2].predicted.samples_per_second)


def test_a_profile_up_to_where_the_rate_settles_ranks_plans_rightly() -> None:
    """A small batch as it is against a large recomputed one: by times of 1, 2 and 4 samples the small one wins."""
    model, training = captured("gpt", "fp32"), Training.of("fp32")
    replicas = replace(RULES, modes=("replicate",))
    ways = (replace(replicas, recompute=(Recompute.NONE,)), 6), (replace(replicas, recompute=(Recompute.FULL,)), 23)
    cluster = replace(Cluster.parse("2x2xCPU"), memory_bytes=1 << 30)
    cluster = replace(cluster, network=replace(cluster.network, bytes_per_second=1e6))

    def rates(*batches: int) -> list[float]:
        found = [plan_graph(model, settling(cluster, batches), training, rules, batch=size) for rules, size in ways]
        return [plan.predicted.samples_per_second for plan in found]

    small, large = rates(*range(1, 13), 16, 20, 24)
    assert large > 1.03 * small
    few_small, few_large = rates(1, 2, 4)
    assert few_large < 0.95 * few_small
    assert rates(1, 2, 4, 8, 16) == pytest.approx([small, large], rel=0.02)


def test_a_profile_with_stages_reads_back_equal() -> None:
    cluster = timed(Cluster.parse("2x2xCPU"), "gpt", f=(1.0, 2.0, 4.5), b=(1.0, 2.5, 5.0))
    cluster = replace(
        cluster, overlap=0.4, collective_overhead_seconds=1e-4, optimizers=(TimedOptimizer("sgd", 0.0, 1e-9),)
    )
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize("batches", [(), (2, 1), (1, 1), (0, 1)])
def test_batches_that_do_not_rise_are_refused(batches: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"must rise from 1|at least 1"):
        TimedStage("x", "block", batches, tuple(1.0 for _ in batches), tuple(1.0 for _ in batches))
