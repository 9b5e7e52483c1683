"""Why nothing fits, and the cheapest single changes that would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from osdp.cluster import Cluster, format_bytes
from osdp.cost.tables import Rules, Tables
from osdp.cost.timeline import Timeline, build_timeline
from osdp.cost.training import OPTIMIZERS, PRECISIONS, Training
from osdp.errors import DoesNotFit, Remedy
from osdp.model.graph import ModelGraph
from osdp.search.solve import lowest_peak

_MOST_DEVICES = 64  # times the given ones: beyond that more devices are no remedy


def smallest_timeline(graph: ModelGraph, cluster: Cluster, training: Training, rules: Rules, batch: int) -> Timeline:
    """The timeline of a plan that needs as little memory as any."""
    tables = Tables(graph, cluster, training, rules)
    found: list[Timeline] = []
    for grain in tables.grains():
        problem = tables.problem(batch, limit=cluster.limit_bytes, grain=grain)
        choice, _ = lowest_peak(problem)
        found.append(build_timeline(*tables.read(problem, choice), batch, training, cluster))
    return min(found, key=lambda timeline: timeline.peak_bytes)


def nothing_fits(graph: ModelGraph, cluster: Cluster, training: Training, rules: Rules, batch: int) -> DoesNotFit:
    """The error that says how small the peak can be made, where it is, and what would make it fit."""
    timeline = smallest_timeline(graph, cluster, training, rules, batch)
    remedies = tuple(_remedies(graph, cluster, training, rules, batch, timeline))
    peak, limit = timeline.peak_bytes, cluster.limit_bytes
    helps = "; ".join(f"{r.change} ({format_bytes(r.peak_bytes)})" for r in remedies[:2])
    return DoesNotFit(
        f"the smallest reachable peak, {format_bytes(peak)} at {timeline.peak}, exceeds the limit of "
        f"{format_bytes(limit)}; {helps} would fit",
        peak_bytes=peak,
        limit_bytes=limit,
        peak_at=str(timeline.peak),
        memory_parts=timeline.peak.parts,
        remedies=remedies,
    )


def _remedies(
    graph: ModelGraph, cluster: Cluster, training: Training, rules: Rules, batch: int, timeline: Timeline
) -> Iterator[Remedy]:
    limit = cluster.limit_bytes

    def reached(*, on: Cluster = cluster, by: Training = training, under: Rules = rules, at: int = batch) -> int:
        return smallest_timeline(graph, on, by, under, at).peak_bytes

    peak = timeline.peak_bytes
    needed = -(-int(peak / (1 - cluster.reserve_fraction)) // (1 << 20)) + 1
    yield Remedy(f"{format_bytes(needed << 20)} of memory on each device", peak, peak)
    free = Rules(pins=None)
    if rules != free and (smaller := reached(under=free)) <= limit:
        yield Remedy("dropping the restrictions on modes, splits, recompute and pins", smaller)
    if batch > 1 and (smaller := reached(at=1)) <= limit:
        yield Remedy("a batch of 1", smaller)
    for factor in (2, 4, 8, 16, 32, _MOST_DEVICES):
        larger = replace(cluster, nodes=cluster.nodes * factor)
        if (smaller := reached(on=larger)) <= limit:
            yield Remedy(f"{larger.world_size} devices ({larger.word})", smaller)
            break
    if training.precision.name != "pure-bf16":
        lighter = replace(training, precision=PRECISIONS["pure-bf16"], reduce_dtype="bf16")
        if training.precision.compute_dtype == "bf16" and (smaller := reached(by=lighter)) <= limit:
            yield Remedy("parameters and optimizer states in bf16 (precision pure-bf16)", smaller)
    if training.optimizer.name == "adamw":
        fused = replace(training, optimizer=OPTIMIZERS["adamw-fused"])
        if (smaller := reached(by=fused)) <= limit:
            yield Remedy("the fused optimizer, which needs no temporary copy (adamw-fused)", smaller)
    moved = replace(training, optimizer=replace(training.optimizer, states=0, temporaries=0, counters=0))
    if training.optimizer.states and (smaller := reached(by=moved)) <= limit:
        yield Remedy("optimizer states offloaded to the host", smaller)
    yield from _shorter(graph, timeline, limit)


def _shorter(graph: ModelGraph, timeline: Timeline, limit: int) -> Iterator[Remedy]:
    """A shorter sequence, where activations are most of what is too much: they shrink with it, or faster."""
    if not graph.seq_len:
        return
    parts = timeline.peak.parts
    growing = parts["saved activations"] + parts["temporaries"]
    fixed = timeline.peak_bytes - growing
    if fixed < limit and growing:
        length = int(graph.seq_len * (limit - fixed) / growing) // 8 * 8
        if length >= 8:
            yield Remedy(f"sequences of about {length} instead of {graph.seq_len}", limit)
