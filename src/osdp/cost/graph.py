"""The distributed computation graph of a step: what computes, what communicates, in which order, at which cost.

Time and memory are computed from this graph, so what is priced is what will run: its nodes carry the seconds, its
holds the bytes. Within a phase (see [Note: Phase]) compute nodes follow each other on one stream and collectives on
another, in the order in which they are issued (see [Note: Issue order]); a stage's compute waits for its gathers, a
reduction for the compute. A stage's pass is one node of compute: gathers that it issues after its first reduction
follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from osdp.cluster import Cluster
from osdp.cost.issue import REDUCE, Issue, Issued, issue_order, pieces_of
from osdp.cost.layout import Layout, Shape, Shapes
from osdp.cost.seconds import BACKWARD, FORWARD, Collective, compute_time, unit_work
from osdp.cost.streams import COMMUNICATION, COMPUTE, Node, Streams
from osdp.cost.timeline import Timeline, build_timeline
from osdp.cost.training import Training
from osdp.cost.units import Option
from osdp.errors import UsageError
from osdp.model.graph import ModelGraph
from osdp.planfile import Plan, PlanUnit
from osdp.search.problem import phase

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
            overlap = 0.0 if stage == first else self.cluster.overlap
            for times, last in ((micro - 1, False), (1, True)):
                running = [node for node in nodes if last or not node.once]
                kernels = sum(node.seconds for node in running if node.kind == COMPUTE)
                copied = sum(node.seconds for node in running if node.kind == "copy")
                copied += sum(node.taken_seconds for node in running)
                wires = sum(node.seconds for node in running if node.stream == COMMUNICATION)
                whole = phase(kernels + copied, wires, overlap)
                compute += times * kernels
                copies += times * copied
                exposed += times * (whole - kernels - copied)
                hidden += times * (wires - (whole - kernels - copied))
        return StepTime(compute, copies, exposed, optimizer, hidden)

    def simulated_seconds(self) -> float:
        """The step on two streams, node by node, where [Note: Phase] sums up: gaps count, and who waits for whom."""
        *_, passes = self.simulated_passes()
        return passes + sum(node.seconds for node in self.nodes if node.kind == OPTIMIZER)

    def simulated_passes(self) -> list[float]:
        """When each pass is done on two streams: of every micro-batch forward, then backward."""
        streams, ends = Streams(busy=1 - self.cluster.overlap), []
        for micro_batch in range(self.training.accumulation):
            last = micro_batch == self.training.accumulation - 1
            for which in (FORWARD, BACKWARD):
                streams.run([node for node in self.nodes if node.phase == which and (last or not node.once)])
                ends.append(streams.end)
        return ends

    def collectives(self, micro_batches: int | None = None) -> list[Planned]:
        """All collectives of a step in the order in which they are issued, micro-batch by micro-batch.

        What is done once comes in the last one. Groups that have several names take the first of world, node and
        across; a group of one rank sends nothing.
        """
        count = self.training.accumulation if micro_batches is None else micro_batches
        names = {group: self._group(group) for group in ("world", "node", "across")}
        wires = [node for node in self.nodes if node.stream == COMMUNICATION and node.group is not None]
        return [
            Planned(node.kind, name, node.nbytes, node.name)
            for micro_batch in range(count)
            for node in wires
            if (name := names[node.group or ""]) and (micro_batch == count - 1 or not node.once)
        ]

    def _group(self, group: str) -> str | None:
        ranks = self.cluster.group_size(group)
        if ranks == 1:
            return None
        return "world" if ranks == self.cluster.world_size else group

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


class Planned(NamedTuple):
    """A collective of a whole step, and the unit that it is for."""

    kind: str
    group: str
    nbytes: int
    unit: str

    @property
    def issued(self) -> Issued:
        return Issued(self.kind, self.group, self.nbytes)


class _Copied(NamedTuple):
    """The copies beside a collective: where they belong, and the visit that needs what was gathered."""

    name: str
    phase: str
    stage: str
    work: Collective
    once: bool
    visit: int


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
        self.pieces = pieces_of(layout.units, options)
        self.home = [shaped.stage.name for shaped in layout.shaped for _ in shaped.units]
        self.pending: list[tuple[_Copied, tuple[int, ...]]] = []  # copies out of gathers, and what they wait for

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

    def issued(self, issue: Issue, computed: int | None) -> None:
        """The collectives of an issue. Copies out of a gather wait until its unit is entered."""
        unit = self.layout.units[issue.piece.index]
        in_forward = issue.visit < len(self.layout.shaped)
        stage, phase_name = self.home[issue.piece.index], FORWARD if in_forward else BACKWARD
        once = issue.what == REDUCE and self.options[issue.piece.index].reduce_once
        place = self.layout.places[issue.piece.index]
        entered = place.enter if in_forward else place.enter_again
        for each in self.collectives(issue):
            copied = _Copied(unit.name, phase_name, stage, each, once, entered.visit if entered else 0)
            after = () if computed is None else (computed,)
            if issue.what == REDUCE:
                after = (*after, self.copy(copied, after))
            if each.kind != "copy":
                details = {"group": each.group, "nbytes": each.nbytes, "once": once, "after": after, "busy": each.busy}
                node = self.add(each.kind, unit.name, phase_name, stage, each.seconds, stream=COMMUNICATION, **details)
                after = (node,)
            if issue.what != REDUCE:
                self.pending.append((copied, after))

    def collectives(self, issue: Issue) -> list[Collective]:
        """Seconds are those of the unit's largest slice, as the search has them; bytes are the piece's own."""
        piece, first = issue.piece, self.pieces[issue.piece.index][0]
        option = Option(piece.mode, two_levels=self.options[piece.index].two_levels)
        own, priced = (
            unit_work(unit, option, self.layout.places[piece.index], self.training, self.cluster)
            for unit in (piece.unit, first.unit)
        )
        pairs = zip(getattr(own, issue.what), getattr(priced, issue.what), strict=True)
        return [most._replace(nbytes=each.nbytes, copied_bytes=each.copied_bytes) for each, most in pairs]

    def copy(self, copied: _Copied, after: tuple[int, ...]) -> int:
        name, phase_name, stage, work, once, _ = copied
        details = {"nbytes": work.copied_bytes, "once": once, "after": after}
        return self.add("copy", name, phase_name, stage, work.copy_seconds, **details)

    def compute(self, visit: int) -> int:
        """The kernels of a visit, after the copies out of what was gathered for it so far."""
        ready: list[int] = []
        for copied, after in self.pending:
            if copied.visit <= visit:
                ready += [*after, self.copy(copied, after)]
        self.pending = [(copied, after) for copied, after in self.pending if copied.visit > visit]
        stages = len(self.layout.shaped)
        backward = visit >= stages
        shaped = self.layout.shaped[2 * stages - 1 - visit if backward else visit]
        work = compute_time(shaped.trace, self.cluster, self.training, backward=backward)
        name, phase_name = shaped.stage.name, BACKWARD if backward else FORWARD
        details = {"flops": work.flops_at(self.batch), "after": tuple(ready)}
        return self.add(COMPUTE, name, phase_name, name, work.at(self.batch), **details)

    def visit(self, visit: int, issues: Sequence[Issue]) -> None:
        """What a visit issues, and its kernels: after its gathers, before its first reduction."""
        computed: int | None = None
        for issue in issues:
            if issue.what == REDUCE and computed is None:
                computed = self.compute(visit)
            self.issued(issue, computed if issue.what == REDUCE else None)
        if computed is None:
            self.compute(visit)

    def finish(self) -> None:
        for copied, after in self.pending:
            self.copy(copied, after)
        stepped = sum(work.step_bytes for work in self.work)
        seconds = sum(work.step_seconds for work in self.work)
        ends = tuple(self.last.values())
        self.add(OPTIMIZER, self.training.optimizer.name, OPTIMIZER, OPTIMIZER, seconds, nbytes=stepped, after=ends)


def step_graph(
    layout: Layout, options: Sequence[Option], batch: int, training: Training, cluster: Cluster
) -> StepGraph:
    """The graph of a step in which the layout's units take these options."""
    builder = _Builder(layout, options, batch, training, cluster)
    visits: list[list[Issue]] = [[] for _ in range(2 * len(layout.shaped))]
    for issue in issue_order(layout, options):
        visits[issue.visit].append(issue)
    for visit, issues in enumerate(visits):
        builder.visit(visit, issues)
    builder.finish()
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
        options.append(_option(entry))
    return step_graph(layout, options, plan.batch_size, training, plan.cluster)


def _option(unit: PlanUnit) -> Option:
    return Option(unit.mode, unit.splits, max(unit.sharded_splits, 1), unit.reduce_once, unit.two_levels)


def _names(shapes: Shapes, stage: int, shape: Shape) -> set[str]:
    return {unit.name for unit in shapes.shaped(stage, shape).units}
