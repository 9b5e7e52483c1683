"""What each option of a unit costs, in the search's terms: bytes at every row, seconds on both streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from osdp.cost.layout import Layout
from osdp.cost.lifetimes import (
    Allocation,
    Places,
    Position,
    forward_issue,
    slice_growths,
    stepping_bytes,
    unit_allocations,
)
from osdp.cost.option_seconds import option_lines
from osdp.cost.table_rows import Slots, is_before_last, value_at, visit_bytes
from osdp.cost.units import SLICES, Option, Unit
from osdp.model.graph import IntArray
from osdp.recompute import Recompute
from osdp.search.problem import (
    SECONDS,
    Amount,
    CrossStageUnit,
    Seconds,
    UnitOption,
)
from osdp.sharding import Scope

if TYPE_CHECKING:
    from osdp.cost.tables import Tables

_LAST_SLOT = 1 << 30
Growths = tuple[IntArray, IntArray]


def slices_of(option: UnitOption) -> int:
    assert isinstance(option.key, tuple)
    return max(key.slices for key in option.key)


def options_of(tables: Tables, layout: Layout, unit: Unit, places: Places, slots: Slots) -> list[UnitOption]:
    prefix = f"{unit.name}."
    deeper = [u.name for u in layout.units if u is not unit and u.name.startswith(prefix)]
    below = [
        name
        for stage in tables.graph.stages
        if unit.block is None or stage.name == unit.block
        for name in stage.operators
        if (name in unit.modules or name.startswith(prefix))
        and not any((name + ".").startswith(other + ".") for other in deeper)
    ]
    modes = tables.rules.modes_of(unit, below, tables.cluster)
    several = tables.training.accumulation > 1 and unit.trained
    once = (True,) if several and tables.rules.only_reduced_once else (False, True) if several else (False,)
    may_split = tables.rules.split and not _is_selective(layout, unit)
    split = [slices for slices in SLICES if may_split and unit.can_split(slices)]
    found = []
    for mode, slices, o in itertools.product(modes, (1, *split), once):
        flat = _option(tables, layout, unit, places, slots, Option(mode, slices, 1, o))
        found.append(flat)
        if several and not o and mode.is_reduced_across:
            option = Option(mode, slices, 1, all_reduce_once=True)
            found.append(_option(tables, layout, unit, places, slots, option))
        if mode.sharded_over is Scope.WORLD and tables.rules.two_levels and tables.cluster.has_two_levels:
            option = Option(mode, slices, 1, o, two_levels=True)
            faster = _option(tables, layout, unit, places, slots, option)
            found += [faster] if _seconds(faster) < _seconds(flat) else []  # it never holds less
    return found


def _is_selective(layout: Layout, unit: Unit) -> bool:
    """Whether the unit's block is recomputed selectively: then it is not split, see [Note: Selective]."""
    selective = (shaped for shaped in layout.shaped if shaped.shape.recompute is Recompute.SELECTIVE)
    return any(unit in shaped.units for shaped in selective)


def _seconds(option: UnitOption) -> float:
    return sum(getattr(option, name).at(option.slices) for name in SECONDS)


def together(units: Sequence[Sequence[UnitOption]]) -> list[UnitOption]:
    """The options of a block whose units choose together: a mode and a number of slices; see [Note: Together]."""
    if not all(units):
        return []  # the pins leave some unit no mode
    by_key = [{option.key[0]: option for option in unit} for unit in units]  # type: ignore[index]
    wanted = dict.fromkeys((key.mode, key.slices, _when(key), key.two_levels) for unit in by_key for key in unit)
    found = []
    for mode, slices, when, two_levels in wanted:
        taken = []
        for unit in by_key:
            fits = [o for key, o in unit.items() if _when(key) == when or not any(_when(k) == when for k in unit)]
            modes = [o for o in fits if o.key[0].mode == mode] or fits  # type: ignore[index]
            exact = [o for o in modes if o.key[0].slices == slices] or modes  # type: ignore[index]
            levels = [o for o in exact if o.key[0].two_levels == two_levels]  # type: ignore[index]
            taken.append((levels or exact or list(unit.values()))[0])
        found.append(_sum_of(taken))
    unique = {option.key: option for option in found}
    return list(unique.values())


def _when(option: Option) -> tuple[bool, bool]:
    """Which of its reductions wait for the last micro-batch."""
    return option.reduce_once, option.all_reduce_once


def _sum_of(options: Sequence[UnitOption]) -> UnitOption:
    """Options taken together, every slice of a split one sharded."""

    def amount(name: str) -> Amount:
        return Amount(sum(getattr(o, name).at(o.slices) for o in options))

    def seconds(name: str) -> Seconds:
        return Seconds(sum(getattr(o, name).at(o.slices) for o in options))

    keys = []
    for option in options:
        assert isinstance(option.key, tuple)
        keys.append(replace(option.key[0], sharded=option.slices))
    sums: dict[str, Any] = {name: amount(name) for name in _BYTES} | {name: seconds(name) for name in SECONDS}
    return UnitOption(
        key=tuple(keys),
        forward=_at_slices(options, "forward"),
        backward=_at_slices(options, "backward"),
        parts=tuple((option, option.slices) for option in options),
        **sums,
    )


_BYTES = ("always", "between", "after", "stepping", "ahead", "cast", "ahead_again", "cast_again", "reducing")


def growth_rows(layout: Layout, units: Sequence[Unit], places: Sequence[Places], key: object, slots: Slots) -> Growths:
    """Of an option's slices, what grows with the batch: for both visits, [slot, constant or per sample]."""
    assert isinstance(key, tuple)
    rows = tuple(np.zeros((length, 2), dtype=np.int64) for length in slots.lengths)
    for unit, place, option in zip(units, places, key, strict=True):
        for growth in slice_growths(unit, option, place, layout.graph.operators):
            assert growth.start.visit == growth.end.visit
            line = growth.nbytes.constant, growth.nbytes.per_sample
            rows[slots.visits.index(growth.start.visit)][growth.start.slot : growth.end.slot] += line
    return rows[0], rows[1]


def _at_slices(options: Sequence[UnitOption], name: str) -> IntArray:
    line = np.sum([getattr(option, name) @ np.array([1, option.slices]) for option in options], axis=0)
    return np.stack([line, np.zeros_like(line)], axis=1)


def _option(tables: Tables, layout: Layout, unit: Unit, places: Places, slots: Slots, option: Option) -> UnitOption:
    """Measures an option at one and, where it is split, at two sharded slices: everything between is on that line."""
    split = option.slices > 1 and option.mode.is_sharded
    one = _Measured(tables, layout, unit, places, slots, option)
    two = _Measured(tables, layout, unit, places, slots, replace(option, sharded=2)) if split else one

    def amount(read: Callable[[_Measured], int]) -> Amount:
        slope = read(two) - read(one)
        return Amount(read(one) - slope, slope)

    def rows(which: int) -> IntArray:
        slope = two.rows[which] - one.rows[which]
        return np.stack([one.rows[which] - slope, slope], axis=1)

    lines, _ = option_lines(unit, option, places, tables.training, tables.cluster)
    return UnitOption(
        key=(option,),
        forward=rows(0),
        backward=rows(1),
        slices=option.slices if split else 1,
        always=amount(lambda m: m.always),
        between=amount(lambda m: m.between),
        after=amount(lambda m: m.after),
        stepping=amount(lambda m: m.stepping),
        ahead=amount(lambda m: m.ahead),
        cast=amount(lambda m: m.cast),
        ahead_again=amount(lambda m: m.ahead_again),
        cast_again=amount(lambda m: m.cast_again),
        reducing=amount(lambda m: m.reducing),
        far=one.far,
        **lines,
    )


class _Measured:
    """The bytes and seconds of one option at one number of sharded slices."""

    def __init__(
        self, tables: Tables, layout: Layout, unit: Unit, places: Places, slots: Slots, option: Option
    ) -> None:
        allocations = unit_allocations(unit, option, places, tables.training, tables.cluster)
        self.always = value_at(allocations, Position(-1, 0))
        forward, backward = slots.visits
        self.rows = [
            visit_bytes(allocations, v, n, self.always) for v, n in zip(slots.visits, slots.lengths, strict=True)
        ]
        end = 2 * len(layout.shaped)
        self.between = value_at(allocations, Position(forward, _LAST_SLOT)) - self.always
        # what lasts to the end of backward, and what of it is left for the optimizer
        last = Position(end, 0) if backward == end - 1 else Position(end - 1, _LAST_SLOT)
        self.after = value_at(allocations, last) - self.always
        self.reducing = value_at(allocations, Position(backward, _LAST_SLOT)) - self.always - self.after
        self.ahead, self.cast = self._prefetched(allocations, forward_issue(places, tables.cluster), forward, 0)
        self.ahead_again, self.cast_again = self._prefetched(allocations, places.issue_again, backward, self.between)
        left = value_at(allocations, Position(end, 0)) - self.always - self.after
        self.stepping = stepping_bytes(unit, option, places, tables.training, tables.cluster) + left
        self.far: IntArray | None = None
        own = _visits_of(places, layout)
        if not own <= set(slots.visits):  # it spans stages
            own |= set(slots.visits)  # there it has rows
            visits = [0 if v in own else value_at(allocations, Position(v, 0)) - self.always for v in range(end)]
            self.far = np.array(visits, dtype=np.int64)
            self.stepping += self.after  # in the visits before the optimizer it is part of `far`
            self.between = self.after = self.reducing = 0
            self.ahead = self.cast = self.ahead_again = self.cast_again = 0

    def _prefetched(
        self, allocations: Sequence[Allocation], issue: Position | None, visit: int, held: int
    ) -> tuple[int, int]:
        """What the unit's gather holds in the visit before its own, and what more at the moment of issue."""
        if issue is None or issue.visit >= visit:
            return 0, 0
        ahead = value_at(allocations, Position(visit - 1, _LAST_SLOT)) - self.always - held
        return ahead, value_at(allocations, issue) - self.always - held - ahead


def _visits_of(places: Places, layout: Layout) -> set[int]:
    """Where a unit is used, and where its gather is issued if that is not the visit before."""
    used = {p.visit for p in (places.enter, places.leave, places.enter_again, places.leave_again) if p is not None}
    issue = places.issue_again
    if issue is not None and places.enter_again is None and not is_before_last(places, layout):  # gathered in vain
        used.add(issue.visit)
    return used | {issue.visit for issue, enter in places.gathers if issue.visit < enter.visit - 1}


def cross_stage_units_of(tables: Tables, layout: Layout, index: int, slots: Slots) -> list[CrossStageUnit]:
    """Units of other stages that are used in this one; only stages outside blocks have any."""
    if layout.shaped[index].stage.is_block:
        return []
    cross_stage_units, at = [], 0
    for stage, shaped in enumerate(layout.shaped):
        for number, unit in enumerate(shaped.units):
            places = layout.places[at]
            at += 1
            if stage == index or not _visits_of(places, layout) & set(slots.visits):
                continue
            home = Slots((layout.visit(stage, False), layout.visit(stage, True)), (0, 0))
            rows: tuple[list[IntArray], list[IntArray]] = ([], [])
            for option in options_of(tables, layout, unit, places, home):
                assert isinstance(option.key, tuple)
                for which in (0, 1):
                    allocations = unit_allocations(unit, option.key[0], places, tables.training, tables.cluster)
                    line = visit_bytes(
                        allocations, slots.visits[which], slots.lengths[which], value_at(allocations, Position(-1, 0))
                    )
                    rows[which].append(np.stack([line, np.zeros_like(line)], axis=1))
            cross_stage_units.append(CrossStageUnit(stage, number, tuple(rows[0]), tuple(rows[1])))
    return cross_stage_units
