"""What each option of a unit costs, in the search's terms: bytes at every row, seconds on both streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from osdp.cost.issue_peaks import counted_twice
from osdp.cost.layout import Layout
from osdp.cost.lifetimes import forward_issue, stepping_bytes, unit_allocations
from osdp.cost.offload import can_offload, host_bytes
from osdp.cost.option_seconds import option_lines
from osdp.cost.positions import Allocation, Places, Position
from osdp.cost.slice_lifetimes import slice_growths
from osdp.cost.table_rows import Slots, is_before_last, pass_bytes, value_at
from osdp.cost.units import SLICES, Option, Unit
from osdp.model.graph import IntArray
from osdp.recompute import Recompute
from osdp.search.problem import BYTES, SECONDS, Amount, CrossStageUnit, Seconds, UnitOption
from osdp.sharding import FREE, REPLICATE, Scope

if TYPE_CHECKING:
    from osdp.cost.tables import Tables

_LAST_SLOT = 1 << 30
PLAIN_MODES = (REPLICATE, FREE)  # see [Note: Narrower] in osdp.search.narrow
Growths = tuple[IntArray, IntArray]


def slices_of(option: UnitOption) -> int:
    return max(key.slices for key in keys_of(option))


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
    held_by = unit.held_by(tables.cluster)
    modes = tables.rules.modes_of(unit, below, held_by)
    if unit.experts > 1:  # FSDP2 cannot shard anew what lies on two dimensions
        modes = tuple(mode for mode in modes if not mode.is_sharded_anew)
    several = tables.training.accumulation > 1 and unit.trained
    once = (True,) if several and tables.rules.only_reduced_once else (False, True) if several else (False,)
    variant = next((staged.variant for staged in layout.staged if unit in staged.units), None)
    is_deep = variant is not None and variant.prefetch > 1
    if is_deep:  # a replica is not gathered
        modes = tuple(mode for mode in modes if mode.is_sharded)
    is_selective = variant is not None and variant.recompute is Recompute.SELECTIVE
    may_split = tables.rules.split and not (is_deep or is_selective or tables.training.optimizer.is_whole)
    split = [slices for slices in SLICES if may_split and unit.can_split(slices)]
    found = []
    for mode, slices, o in itertools.product(modes, (1, *split), once):
        flat = _option(tables, layout, unit, places, slots, Option(mode, slices, 1, o))
        found.append(flat)
        if tables.rules.offload and unit.experts == 1:
            option = Option(mode, slices, 1, o, offload=True)
            may = can_offload(mode, option, tables.training, tables.cluster)
            found += [_option(tables, layout, unit, places, slots, option)] if may else []
        if several and not o and mode.is_reduced_across:
            option = Option(mode, slices, 1, all_reduce_once=True)
            found.append(_option(tables, layout, unit, places, slots, option))
        if mode.sharded_over is Scope.WORLD and tables.rules.two_levels and held_by.has_two_levels:
            option = Option(mode, slices, 1, o, two_levels=True)
            faster = _option(tables, layout, unit, places, slots, option)
            found += [faster] if _seconds(faster) < _seconds(flat) else []  # it never holds less
    if tables.training.accumulation > 1 and places.enter is not None:
        kept = [key for option in found for key in keys_of(option) if key.mode.is_kept and key.slices == 1]
        found += [_option(tables, layout, unit, places, slots, replace(key, gather_once=True)) for key in kept]
    return found


def keys_of(option: UnitOption) -> tuple[Option, ...]:
    assert isinstance(option.key, tuple)
    return option.key


def _seconds(option: UnitOption) -> float:
    return sum(getattr(option, name).at(option.slices) for name in SECONDS)


def together(units: Sequence[Sequence[UnitOption]], experts: Sequence[bool]) -> list[UnitOption]:
    """The options of a block whose units choose together: a mode and a number of slices; see [Note: Together]."""
    if not all(units):
        return []  # the pins leave some unit no mode
    by_key = [{option.key[0]: option for option in unit} for unit in units]  # type: ignore[index]
    wanted = dict.fromkeys(
        (key.mode, key.slices, _when(key), key.two_levels, key.offload)
        for unit, is_expert in zip(by_key, experts, strict=True)
        for key in unit
        if not is_expert or all(experts)
    )
    modes_of_experts = dict.fromkeys(
        key.mode for unit, is_expert in zip(by_key, experts, strict=True) if is_expert for key in unit
    )
    found = []
    for (mode_of_others, slices, when, two_levels, offload), mode_of_experts in itertools.product(
        wanted, modes_of_experts or (None,)
    ):
        taken = []
        for alike, is_expert in zip(by_key, experts, strict=True):
            mode = mode_of_experts if is_expert else mode_of_others
            unit = {key: o for key, o in alike.items() if key.offload == offload} or alike
            fits = [o for key, o in unit.items() if _when(key) == when or not any(_when(k) == when for k in unit)]
            modes = [o for o in fits if o.key[0].mode == mode] or fits  # type: ignore[index]
            exact = [o for o in modes if o.key[0].slices == slices] or modes  # type: ignore[index]
            levels = [o for o in exact if o.key[0].two_levels == two_levels] or exact  # type: ignore[index]
            alike = [o for o in levels if o.key[0].gather_once == when[-1]]  # type: ignore[index]
            taken.append((alike or levels or list(unit.values()))[0])
        found.append(_sum_of(taken))
    unique = {option.key: option for option in found}
    return list(unique.values())


def less_counted_twice(
    tables: Tables, units: Sequence[Unit], places: Sequence[Places], option: UnitOption, slots: Slots
) -> UnitOption:
    """A block's option with what two gathers that are issued at one place hold together; see [Note: Two at once]."""
    assert isinstance(option.key, tuple)
    less = counted_twice(units, option.key, places, tables.training, tables.cluster)
    cast, cast_backward = (
        Amount(amount.base + sum(each.nbytes for each in less if each.start.stage_pass == stage_pass - 1))
        for amount, stage_pass in zip((option.cast, option.cast_backward), slots.stage_passes, strict=True)
    )
    forward, backward = (
        np.stack([line, np.zeros_like(line)], axis=1)
        for line in (pass_bytes(less, v, n, 0) for v, n in zip(slots.stage_passes, slots.lengths, strict=True))
    )
    rows = {"forward": option.forward + forward, "backward": option.backward + backward}
    return replace(option, **rows, cast=cast, cast_backward=cast_backward)


def _when(option: Option) -> tuple[bool, bool, bool]:
    """Which of its reductions wait for the last micro-batch, and whether its gather is the first one's."""
    return option.reduce_once, option.all_reduce_once, option.gather_once


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
    sums: dict[str, Any] = {name: amount(name) for name in BYTES} | {name: seconds(name) for name in SECONDS}
    return UnitOption(
        key=tuple(keys),
        forward=_at_slices(options, "forward"),
        backward=_at_slices(options, "backward"),
        is_plain=all(option.is_plain for option in options),
        parts=tuple((option, option.slices) for option in options),
        **sums,
    )


def growth_rows(layout: Layout, units: Sequence[Unit], places: Sequence[Places], key: object, slots: Slots) -> Growths:
    """Of an option's slices, what grows with the batch: for both passes, [slot, constant or per sample]."""
    assert isinstance(key, tuple)
    rows = tuple(np.zeros((length, 2), dtype=np.int64) for length in slots.lengths)
    for unit, place, option in zip(units, places, key, strict=True):
        for growth in slice_growths(unit, option, place, layout.graph.operators):
            assert growth.start.stage_pass == growth.end.stage_pass
            line = growth.nbytes.constant, growth.nbytes.per_sample
            rows[slots.stage_passes.index(growth.start.stage_pass)][growth.start.slot : growth.end.slot] += line
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
        ahead_backward=amount(lambda m: m.ahead_backward),
        cast_backward=amount(lambda m: m.cast_backward),
        reducing=amount(lambda m: m.reducing),
        host=amount(lambda m: m.host),
        far=one.far,
        is_plain=option == Option(option.mode, reduce_once=option.reduce_once) and option.mode in PLAIN_MODES,
        **lines,
    )


class _Measured:
    """The bytes and seconds of one option at one number of sharded slices."""

    def __init__(
        self, tables: Tables, layout: Layout, unit: Unit, places: Places, slots: Slots, option: Option
    ) -> None:
        allocations = unit_allocations(unit, option, places, tables.training, tables.cluster)
        self.always = value_at(allocations, Position(-1, 0))
        forward, backward = slots.stage_passes
        self.rows = [
            pass_bytes(allocations, v, n, self.always) for v, n in zip(slots.stage_passes, slots.lengths, strict=True)
        ]
        end = 2 * len(layout.staged)
        self.between = value_at(allocations, Position(forward, _LAST_SLOT)) - self.always
        # what lasts to the end of backward, and what of it is left for the optimizer
        last = Position(end, 0) if backward == end - 1 else Position(end - 1, _LAST_SLOT)
        self.after = value_at(allocations, last) - self.always
        self.reducing = value_at(allocations, Position(backward, _LAST_SLOT)) - self.always - self.after
        self.ahead, self.cast = self._prefetched(allocations, forward_issue(places, tables.cluster), forward, 0)
        self.ahead_backward, self.cast_backward = self._prefetched(
            allocations, places.issue_backward, backward, self.between
        )
        left = value_at(allocations, Position(end, 0)) - self.always - self.after
        self.stepping = stepping_bytes(unit, option, places, tables.training, tables.cluster) + left
        self.host = host_bytes(unit, option, places, tables.training, tables.cluster)
        self.far: IntArray | None = None
        own = _passes_of(places, layout)
        if not own <= set(slots.stage_passes):  # it spans stages
            own |= set(slots.stage_passes)  # there it has rows
            stage_passes = [0 if v in own else value_at(allocations, Position(v, 0)) - self.always for v in range(end)]
            self.far = np.array(stage_passes, dtype=np.int64)
            self.stepping += self.after  # in the passes before the optimizer it is part of `far`
            self.between = self.after = self.reducing = 0
            self.ahead = self.cast = self.ahead_backward = self.cast_backward = 0

    def _prefetched(
        self, allocations: Sequence[Allocation], issue: Position | None, stage_pass: int, held: int
    ) -> tuple[int, int]:
        """What the unit's gather holds in the pass before its own, and what more at the moment of issue."""
        if issue is None or issue.stage_pass >= stage_pass:
            return 0, 0
        ahead = value_at(allocations, Position(stage_pass - 1, _LAST_SLOT)) - self.always - held
        return ahead, value_at(allocations, issue) - self.always - held - ahead


def _passes_of(places: Places, layout: Layout) -> set[int]:
    """Where a unit is used, and where its gather is issued if that is not the pass before."""
    used = {
        p.stage_pass
        for p in (places.enter, places.leave, places.enter_backward, places.leave_backward)
        if p is not None
    }
    issue = places.issue_backward
    if issue is not None and places.enter_backward is None and not is_before_last(places, layout):  # gathered in vain
        used.add(issue.stage_pass)
    return used | {issue.stage_pass for issue, enter in places.gathers if issue.stage_pass < enter.stage_pass - 1}


def cross_stage_units_of(tables: Tables, layout: Layout, index: int, slots: Slots) -> list[CrossStageUnit]:
    """Units of other stages that are used in this one; only stages outside blocks have any."""
    if layout.staged[index].stage.is_block:
        return []
    cross_stage_units, at = [], 0
    for stage, staged in enumerate(layout.staged):
        for number, unit in enumerate(staged.units):
            places = layout.places[at]
            at += 1
            if stage == index or not _passes_of(places, layout) & set(slots.stage_passes):
                continue
            home = Slots((layout.stage_pass(stage, False), layout.stage_pass(stage, True)), (0, 0))
            rows: tuple[list[IntArray], list[IntArray]] = ([], [])
            for option in options_of(tables, layout, unit, places, home):
                assert isinstance(option.key, tuple)
                for which in (0, 1):
                    allocations = unit_allocations(unit, option.key[0], places, tables.training, tables.cluster)
                    line = pass_bytes(
                        allocations,
                        slots.stage_passes[which],
                        slots.lengths[which],
                        value_at(allocations, Position(-1, 0)),
                    )
                    rows[which].append(np.stack([line, np.zeros_like(line)], axis=1))
            cross_stage_units.append(CrossStageUnit(stage, number, tuple(rows[0]), tuple(rows[1])))
    return cross_stage_units
