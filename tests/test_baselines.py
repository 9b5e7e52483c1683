"""Claim: a baseline is one way for all units, priced by the same cost model, at the batch size that a plan would take.

That is the smallest within 1 % of its best rate.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_models import captured

from osdp.baselines import WAYS, baselines
from osdp.batching import Batching
from osdp.cluster import Cluster, parse_bytes
from osdp.cost.buckets import can_join, joined
from osdp.cost.graph import StepGraph, step_graph
from osdp.cost.layout import Variant, Variants
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option
from osdp.planfile import Baseline
from osdp.recompute import EVERY_RECOMPUTE, Recompute

MODES = dict(WAYS)


def machines(word: str, memory: str) -> Cluster:
    return replace(Cluster.parse(word), memory_bytes=parse_bytes(memory))


def found(cluster: Cluster, **changes: int) -> tuple[Baseline, ...]:
    ways = baselines(captured("gpt"), cluster, Training.of(), Batching(**changes))
    return tuple(way.baseline for way in ways)


def priced(baseline: Baseline, cluster: Cluster, batch: int, accumulation: int = 1, *, once: bool = False) -> StepGraph:
    """The step of a baseline without tables and search: every block one unit, every unit in the one mode.

    DDP's reductions are joined up to torch's 25 MiB where the engine can.
    """
    graph = captured("gpt")
    variants = [Variant(WHOLE, baseline.recompute) if stage.is_block else Variant(OPERATORS) for stage in graph.stages]
    layout = Variants(graph).layout(variants)
    options = [Option(MODES[baseline.name], reduce_once=once)] * len(layout.units)
    training = replace(Training.of(), accumulation=accumulation)
    if baseline.name == "DDP" and can_join(training, cluster):
        options = joined(layout, options, 25 << 20, training)
    return step_graph(layout, options, batch, training, cluster)


@pytest.mark.parametrize(("word", "memory"), [("4xCPU", "3MiB"), ("2x2xA100-40GB", "4MiB")])
def test_cost_and_the_smallest_batch_close_to_the_best_rate(word: str, memory: str) -> None:
    cluster = machines(word, memory)
    for baseline in found(cluster):
        assert baseline.feasible, baseline.name
        step = priced(baseline, cluster, baseline.batch_size)
        assert baseline.peak_bytes == step.timeline().peak_bytes <= cluster.limit_bytes
        assert baseline.step_seconds == pytest.approx(step.time().total, rel=1e-9)
        rate = baseline.batch_size * cluster.world_size / step.time().total
        assert baseline.samples_per_second == pytest.approx(rate, rel=1e-9)
        rates = []
        for batch in range(1, 200):
            step = priced(baseline, cluster, batch)
            if step.timeline().peak_bytes > cluster.limit_bytes:
                break
            rates.append(batch * cluster.world_size / step.time().total)
        assert len(rates) < 199
        enough = 0.99 * max(rates) * (1 - 1e-9)
        assert baseline.batch_size == 1 + next(n for n, rate in enumerate(rates) if rate >= enough)


def test_what_does_not_fit_is_flagged() -> None:
    cluster = machines("8xCPU", "500KiB")
    by_name = {(b.name, b.recompute): b for b in found(cluster)}
    for again in EVERY_RECOMPUTE:
        replicated = by_name["DDP", again]
        assert not replicated.feasible
        assert (replicated.batch_size, replicated.accumulation) == (0, 0)
        assert (replicated.samples_per_second, replicated.step_seconds) == (0.0, 0.0)
        assert replicated.peak_bytes == priced(replicated, cluster, 1).timeline().peak_bytes > cluster.limit_bytes
    assert by_name["FSDP", Recompute.FULL].feasible


def test_ways_that_differ_on_the_cluster() -> None:
    def names(word: str) -> list[str]:
        return [b.name for b in found(machines(word, "64MiB"), batch=2)]

    assert names("1xCPU") == ["DDP"] * 3
    assert names("4xCPU") == ["DDP"] * 3 + ["ZeRO-2"] * 3 + ["FSDP"] * 3
    assert names("2x2xCPU") == names("4xCPU") + ["HSDP"] * 3


def test_a_fixed_batch_is_kept() -> None:
    for baseline in found(machines("2x2xCPU", "64MiB"), batch=5):
        assert (baseline.feasible, baseline.batch_size, baseline.accumulation) == (True, 5, 1)


def test_a_global_batch_is_divided_in_the_best_way() -> None:
    cluster = machines("4xCPU", "3MiB")
    for baseline in found(cluster, global_batch=4 * 60):
        assert baseline.feasible
        assert baseline.batch_size * baseline.accumulation == 60
        rates = []
        ways = [(a, once) for a in range(1, 61) if 60 % a == 0 for once in ((False, True) if a > 1 else (False,))]
        for micro, once in ways:
            step = priced(baseline, cluster, 60 // micro, micro, once=once)
            if step.timeline().peak_bytes <= cluster.limit_bytes:
                rates.append(60 * cluster.world_size / step.time().total)
        assert baseline.samples_per_second == pytest.approx(max(rates), rel=1e-9)


def test_with_a_global_batch_the_peak_of_what_does_not_fit_is_its_smallest() -> None:
    """However it is accumulated, and whether gradients are reduced in every micro-batch or once."""
    cluster = machines("4xCPU", "500KiB")
    for baseline in (each for each in found(cluster, global_batch=4 * 6) if not each.feasible):
        ways = [(1, False), *((a, once) for a in (2, 3, 6) for once in (False, True))]
        peaks = [priced(baseline, cluster, 6 // a, a, once=once).timeline().peak_bytes for a, once in ways]
        assert baseline.peak_bytes == min(peaks) > cluster.limit_bytes


def test_recompute_trades_speed_for_room() -> None:
    cluster = replace(machines("4xCPU", "1200KiB"), overlap=False)
    plain, selective, full = (b for b in found(cluster) if b.name == "FSDP")
    assert full.batch_size > selective.batch_size > plain.batch_size
    at_once = {b.recompute: b for b in found(cluster, batch=1) if b.name == "FSDP"}
    seconds, peaks = (
        [getattr(at_once[how], name) for how in EVERY_RECOMPUTE] for name in ("step_seconds", "peak_bytes")
    )
    assert seconds == sorted(set(seconds)) and peaks == sorted(set(peaks), reverse=True)
