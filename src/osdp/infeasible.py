"""Why nothing fits, and the cheapest single changes that would.

[Note: Remedies]
A remedy's peak is computed as the error's own is: the smallest peak of the model after the change. What cannot be
computed so is an estimate, and says it: a shorter sequence, for which the model would have to be traced again; and
everything after a dry run that found more than was predicted, as another plan's dry run may find more, or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from osdp.batching import Batching
from osdp.cluster import Cluster, format_bytes
from osdp.cost.offload import may_step_on_host
from osdp.cost.positions import PARTS, SAVED, TEMPORARIES
from osdp.cost.tables import Rules, Tables
from osdp.cost.timeline import Timeline, build_timeline
from osdp.cost.training import OPTIMIZERS, PRECISIONS, Training
from osdp.errors import DoesNotFit, Remedy
from osdp.model.graph import ModelGraph
from osdp.search.solve import lowest_peak

_MOST_DEVICES = 64  # times the given ones: beyond that more devices are no remedy

_HOST_FACTORS = (2, 4)  # times the memory of a node's host


@dataclass(frozen=True)
class Measured:
    """The peak of the dry run that needed least, and how many bytes more than predicted that is."""

    peak_bytes: int
    peak_at: str
    memory_parts: Mapping[str, int]
    unseen_bytes: int


def smallest_timeline(graph: ModelGraph, cluster: Cluster, training: Training, rules: Rules, batch: int) -> Timeline:
    """The timeline of a plan that needs as little memory as any."""
    tables = Tables(graph, cluster, training, rules)
    found: list[Timeline] = []
    for recomputed in tables.recompute_cases:
        problem = tables.problem(
            batch, limit=cluster.limit_bytes, accumulation=training.accumulation, recomputed=recomputed
        )
        choice, _ = lowest_peak(problem)
        found.append(build_timeline(*tables.read(problem, choice), batch, training, cluster))
    return min(found, key=lambda timeline: timeline.peak_bytes)


def nothing_fits(
    graph: ModelGraph,
    cluster: Cluster,
    training: Training,
    rules: Rules,
    batching: Batching,
    *,
    measured: Measured | None = None,
) -> DoesNotFit:
    """The error that says how small the peak can be made, where it is, and what would make it fit.

    However a global batch is accumulated; `measured` is the least that dry runs found, if they were made.
    """
    needs = _Needs(graph, rules, batching)
    timeline = needs.least(cluster, training)
    assert timeline is not None
    peak = timeline.peak
    least = measured or Measured(peak.nbytes, str(peak), peak.parts, 0)
    remedies = tuple(_remedies(needs, cluster, training, timeline, least))
    helps = "; ".join(
        f"{r.change} ({'about ' if r.estimate else ''}{format_bytes(r.peak_bytes)})" for r in remedies[:2]
    )
    return DoesNotFit(
        f"the smallest {'measured' if measured else 'reachable'} peak, {format_bytes(least.peak_bytes)} at "
        f"{least.peak_at}, exceeds the limit of {format_bytes(cluster.limit_bytes)}; {helps} would fit",
        peak_bytes=least.peak_bytes,
        limit_bytes=cluster.limit_bytes,
        peak_at=least.peak_at,
        memory_parts=least.memory_parts,
        remedies=remedies,
    )


@dataclass(frozen=True)
class _Needs:
    """A model with what is asked of its plans."""

    graph: ModelGraph
    rules: Rules
    batching: Batching

    def least(self, cluster: Cluster, training: Training) -> Timeline | None:
        """The smallest timeline; None where the global batch does not divide over the cluster."""
        found = [
            smallest_timeline(self.graph, cluster, replace(training, accumulation=accumulation), self.rules, batch)
            for accumulation, batch in self.batching.smallest(cluster.world_size)
        ]
        return min(found, key=lambda timeline: timeline.peak_bytes, default=None)


def _remedies(
    needs: _Needs, cluster: Cluster, training: Training, timeline: Timeline, least: Measured
) -> Iterator[Remedy]:
    limit, unseen = cluster.limit_bytes, least.unseen_bytes
    needed = -(-cluster.with_limit(least.peak_bytes).total_bytes // (1 << 20)) + 1
    size = f"{format_bytes(needed << 20)} of memory on each device"
    yield Remedy(size, least.peak_bytes, least.peak_bytes, estimate=unseen != 0)

    def tried(
        change: str, *, on: Cluster = cluster, by: Training = training, of: _Needs = needs, estimate: bool = False
    ) -> Iterator[Remedy]:
        found = of.least(on, by)
        if found is not None and found.peak_bytes + unseen <= limit:
            yield Remedy(change, found.peak_bytes + unseen, estimate=estimate or unseen != 0)

    unrestricted = Rules(offload=needs.rules.offload)
    if needs.rules != unrestricted:
        of = replace(needs, rules=unrestricted)
        yield from tried("dropping the restrictions on modes, splits, recompute and pins", of=of)
    if needs.batching.batch is not None and needs.batching.batch > 1:
        yield from tried("a batch of 1", of=replace(needs, batching=replace(needs.batching, batch=1)))
    yield from _more_devices(cluster, tried)
    if not needs.rules.offload and cluster.can_offload and may_step_on_host(training):
        of = replace(needs, rules=replace(needs.rules, offload=True))
        yield from tried("units on the host (offload auto)", of=of)
    if needs.rules.offload:
        yield from _more_host(cluster, tried)
    yield from _lighter(training, tried)
    yield from _shorter(needs.graph, timeline, limit, unseen)


def _more_devices(cluster: Cluster, tried: Callable[..., Iterator[Remedy]]) -> Iterator[Remedy]:
    factor = 2
    while factor <= _MOST_DEVICES:
        larger = replace(cluster, nodes=cluster.nodes * factor)
        remedy = next(tried(f"{larger.world_size} devices ({larger.word})", on=larger), None)
        if remedy is not None:
            yield remedy
            return
        factor *= 2


def _more_host(cluster: Cluster, tried: Callable[..., Iterator[Remedy]]) -> Iterator[Remedy]:
    """Where units are held on the host already, its memory may be what is too small."""
    for factor in _HOST_FACTORS:
        larger = replace(cluster, host_memory_bytes=cluster.host_total_bytes * factor)
        change = f"{format_bytes(larger.host_total_bytes)} of memory on each node's host (--host-memory)"
        remedy = next(tried(change, on=larger), None)
        if remedy is not None:
            yield remedy
            return


def _lighter(training: Training, tried: Callable[..., Iterator[Remedy]]) -> Iterator[Remedy]:
    """Fewer bytes for each parameter."""
    precision, optimizer = training.precision, training.optimizer
    if precision.name != "pure-bf16" and precision.compute_dtype == "bf16":
        lighter = replace(training, precision=PRECISIONS["pure-bf16"], reduce_dtype="bf16")
        yield from tried("parameters and optimizer states in bf16 (precision pure-bf16)", by=lighter)
    if optimizer.name == "adamw":
        fused = replace(training, optimizer=OPTIMIZERS["adamw-fused"])
        yield from tried("the fused optimizer, which needs no temporary copy (adamw-fused)", by=fused)


def _shorter(graph: ModelGraph, timeline: Timeline, limit: int, unseen: int) -> Iterator[Remedy]:
    """A shorter sequence: at every point of the step activations shrink with it, or faster, and the rest does not."""
    if not graph.seq_len:
        return
    growing = timeline.parts[[PARTS.index(SAVED), PARTS.index(TEMPORARIES)]].sum(axis=0)
    growing[-1] = 0  # the optimizer's temporaries
    fixed = timeline.total - growing + unseen
    if (fixed > limit).any() or not growing.any():
        return
    share = ((limit - fixed)[growing > 0] / growing[growing > 0]).min()
    length = int(graph.seq_len * share) // 8 * 8
    if 8 <= length < graph.seq_len:
        reached = int((fixed + growing * (length / graph.seq_len)).max())
        yield Remedy(f"sequences of about {length} instead of {graph.seq_len}", reached, estimate=True)
