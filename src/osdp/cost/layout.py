"""Where things happen: the order of a step's visits, and the places at which each unit is used.

[Note: Shape]
A stage's shape is its granularity and how it is recomputed. It fixes the stage's trace and its units. The places
of a stage's units depend on its own shape alone, except that the first gather and the last reduction of a stage reach
into the neighbouring visits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from osdp.cost.lifetimes import COPY, ISSUE, Places, Position
from osdp.cost.units import OPERATORS, WHOLE, Unit, stage_units
from osdp.model.graph import IntArray, ModelGraph, Segment, Stage, Trace
from osdp.planfile import Granularity, backward_order
from osdp.recompute import Recompute

NOWHERE = -1


@dataclass(frozen=True)
class Shape:
    granularity: Granularity
    recompute: Recompute = Recompute.NONE


@dataclass(frozen=True)
class Footprint:
    """A unit's segments within one stage; NOWHERE where it has none."""

    enter: int
    leave: int
    enter_again: int  # where backward, or the second forward, first needs it
    reached: int  # where backward itself reaches it
    leave_again: int
    gradients: tuple[tuple[str, int], ...]
    calls: int  # in forward


def footprint(trace: Trace, unit: Unit) -> Footprint:
    names, parameters = set(unit.modules), {parameter.name for parameter in unit.parameters}

    def at(segments: Sequence[Segment], kind: str, again: bool, last: bool, names: set[str] = names) -> int:
        found = [
            index
            for index, segment in enumerate(segments)
            if segment.mark.kind == kind and segment.mark.again == again and segment.mark.name in names
        ]
        return NOWHERE if not found else found[-1 if last else 0]

    leave = at(trace.forward, "leave", again=False, last=True)
    # of several modules, backward reaches the unit through the one that forward left last
    through = names if leave == NOWHERE else {trace.forward[leave].mark.name}
    reached = at(trace.backward, "enter", again=False, last=False, names=through)
    again = at(trace.backward, "enter", again=True, last=False)
    gradients: dict[str, int] = {}
    for index, segment in enumerate(trace.backward):
        if segment.mark.kind == "gradient" and segment.mark.name in parameters:
            gradients.setdefault(segment.mark.name, index)
    return Footprint(
        enter=at(trace.forward, "enter", again=False, last=False),
        leave=leave,
        enter_again=min((place for place in (reached, again) if place != NOWHERE), default=NOWHERE),
        reached=reached,
        leave_again=at(trace.backward, "leave", again=False, last=True),
        gradients=tuple(gradients.items()),
        calls=sum(segment.mark.kind == "enter" and segment.mark.name == unit.name for segment in trace.forward),
    )


@dataclass(frozen=True)
class ShapedStage:
    """A stage in one shape: its units with their footprints."""

    stage: Stage
    shape: Shape
    units: tuple[Unit, ...]

    @cached_property
    def trace(self) -> Trace:
        return self.stage.trace(self.shape.recompute)

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        return tuple(footprint(self.trace, unit) for unit in self.units)


def levels(segments: Sequence[Segment], batch: int, *, workspaces: bool) -> IntArray:
    """Activation bytes of every slot, relative to the stage's start: at a mark its level, then the segment's peak."""
    result = np.zeros(3 * len(segments), dtype=np.int64)
    before = 0
    for index, segment in enumerate(segments):
        result[3 * index : 3 * index + 2] = before
        result[3 * index + 2] = segment.peak_at(batch, workspaces=workspaces)
        before = segment.end.at(batch)
    return result


class Layout:
    """A step in given shapes: visits 0 to n-1 are the stages forward, n to 2n-1 backward, 2n the optimizer."""

    def __init__(self, graph: ModelGraph, shaped: Sequence[ShapedStage]) -> None:
        self.graph = graph
        self.shaped = tuple(shaped)

    def visit(self, stage: int, backward: bool) -> int:
        return 2 * len(self.shaped) - 1 - stage if backward else stage

    @cached_property
    def units(self) -> list[Unit]:
        return [unit for shaped in self.shaped for unit in shaped.units]

    @cached_property
    def places(self) -> list[Places]:
        """The places of every unit, in the order of `units`."""
        raw = [self._raw(index, unit) for index, shaped in enumerate(self.shaped) for unit in shaped.units]
        entered = sorted((p.enter, i) for i, p in enumerate(raw) if p.enter is not None)
        issues = {i: Position(before[0].visit, before[0].slot + ISSUE) for before, (_, i) in _pairs(entered)}
        after_first = {i for _, i in entered[1:2]}
        again: dict[int, Position] = {}
        index = {self.units[i].name: i for _, i in entered}
        order = backward_order([self.units[i] for _, i in entered])  # each issues the next one's gather
        for before, i in pairwise(index[unit.name] for unit in order):
            if (reached := raw[before].reached) is not None:
                again[i] = Position(reached.visit, reached.slot + ISSUE)
        for i in issues:  # a second forward gathers as the first did: the unit before issues it
            place = raw[i]
            second = self._second_issue(raw, entered, i)
            if second is not None and place.enter_again is not None and second < place.enter_again:
                again[i] = min(again.get(i, second), second)
        for i, place in enumerate(raw):
            if i in again and place.enter_again is not None and again[i] >= place.enter_again:
                del again[i]
        left = sorted((p.leave_again, i) for i, p in enumerate(raw) if p.leave_again is not None and not p.late)
        reduced = {i: self._reduced(place, raw[after], self.units[after]) for (_, i), (place, after) in _pairs(left)}
        return [
            Places(
                issue=issues.get(i),
                enter=p.enter,
                leave=p.leave,
                issue_again=again.get(i),
                enter_again=p.enter_again,
                leave_again=p.leave_again,
                reduced=reduced.get(i, Position(2 * len(self.shaped), 0)),
                finish=Position(2 * len(self.shaped), 0),
                gradients=p.gradients,
                second=p.second,
                is_second=i in after_first,
                calls=p.calls,
                late=p.late,
            )
            for i, p in enumerate(raw)
        ]

    @staticmethod
    def _reduced(left: Position, after: _RawPlaces, unit: Unit) -> Position:
        """Where a reduction gives way to the next unit's: once that one has the zeros that it sends, if any."""
        makes_zeros = len(after.gradients) < sum(parameter.trainable for parameter in unit.parameters)
        return left.next() if makes_zeros else left

    def _second_issue(self, raw: list[_RawPlaces], entered: list[tuple[Position, int]], unit: int) -> Position | None:
        """Where, in a second forward, the unit entered before this one issues its gather."""
        order = [i for _, i in entered]
        before = order[order.index(unit) - 1]
        mine, other = raw[unit], raw[before]
        if mine.second is None or other.second is None or mine.second.visit != other.second.visit:
            return None
        return Position(other.second.visit, other.second.slot + ISSUE)

    def _raw(self, home: int, unit: Unit) -> _RawPlaces:
        """Positions of one unit by itself. A unit of several modules is looked for outside blocks too."""
        stages = [home]
        if unit.block is None:
            stages = [i for i, shaped in enumerate(self.shaped) if i == home or not shaped.stage.is_block]
        found = [(i, self._footprint(i, home, unit)) for i in stages]

        def place(attribute: str, backward: bool, last: bool) -> Position | None:
            hits = [(i, getattr(f, attribute)) for i, f in found if getattr(f, attribute) != NOWHERE]
            positions = [Position(self.visit(i, backward), 3 * segment + COPY) for i, segment in hits]
            return (max(positions) if last else min(positions)) if positions else None

        gradients: dict[str, Position] = {}
        for i, f in sorted(found, key=lambda item: -item[0]):
            for name, segment in f.gradients:
                gradients.setdefault(name, Position(self.visit(i, True), 3 * segment))
        reached = place("reached", True, False)
        enter_again = place("enter_again", True, False)
        enter, leave_again = place("enter", False, False), place("leave_again", True, True)
        late = unit.block is not None and unit.trained and enter is not None and leave_again is None
        if late:
            leave_again = Position(self.visit(home, True), 3 * len(self.shaped[home].trace.backward) - 3)
        return _RawPlaces(
            enter=enter,
            leave=place("leave", False, True),
            enter_again=enter_again,
            reached=reached,
            second=enter_again if enter_again != reached else None,
            leave_again=leave_again,
            gradients=tuple(gradients.items()),
            calls=sum(f.calls for _, f in found) if len(unit.modules) == 1 else 1,
            late=late,
        )

    def _footprint(self, stage: int, home: int, unit: Unit) -> Footprint:
        shaped = self.shaped[stage]
        if stage == home:
            return shaped.footprints[shaped.units.index(unit)]
        return footprint(shaped.trace, unit)


@dataclass(frozen=True)
class _RawPlaces:
    enter: Position | None
    leave: Position | None
    enter_again: Position | None
    reached: Position | None
    second: Position | None
    leave_again: Position | None
    gradients: tuple[tuple[str, Position], ...]
    calls: int
    late: bool


def _pairs(items: list[tuple[Position, int]]) -> list[tuple[tuple[Position, int], tuple[Position, int]]]:
    return list(pairwise(items))


class Shapes:
    """The shapes that every stage of a model can take, each made once."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self._units = [stage_units(graph, stage) for stage in graph.stages]
        self._made: dict[tuple[int, Shape], ShapedStage] = {}

    def of(self, stage: int) -> list[Shape]:
        """Selective recompute needs a block that is one unit; see [Note: Selective] in osdp.model.selective."""
        here = self.graph.stages[stage]
        able = {
            Recompute.NONE: True,
            Recompute.SELECTIVE: here.selective is not None,
            Recompute.FULL: here.recomputed is not None,
        }
        return [
            Shape(granularity, how)
            for granularity in self._units[stage]
            for how, is_able in able.items()
            if is_able and (how is not Recompute.SELECTIVE or granularity == WHOLE)
        ]

    def shaped(self, stage: int, shape: Shape) -> ShapedStage:
        key = stage, shape
        if key not in self._made:
            self._made[key] = ShapedStage(self.graph.stages[stage], shape, self._units[stage][shape.granularity])
        return self._made[key]

    def layout(self, shapes: Sequence[Shape]) -> Layout:
        return Layout(self.graph, [self.shaped(stage, shape) for stage, shape in enumerate(shapes)])

    def plainest(self) -> list[Shape]:
        """Every block whole and nothing recomputed."""
        return [Shape(WHOLE if WHOLE in units else OPERATORS) for units in self._units]
