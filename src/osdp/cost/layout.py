"""Where things happen: the order of a step's passes, and the places at which each unit is used.

[Note: Variant]
A stage's variant is its granularity, how it is recomputed, and how deep it prefetches. It fixes the stage's trace, its
units and which of them issues whose gather (see [Note: Depth] in osdp.cost.gather_order). The places
of a stage's units depend on its own variant alone, except that the first gather and the last reduction of a stage reach
into the neighbouring passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from osdp.cost.gather_order import Place, backward_gathers, backward_order, forward_gathers
from osdp.cost.positions import COPY, ISSUE, Places, Position
from osdp.cost.units import OPERATORS, WHOLE, Unit, stage_units
from osdp.model.graph import IntArray, ModelGraph, Segment, Stage, Trace
from osdp.planfile import Depth, Granularity
from osdp.recompute import Recompute

NOWHERE = -1


@dataclass(frozen=True)
class Variant:
    granularity: Granularity
    recompute: Recompute = Recompute.NONE
    prefetch: Depth = 1


@dataclass(frozen=True)
class Footprint:
    """A unit's segments within one stage; NOWHERE where it has none."""

    enter: int
    leave: int
    enter_backward: int  # where backward, or the second forward, first needs it
    reached: int  # where backward itself reaches it
    leave_backward: int
    gradients: tuple[tuple[str, int], ...]
    calls: int  # in forward
    repeated: int  # where the second forward enters it, be it before backward reaches it or after


def footprint(trace: Trace, unit: Unit) -> Footprint:
    names, parameters = set(unit.modules), {parameter.name for parameter in unit.parameters}

    def at(segments: Sequence[Segment], kind: str, again: bool, last: bool, names: set[str] = names) -> int:
        found = [
            index
            for index, segment in enumerate(segments)
            if segment.mark.kind == kind and segment.mark.recomputed == again and segment.mark.name in names
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
        enter_backward=min((place for place in (reached, again) if place != NOWHERE), default=NOWHERE),
        reached=reached,
        leave_backward=at(trace.backward, "leave", again=False, last=True),
        gradients=tuple(gradients.items()),
        calls=sum(segment.mark.kind == "enter" and segment.mark.name == unit.name for segment in trace.forward),
        repeated=again,
    )


@dataclass(frozen=True)
class StageVariant:
    """A stage in one variant: its units with their footprints."""

    stage: Stage
    variant: Variant
    units: tuple[Unit, ...]

    @cached_property
    def trace(self) -> Trace:
        return self.stage.by(self.variant.granularity).trace(self.variant.recompute)

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        return tuple(footprint(self.trace, unit) for unit in self.units)


def levels(segments: Sequence[Segment], batch: int, *, workspaces: bool) -> IntArray:
    """Activation bytes of every slot, relative to the stage's start: at a mark its level, then the segment's peak.

    A unit that is entered casts what it is given before it is gathered.
    """
    result = np.zeros(3 * len(segments), dtype=np.int64)
    before = 0
    for index, segment in enumerate(segments):
        result[3 * index : 3 * index + 2] = max([before, *(line.at(batch) for line in segment.begin)])
        result[3 * index + 2] = segment.peak_at(batch, workspaces=workspaces)
        before = segment.end.at(batch)
    return result


class Layout:
    """A step in given variants: passes 0 to n-1 are the stages forward, n to 2n-1 backward, 2n the optimizer."""

    def __init__(self, graph: ModelGraph, staged: Sequence[StageVariant]) -> None:
        self.graph = graph
        self.staged = tuple(staged)

    def stage_pass(self, stage: int, backward: bool) -> int:
        return 2 * len(self.staged) - 1 - stage if backward else stage

    @cached_property
    def units(self) -> list[Unit]:
        return [unit for staged in self.staged for unit in staged.units]

    @cached_property
    def places(self) -> list[Places]:
        """The places of every unit, in the order of `units`."""
        raw = [self._raw(index, unit) for index, staged in enumerate(self.staged) for unit in staged.units]
        entered = sorted((p.enter, i) for i, p in enumerate(raw) if p.enter is not None)
        order = [i for _, i in entered]
        ahead = forward_gathers(order, self.place_of)
        issues = _first_issues(ahead, lambda before, _: raw[before].enter)
        after_first = set(ahead.get(order[0], ())) if order else set()
        again = self._issues_again(raw, order, ahead)
        left = sorted((p.leave_backward, i) for i, p in enumerate(raw) if p.leave_backward is not None and not p.late)
        reduced = {i: self._reduced(place, raw[after], self.units[after]) for (_, i), (place, after) in _pairs(left)}
        return [
            Places(
                issue=issues.get(i, _NO_ISSUE)[0],
                enter=p.enter,
                leave=p.leave,
                issue_backward=again.get(i, _NO_ISSUE)[0],
                enter_backward=p.enter_backward,
                leave_backward=p.leave_backward,
                reduced=reduced.get(i, Position(2 * len(self.staged), 0)),
                finish=Position(2 * len(self.staged), 0),
                gradients=p.gradients,
                second=p.second,
                repeated=p.repeated,
                is_second=i in after_first,
                calls=p.calls,
                late=p.late,
                turn=issues.get(i, _NO_ISSUE)[1],
                turn_again=again.get(i, _NO_ISSUE)[1],
            )
            for i, p in enumerate(raw)
        ]

    @staticmethod
    def _reduced(left: Position, after: _RawPlaces, unit: Unit) -> Position:
        """Where a reduction gives way to the next unit's: once that one has the zeros that it sends, if any."""
        makes_zeros = len(after.gradients) < sum(parameter.trainable for parameter in unit.parameters)
        return left.next() if makes_zeros else left

    def place_of(self, unit: int) -> Place:
        """What the order of gathers depends on."""
        return self._places_of_units[unit]

    @cached_property
    def _places_of_units(self) -> list[Place]:
        return [
            Place(unit.block, staged.variant.prefetch, bool(staged.variant.recompute), unit.name == unit.block)
            for staged in self.staged
            for unit in staged.units
        ]

    def _issues_again(
        self, raw: list[_RawPlaces], order: list[int], ahead: Mapping[int, tuple[int, ...]]
    ) -> dict[int, _Issue]:
        """Where backward issues gathers: as it reaches a unit, and in a second forward, which gathers as the first."""

        def second(before: int, unit: int) -> Position | None:
            mine, other, again = raw[unit].second, raw[before].second, raw[unit].enter_backward
            if mine is None or other is None or again is None or mine.stage_pass != other.stage_pass:
                return None
            return other if Position(other.stage_pass, other.slot + ISSUE) < again else None

        index = {self.units[i].name: i for i in order}
        left = [index[unit.name] for unit in backward_order([self.units[i] for i in order])]
        found = _first_issues(backward_gathers(left, self.place_of), lambda before, _: raw[before].reached)
        for i, issue in _first_issues(ahead, second).items():
            found[i] = min(found.get(i, issue), issue)
        needed = ((i, raw[i].enter_backward) for i in found)
        late = [i for i, enter in needed if enter is not None and found[i].position >= enter]
        return {i: issue for i, issue in found.items() if i not in late}

    def _raw(self, home: int, unit: Unit) -> _RawPlaces:
        """Positions of one unit by itself. A unit of several modules is looked for outside blocks too."""
        stages = [home]
        if unit.block is None:
            stages = [i for i, staged in enumerate(self.staged) if i == home or not staged.stage.is_block]
        found = [(i, self._footprint(i, home, unit)) for i in stages]

        def place(attribute: str, backward: bool, last: bool) -> Position | None:
            hits = [(i, getattr(f, attribute)) for i, f in found if getattr(f, attribute) != NOWHERE]
            positions = [Position(self.stage_pass(i, backward), 3 * segment + COPY) for i, segment in hits]
            return (max(positions) if last else min(positions)) if positions else None

        gradients: dict[str, Position] = {}
        for i, f in sorted(found, key=lambda item: -item[0]):
            for name, segment in f.gradients:
                gradients.setdefault(name, Position(self.stage_pass(i, True), 3 * segment))
        reached = place("reached", True, False)
        enter_backward = place("enter_backward", True, False)
        enter, leave_backward = place("enter", False, False), place("leave_backward", True, True)
        late = unit.block is not None and unit.trained and enter is not None and leave_backward is None
        if late:
            leave_backward = Position(self.stage_pass(home, True), 3 * len(self.staged[home].trace.backward) - 3)
        return _RawPlaces(
            enter=enter,
            leave=place("leave", False, True),
            enter_backward=enter_backward,
            reached=reached,
            second=enter_backward if enter_backward != reached else None,
            repeated=place("repeated", True, False),
            leave_backward=leave_backward,
            gradients=tuple(gradients.items()),
            calls=sum(f.calls for _, f in found) if len(unit.modules) == 1 else 1,
            late=late,
        )

    def _footprint(self, stage: int, home: int, unit: Unit) -> Footprint:
        staged = self.staged[stage]
        if stage == home:
            return staged.footprints[staged.units.index(unit)]
        return footprint(staged.trace, unit)


@dataclass(frozen=True)
class _RawPlaces:
    enter: Position | None
    leave: Position | None
    enter_backward: Position | None
    reached: Position | None
    second: Position | None
    repeated: Position | None
    leave_backward: Position | None
    gradients: tuple[tuple[str, Position], ...]
    calls: int
    late: bool


class _Issue(NamedTuple):
    position: Position
    turn: int  # of several that are issued there


_NO_ISSUE = None, 0


def _first_issues(
    ahead: Mapping[int, tuple[int, ...]], entered: Callable[[int, int], Position | None]
) -> dict[int, _Issue]:
    """Where each unit's gather is issued first; `entered` is where one unit is entered, to issue another's."""
    found: dict[int, _Issue] = {}
    for before, units in ahead.items():
        for turn, unit in enumerate(units):
            if (at := entered(before, unit)) is not None:
                issue = _Issue(Position(at.stage_pass, at.slot + ISSUE), turn)
                found[unit] = min(found.get(unit, issue), issue)
    return found


def _pairs(items: list[tuple[Position, int]]) -> list[tuple[tuple[Position, int], tuple[Position, int]]]:
    return list(pairwise(items))


class Variants:
    """The variants that every stage of a model can take, each made once."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self._units = [stage_units(graph, stage) for stage in graph.stages]
        self._made: dict[tuple[int, Variant], StageVariant] = {}

    def of(self, stage: int) -> list[Variant]:
        """Selective recompute needs a block that is one unit; see [Note: Selective] in osdp.model.selective.

        A depth of two needs three units or more, each called once: a second call would gather again those behind it.
        """
        here = self.graph.stages[stage]
        able = {
            Recompute.NONE: True,
            Recompute.SELECTIVE: here.selective is not None,
            Recompute.FULL: here.recomputed is not None,
            Recompute.ON_HOST: here.on_host is not None,
        }
        plain = [
            Variant(granularity, how)
            for granularity in self._units[stage]
            for how, is_able in able.items()
            if is_able and (how is not Recompute.SELECTIVE or granularity == WHOLE)
        ]
        return plain + [replace(variant, prefetch=2) for variant in plain if self._can_prefetch_two(stage, variant)]

    def _can_prefetch_two(self, stage: int, variant: Variant) -> bool:
        if variant.granularity != OPERATORS or not self.graph.stages[stage].is_block:
            return False
        calls = [each.calls for each in self.staged(stage, variant).footprints]
        return len(calls) > 2 and max(calls) == 1

    def staged(self, stage: int, variant: Variant) -> StageVariant:
        key = stage, variant
        if key not in self._made:
            self._made[key] = StageVariant(self.graph.stages[stage], variant, self._units[stage][variant.granularity])
        return self._made[key]

    def layout(self, variants: Sequence[Variant]) -> Layout:
        return Layout(self.graph, [self.staged(stage, variant) for stage, variant in enumerate(variants)])

    def plainest(self) -> list[Variant]:
        """Every block whole and nothing recomputed."""
        return [Variant(WHOLE if WHOLE in units else OPERATORS) for units in self._units]
