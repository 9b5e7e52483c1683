"""Makes the search's tables out of layouts, holds and seconds; see [Note: Problem] in osdp.search.problem.

[Note: Together]
The units of one block choose their mode, and what can be split its number of slices, together. Blocks differ from each
other in granularity, mode, slices and recompute, so any mixture over the model remains, in steps of a block instead of
an operator, and a person can read the plan. Outside blocks every unit chooses for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.layout import Layout, Shape, ShapedStage, Shapes, levels
from osdp.cost.lifetimes import Places
from osdp.cost.option_seconds import Kernels, SliceWires, option_lines, slice_lines
from osdp.cost.options import Growths, cross_stage_units_of, growth_rows, options_of, slices_of, together
from osdp.cost.schedule import full_schedule
from osdp.cost.stage_passes import PassOps, StagePasses
from osdp.cost.table_rows import SlotGroups, Slots, neighbour_flags
from osdp.cost.time_model import Compute, compute_time
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option, Unit, is_any_unused, modes_for, stage_units
from osdp.errors import UsageError
from osdp.model.graph import IntArray, ModelGraph
from osdp.recompute import EVERY_RECOMPUTE, Recompute
from osdp.search.problem import (
    CrossStageUnit,
    Problem,
    ShapeTable,
    StageChoice,
    StageTable,
    UnitOption,
)
from osdp.sharding import MODES, ShardingMode


@dataclass(frozen=True)
class Rules:
    """What may be chosen: modes, splitting, recompute, granularity, exchange on two levels, and what is pinned.

    A block that can be recomputed in none of the ways in `recompute` chooses from those it has.
    """

    modes: tuple[str, ...] = MODES
    split: bool = True
    recompute: tuple[Recompute, ...] = EVERY_RECOMPUTE
    granularities: tuple[str, ...] | None = None
    two_levels: bool = True
    only_reduced_once: bool = False  # where micro-batches are accumulated, as a pipeline's schedule does
    pins: Mapping[str, str] | None = None

    def modes_of(self, unit: Unit, operators: Sequence[str], cluster: Cluster) -> tuple[ShardingMode, ...]:
        allowed = tuple(mode for mode in modes_for(cluster) if mode in self.modes)
        names = {unit.name, *unit.modules, *operators}
        pinned = {
            mode for pattern, mode in (self.pins or {}).items() if any(fnmatchcase(name, pattern) for name in names)
        }
        if len(pinned) > 1:
            return ()  # this unit holds operators that are pinned to different modes
        return tuple(mode for mode in allowed if not pinned or mode in pinned)


class Tables:
    """All tables of one model on one cluster; what does not depend on the batch size is made once."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, training: Training, rules: Rules) -> None:
        self.graph, self.cluster, self.training, self.rules = graph, cluster, training, rules
        self.shapes = Shapes(graph)
        self._check_rules()
        self._made: dict[object, list[_MadeShape]] = {}
        self._stages = [self._stage(index) for index in range(len(graph.stages))]

    def _check_rules(self) -> None:
        known = modes_for(self.cluster)
        for mode in self.rules.modes:
            if mode not in MODES:
                raise UsageError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
        if not set(known) & set(self.rules.modes):
            raise UsageError(
                f"none of the modes {', '.join(self.rules.modes)} exists on {self.cluster.label}; "
                f"it has {', '.join(known)}"
            )
        names = [name for stage in self.graph.stages for name in (stage.name, *stage.parts, *stage.operators)]
        for pattern, mode in (self.rules.pins or {}).items():
            if mode not in known:
                raise UsageError(f"cannot pin {pattern!r} to {mode!r}: {self.cluster.label} has {', '.join(known)}")
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(f"pin {pattern!r} matches no operator; names look like {names[1]!r} and {names[-1]!r}")

    def _stage(self, index: int) -> list[_MadeShape]:
        stage = self.graph.stages[index]
        ends = index == 0, index + 1 == len(self.graph.stages)
        pinned = tuple(
            p
            for p in (self.rules.pins or {})
            if any(fnmatchcase(n, p) for n in (stage.name, *stage.parts, *stage.operators))
        )
        key = (stage.alike, ends, pinned, self._is_gathered_ahead(index)) if stage.is_block else ("outside", index)
        if key not in self._made:
            made = [_MadeShape.of(self, index, shape) for shape in self._allowed(index)]
            usable = [shape for shape in made if all(shape.options)]
            if not usable:
                raise UsageError(f"the pins leave no way to hold {stage.name}; drop one, or allow finer granularity")
            self._made[key] = usable
        return self._made[key]

    def _is_gathered_ahead(self, index: int) -> bool:
        """Whether backward enters the unit that issues this stage's gather: not if it has no gradient."""
        behind = self.graph.stages[index + 1 : index + 2]
        first = [units[0] for stage in behind for units in stage_units(self.graph, stage).values() if units]
        return not is_any_unused(self.graph, first)

    def _allowed(self, index: int) -> list[Shape]:
        stage = self.graph.stages[index]
        shapes = self.shapes.of(index)
        if not stage.is_block:  # what matters there is whether some block is recomputed
            some = {bool(how) for how in self.rules.recompute}
            return [s for s in shapes if bool(s.recompute) in some] or shapes
        wanted = self.rules.granularities
        shapes = [s for s in shapes if wanted is None or s.granularity in wanted or s.granularity == WHOLE]
        return [s for s in shapes if s.recompute in self.rules.recompute] or shapes

    @property
    def num_options(self) -> int:
        """Options of all units of all stages in all their shapes."""
        return sum(len(unit) for made in self._stages for shape in made for unit in shape.options)

    @property
    def variants(self) -> list[bool | None]:
        """Problems to search: where stages outside blocks differ once some block is recomputed, one for either case."""
        again = {bool(s.shaped.shape.recompute) for made in self._stages for s in made if not s.shaped.stage.is_block}
        return [False, True] if True in again else [None]

    def problem(
        self,
        batch: int,
        *,
        limit: int,
        accumulation: int = 1,
        recomputed: bool | None = None,
        time_batch: int | None = None,
    ) -> Problem:
        """The tables at a batch size; with `time_batch`, the seconds are those of another one.

        `recomputed` is one of the variants.
        """
        assert (accumulation > 1) == (self.training.accumulation > 1)
        kinds: dict[int, tuple[int, tuple[ShapeTable, ...]]] = {}
        stages = []
        for made in self._stages:
            if id(made) not in kinds:
                allowed = [shape for shape in made if shape.allowed(recomputed)] or made
                tables = tuple(shape.table(batch, time_batch or batch) for shape in allowed)
                kinds[id(made)] = len(kinds), tables
            number, tables = kinds[id(made)]
            stages.append(StageTable(tables, number))
        constant = self.graph.constant_bytes(batch, on_cpu=self.cluster.device.is_cpu)
        return Problem(tuple(stages), constant, limit, self.cluster.overlap, accumulation)

    def uniform(self, problem: Problem, way: Uniform) -> tuple[StageChoice, ...] | None:
        """The choice that holds every unit in one way; None where the problem has it not."""
        choice = []
        for table in problem.stages:
            found = None
            for how in (way.recompute, Recompute.NONE):  # a block that cannot be recomputed is not
                tried = (_uniform(n, shape, replace(way, recompute=how)) for n, shape in enumerate(table.shapes))
                found = found or next(filter(None, tried), None)
            if found is None:
                return None
            choice.append(found)
        return tuple(choice)

    def read(self, problem: Problem, choice: Sequence[StageChoice]) -> tuple[Layout, list[Option]]:
        """A choice as a layout and the option of each of its units."""
        shapes: list[Shape] = []
        options: list[Option] = []
        for table, stage in zip(problem.stages, choice, strict=True):
            shape = table.shapes[stage.shape]
            assert isinstance(shape.key, Shape)
            shapes.append(shape.key)
            for unit, (option, sharded) in zip(shape.units, stage.options, strict=True):
                chosen = unit[option]
                assert isinstance(chosen.key, tuple)
                options += [replace(key, sharded=sharded) if chosen.slices > 1 else key for key in chosen.key]
        return self.shapes.layout(shapes), options


@dataclass(frozen=True)
class Uniform:
    """One way for all units: blocks are gathered whole, nothing is split; as the baselines are."""

    mode: ShardingMode
    recompute: Recompute
    reduce_once: bool


def _uniform(number: int, shape: ShapeTable, way: Uniform) -> StageChoice | None:
    key = shape.key
    assert isinstance(key, Shape)
    if key.granularity == WHOLE and key.recompute != way.recompute:
        return None
    if key.granularity not in (WHOLE, OPERATORS) or (key.granularity == OPERATORS and shape.is_block):
        return None
    options = []
    for unit in shape.units:
        fits = [
            o
            for o, option in enumerate(unit)
            if all(
                (each.mode, each.slices, each.two_levels, each.all_reduce_once) == (way.mode, 1, False, False)
                and each.reduce_once in (way.reduce_once, False)
                for each in _keys(option)
            )
        ]
        if not fits:
            return None
        best = max(fits, key=lambda o: all(each.reduce_once == way.reduce_once for each in _keys(unit[o])))
        options.append((best, 1))
    return StageChoice(number, tuple(options))


@dataclass
class _MadeShape:
    """A stage's shape with everything that does not depend on the batch size."""

    shaped: ShapedStage
    options: tuple[tuple[UnitOption, ...], ...]
    cross_stage_units: tuple[CrossStageUnit, ...]
    growths: tuple[Mapping[object, Growths], ...]  # of every unit, by the keys of its split options
    forward: SlotGroups
    backward: SlotGroups
    forward_time: Compute
    backward_time: Compute
    passes: tuple[PassOps, PassOps]
    places: tuple[Places, ...]
    wires: Mapping[tuple[int, Option], SliceWires]  # of every unit's split options
    workspaces: bool  # see [Note: Workspaces] in osdp.model.kernels

    @staticmethod
    def of(tables: Tables, index: int, shape: Shape) -> _MadeShape:
        layout, index = _around(tables.shapes, index, shape)
        shaped = layout.shaped[index]
        visits = layout.visit(index, False), layout.visit(index, True)
        lengths = 3 * len(shaped.trace.forward), 3 * len(shaped.trace.backward)
        slots = Slots(visits, lengths)
        first = sum(len(other.units) for other in layout.shaped[:index])
        all_places = layout.places[first : first + len(shaped.units)]
        options = tuple(
            tuple(options_of(tables, layout, unit, places, slots))
            for unit, places in zip(shaped.units, all_places, strict=True)
        )
        alone = [((unit,), (places,)) for unit, places in zip(shaped.units, all_places, strict=True)]
        wires = {
            (number, key): option_lines(unit, key, places, tables.training, tables.cluster)[1]
            for number, (unit, places) in enumerate(zip(shaped.units, all_places, strict=True))
            for key in {replace(key, sharded=1) for o in options[number] for key in _keys(o) if key.slices > 1}
        }
        if shaped.stage.is_block and len(shaped.units) > 1:
            options, alone = (tuple(together(options)),), [(shaped.units, tuple(all_places))]
        growths = [
            {o.key: growth_rows(layout, *held, o.key, slots) for o in unit if slices_of(o) > 1}
            for held, unit in zip(alone, options, strict=True)
        ]
        cross_stage_units = cross_stage_units_of(tables, layout, index, slots)
        flags = neighbour_flags(layout, slots, tables.training, tables.cluster)
        grown = [[each[which] for unit in growths for each in unit.values()] for which in (0, 1)]
        groups = [SlotGroups.of(options, cross_stage_units, grown[which], which, flags[which]) for which in (0, 1)]
        training = tables.training.of_stage(is_block=shaped.stage.is_block)
        return _MadeShape(
            shaped,
            tuple(tuple(_regrouped(option, groups) for option in unit) for unit in options),
            tuple(
                replace(
                    guest,
                    forward=tuple(rows[groups[0].first] for rows in guest.forward),
                    backward=tuple(rows[groups[1].first] for rows in guest.backward),
                )
                for guest in cross_stage_units
            ),
            tuple(
                {key: (rows[0][groups[0].first], rows[1][groups[1].first]) for key, rows in unit.items()}
                for unit in growths
            ),
            groups[0],
            groups[1],
            compute_time(shaped.trace, tables.cluster, training, backward=False),
            compute_time(shaped.trace, tables.cluster, training, backward=True),
            _passes(layout, index, tables.cluster),
            tuple(all_places),
            wires,
            tables.cluster.device.is_cpu,
        )

    def allowed(self, recomputed: bool | None) -> bool:
        """Whether this shape occurs where some block is recomputed, or where none is."""
        shape = self.shaped.shape
        return recomputed in (None, bool(shape.recompute)) or (bool(recomputed) and self.shaped.stage.is_block)

    def table(self, batch: int, time_batch: int) -> ShapeTable:
        trace = self.shaped.trace
        forward, kept = self.forward.rows(levels(trace.forward, batch, workspaces=self.workspaces))
        backward, kept_again = self.backward.rows(levels(trace.backward, batch, workspaces=self.workspaces))
        # at another batch the seconds bound those of all sizes in between; see [Note: Interval] in osdp.search.batches
        passes = [
            ops.timed(lambda first, stop, time=time: time.between(first, stop, batch, time_batch))
            for ops, time in zip(self.passes, (self.forward_time, self.backward_time), strict=True)
        ]
        times = self.forward_time, self.backward_time
        kernels = [Kernels.of(places, *times, batch, time_batch) for places in self.places]
        return ShapeTable(
            key=self.shaped.shape,
            is_block=self.shaped.stage.is_block,
            is_whole=self.shaped.shape.granularity == WHOLE or not self.shaped.stage.is_block,
            units=tuple(
                tuple(
                    self._timed(number, _at_batch(o, growths.get(o.key), kept, kept_again, batch), kernels)
                    for o in unit
                )
                for number, (unit, growths) in enumerate(zip(self.options, self.growths, strict=True))
            ),
            forward=forward,
            backward=backward,
            saved=trace.forward_delta.at(batch),
            freed=trace.backward_delta.at(batch),
            forward_pass=passes[0],
            backward_pass=passes[1],
            cross_stage_units=tuple(
                replace(
                    guest,
                    forward=tuple(rows[kept] for rows in guest.forward),
                    backward=tuple(rows[kept_again] for rows in guest.backward),
                )
                for guest in self.cross_stage_units
            ),
        )

    def _timed(self, unit: int, option: UnitOption, kernels: Sequence[Kernels]) -> UnitOption:
        """An option with what its slices' turns take at a batch size, at which each unit has these kernels."""
        if option.parts:
            if slices_of(option) == 1:
                return option
            parts = tuple((self._timed(n, part, kernels), k) for n, (part, k) in enumerate(option.parts))
            return replace(option, parts=parts)
        (key,) = _keys(option)
        if key.slices == 1:
            return option
        wires = self.wires[unit, replace(key, sharded=1)]
        return replace(option, **slice_lines(wires, kernels[unit], replicated=not key.mode.is_sharded))


_NEIGHBOURS = 2  # on either side of a block: what it costs depends on no more of them


def _around(shapes: Shapes, index: int, shape: Shape) -> tuple[Layout, int]:
    """A layout in which a stage has this shape, and the stage's place in it; of blocks only the nearest are there."""
    stages = shapes.graph.stages
    kept = [n for n, stage in enumerate(stages) if not (stages[index].is_block and stage.is_block)]
    kept = sorted({*kept, *range(max(0, index - _NEIGHBOURS), min(len(stages), index + _NEIGHBOURS + 1))})
    plainest = shapes.plainest()
    plainest[index] = shape
    return Layout(shapes.graph, [shapes.shaped(n, plainest[n]) for n in kept]), kept.index(index)


def _keys(option: UnitOption) -> tuple[Option, ...]:
    assert isinstance(option.key, tuple)
    return option.key


def _passes(layout: Layout, index: int, cluster: Cluster) -> tuple[PassOps, PassOps]:
    passes = StagePasses(layout, full_schedule(layout, cluster.engine), cluster.engine)
    return passes.of(index, backward=False), passes.of(index, backward=True)


def _at_batch(option: UnitOption, growths: Growths | None, kept: IntArray, again: IntArray, batch: int) -> UnitOption:
    """An option's rows that are kept, with what its slices' activations need at a batch size."""
    forward, backward = option.forward[kept], option.backward[again]
    if growths is not None:
        line = np.array([1, batch])
        forward = forward + np.outer(growths[0][kept] @ line, [1, 0])
        backward = backward + np.outer(growths[1][again] @ line, [1, 0])
    return replace(option, forward=forward, backward=backward)


def _regrouped(option: UnitOption, groups: Sequence[SlotGroups]) -> UnitOption:
    return replace(option, forward=option.forward[groups[0].first], backward=option.backward[groups[1].first])
