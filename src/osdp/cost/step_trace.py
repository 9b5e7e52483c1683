"""A planned step on its two streams with begin and end of every operation: what a picture of a step is drawn from.

The operations, their order and their durations are those of osdp.search.streams; here the clocks are plain numbers and
every operation that takes time is written down. The last clock is the step that the plan states, which is tested.

[Note: Partial overlap]
Where compute and communication slow each other down, the stated step is a mixture of both streams side by side and of
all operations one after the other. The trace then has the operations as they would run side by side, stretched to the
stated step by one factor, `StepTrace.slowdown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from osdp.cost.buckets import carried
from osdp.cost.graph import COMMUNICATION, COMPUTE, OPTIMIZER, StepGraph
from osdp.cost.schedule import full_schedule
from osdp.cost.stage_passes import PassOps, StagePasses
from osdp.cost.time_model import BACKWARD, FORWARD, TO_HOST, Collective, compute_time, slice_work
from osdp.search.evaluate import option_seconds
from osdp.search.problem import MicroBatch, UnitOption
from osdp.search.streams import Act, Op

COPY, STALL = "copy", "stall"


@dataclass(frozen=True)
class Span:
    """Something that runs on a stream from `start` to `end`, in seconds; a stall is for `name`'s collective."""

    stream: str
    kind: str
    name: str
    phase: str
    stage: str
    start: float
    end: float
    nbytes: int = 0
    group: str | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class StepTrace:
    """One micro-batch, the last of a step, and the optimizer.

    `segments` has the begin and end of every segment of every pass. `step_seconds` is the whole step's, with the
    other micro-batches. Of a split operator, spans have the first slice's collective; `sliced_seconds` are those of the
    others, which run while the operator computes.
    """

    spans: tuple[Span, ...]
    segments: tuple[tuple[tuple[float, float], ...], ...]
    optimizer: tuple[float, float]
    step_seconds: float
    slowdown: float
    sliced_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.optimizer[1]

    @cached_property
    def stall_seconds(self) -> dict[str, float]:
        """What computation waits for each unit, in this micro-batch."""
        found: dict[str, float] = {}
        for span in self.spans:
            if span.kind == STALL:
                found[span.name] = found.get(span.name, 0.0) + span.seconds
        return found


def step_trace(graph: StepGraph) -> StepTrace:
    """The trace of a step; see [Note: Partial overlap]."""
    problem, _ = graph.decided
    of_kind = {kind: _MicroBatch(graph, kind) for kind, _ in problem.micro_batches}
    for micro in of_kind.values():
        micro.run()
    last = list(of_kind.values())[-1]
    optimizer = sum(node.seconds for node in graph.nodes if node.kind == OPTIMIZER)
    streamed = optimizer + sum(times * of_kind[kind].now for kind, times in problem.micro_batches)
    stated = graph.seconds
    slowdown = (stated - optimizer) / (streamed - optimizer) if streamed > optimizer else 1.0
    end = last.now * slowdown
    spans = [replace(span, start=span.start * slowdown, end=span.end * slowdown) for span in last.spans]
    name = graph.training.optimizer.name
    spans.append(Span(COMPUTE, OPTIMIZER, name, OPTIMIZER, OPTIMIZER, end, end + optimizer))
    segments = tuple(tuple((a * slowdown, b * slowdown) for a, b in stage_pass) for stage_pass in last.segments)
    wires = sum(node.seconds for node in graph.nodes if node.stream == COMMUNICATION)
    sliced = max(0.0, slowdown * wires - sum(span.seconds for span in spans if span.stream == COMMUNICATION))
    return StepTrace(tuple(spans), segments, (end, end + optimizer), stated, slowdown, sliced)


class _MicroBatch:
    """The two clocks while the operations of one micro-batch are gone through."""

    def __init__(self, graph: StepGraph, kind: MicroBatch) -> None:
        self.graph, self.kind, self.layout = graph, kind, graph.layout
        self.compute = self.wire = self.reduced = 0.0
        self.gathered: dict[object, float] = {}
        self.spans: list[Span] = []
        self.segments: list[list[tuple[float, float]]] = []
        problem, choice = graph.decided
        self.options = [
            [(table.variants[0].units[n][0], sharded) for n, (_, sharded) in enumerate(stage.options)]
            for table, stage in zip(problem.stages, choice, strict=True)
        ]
        first = 0
        self.first: list[int] = []  # of each stage, the place of its first unit among the layout's
        for staged in self.layout.staged:
            self.first.append(first)
            first += len(staged.units)
        engine = graph.cluster.engine
        self.passes = StagePasses(self.layout, full_schedule(self.layout, engine), engine, carried(graph.options))
        self.phase, self.stage, self.last_reduced = FORWARD, "", ""

    @property
    def now(self) -> float:
        return max(self.compute, self.wire)

    def run(self) -> None:
        stages = range(len(self.layout.staged))
        order = [(index, False) for index in stages] + [(index, True) for index in reversed(stages)]
        passes = [self.passes.of(index, backward=backward) for index, backward in order]
        for number, (index, backward) in enumerate(order):
            self.phase = BACKWARD if backward else FORWARD
            self.stage = self.layout.staged[index].stage.name
            ahead = self._ahead(order, passes, number)
            self._pass(index, backward, passes[number], ahead)
        if self.wire > self.compute:
            self._stall(self.wire, self.last_reduced)

    def _ahead(
        self, order: Sequence[tuple[int, bool]], passes: Sequence[PassOps], number: int
    ) -> tuple[int, tuple[int, ...], tuple[str, ...]] | None:
        """The units of a later stage whose gathers this pass may issue: their stage, numbers, and which gather."""
        for (index, backward), ops in list(zip(order, passes, strict=True))[number + 1 :]:
            if backward != order[number][1]:
                return None
            if ops.pending:
                return index, ops.pending, ops.pending_names
        return None

    def _pass(
        self, index: int, backward: bool, ops: PassOps, ahead: tuple[int, tuple[int, ...], tuple[str, ...]] | None
    ) -> None:
        self.reduced = self.wire
        pending = {(index, unit) for unit in ops.pending}
        self.gathered = {unit: at for unit, at in self.gathered.items() if unit in pending}
        time = compute_time(self.layout.staged[index].trace, self.graph.cluster, self.graph.training, backward=backward)
        batch = self.graph.batch
        trace = self.layout.staged[index].trace
        count = len(trace.backward if backward else trace.forward)
        shares = [time.between(segment, segment + 1, batch, batch) for segment in range(count)]
        self.segments.append([(self.compute, self.compute)] * count)
        for op, (first, stop) in ops.ops:
            if op.act is Act.ISSUE_NEXT:
                if ahead is not None:
                    stage, units, names = ahead
                    for unit in units:
                        self._collective((stage, unit), names)
                continue
            unit = op.unit if isinstance(op.unit, tuple) else (index, op.unit)
            kernels = sum(shares[first:stop])
            self._operation(op, unit, kernels)
            if stop > first:
                self._place(first, stop, shares)

    def _place(self, first: int, stop: int, shares: Sequence[float]) -> None:
        """Segments share the time that their operation has taken."""
        begun, whole = self._began, sum(shares[first:stop])
        at = begun
        for segment in range(first, stop):
            part = shares[segment] / whole if whole else 1 / (stop - first)
            end = self.compute if segment + 1 == stop else at + part * (self.compute - begun)
            self.segments[-1][segment] = at, end
            at = end

    def _operation(self, op: Op, unit: tuple[int, int], kernels: float) -> None:
        self._began = self.compute
        if op.act is Act.RUN:
            self._run(op, unit, kernels)
        elif op.act in (Act.ISSUE, Act.REDUCE):
            self._collective(unit, op.names)
        elif op.act is Act.WAIT:
            option, sharded = self._option(unit)
            if option_seconds(option, sharded, op.names, self.kind) > 0:
                self._stall(self.gathered.get(unit, self.wire), self._name(unit))
        else:
            self._stall(self.reduced, self.last_reduced)

    def _run(self, op: Op, unit: tuple[int, int], kernels: float) -> None:
        copies = [name for name in op.names if name.startswith("copy")]
        slices = [name for name in op.names if name.startswith("slice")]
        if copies:
            self._compute(COPY, self._name(unit), self._seconds(unit, copies))
        seconds = kernels + (self._seconds(unit, slices) if slices else 0.0)
        if kernels or seconds:
            self._compute(COMPUTE, self._name(unit) if slices else self.stage, seconds)

    def _compute(self, kind: str, name: str, seconds: float) -> None:
        if seconds:
            start, self.compute = self.compute, self.compute + seconds
            if seconds > 0:
                self.spans.append(Span(COMPUTE, kind, name, self.phase, self.stage, start, self.compute))
            else:
                self._take_back()

    def _take_back(self) -> None:
        """Slices' turns have kernels in them that the spans before had already: these end where computation is."""
        for index in range(len(self.spans) - 1, -1, -1):
            span = self.spans[index]
            if span.stream != COMPUTE:
                continue
            if span.end <= self.compute:
                break
            if span.start >= self.compute:
                del self.spans[index]
            else:
                self.spans[index] = replace(span, end=self.compute)

    def _stall(self, until: float, name: str) -> None:
        if until > self.compute:
            self.spans.append(Span(COMPUTE, STALL, name, self.phase, self.stage, self.compute, until))
            self.compute = until

    def _collective(self, unit: tuple[int, int], names: Sequence[str]) -> None:
        """Puts a unit's gather or reduction on the wire; one that takes no time leaves no span."""
        start, name = max(self.compute, self.wire), names[0]
        self.wire = start + self._seconds(unit, names)
        if name == "reduce":
            self.reduced, self.last_reduced = self.wire, self._name(unit)
        else:
            self.gathered[unit] = self.wire
        if self.wire > start:
            sent = [each for each in self._collectives(unit, name) if each.seconds]
            label = self._name(unit), self.phase, self.stage
            nbytes, group = sum(each.nbytes for each in sent if each.kind != TO_HOST), sent[0].group
            self.spans.append(Span(COMMUNICATION, sent[0].kind, *label, start, self.wire, nbytes, group))

    def _option(self, unit: tuple[int, int]) -> tuple[UnitOption, int]:
        return self.options[unit[0]][unit[1]]

    def _seconds(self, unit: tuple[int, int], names: Sequence[str]) -> float:
        option, sharded = self._option(unit)
        return option_seconds(option, sharded, names, self.kind)

    def _name(self, unit: tuple[int, int]) -> str:
        return self.layout.units[self.first[unit[0]] + unit[1]].name if unit[1] >= 0 else self.stage

    def _collectives(self, unit: tuple[int, int], name: str) -> tuple[Collective, ...]:
        """Of a split unit, those of one slice."""
        graph, place = self.graph, self.first[unit[0]] + unit[1]
        option = graph.options[place]
        held, places = graph.layout.units[place], graph.layout.places[place]
        return getattr(slice_work(held, option, option.mode, places, graph.training, graph.cluster), name)
