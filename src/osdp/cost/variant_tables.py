"""A stage's variant as tables: what does not depend on the batch size is made once; see [Note: Problem]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from osdp.cluster import Cluster
from osdp.cost.layout import Layout, StageVariant, Variant, Variants, levels
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
from osdp.cost.units import WHOLE, Option
from osdp.model.graph import IntArray
from osdp.search.problem import CrossStageUnit, Rows, UnitOption, VariantTable

if TYPE_CHECKING:
    from osdp.cost.tables import Tables

_BATCHES = 4  # of which a variant's bytes are kept
_NEIGHBOURS = 2  # on either side of a block: what it costs depends on no more of them


@dataclass
class MadeVariant:
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
    known: dict[int, _AtBatch] = field(default_factory=dict)  # by batch size, the latest ones

    @staticmethod
    def of(tables: Tables, index: int, variant: Variant) -> MadeVariant:
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
        return MadeVariant(
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

    def _at_batch(self, batch: int) -> _AtBatch:
        """All bytes at a batch size; intervals of batch sizes that begin with it have them too."""
        if batch not in self.known:
            trace = self.staged.trace
            forward, kept = self.forward.rows(levels(trace.forward, batch, workspaces=self.workspaces))
            backward, kept_again = self.backward.rows(levels(trace.backward, batch, workspaces=self.workspaces))
            options = tuple(
                tuple(_at_batch(o, growths.get(o.key), kept, kept_again, batch) for o in unit)
                for unit, growths in zip(self.options, self.growths, strict=True)
            )
            guests = tuple(
                replace(
                    guest,
                    forward=tuple(rows[kept] for rows in guest.forward),
                    backward=tuple(rows[kept_again] for rows in guest.backward),
                )
                for guest in self.cross_stage_units
            )
            while len(self.known) >= _BATCHES:
                del self.known[next(iter(self.known))]
            self.known[batch] = _AtBatch(forward, backward, options, guests)
        return self.known[batch]

    def table(self, batch: int, time_batch: int) -> VariantTable:
        trace, held = self.staged.trace, self._at_batch(batch)
        # at another batch the seconds bound those of all sizes in between; see [Note: Interval] in osdp.search.batches
        passes = [
            ops.timed(lambda first, stop, time=time: time.between(first, stop, batch, time_batch))
            for ops, time in zip(self.passes, (self.forward_time, self.backward_time), strict=True)
        ]
        times = self.forward_time, self.backward_time
        kernels = [Kernels.of(places, *times, batch, time_batch) for places in self.places]
        timed: dict[int, UnitOption] = {}
        return VariantTable(
            key=self.staged.variant,
            is_block=self.staged.stage.is_block,
            is_whole=self.staged.variant.granularity == WHOLE or not self.staged.stage.is_block,
            units=tuple(
                tuple(self._timed(number, option, kernels, timed) for option in unit)
                for number, unit in enumerate(held.options)
            ),
            forward=held.forward,
            backward=held.backward,
            saved=trace.forward_delta.at(batch),
            freed=trace.backward_delta.at(batch),
            host=input_host_bytes(trace, batch),
            forward_pass=passes[0],
            backward_pass=passes[1],
            cross_stage_units=held.cross_stage_units,
        )

    def _timed(
        self, unit: int, option: UnitOption, kernels: Sequence[Kernels], timed: dict[int, UnitOption]
    ) -> UnitOption:
        """An option with what its slices' turns take at a batch size, at which each unit has these kernels.

        `timed` has those that are done: options of a block that choose together share their parts.
        """
        if slices_of(option) == 1:
            return option
        if id(option) not in timed:
            if option.parts:
                parts = ((self._timed(n, part, kernels, timed), k) for n, (part, k) in enumerate(option.parts))
                timed[id(option)] = option.changed(parts=tuple(parts))
            else:
                (key,) = keys_of(option)
                lines = slice_lines(
                    self.wires[unit, replace(key, sharded=1)], kernels[unit], replicated=not key.mode.is_sharded
                )
                timed[id(option)] = option.changed(**lines)
        return timed[id(option)]


@dataclass(frozen=True)
class _AtBatch:
    """What of a variant depends on the batch size, but for seconds."""

    forward: Rows
    backward: Rows
    options: tuple[tuple[UnitOption, ...], ...]
    cross_stage_units: tuple[CrossStageUnit, ...]


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
    return option.changed(forward=forward, backward=backward)


def _regrouped(option: UnitOption, groups: Sequence[SlotGroups]) -> UnitOption:
    return replace(option, forward=option.forward[groups[0].first], backward=option.backward[groups[1].first])
