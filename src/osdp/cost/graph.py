"""The distributed computation graph of a step: what computes, what communicates, in which order, at which cost.

Time and memory are computed from this graph, so what is priced is what will run: its nodes carry the seconds, its
holds the bytes. Within a phase (see [Note: Phase]) compute nodes follow each other on one stream and collectives on
another; a unit's compute waits for its gather, its reduction for its compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from osdp.cluster import Cluster
from osdp.cost.layout import Layout, Shape, ShapedStage, Shapes
from osdp.cost.seconds import BACKWARD, FORWARD, Collective, Roofline, unit_work
from osdp.cost.timeline import Timeline, build_timeline
from osdp.cost.training import Training
from osdp.cost.units import Option, Unit
from osdp.errors import UsageError
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan
from osdp.search.problem import phase

COMPUTE, COMMUNICATION = "compute", "communication"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Node:
    """One thing that runs, after the nodes that it `depends` on; with `once`, in the last micro-batch only."""

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
        """Sums the phases: both streams of each, side by side or one after the other; see [Note: Phase]."""
        micro = self.training.accumulation
        compute = copies = exposed = hidden = optimizer = 0.0
        phases: dict[tuple[str, str], list[Node]] = {}
        for node in self.nodes:
            if node.kind == OPTIMIZER:
                optimizer += node.seconds
            else:
                phases.setdefault((node.phase, node.stage), []).append(node)
        first = self.layout.shaped[0].stage.name
        for (_, stage), nodes in phases.items():
            add = not self.cluster.overlap or stage == first
            for times, last in ((micro - 1, False), (1, True)):
                running = [node for node in nodes if last or not node.once]
                kernels = sum(node.seconds for node in running if node.kind == COMPUTE)
                copied = sum(node.seconds for node in running if node.kind == "copy")
                wires = sum(node.seconds for node in running if node.stream == COMMUNICATION)
                whole = phase(kernels + copied, wires, add)
                compute += times * kernels
                copies += times * copied
                exposed += times * (whole - kernels - copied)
                hidden += times * (wires - (whole - kernels - copied))
        return StepTime(compute, copies, exposed, optimizer, hidden)

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


class _Builder:
    def __init__(
        self, layout: Layout, options: Sequence[Option], batch: int, training: Training, cluster: Cluster
    ) -> None:
        self.layout, self.options, self.batch = layout, options, batch
        self.training, self.cluster = training, cluster
        self.nodes: list[Node] = []
        self.last: dict[str, int] = {}  # stream -> its latest node
        places = layout.places
        self.work = [
            unit_work(u, o, p, training, cluster) for u, o, p in zip(layout.units, options, places, strict=True)
        ]
        self.number = {id(unit): index for index, unit in enumerate(layout.units)}

    def add(
        self, kind: str, name: str, phase_name: str, stage: str, seconds: float, *, stream: str = COMPUTE, **more: Any
    ) -> int:
        depends = {self.last[stream]} if stream in self.last else set()
        depends |= set(more.pop("after", ()))
        values: dict[str, Any] = {"group": None, "nbytes": 0, "flops": 0, **more}
        node = Node(
            id=len(self.nodes),
            kind=kind,
            name=name,
            phase=phase_name,
            stage=stage,
            stream=stream,
            seconds=seconds,
            depends=tuple(sorted(depends)),
            **values,
        )
        self.nodes.append(node)
        self.last[stream] = node.id
        return node.id

    def collectives(
        self, work: Sequence[Collective], unit: Unit, phase_name: str, stage: str, *, once: bool, after: tuple[int, ...]
    ) -> list[int]:
        ids = []
        for each in work:
            shared = {"nbytes": each.nbytes, "once": once}
            if each.kind != "copy":
                node = self.add(
                    each.kind,
                    unit.name,
                    phase_name,
                    stage,
                    each.seconds,
                    stream=COMMUNICATION,
                    group=each.group,
                    after=after,
                    **shared,
                )
                ids.append(node)
            ids.append(
                self.add(
                    "copy",
                    unit.name,
                    phase_name,
                    stage,
                    each.copy_seconds,
                    nbytes=each.copied_bytes,
                    once=once,
                    after=tuple(ids[-1:]),
                )
            )
        return ids

    def visit(self, shaped: ShapedStage, phase_name: str) -> None:
        backward = phase_name == BACKWARD
        units = list(shaped.units)
        if backward:
            units.reverse()
        name = shaped.stage.name
        ready: list[int] = []
        for unit in units:
            work = self.work[self.number[id(unit)]]
            gathers = work.gather_again if backward else work.gather
            ready += self.collectives(gathers, unit, phase_name, name, once=False, after=())
        roofline = Roofline(shaped.trace.backward if backward else shaped.trace.forward, self.cluster, self.training)
        computed = self.add(
            COMPUTE,
            name,
            phase_name,
            name,
            roofline.at(self.batch),
            flops=roofline.flops_at(self.batch),
            after=tuple(ready),
        )
        if backward:
            for unit in units:
                index = self.number[id(unit)]
                once = self.options[index].reduce_once
                self.collectives(self.work[index].reduce, unit, phase_name, name, once=once, after=(computed,))


def step_graph(
    layout: Layout, options: Sequence[Option], batch: int, training: Training, cluster: Cluster
) -> StepGraph:
    """The graph of a step in which the layout's units take these options."""
    builder = _Builder(layout, options, batch, training, cluster)
    for shaped in layout.shaped:
        builder.visit(shaped, FORWARD)
    for shaped in reversed(layout.shaped):
        builder.visit(shaped, BACKWARD)
    stepped = sum(work.step_bytes for work in builder.work)
    seconds = sum(work.step_seconds for work in builder.work)
    ends = tuple(builder.last.values())
    builder.add(OPTIMIZER, training.optimizer.name, OPTIMIZER, OPTIMIZER, seconds, nbytes=stepped, after=ends)
    return StepGraph(layout, tuple(options), batch, training, cluster, tuple(builder.nodes))


def step_graph_of(plan: Plan, graph: ModelGraph) -> StepGraph:
    """The graph of a plan; the model graph must be of the model that was planned."""
    training = Training.of(plan.precision, plan.optimizer, plan.reduce_dtype)
    training = Training(training.precision, training.optimizer, training.reduce_dtype, plan.accumulation)
    shapes = Shapes(graph)
    planned = {unit.name: unit for unit in plan.units}
    chosen: list[Shape] = []
    for index, stage in enumerate(graph.stages):
        mine = {unit.name for unit in plan.units if stage.is_block and unit.block == stage.name}
        again = any(unit.recompute for unit in plan.units if unit.block == stage.name or not stage.is_block)
        fitting = [s for s in shapes.of(index) if not stage.is_block or _names(shapes, index, s) == mine]
        fitting = [s for s in fitting if s.recompute == again] or ([] if stage.is_block else fitting)
        if not fitting:
            raise UsageError(
                f"the plan's units of {stage.name} ({', '.join(sorted(mine)) or 'none'}) "
                "do not fit this model; plan again"
            )
        chosen.append(fitting[0])
    layout = shapes.layout(chosen)
    options = []
    for unit in layout.units:
        if unit.name not in planned:
            raise UsageError(f"the plan has no unit for {unit.name}; it was made for another model, plan again")
        entry = planned[unit.name]
        options.append(Option(entry.mode, entry.splits, max(entry.sharded_splits, 1), entry.reduce_once))
    return step_graph(layout, options, plan.batch_size, training, plan.cluster)


def _names(shapes: Shapes, stage: int, shape: Shape) -> set[str]:
    return {unit.name for unit in shapes.shaped(stage, shape).units}
