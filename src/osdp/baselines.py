"""What people would use instead, priced by the same cost model: one way for all units, at its own best batch size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from osdp.batching import CLOSE, Batching, largest_that_fits
from osdp.cluster import Cluster
from osdp.cost.buckets import DDP_BUCKET_BYTES, can_join, joined
from osdp.cost.graph import StepGraph, step_graph
from osdp.cost.tables import Rules, Tables, Uniform
from osdp.cost.training import Training
from osdp.cost.units import WHOLE, modes_for
from osdp.model.graph import ModelGraph
from osdp.planfile import Baseline
from osdp.recompute import Recompute
from osdp.search.evaluate import Verdict, evaluate
from osdp.search.problem import Problem, StageChoice
from osdp.sharding import FREE, FREE_IN_NODE, KEEP, REPLICATE, ShardingMode

WAYS = (("DDP", REPLICATE), ("ZeRO-2", KEEP), ("FSDP", FREE), ("HSDP", FREE_IN_NODE))


@dataclass(frozen=True)
class Way:
    """A baseline at its best, and how it holds every unit."""

    baseline: Baseline
    uniform: Uniform


def baselines(graph: ModelGraph, cluster: Cluster, training: Training, batching: Batching) -> tuple[Way, ...]:
    """Every way that differs on this cluster, without recompute, with selective and with full."""
    prices = Prices(graph, cluster, training)
    blocks = graph.blocks
    able = {
        Recompute.NONE: True,
        Recompute.SELECTIVE: any(stage.selective for stage in blocks),
        Recompute.FULL: any(stage.recomputed for stage in blocks),
    }
    again = [how for how, is_able in able.items() if is_able]
    ways = [(name, mode) for name, mode in WAYS if mode in modes_for(cluster)]
    return tuple(_best(prices, batching, name, mode, recompute) for name, mode in ways for recompute in again)


class Prices:
    """The tables of ways that hold every unit alike: with micro-batches that are accumulated, and without."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, training: Training) -> None:
        self.cluster = cluster
        self._graph, self._training = graph, training

    def _tables(self, accumulation: int) -> Tables:
        rules = Rules(split=False, granularities=(WHOLE,), two_levels=False)
        return Tables(self._graph, self.cluster, replace(self._training, accumulation=accumulation), rules)

    @cached_property
    def _once(self) -> Tables:
        return self._tables(1)

    @cached_property
    def _often(self) -> Tables:
        return self._tables(2)

    def _chosen(
        self, uniform: Uniform, batch: int, accumulation: int
    ) -> tuple[Tables, Problem, tuple[StageChoice, ...]]:
        tables = self._often if accumulation > 1 else self._once
        recomputed = None if tables.recompute_cases == [None] else bool(uniform.recompute)
        limit = self.cluster.limit_bytes
        problem = tables.problem(batch, limit=limit, accumulation=accumulation, recomputed=recomputed)
        choice = tables.uniform(problem, uniform)
        assert choice is not None
        return tables, problem, choice

    def verdict(self, uniform: Uniform, batch: int, accumulation: int) -> Verdict:
        if self._joins(uniform):
            step = self.step(uniform, batch, accumulation)
            return Verdict(step.seconds, step.timeline().peak_bytes)
        _, problem, choice = self._chosen(uniform, batch, accumulation)
        return evaluate(problem, choice)

    def step(self, uniform: Uniform, batch: int, accumulation: int) -> StepGraph:
        """The graph of a step in this way. Where reductions can be joined, DDP's are, as torch's own are."""
        tables, problem, choice = self._chosen(uniform, batch, accumulation)
        training = replace(self._training, accumulation=accumulation)
        layout, options = tables.read(problem, choice)
        if self._joins(uniform):
            options = joined(layout, options, DDP_BUCKET_BYTES, training)
        return step_graph(layout, options, batch, training, self.cluster)

    def _joins(self, uniform: Uniform) -> bool:
        return not uniform.mode.is_sharded and can_join(self._training, self.cluster)

    def fits(self, verdict: Verdict) -> bool:
        return verdict.peak <= self.cluster.limit_bytes


def _best(prices: Prices, batching: Batching, name: str, mode: ShardingMode, recompute: Recompute) -> Way:
    """The fastest over all micro-batches, gradients reduced in each or once; where none fits, the smallest peak."""
    best: tuple[float, Way] | None = None
    smallest: tuple[int, Way] | None = None
    for uniform, micro, batch, verdict in _tried(prices, batching, mode, recompute):
        each = verdict.seconds / (batch * micro)
        rate = prices.cluster.world_size / each
        found = Baseline(name, recompute, True, batch, micro, rate, verdict.seconds, verdict.peak)
        if prices.fits(verdict) and (best is None or each < best[0]):
            best = each, Way(found, uniform)
        if smallest is None or verdict.peak < smallest[0]:
            missing = Baseline(name, recompute, False, 0, 0, 0.0, 0.0, verdict.peak)
            smallest = verdict.peak, Way(missing, uniform)
    assert smallest is not None
    return smallest[1] if best is None else best[1]


def _tried(
    prices: Prices, batching: Batching, mode: ShardingMode, recompute: Recompute
) -> Iterator[tuple[Uniform, int, int, Verdict]]:
    for micro, batch in batching.ways(prices.cluster.world_size):
        for once in (False, True) if micro > 1 else (False,):
            uniform = Uniform(mode, recompute, once)
            size = _size(prices, uniform, micro) if batch is None else batch
            yield uniform, micro, size, prices.verdict(uniform, size, micro)


def _size(prices: Prices, uniform: Uniform, micro: int) -> int:
    """The smallest batch size within CLOSE of the rate of the largest that fits, as plans take it. 1 if none fits.

    Seconds per sample never grow with the batch size.
    """

    def each(batch: int) -> float:
        return prices.verdict(uniform, batch, micro).seconds / batch

    largest = max(1, largest_that_fits(lambda batch: prices.fits(prices.verdict(uniform, batch, micro))))
    enough = each(largest) / (1 - CLOSE)
    return 1 + bisect_left(range(1, largest), True, key=lambda batch: each(batch) <= enough)
