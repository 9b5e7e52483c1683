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

from osdp.cluster import Cluster
from osdp.cost.layout import Layout, Variant, Variants
from osdp.cost.lifetimes import chunk_bytes
from osdp.cost.options import (
    keys_of,
)
from osdp.cost.timeline import stage_label
from osdp.cost.training import Training
from osdp.cost.units import OPERATORS, WHOLE, Option, Unit, is_any_unused, modes_for, stage_units
from osdp.cost.variant_tables import MadeVariant
from osdp.errors import UsageError
from osdp.model.graph import ModelGraph
from osdp.planfile import Depth
from osdp.recompute import EVERY_RECOMPUTE, Recompute
from osdp.search.problem import Problem, StageChoice, StageTable, VariantTable
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
        self._made: dict[object, list[MadeVariant]] = {}
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

    def _stage(self, index: int) -> list[MadeVariant]:
        stage = self.graph.stages[index]
        ends = index == 0, index + 1 == len(self.graph.stages)
        pinned = tuple(
            p
            for p in (self.rules.pins or {})
            if any(fnmatchcase(n, p) for n in (stage.name, *stage.parts, *stage.operators))
        )
        key = (stage.alike, ends, pinned, self._is_gathered_ahead(index)) if stage.is_block else ("outside", index)
        if key not in self._made:
            made = [MadeVariant.of(self, index, variant) for variant in self._allowed(index)]
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
