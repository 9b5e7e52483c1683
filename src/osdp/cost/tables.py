"""Makes the search's tables out of layouts, holds and seconds; see [Note: Problem] in osdp.search.problem.

[Note: Together]
The units of one block choose their mode, and what can be split its number of slices, together; experts over a mesh
dimension of their own, which other ranks hold, choose a mode for themselves. Blocks differ from each
other in granularity, mode, slices, recompute and prefetch, so any mixture over the model remains, in steps of a block
instead of an operator, and a person can read the plan. Outside blocks every unit chooses for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.layout import Layout, StageVariant, Variant, Variants, levels
from osdp.cost.lifetimes import chunk_bytes
from osdp.cost.offload import input_host_bytes
from osdp.cost.option_seconds import Kernels, SliceWires, option_lines, slice_lines
from osdp.cost.options import (
    Growths,
    cross_stage_units_of,
    growth_rows,
    keys_of,
    less_counted_twice,
    options_of,
    slices_of,
    together,
)
from osdp.cost.positions import Places
from osdp.cost.schedule import full_schedule
from osdp.cost.stage_passes import PassOps, StagePasses
from osdp.cost.table_rows import SlotGroups, Slots, neighbour_flags
from osdp.cost.time_model import Compute, compute_time
from osdp.cost.timeline import stage_label
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option, Unit, is_any_unused, modes_for, stage_units
from osdp.errors import UsageError
from osdp.model.graph import IntArray, ModelGraph
from osdp.planfile import Depth
from osdp.recompute import EVERY_RECOMPUTE, Recompute
from osdp.search.problem import CrossStageUnit, Problem, StageChoice, StageTable, UnitOption, VariantTable
from osdp.sharding import MODES, ShardingMode, stand_ins


@dataclass(frozen=True)
class Rules:
    """What may be chosen: modes, splitting, recompute, granularity, two levels, depth of prefetch, and what is pinned.

    A block that can be recomputed in none of the ways in `recompute` chooses from those it has.
    """

    modes: tuple[str, ...] = MODES
    split: bool = True
    recompute: tuple[Recompute, ...] = EVERY_RECOMPUTE
    granularities: tuple[str, ...] | None = None
    two_levels: bool = True
    prefetch: tuple[Depth, ...] = (1, 2)  # depth one always may be; see [Note: Depth] in osdp.cost.gather_order
    only_reduced_once: bool = False  # where micro-batches are accumulated, as a pipeline's schedule does
    pins: Mapping[str, str] | None = None
    offload: bool = False  # units, and inputs of blocks that are recomputed in full, may be held on the host

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
        self.variants = Variants(graph)
        self._has_experts = any(operator.experts > 1 for operator in graph.operators.values())
        self._check_rules()
        self._made: dict[object, list[_MadeVariant]] = {}
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

    def _stage(self, index: int) -> list[_MadeVariant]:
        stage = self.graph.stages[index]
        ends = index == 0, index + 1 == len(self.graph.stages)
        pinned = tuple(
            p
            for p in (self.rules.pins or {})
            if any(fnmatchcase(n, p) for n in (stage.name, *stage.parts, *stage.operators))
        )
        key = (stage.alike, ends, pinned, self._is_gathered_ahead(index)) if stage.is_block else ("outside", index)
        if key not in self._made:
            made = [_MadeVariant.of(self, index, variant) for variant in self._allowed(index)]
            usable = [variant for variant in made if all(variant.options)]
            if not usable:
                raise UsageError(
                    f"the pins leave {stage_label(stage.name)} no mode that is allowed; drop one, or allow its mode"
                )
            self._made[key] = usable
        return self._made[key]

    def _is_gathered_ahead(self, index: int) -> bool:
        """Whether backward enters the unit that issues this stage's gather: not if it has no gradient."""
        behind = self.graph.stages[index + 1 : index + 2]
        first = [units[0] for stage in behind for units in stage_units(self.graph, stage).values() if units]
        return not is_any_unused(self.graph, first)

    def _allowed(self, index: int) -> list[Variant]:
        stage = self.graph.stages[index]
        variants = self.variants.of(index)
        if not stage.is_block:  # what matters there is whether some block is recomputed
            some = {bool(how) for how in self.rules.recompute}
            return [s for s in variants if bool(s.recompute) in some] or variants
        wanted = self.rules.granularities
        variants = [s for s in variants if wanted is None or s.granularity in wanted or s.granularity == WHOLE]
        depths = self.rules.prefetch if self.cluster.overlap > 0 else ()  # where nothing overlaps it gains nothing
        variants = [s for s in variants if s.prefetch == 1 or s.prefetch in depths]
        on_device = [s for s in variants if s.recompute is not Recompute.ON_HOST]
        allowed = [s for s in on_device if s.recompute in self.rules.recompute] or on_device
        if not self.rules.offload or Recompute.FULL not in self.rules.recompute:
            return allowed
        return allowed + [s for s in variants if s.recompute is Recompute.ON_HOST]

    @property
    def num_options(self) -> int:
        """Options of all units of all stages in all their variants."""
        return sum(len(unit) for made in self._stages for variant in made for unit in variant.options)

    @property
    def recompute_cases(self) -> list[bool | None]:
        """Problems to search: where stages outside blocks differ once some block is recomputed, one for either case."""
        again = {bool(s.staged.variant.recompute) for made in self._stages for s in made if not s.staged.stage.is_block}
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

        `recomputed` is one of the cases.
        """
        assert (accumulation > 1) == (self.training.accumulation > 1)
        kinds: dict[int, tuple[int, tuple[VariantTable, ...]]] = {}
        stages = []
        for made in self._stages:
            if id(made) not in kinds:
                allowed = [variant for variant in made if variant.allowed(recomputed)] or made
                tables = tuple(variant.table(batch, time_batch or batch) for variant in allowed)
                kinds[id(made)] = len(kinds), tables
            number, tables = kinds[id(made)]
            stages.append(StageTable(tables, number))
        constant = self.graph.constant_bytes(batch, on_cpu=self.cluster.device.is_cpu)
        stepping = chunk_bytes(self.graph, self.training)
        host_limit = self.cluster.host_limit_bytes // self.cluster.devices_per_node if self.rules.offload else None
        return Problem(tuple(stages), constant, limit, self.cluster.overlap, accumulation, stepping, host_limit)

    def uniform(self, problem: Problem, way: Uniform) -> tuple[StageChoice, ...] | None:
        """The choice that holds every unit in one way; None where the problem has it not."""
        choice = []
        for table in problem.stages:
            found = None
            for how in (way.recompute, Recompute.NONE):  # a block that cannot be recomputed is not
                tried = (
                    _uniform(n, variant, replace(way, recompute=how), self._has_experts)
                    for n, variant in enumerate(table.variants)
                )
                found = found or next(filter(None, tried), None)
            if found is None:
                return None
            choice.append(found)
        return tuple(choice)

    def read(self, problem: Problem, choice: Sequence[StageChoice]) -> tuple[Layout, list[Option]]:
        """A choice as a layout and the option of each of its units."""
        variants: list[Variant] = []
        options: list[Option] = []
        for table, stage in zip(problem.stages, choice, strict=True):
            variant = table.variants[stage.variant]
            assert isinstance(variant.key, Variant)
            variants.append(variant.key)
            for unit, (option, sharded) in zip(variant.units, stage.options, strict=True):
                chosen = unit[option]
                assert isinstance(chosen.key, tuple)
                options += [replace(key, sharded=sharded) if chosen.slices > 1 else key for key in chosen.key]
        return self.variants.layout(variants), options


@dataclass(frozen=True)
class Uniform:
    """One way for all units: blocks are gathered whole, nothing is split; as the baselines are."""

    mode: ShardingMode
    recompute: Recompute
    reduce_once: bool


def _uniform(number: int, variant: VariantTable, way: Uniform, has_experts: bool) -> StageChoice | None:
    """Experts over a dimension of their own may not have the way's mode: then they are in the nearest one."""
    modes = stand_ins(way.mode) if has_experts else (way.mode,)
    key = variant.key
    assert isinstance(key, Variant)
    if key.granularity == WHOLE and key.recompute != way.recompute:
        return None
    if key.granularity not in (WHOLE, OPERATORS) or (key.granularity == OPERATORS and variant.is_block):
        return None
    options = []
    for unit in variant.units:
        fits = [
            o
            for o, option in enumerate(unit)
            if all(
                (each.slices, each.two_levels, each.all_reduce_once) == (1, False, False)
                and each.mode in modes
                and not (each.gather_once or each.offload)
                and each.reduce_once in (way.reduce_once, False)
                for each in keys_of(option)
            )
        ]
        if not fits:
            return None
        best = max(
            fits,
            key=lambda o: (
                -sum(modes.index(each.mode) for each in keys_of(unit[o])),
                all(each.reduce_once == way.reduce_once for each in keys_of(unit[o])),
            ),
        )
        options.append((best, 1))
    return StageChoice(number, tuple(options))


@dataclass
class _MadeVariant:
    """A stage's variant with everything that does not depend on the batch size."""

    staged: StageVariant
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
    def of(tables: Tables, index: int, variant: Variant) -> _MadeVariant:
        layout, index, kept = _around(tables.variants, index, variant)
        staged = layout.staged[index]
        stage_passes = layout.stage_pass(index, False), layout.stage_pass(index, True)
        lengths = 3 * len(staged.trace.forward), 3 * len(staged.trace.backward)
        slots = Slots(stage_passes, lengths)
        first = sum(len(other.units) for other in layout.staged[:index])
        all_places = layout.places[first : first + len(staged.units)]
        options = tuple(
            tuple(options_of(tables, layout, unit, places, slots))
            for unit, places in zip(staged.units, all_places, strict=True)
        )
        alone = [((unit,), (places,)) for unit, places in zip(staged.units, all_places, strict=True)]
        wires = {
            (number, key): option_lines(unit, key, places, tables.training, tables.cluster)[1]
            for number, (unit, places) in enumerate(zip(staged.units, all_places, strict=True))
            for key in {replace(key, sharded=1) for o in options[number] for key in keys_of(o) if key.slices > 1}
        }
        is_experts = [unit.experts > 1 for unit in staged.units]
        if staged.stage.is_block and len(staged.units) > 1:
            options, alone = (
                (tuple(together(options, is_experts)),),
                [(staged.units, tuple(all_places))],
            )
        if variant.prefetch > 1:
            (block,) = options
            options = (tuple(less_counted_twice(tables, staged.units, all_places, o, slots) for o in block),)
        growths = [
            {o.key: growth_rows(layout, *held, o.key, slots) for o in unit if slices_of(o) > 1}
            for held, unit in zip(alone, options, strict=True)
        ]
        cross_stage_units = cross_stage_units_of(tables, layout, index, slots)
        flags = neighbour_flags(layout, slots, tables.training, tables.cluster)
        grown = [[each[which] for unit in growths for each in unit.values()] for which in (0, 1)]
        groups = [SlotGroups.of(options, cross_stage_units, grown[which], which, flags[which]) for which in (0, 1)]
        training = tables.training.of_stage(is_block=staged.stage.is_block)
        return _MadeVariant(
            staged,
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
            compute_time(staged.trace, tables.cluster, training, backward=False),
            compute_time(staged.trace, tables.cluster, training, backward=True),
            _passes(layout, index, kept, tables.cluster),
            tuple(all_places),
            wires,
            tables.cluster.device.is_cpu,
        )

    def allowed(self, recomputed: bool | None) -> bool:
        """Whether this variant occurs where some block is recomputed, or where none is."""
        variant = self.staged.variant
        return recomputed in (None, bool(variant.recompute)) or (bool(recomputed) and self.staged.stage.is_block)

    def table(self, batch: int, time_batch: int) -> VariantTable:
        trace = self.staged.trace
        forward, kept = self.forward.rows(levels(trace.forward, batch, workspaces=self.workspaces))
        backward, kept_again = self.backward.rows(levels(trace.backward, batch, workspaces=self.workspaces))
        # at another batch the seconds bound those of all sizes in between; see [Note: Interval] in osdp.search.batches
        passes = [
            ops.timed(lambda first, stop, time=time: time.between(first, stop, batch, time_batch))
            for ops, time in zip(self.passes, (self.forward_time, self.backward_time), strict=True)
        ]
        times = self.forward_time, self.backward_time
        kernels = [Kernels.of(places, *times, batch, time_batch) for places in self.places]
        return VariantTable(
            key=self.staged.variant,
            is_block=self.staged.stage.is_block,
            is_whole=self.staged.variant.granularity == WHOLE or not self.staged.stage.is_block,
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
            host=input_host_bytes(trace, batch),
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
        (key,) = keys_of(option)
        if key.slices == 1:
            return option
        wires = self.wires[unit, replace(key, sharded=1)]
        return replace(option, **slice_lines(wires, kernels[unit], replicated=not key.mode.is_sharded))


_NEIGHBOURS = 2  # on either side of a block: what it costs depends on no more of them


def _around(variants: Variants, index: int, variant: Variant) -> tuple[Layout, int, list[int]]:
    """A layout in which a stage has this variant, the stage's place in it, and all its stages' places in the model.

    Of blocks only the nearest are there.
    """
    stages = variants.graph.stages
    kept = [n for n, stage in enumerate(stages) if not (stages[index].is_block and stage.is_block)]
    kept = sorted({*kept, *range(max(0, index - _NEIGHBOURS), min(len(stages), index + _NEIGHBOURS + 1))})
    plainest = variants.plainest()
    plainest[index] = variant
    return Layout(variants.graph, [variants.staged(n, plainest[n]) for n in kept]), kept.index(index), kept


def _passes(layout: Layout, index: int, places: Sequence[int], cluster: Cluster) -> tuple[PassOps, PassOps]:
    passes = StagePasses(layout, full_schedule(layout, cluster.engine), cluster.engine, places=places)
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
