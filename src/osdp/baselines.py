"""What people would use instead, priced by the same cost model: one way for all units, at its own best batch size."""

from __future__ import annotations

from dataclasses import replace

from osdp.cluster import Cluster
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.cost.units import WHOLE, modes_for
from osdp.model.graph import ModelGraph
from osdp.planfile import FREE, FREE_IN_NODE, KEEP, REPLICATE, Baseline
from osdp.search.batches import MOST_SAMPLES
from osdp.search.problem import Problem, StageChoice, Verdict, evaluate

WAYS = (("DDP", REPLICATE), ("ZeRO-2", KEEP), ("FSDP", FREE), ("HSDP", FREE_IN_NODE))


def baselines(
    graph: ModelGraph,
    cluster: Cluster,
    training: Training,
    *,
    batch: int | None = None,
    global_batch: int | None = None,
) -> tuple[Baseline, ...]:
    """Every way that differs on this cluster, with and without recompute."""
    known = modes_for(cluster)
    found = []
    for name, mode in WAYS:
        if mode not in known:
            continue
        for again in (False, True) if any(stage.recomputed for stage in graph.stages) else (False,):
            found.append(_baseline(name, mode, again, graph, cluster, training, batch, global_batch))
    return tuple(found)


def _baseline(
    name: str,
    mode: str,
    again: bool,
    graph: ModelGraph,
    cluster: Cluster,
    training: Training,
    batch: int | None,
    global_batch: int | None,
) -> Baseline:
    rules = Rules(
        modes=(mode,),
        split=False,
        recompute=again,
        only_recompute=again,
        granularities=(WHOLE,),
        two_levels=False,
    )
    best: tuple[float, int, int, Verdict] | None = None
    smallest = 0
    for micro, sizes in _ways(batch, global_batch, cluster):
        tables = Tables(graph, cluster, replace(training, accumulation=micro), rules)
        size, verdict = _largest(tables, cluster) if sizes is None else (sizes, _verdict(tables, cluster, sizes))
        smallest = smallest or verdict.peak
        if verdict.peak <= cluster.limit_bytes:
            each = verdict.seconds / (size * micro)
            if best is None or each < best[0]:
                best = each, size, micro, verdict
    if best is None:
        return Baseline(name, again, False, 0, 0, 0.0, 0.0, smallest)
    each, size, micro, verdict = best
    return Baseline(name, again, True, size, micro, cluster.world_size / each, verdict.seconds, verdict.peak)


def _ways(batch: int | None, global_batch: int | None, cluster: Cluster) -> list[tuple[int, int | None]]:
    if global_batch is None:
        return [(1, batch)]
    each = global_batch // cluster.world_size
    return [(a, each // a) for a in range(1, each + 1) if each % a == 0]


def _verdict(tables: Tables, cluster: Cluster, batch: int) -> Verdict:
    return evaluate(*_only_choice(tables.problem(batch, limit=cluster.limit_bytes)))


def _only_choice(problem: Problem) -> tuple[Problem, tuple[StageChoice, ...]]:
    """The first option of every unit: there is one, but for reducing at every micro-batch or once, as is usual."""
    choice = []
    for stage in problem.stages:
        units = stage.shapes[0].units
        choice.append(StageChoice(0, tuple((len(options) - 1, 1) for options in units)))
    return problem, tuple(choice)


def _largest(tables: Tables, cluster: Cluster) -> tuple[int, Verdict]:
    """The largest batch size that fits: seconds per sample never grow with it. One that does not fit, if none does."""
    first = _verdict(tables, cluster, 1)
    if first.peak > cluster.limit_bytes:
        return 1, first
    low, high, best = 1, 2, first
    while high <= MOST_SAMPLES and (verdict := _verdict(tables, cluster, high)).peak <= cluster.limit_bytes:
        low, high, best = high, 2 * high, verdict
    while high - low > 1:
        middle = (low + high) // 2
        verdict = _verdict(tables, cluster, middle)
        if verdict.peak <= cluster.limit_bytes:
            low, best = middle, verdict
        else:
            high = middle
    return low, best
