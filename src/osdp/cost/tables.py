"""Makes the search's tables out of layouts, holds and seconds; see [Note: Problem] in osdp.search.problem.

[Note: Long lists]
Every unit chooses for itself, with one exception: lists of more than LONG_LIST blocks. There one granularity, and
one number of slices for what can be split, holds for all blocks, and the units of one block choose their mode
together. Blocks still differ from each other in mode and recompute, so any mixture over the list remains, in steps of a
block instead of an operator, and a person can read the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.layout import Layout, Shape, ShapedStage, Shapes, levels
from osdp.cost.options import Growths, growth_rows, guests_of, options_of, slices_of, together
from osdp.cost.seconds import Compute, compute_time
from osdp.cost.slots import SlotGroups, Slots, neighbour_flags
from osdp.cost.training import Training
from osdp.cost.units import WHOLE, Option, Unit, modes_for
from osdp.errors import UsageError
from osdp.model.graph import IntArray, ModelGraph
from osdp.planfile import MODES
from osdp.search.problem import (
    Guest,
    Problem,
    ShapeTable,
    StageChoice,
    StageTable,
    UnitOption,
)

LONG_LIST = 8  # see [Note: Long lists]


@dataclass(frozen=True)
class Rules:
    """What may be chosen: modes, splitting, recompute, granularity, exchange on two levels, and what is pinned."""

    modes: tuple[str, ...] = MODES
    split: bool = True
    recompute: bool = True
    only_recompute: bool = False
    granularities: tuple[str, ...] | None = None
    two_levels: bool = True
    pins: Mapping[str, str] | None = None

    def modes_of(self, unit: Unit, operators: Sequence[str], cluster: Cluster) -> tuple[str, ...]:
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
        self._long = _long_lists(graph)
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
        key = (stage.alike, ends, pinned) if stage.is_block else ("outside", index)
        if key not in self._made:
            made = [_MadeShape.of(self, index, shape) for shape in self._allowed(index)]
            usable = [shape for shape in made if all(shape.options)]
            if not usable:
                raise UsageError(f"the pins leave no way to hold {stage.name}; drop one, or allow finer granularity")
            self._made[key] = usable
        return self._made[key]

    def _allowed(self, index: int) -> list[Shape]:
        stage = self.graph.stages[index]
        shapes = self.shapes.of(index)
        if not stage.is_block:
            allowed = [s for s in shapes if (self.rules.recompute or not s.recompute)]
            return [s for s in allowed if s.recompute or not self.rules.only_recompute] or shapes
        wanted = self.rules.granularities
        shapes = [s for s in shapes if wanted is None or s.granularity in wanted or s.granularity == WHOLE]
        if self.rules.only_recompute:
            return [s for s in shapes if s.recompute] or shapes
        return [s for s in shapes if self.rules.recompute or not s.recompute]

    @property
    def num_options(self) -> int:
        """Options of all units of all stages in all their shapes."""
        return sum(len(unit) for made in self._stages for shape in made for unit in shape.options)

    def grains(self) -> list[Grain]:
        """The ways to gather the blocks of long lists, for the search to try; see [Note: Long lists]."""
        found: dict[Grain, None] = {}
        for index, made in enumerate(self._stages):
            if self.graph.stages[index].name in self._long:
                for shape in made:
                    found.update(dict.fromkeys(Grain(shape.granularity, slices_of(o)) for o in shape.options[0]))
        grains = list(found) or [Grain(WHOLE, 1)]
        again = {s.shaped.shape.recompute for made in self._stages for s in made if not s.shaped.stage.is_block}
        return [replace(grain, recompute=r) for r in sorted(again) for grain in grains] if True in again else grains

    def problem(self, batch: int, *, limit: int, grain: Grain | None = None, time_batch: int | None = None) -> Problem:
        """The tables at a batch size and grain; with `time_batch`, the seconds are those of another one."""
        grain = grain or self.grains()[0]
        kinds: dict[int, tuple[int, tuple[ShapeTable, ...]]] = {}
        stages = []
        for index, made in enumerate(self._stages):
            if id(made) not in kinds:
                long = self.graph.stages[index].name in self._long
                known = [shape for shape in made if shape.allowed(grain)] or made
                fine = [fit for shape in known if (fit := shape.of_grain(grain))] if long else known
                chosen = fine or [fit for shape in known if (fit := shape.of_grain(Grain(WHOLE, 1)))]
                tables = tuple(shape.table(batch, time_batch or batch) for shape in chosen)
                kinds[id(made)] = len(kinds), tables
            number, tables = kinds[id(made)]
            stages.append(StageTable(tables, number, exposed=index == 0))
        constant = self.graph.buffer_bytes + self.graph.input_bytes.at(batch)
        return Problem(tuple(stages), constant, limit, self.cluster.overlap, self.training.accumulation)

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
class Grain:
    """How the blocks of long lists are gathered: at which granularity, split into how many slices.

    Where stages outside blocks differ once a block is recomputed (see [Note: Stage]), `recompute` tells if one may be.
    """

    granularity: str
    slices: int
    recompute: bool | None = None


@dataclass
class _MadeShape:
    """A stage's shape with everything that does not depend on the batch size."""

    shaped: ShapedStage
    options: tuple[tuple[UnitOption, ...], ...]
    guests: tuple[Guest, ...]
    growths: tuple[Mapping[object, Growths], ...]  # of every unit, by the keys of its split options
    forward: SlotGroups
    backward: SlotGroups
    forward_time: Compute
    backward_time: Compute

    @staticmethod
    def of(tables: Tables, index: int, shape: Shape) -> _MadeShape:
        shapes = tables.shapes.plainest()
        shapes[index] = shape
        layout = tables.shapes.layout(shapes)
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
        if shaped.stage.name in tables._long:
            options, alone = (tuple(together(options)),), [(shaped.units, tuple(all_places))]
        growths = [
            {o.key: growth_rows(layout, *held, o.key, slots) for o in unit if slices_of(o) > 1}
            for held, unit in zip(alone, options, strict=True)
        ]
        guests = guests_of(tables, layout, index, slots)
        flags = neighbour_flags(layout, slots, tables.training, tables.cluster)
        grown = [[each[which] for unit in growths for each in unit.values()] for which in (0, 1)]
        groups = [SlotGroups.of(options, guests, grown[which], which, flags[which]) for which in (0, 1)]
        return _MadeShape(
            shaped,
            tuple(tuple(_regrouped(option, groups) for option in unit) for unit in options),
            tuple(
                replace(
                    guest,
                    forward=tuple(rows[groups[0].first] for rows in guest.forward),
                    backward=tuple(rows[groups[1].first] for rows in guest.backward),
                )
                for guest in guests
            ),
            tuple(
                {key: (rows[0][groups[0].first], rows[1][groups[1].first]) for key, rows in unit.items()}
                for unit in growths
            ),
            groups[0],
            groups[1],
            compute_time(shaped.trace, tables.cluster, tables.training, backward=False),
            compute_time(shaped.trace, tables.cluster, tables.training, backward=True),
        )

    @property
    def granularity(self) -> str:
        return self.shaped.shape.granularity

    def allowed(self, grain: Grain) -> bool:
        """Whether this shape occurs where some block is recomputed, or where none is."""
        shape = self.shaped.shape
        return grain.recompute in (None, shape.recompute) or (bool(grain.recompute) and self.shaped.stage.is_block)

    def of_grain(self, grain: Grain) -> _MadeShape | None:
        """This shape with the options of a grain only; None where it has none."""
        options = tuple(o for o in self.options[0] if slices_of(o) == grain.slices)
        return replace(self, options=(options,)) if self.granularity == grain.granularity and options else None

    def table(self, batch: int, time_batch: int) -> ShapeTable:
        trace = self.shaped.trace
        forward, kept = self.forward.rows(levels(trace.forward, batch))
        backward, kept_again = self.backward.rows(levels(trace.backward, batch))
        passes = self.forward_time, self.backward_time
        # at another batch the seconds bound those of all sizes in between; see [Note: Interval] in osdp.search.batches
        forward_seconds, backward_seconds = (each.at_least(batch, time_batch) for each in passes)
        return ShapeTable(
            key=self.shaped.shape,
            units=tuple(
                tuple(_at_batch(o, growths.get(o.key), kept, kept_again, batch) for o in unit)
                for unit, growths in zip(self.options, self.growths, strict=True)
            ),
            forward=forward,
            backward=backward,
            saved=trace.forward_delta.at(batch),
            freed=trace.backward_delta.at(batch),
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            guests=tuple(
                replace(
                    guest,
                    forward=tuple(rows[kept] for rows in guest.forward),
                    backward=tuple(rows[kept_again] for rows in guest.backward),
                )
                for guest in self.guests
            ),
        )


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


def _long_lists(graph: ModelGraph) -> set[str]:
    """Names of the blocks whose units choose together; see [Note: Long lists]."""
    lists: dict[str, list[str]] = {}
    for stage in graph.blocks:
        lists.setdefault(stage.name.rpartition(".")[0], []).append(stage.name)
    return {name for names in lists.values() if len(names) > LONG_LIST for name in names}
