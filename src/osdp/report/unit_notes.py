"""What units do beyond their mode, in sentences: when they are gathered and reduced, and over which groups."""

from __future__ import annotations

from collections.abc import Callable

from osdp.recompute import Recompute
from osdp.report.page import PlanPage, UnitRow

SHOWN_PLACES = 4
# What a unit does beyond its mode, in words: when it is gathered and reduced, and over which groups.
UNIT_NOTES: tuple[tuple[Callable[[UnitRow], bool], str], ...] = (
    (lambda unit: unit.reduce_once, "gradients reduced once a step, by the last micro-batch"),
    (
        lambda unit: unit.all_reduce_once,
        "gradients reduced in the node by each micro-batch, and across nodes once a step",
    ),
    (lambda unit: unit.gather_once, "gathered once a step, by the first micro-batch, and freed by the last"),
    (lambda unit: unit.two_levels, "two levels (collectives across nodes, then in each node)"),
    (lambda unit: unit.prefetch > 1, "prefetch of two units instead of one"),
)


def unit_notes(page: PlanPage) -> tuple[str, ...]:
    """What units do beyond their mode, a sentence each with the units that do it."""
    notes = [
        f"{text}: {_places(page, does)}"
        for does, text in UNIT_NOTES
        if any(does(unit) for group in page.groups for unit in group.units)
    ]
    if page.buckets:
        joined = "one all-reduce" if len(page.buckets) == 1 else f"{len(page.buckets)} all-reduces"
        notes.append(f"{sum(page.buckets)} replicated units are reduced in {joined}")
    if any(group.recompute is Recompute.ON_HOST for group in page.groups):
        notes.append("recompute host: in full, and the block's input is on the host until then")
    return tuple(notes)


def _places(page: PlanPage, does: Callable[[UnitRow], bool]) -> str:
    found, all_units = [], True
    for group in page.groups:
        mine = [unit for unit in group.units if does(unit)]
        all_units &= len(mine) == len(group.units)
        if len(mine) == len(group.units):
            found.append(group.label or "the whole model")
        elif mine:
            found.append(f"{', '.join(unit.name or 'the rest' for unit in mine)} of {group.label}")
    more = [f"{len(found) - SHOWN_PLACES} more rows"] if len(found) > SHOWN_PLACES else []
    return "all units" if all_units else "; ".join([*found[:SHOWN_PLACES], *more])
