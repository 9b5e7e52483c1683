"""The distributed computation graph of a step: what computes, what communicates, in which order, at which cost.

Its nodes are the schedule's events with the collectives, copies and kernels that they mean. Its time is that of the two
streams, as the search has it; its memory is the timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.buckets import BUCKET_BYTES, can_join, carried, joined, with_carried
from osdp.cost.layout import Layout, Variant, Variants
from osdp.cost.offload import host_bytes, input_host_bytes
from osdp.cost.option_seconds import Kernels, option_lines, slice_lines
from osdp.cost.schedule import CollectiveRecord, Do, Event, Piece, full_schedule, pieces_of, schedule
from osdp.cost.stage_passes import StagePasses
from osdp.cost.time_model import BACKWARD, FORWARD, Collective, Compute, compute_time, taken_seconds, unit_work
from osdp.cost.timeline import Timeline, build_timeline
from osdp.cost.training import Training
from osdp.cost.units import Option
from osdp.errors import UsageError
from osdp.model.graph import ModelGraph, Stage
from osdp.planfile import Plan, PlanUnit
from osdp.recompute import Recompute
from osdp.search.evaluate import evaluate, forward_seconds
from osdp.search.problem import Problem, Rows, StageChoice, StageTable, UnitOption, VariantTable

COMPUTE, COMMUNICATION = "compute", "communication"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on; they add up to `total`."""

    compute: float
    copies: float
    exposed_communication: float
    optimizer: float
    hidden_communication: float  # beside compute, not part of the total

    @property
    def total(self) -> float:
        return self.compute + self.copies + self.exposed_communication + self.optimizer


@dataclass(frozen=True)
class StepGraph:
    layout: Layout
    options: tuple[Option, ...]
    batch: int
    training: Training
    cluster: Cluster
    nodes: tuple[Node, ...]

    def time(self) -> StepTime:
        """The step on its two streams, by what its seconds are spent on."""
        micro = self.training.accumulation
        compute = copies = wires = optimizer = 0.0
        for node in self.nodes:
            times = 1 if node.once or node.first else micro
            if node.kind == OPTIMIZER:
                optimizer += node.seconds
            elif node.kind == COMPUTE:
                compute += times * node.seconds
            elif node.stream == COMMUNICATION:
                wires += times * node.seconds
                copies += times * node.taken_seconds
            else:
                copies += times * node.seconds
        problem, choice = self.decided
        exposed = evaluate(problem, choice).seconds - compute - copies - optimizer
        return StepTime(compute, copies, exposed, optimizer, wires - exposed)

    @property
    def seconds(self) -> float:
        return evaluate(*self.decided).seconds

    def pass_seconds(self) -> tuple[float, float]:
        """One micro-batch: its forward, and both of its passes."""
        problem, choice = self.decided
        both = self.seconds - sum(node.seconds for node in self.nodes if node.kind == OPTIMIZER)
        return forward_seconds(problem, choice), both / self.training.accumulation

    @cached_property
    def decided(self) -> tuple[Problem, tuple[StageChoice, ...]]:
        """The step as a problem with nothing left to choose: its time is that of the search."""
        stages, at = [], 0
        engine = self.cluster.engine
        passes = StagePasses(self.layout, full_schedule(self.layout, engine), engine, carried(self.options))
        for index, staged in enumerate(self.layout.staged):
            training = self.training.of_stage(is_block=staged.stage.is_block)
            timed = [compute_time(staged.trace, self.cluster, training, backward=b) for b in (False, True)]
            units = tuple((self._decided_unit(at + n, timed),) for n in range(len(staged.units)))
            at += len(staged.units)
            forward, backward = (
                passes.of(index, backward=bool(b)).timed(
                    lambda first, stop, time=time: time.between(first, stop, self.batch, self.batch)
                )
                for b, time in enumerate(timed)
            )
            variant = VariantTable(None, units, _NO_ROWS, _NO_ROWS, 0, 0, forward, backward)
            stages.append(StageTable((variant,), index))
        problem = Problem(tuple(stages), 0, 0, self.cluster.overlap, self.training.accumulation)
        options = iter(self.options)
        choice = [
            StageChoice(0, tuple((0, next(options).sharded) for _ in staged.units)) for staged in self.layout.staged
        ]
        return problem, tuple(choice)

    def _decided_unit(self, index: int, timed: Sequence[Compute]) -> UnitOption:
        unit, option, places = self.layout.units[index], self.options[index], self.layout.places[index]
        lines, wires = option_lines(unit, option, places, self.training, self.cluster)
        kernels = Kernels.of(places, timed[0], timed[1], self.batch, self.batch)
        lines |= slice_lines(wires, kernels, replicated=not option.mode.is_sharded)
        split = option.slices if option.mode.is_sharded else 1
        return UnitOption(option, _NO_BYTES, _NO_BYTES, split, **lines)

    def collectives(self, micro_batches: int | None = None) -> list[PlannedCollective]:
        """All collectives of a step in the order in which they are issued, micro-batch by micro-batch.

        What is done once comes in the first one or in the last. Groups that have several names take the first of world,
        node and across; a group of one rank sends nothing.
        """
        count = self.training.accumulation if micro_batches is None else micro_batches
        names = {group: self._group(group) for group in ("world", "node", "across")}
        wires = [node for node in self.nodes if node.stream == COMMUNICATION and node.group is not None]
        return [
            PlannedCollective(node.kind, name, node.nbytes, node.name)
            for micro_batch in range(count)
            for node in wires
            if (name := names[node.group or ""])
            and (micro_batch == count - 1 or not node.once)
            and (micro_batch == 0 or not node.first)
        ]

    def _group(self, group: str) -> str | None:
        ranks = self.cluster.group_size(group)
        if ranks == 1:
            return None
        return "world" if ranks == self.cluster.world_size else group

    def host_bytes(self) -> int:
        """What units and inputs of blocks on the host take there, of all ranks of a node."""
        units = zip(self.layout.units, self.options, self.layout.places, strict=True)
        held = sum(host_bytes(*each, self.training, self.cluster) for each in units)
        held += sum(input_host_bytes(staged.trace, self.batch) for staged in self.layout.staged)
        return self.cluster.devices_per_node * held

    def timeline(self) -> Timeline:
        return build_timeline(self.layout, self.options, self.batch, self.training, self.cluster)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "model": self.layout.graph.name,
            "cluster": self.cluster.word,
            "batch_size": self.batch,
            "accumulation": self.training.accumulation,
            "nodes": [asdict(node) for node in self.nodes],
        }


_NO_BYTES = np.zeros((1, 2), dtype=np.int64)
_NO_ROWS = Rows(np.zeros(1, dtype=np.int64), *(np.zeros(1, dtype=bool) for _ in range(3)))


class PlannedCollective(NamedTuple):
    """A collective of a whole step, and the unit that it is for."""

    kind: str
    group: str
    nbytes: int
    unit: str

    @property
    def record(self) -> CollectiveRecord:
        return CollectiveRecord(self.kind, self.group, self.nbytes)


@dataclass(frozen=True)
class Node:
    """One thing that runs, after the nodes that it `depends` on.

    With `once` it runs in the last micro-batch only, with `first` in the first only.
    """

    id: int
    kind: str
    name: str
    phase: str
    stage: str
    stream: str
    group: str | None
    nbytes: int
    flops: int
    seconds: float
    depends: tuple[int, ...]
    once: bool = False
    first: bool = False
    busy: float = 0.0  # what a collective takes from the computation beside it, beyond what all of them do

    @property
    def taken_seconds(self) -> float:
        return taken_seconds(self.seconds, self.busy)


class _Builder:
    def __init__(
        self, layout: Layout, options: Sequence[Option], batch: int, training: Training, cluster: Cluster
    ) -> None:
        self.layout, self.options, self.batch = layout, options, batch
        self.training, self.cluster = training, cluster
        self.nodes: list[Node] = []
        self.last: dict[str, int] = {}  # stream -> its latest node
        self.work = [
            unit_work(u, o, p, training, cluster) for u, o, p in zip(layout.units, options, layout.places, strict=True)
        ]
        self.pieces = pieces_of(layout.units, options)
        self.gathered: dict[tuple[int, int], list[tuple[Collective, tuple[int, ...]]]] = {}  # and not yet entered
        self.timed = {
            (index, backward): compute_time(
                staged.trace, cluster, training.of_stage(is_block=staged.stage.is_block), backward=backward
            )
            for index, staged in enumerate(layout.staged)
            for backward in (False, True)
        }

    def add(self, kind: str, name: str, stage_pass: int, seconds: float, *, stream: str = COMPUTE, **more: Any) -> int:
        depends = {self.last[stream]} if stream in self.last else set()
        depends |= set(more.pop("after", ()))
        stages = len(self.layout.staged)
        values: dict[str, Any] = {"group": None, "nbytes": 0, "flops": 0, **more}
        if stage_pass == 2 * stages:
            phase, stage = OPTIMIZER, OPTIMIZER
        else:
            phase = BACKWARD if stage_pass >= stages else FORWARD
            stage = self.layout.staged[min(stage_pass, 2 * stages - 1 - stage_pass)].stage.name
        after = tuple(sorted(depends))
        node = Node(len(self.nodes), kind, name, phase, stage, stream, seconds=seconds, depends=after, **values)
        self.nodes.append(node)
        self.last[stream] = node.id
        return node.id

    def event(self, event: Event) -> None:
        if event.piece is None:
            self.compute(event)
        elif event.do is Do.REDUCE:
            self.reduce(event.piece, event.stage_pass)
        elif event.do in (Do.ENTER, Do.ENTER_BACKWARD):
            for each, after in self.gathered.pop((event.piece.index, event.piece.slice), []):
                self.copy(event.piece, event.stage_pass, each, after)
        else:
            for each in self.collectives(event.piece, event.do):
                after = (self.collective(event.piece, event.stage_pass, each, ()),) if each.kind != "copy" else ()
                self.gathered.setdefault((event.piece.index, event.piece.slice), []).append((each, after))

    def reduce(self, piece: Piece, stage_pass: int) -> None:
        works = self.collectives(piece, Do.REDUCE)
        copied = [self.copy(piece, stage_pass, each, ()) for each in works if each.copy_seconds]
        for each in works:
            if each.kind != "copy":
                self.collective(piece, stage_pass, each, tuple(copied))

    def collectives(self, piece: Piece, do: Do) -> list[Collective]:
        """Seconds are those of the unit's largest slice, as the search has them; bytes are the piece's own."""
        first = self.pieces[piece.index][0]
        option = replace(self.options[piece.index], mode=piece.mode, slices=1, sharded=1)
        own, priced = (
            unit_work(unit, option, self.layout.places[piece.index], self.training, self.cluster)
            for unit in (piece.unit, first.unit)
        )
        pairs = zip(getattr(own, do.value), getattr(priced, do.value), strict=True)
        return [most._replace(nbytes=each.nbytes, copied_bytes=each.copied_bytes) for each, most in pairs]

    def collective(self, piece: Piece, stage_pass: int, work: Collective, after: tuple[int, ...]) -> int:
        issued = (self.last[COMPUTE],) if COMPUTE in self.last else ()
        when = {"once": work.once, "first": work.first}
        details = {"group": work.group, "nbytes": work.nbytes, "busy": work.busy, **when}
        name = self.layout.units[piece.index].name
        return self.add(
            work.kind, name, stage_pass, work.seconds, stream=COMMUNICATION, after=(*after, *issued), **details
        )

    def copy(self, piece: Piece, stage_pass: int, work: Collective, after: tuple[int, ...]) -> int:
        details = {"nbytes": work.copied_bytes, "once": work.once, "first": work.first, "after": after}
        return self.add("copy", self.layout.units[piece.index].name, stage_pass, work.copy_seconds, **details)

    def compute(self, event: Event) -> None:
        stages = len(self.layout.staged)
        backward = event.stage_pass >= stages
        index = 2 * stages - 1 - event.stage_pass if backward else event.stage_pass
        work, staged = self.timed[index, backward], self.layout.staged[index]
        segments = (staged.trace.backward if backward else staged.trace.forward)[slice(*event.segments)]
        flops = sum(int((segment.flops @ np.array([1, self.batch])).sum()) for segment in segments)
        copied = work.copies(*event.segments, self.batch)
        if copied:
            nbytes = staged.trace.on_host.at(self.batch)
            self.add("copy", staged.stage.name, event.stage_pass, copied, nbytes=nbytes)
        seconds = work.between(*event.segments, self.batch, self.batch) - copied
        self.add(COMPUTE, staged.stage.name, event.stage_pass, seconds, flops=flops)

    def finish(self) -> None:
        stepped = sum(work.step_bytes for work in self.work)
        seconds = sum(work.step_seconds for work in self.work)
        ends = tuple(self.last.values())
        name, stage_pass = self.training.optimizer.name, 2 * len(self.layout.staged)
        self.add(OPTIMIZER, name, stage_pass, seconds, nbytes=stepped, after=ends)


def step_graph(
    layout: Layout, options: Sequence[Option], batch: int, training: Training, cluster: Cluster
) -> StepGraph:
    """The graph of a step in which the layout's units take these options."""
    builder = _Builder(layout, options, batch, training, cluster)
    for event in schedule(layout, options, cluster.engine):
        builder.event(event)
    builder.finish()
    return StepGraph(layout, tuple(options), batch, training, cluster, tuple(builder.nodes))


def fastest_joined(step: StepGraph, limit_bytes: int) -> StepGraph:
    """The step with its reductions joined as is fastest of what fits; see [Note: Rule of joining]."""
    if not can_join(step.training, step.cluster):
        return step
    best, tried = step, {step.options}
    for nbytes in BUCKET_BYTES:
        options = tuple(joined(step.layout, step.options, nbytes, step.training))
        if options in tried:
            continue
        tried.add(options)
        each = replace(step, options=options, nodes=())
        if each.seconds < best.seconds and each.timeline().peak_bytes <= limit_bytes:
            best = each
    return best if best is step else step_graph(best.layout, best.options, best.batch, best.training, best.cluster)


def training_of(plan: Plan) -> Training:
    """How a plan trains."""
    way = {"accumulation": plan.accumulation, "compiled": plan.compiled, "loss_chunks": plan.loss_chunks}
    return Training.of(plan.precision, plan.optimizer, plan.reduce_dtype, **way)


def step_graph_of(plan: Plan, graph: ModelGraph) -> StepGraph:
    """The graph of a plan; the model graph must be of the model that was planned."""
    training = training_of(plan)
    variants = Variants(graph)
    planned = {unit.name: unit for unit in plan.units}
    chosen: list[Variant] = []
    for index, stage in enumerate(graph.stages):
        variant = _planned_variant(plan, stage, variants.of(index))
        if variant is None or (stage.is_block and _names(variants, index, variant) != _planned_names(plan, stage)):
            raise UsageError(
                f"the plan's units of {stage.name} ({', '.join(sorted(_planned_names(plan, stage))) or 'none'}) "
                "do not fit this model; plan again"
            )
        chosen.append(variant)
    layout = variants.layout(chosen)
    options = []
    for unit in layout.units:
        if unit.name not in planned:
            raise UsageError(f"the plan has no unit for {unit.name}; it was made for another model, plan again")
        entry = planned[unit.name]
        options.append(_option(entry))
    return step_graph(layout, with_carried(layout, options), plan.batch_size, training, plan.cluster)


def _option(unit: PlanUnit) -> Option:
    late = {"reduce_once": unit.reduce_once, "all_reduce_once": unit.all_reduce_once, "gather_once": unit.gather_once}
    late |= {"two_levels": unit.two_levels, "offload": unit.offload}
    return Option(unit.sharding, unit.splits, max(unit.sharded_splits, 1), reduced_with=unit.reduced_with, **late)


def _planned_variant(plan: Plan, stage: Stage, variants: Sequence[Variant]) -> Variant | None:
    """The variant that a plan gives to a stage; outside blocks the one that goes with what blocks do."""
    if not stage.is_block:
        how = Recompute.FULL if any(unit.recompute for unit in plan.units) else Recompute.NONE
        return next((variant for variant in variants if variant.recompute is how), variants[0])
    own = next((unit for unit in plan.units if unit.block == stage.name), None)
    if own is None:
        return None
    variant = Variant(own.granularity, own.recompute, own.prefetch)
    return variant if variant in variants else None


def _planned_names(plan: Plan, stage: Stage) -> set[str]:
    return {unit.name for unit in plan.units if unit.block == stage.name}


def _names(variants: Variants, stage: int, variant: Variant) -> set[str]:
    return {unit.name for unit in variants.staged(stage, variant).units}
