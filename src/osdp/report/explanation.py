"""Why a plan is as it is: what binds it, what other choices would have cost, and what more memory or network is worth.

[Note: Alternatives]
An alternative holds one block, or one unit outside blocks, in another way and leaves all else as planned. Its step and
peak are those of the cost model. The search weighs many such changes together, so a single change that fits is never
faster than the plan by more than the proof leaves open.

[Note: Prices]
A GiB is priced by planning again with one more, at the plan's own micro-batch and accumulation or, if asked, at any. A
Gbit/s is priced by the plan's own choices on a faster link, which is the least that it is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from osdp.cluster import Cluster
from osdp.cluster.link import Link, Measured
from osdp.cost.buckets import apart
from osdp.cost.graph import StepGraph, fastest_joined, step_graph_of, training_of
from osdp.cost.layout import Variant, Variants
from osdp.cost.step_trace import step_trace
from osdp.cost.tables import Rules
from osdp.cost.timeline import stage_label
from osdp.cost.units import WHOLE, Option, modes_for
from osdp.errors import UsageError
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.report.grouping import label_of
from osdp.sharding import Scope, ShardingMode

GIB = 1 << 30
GBIT_BYTES = 125_000_000
NEAR = 0.01  # of the limit: memory this close to it is what binds
MOST_EXPLAINED = 8
MOST_STALLS = 5
PRICING_SECONDS = 10.0


@dataclass(frozen=True)
class Alternative:
    """One way to hold a block or unit with all else as planned; see [Note: Alternatives]."""

    mode: str
    granularity: str
    recompute: Recompute
    slices: int
    step_seconds: float
    peak_bytes: int
    fits: bool
    chosen: bool = False
    prefetch: int = 1

    @property
    def gathered(self) -> str:
        return f"{self.granularity}, prefetch of two" if self.prefetch > 1 else self.granularity


@dataclass(frozen=True)
class Explained:
    """A block, or a unit outside blocks, with its alternatives: the chosen one first, then the fastest first."""

    name: str
    units: tuple[str, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def chosen(self) -> Alternative:
        return self.alternatives[0]

    @property
    def sentence(self) -> str:
        others = self.alternatives[1:]
        fitting = [each for each in others if each.fits]
        faster = [each for each in others if not each.fits and each.step_seconds < self.chosen.step_seconds]
        if not others:
            return "there is no other mode, split or recompute for it here"
        if faster:
            best = min(faster, key=lambda each: each.step_seconds)
            return f"{describe(best)} would be faster, but does not fit the memory"
        if fitting and min(each.step_seconds for each in fitting) < self.chosen.step_seconds * (1 - 1e-9):
            best = min(fitting, key=lambda each: each.step_seconds)
            return f"{describe(best)} would be faster by less than the proof leaves open"
        return "no other mode, split or recompute is faster"


@dataclass(frozen=True)
class Binding:
    """Stages of a pass whose memory comes within NEAR of the limit, and the least that is left there."""

    phase: str
    stages: tuple[str, ...]
    spare_bytes: int

    @property
    def label(self) -> str:
        return label_of(tuple(map(stage_label, self.stages)))


@dataclass(frozen=True)
class Stalled:
    """What computation waits for a unit's collectives in a micro-batch."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Price:
    """Samples per second with one more of something; `what` names it, `how` says how it was found."""

    what: str
    samples_per_second: float
    gain: float  # as a share of the plan's rate
    how: str


@dataclass(frozen=True)
class Explanation:
    model: str
    cluster: str
    samples_per_second: float
    step_seconds: float
    peak_bytes: int
    limit_bytes: int
    compute_share: float  # of the step in which the compute stream works
    binding: tuple[Binding, ...]
    stalls: tuple[Stalled, ...]
    prices: tuple[Price, ...]
    explained: tuple[Explained, ...]


def describe(way: Alternative) -> str:
    slices = f" in {way.slices} slices" if way.slices > 1 else ""
    return f"{way.mode}{slices}, {way.recompute.words}, gathered {way.gathered}"


def explanation(
    plan: Plan, graph: ModelGraph, *, unit: str | None = None, prices: bool = True, any_batch: bool = False
) -> Explanation:
    step = step_graph_of(plan, graph)
    wanted = [] if unit is None else _matching(step, unit)
    trace, time = step_trace(step), step.time()
    stalls = sorted(trace.stall_seconds.items(), key=lambda each: -each[1])[:MOST_STALLS]
    return Explanation(
        model=plan.model.name,
        cluster=plan.cluster.label,
        samples_per_second=plan.predicted.samples_per_second,
        step_seconds=step.seconds,
        peak_bytes=step.timeline().peak_bytes,
        limit_bytes=plan.predicted.limit_bytes,
        compute_share=1 - time.exposed_communication / time.total,
        binding=tuple(bindings(step, plan.predicted.limit_bytes)),
        stalls=tuple(Stalled(name, seconds) for name, seconds in stalls),
        prices=tuple(priced(plan, graph, any_batch=any_batch)) if prices else (),
        explained=tuple(explained(step, index, names) for index, names in wanted),
    )


# ---- what binds


def bindings(step: StepGraph, limit: int) -> Iterator[Binding]:
    """The passes of stages whose memory is close to the limit, neighbours together; see `Binding`."""
    timeline, stages = step.timeline(), len(step.layout.staged)
    edges = [*timeline.starts, len(timeline.total)]
    found: dict[str, list[tuple[str, int]]] = {}
    for stage_pass in range(2 * stages + 1):
        columns = timeline.total[edges[stage_pass] : edges[stage_pass + 1]]
        if not len(columns) or limit - int(columns.max()) > NEAR * limit:
            continue
        moment = timeline.moment(int(edges[stage_pass] + np.argmax(columns)))
        found.setdefault(moment.phase, []).append((moment.stage, limit - int(columns.max())))
    for phase, each in found.items():
        yield Binding(phase, tuple(name for name, _ in each), min(spare for _, spare in each))


# ---- alternatives


def _matching(step: StepGraph, wanted: str) -> list[tuple[int, tuple[str, ...]]]:
    """Stages with the units in them that are meant: a whole block, or single units outside blocks."""
    found: list[tuple[int, tuple[str, ...]]] = []
    known: list[str] = []
    for index, staged in enumerate(step.layout.staged):
        names = [unit.name for unit in staged.units]
        if staged.stage.is_block:
            known.append(staged.stage.name)
            if any(fnmatchcase(name, wanted) for name in (staged.stage.name, *names)):
                found.append((index, tuple(names)))
        else:
            known += names
            found += [(index, (name,)) for name in names if fnmatchcase(name, wanted)]
    if not found:
        close = get_close_matches(wanted, known, 3) or known[:3]
        raise UsageError(f"the plan has no unit {wanted!r}; names look like {', '.join(map(repr, close))}")
    if len(found) > MOST_EXPLAINED:
        first = step.layout.staged[found[0][0]].stage.name
        raise UsageError(
            f"{wanted!r} is {len(found)} blocks and units, and at most {MOST_EXPLAINED} are explained; name one of "
            f"them, such as {first!r}"
        )
    return found


def explained(step: StepGraph, index: int, names: tuple[str, ...]) -> Explained:
    staged = step.layout.staged[index]
    variants = Variants(step.layout.graph)
    mine = [step.options[place] for place, unit in enumerate(step.layout.units) if unit.name in names]
    largest = max(mine, key=lambda option: option.slices)
    chosen = _alternative(step, staged.variant, largest, chosen=True)
    others: list[Alternative] = []
    for variant in _variants_of(variants, index, staged.variant, staged.stage.is_block):
        for mode in (mode for mode in modes_for(step.cluster) if mode.is_sharded or variant.prefetch == 1):
            two_levels = largest.two_levels and ShardingMode(mode).sharded_over is Scope.WORLD
            late: dict[str, Any] = {"reduce_once": largest.reduce_once, "all_reduce_once": largest.all_reduce_once}
            late["all_reduce_once"] &= mode.is_reduced_across
            there = largest.offload and not mode.is_sharded_anew and mode.is_sharded
            late |= {"offload": there, "gather_once": largest.gather_once and mode.is_kept}
            option = Option(mode, two_levels=two_levels, **late)
            if variant != staged.variant or any(each != option for each in apart(mine)):
                changed = _changed(step, variants, index, variant, names, option)
                others.append(_alternative(changed, variant, option))
    others.sort(key=lambda each: (not each.fits, each.step_seconds, each.peak_bytes))
    return Explained(staged.stage.name if staged.stage.is_block else names[0], names, (chosen, *others))


def _variants_of(variants: Variants, index: int, now: Variant, is_block: bool) -> list[Variant]:
    """As it is, and where it is a block gathered whole, each with every kind of recompute."""
    if not is_block:
        return [now]
    return [variant for variant in variants.of(index) if variant.granularity in (now.granularity, WHOLE)]


def _alternative(step: StepGraph, variant: Variant, option: Option, *, chosen: bool = False) -> Alternative:
    peak = step.timeline().peak_bytes
    fits = peak <= step.cluster.limit_bytes
    seconds = step.seconds
    how = variant.granularity, variant.recompute, option.slices
    return Alternative(option.mode, *how, seconds, peak, fits, chosen, variant.prefetch)


def _changed(
    step: StepGraph, variants: Variants, index: int, variant: Variant, names: Sequence[str], option: Option
) -> StepGraph:
    """The step with one stage, or some of its units, held in another way."""
    old = {unit.name: option for unit, option in zip(step.layout.units, step.options, strict=True)}
    taken = [each.variant for each in step.layout.staged]
    taken[index] = variant
    blocks = [each.stage.is_block for each in step.layout.staged]
    again = any(each.recompute for each, is_block in zip(taken, blocks, strict=True) if is_block)
    for place, is_block in enumerate(blocks):  # see [Note: Stage] in osdp.model.graph
        other = replace(taken[place], recompute=Recompute.FULL if again else Recompute.NONE)
        if not is_block and other in variants.of(place):
            taken[place] = other
    layout = variants.layout(taken)
    whole_block = blocks[index]
    inside = {unit.name for unit in layout.staged[index].units} if whole_block else set(names)
    options = [option if unit.name in inside else old[unit.name] for unit in layout.units]
    changed = StepGraph(layout, tuple(apart(options)), step.batch, step.training, step.cluster, ())
    return fastest_joined(changed, step.cluster.limit_bytes)


# ---- prices


def priced(plan: Plan, graph: ModelGraph, *, any_batch: bool) -> Iterator[Price]:
    rate, cluster = plan.predicted.samples_per_second, plan.cluster
    more = replace(cluster, memory_bytes=cluster.total_bytes + GIB)
    training = replace(training_of(plan), accumulation=1)
    there = plan.has_inputs_on_host or any(unit.offload for unit in plan.units)
    rules = Rules(granularities=(WHOLE,) if plan.compiled else None, offload=there)
    batch, micro = (None, None) if any_batch else (plan.batch_size, plan.accumulation)
    found = plan_graph(graph, more, training, rules, batch=batch, accumulation=micro, search_seconds=PRICING_SECONDS)
    best = max(rate, found.predicted.samples_per_second)  # what fits also fits with more
    how = "planned again, at any micro-batch" if any_batch else f"planned again, at micro-batch {plan.batch_size}"
    yield Price("one GiB more on each device", best, best / rate - 1, how)
    for what, faster in _faster(cluster):
        step = step_graph_of(replace(plan, cluster=faster), graph)
        faster_rate = plan.global_batch / step.seconds
        yield Price(what, faster_rate, faster_rate / rate - 1, "the plan's own choices")


def _faster(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with each of its links a Gbit/s faster, measured collectives as well."""
    if cluster.devices_per_node > 1:
        inside = ("node",) if cluster.nodes > 1 else ("node", "world")
        link, measured = _faster_link(cluster.node_link), _faster_measured(cluster, inside)
        what = "one Gbit/s more for each device's link in its node"
        yield what, replace(cluster, node_link=link, measured=measured)
    if cluster.nodes > 1:
        link, measured = _faster_link(cluster.network), _faster_measured(cluster, ("world", "across"))
        yield "one Gbit/s more for each node's network", replace(cluster, network=link, measured=measured)


def _faster_link(link: Link) -> Link:
    return replace(link, bytes_per_second=link.bytes_per_second + GBIT_BYTES)


def _faster_measured(cluster: Cluster, groups: tuple[str, ...]) -> tuple[Measured, ...]:
    return tuple(
        replace(each, bytes_per_second=each.bytes_per_second + GBIT_BYTES) if each.group in groups else each
        for each in cluster.measured
    )
