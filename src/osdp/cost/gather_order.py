"""Who issues whose gather: the one place that says it. Positions, events and FSDP2's prefetch lists are read off it.

[Note: Prefetch]
Every unit issues the next one's gather when its own is done, in both directions, so that one gather is under way
while one unit computes. The gather's buffer lives from there until the next unit has copied it out. On asynchronous
gloo, forward issues it before it waits for its own, so that the link is not idle while that is copied
out. The step's first unit and slices wait first.

[Note: Depth]
A block that is gathered by operators may have a prefetch depth of two. Then whoever issues the gather of one of its
units issues that of the block's next unit too: each of its units gathers two ahead, as far as the block goes, and the
unit before the block its first two. Its last unit gathers what follows as ever. So all that is issued from outside the
block is issued at one place, one gather behind the other. What gains are operators behind a short one (the first of a
block, behind its norm; an up-projection, behind the attention's projection): their gathers have time to hide.
In a block that is recomputed, backward needs the last unit first, as its gradient arrives, and then those of the second
forward from the first on. At depth two it gathers them in that order; at depth one it gathers the last but one before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

from osdp.planfile import PlanUnit


class Entered(Protocol):
    """What forward enters: a unit of a plan, or one that may become one."""

    @property
    def name(self) -> str: ...

    @property
    def modules(self) -> tuple[str, ...]: ...


E = TypeVar("E", bound=Entered)
T = TypeVar("T", bound=Hashable)


def backward_order(units: Sequence[E]) -> list[E]:
    """Units in the order in which backward reaches them: the reverse of that in which forward leaves them.

    `units` are in the order in which forward enters them. A module is left after all that is below it, a unit of
    several modules with the last of them.
    """

    def left(index: int) -> tuple[int, int]:
        unit = units[index]
        if len(unit.modules) > 1:
            return len(units), -1
        name = unit.name
        below = [i for i, other in enumerate(units) if not name or (other.name + ".").startswith(name + ".")]
        return (len(units) + 1 if not name else max(below)), -len(name.split("."))

    return [units[index] for index in sorted(range(len(units)), key=left, reverse=True)]


class Place(NamedTuple):
    """Where a unit, or a piece of one, is: in which block, if any, and what that block does."""

    block: str | None
    depth: int
    recomputed: bool
    is_whole_block: bool  # its module is the block itself, which backward reaches before what is in it


def forward_gathers(order: Sequence[T], place: Callable[[T], Place]) -> dict[T, tuple[T, ...]]:
    """What each unit, or piece, issues the gathers of as forward enters it; `order` is that of entering."""
    return {one: _first(order[at + 1 : at + 3], place) for at, one in enumerate(order[:-1])}


def _first(next_two: Sequence[T], place: Callable[[T], Place]) -> tuple[T, ...]:
    """Which of the next two are gathered: the first, and the other one if both are of a deep block."""
    block, depth = place(next_two[0])[:2]
    is_deep = depth > 1 and all(place(one).block == block for one in next_two)
    return tuple(next_two if is_deep else next_two[:1])


def backward_gathers(order: Sequence[T], place: Callable[[T], Place]) -> dict[T, tuple[T, ...]]:
    """The same as backward reaches it; `order` is that of `backward_order`."""
    found: dict[T, tuple[T, ...]] = {}
    behind: list[T] = []  # the first two that come after a block, in the order in which backward needs them
    for _, run in groupby(reversed(order), key=lambda one: place(one).block):
        own = list(run)[::-1]
        needed, reached = own, len(own)
        if (first := place(own[0])).block is not None and first.depth > 1 and first.recomputed:
            reached = 2 if first.is_whole_block else 1  # before the second forward, which runs the other way
            needed = [*own[:reached], *reversed(own[reached:])]
        for at, one in enumerate(own):
            following = needed[at + 1 : at + 3] if at < reached else own[at + 1 : at + 2]
            if next_two := [*following, *behind][:2] if at < reached else following or behind:
                found[one] = _first(next_two, place)
        behind = [*needed, *behind][:2]
    return {one: found[one] for one in order if one in found}


def planned_place(unit: PlanUnit) -> Place:
    return Place(unit.block, unit.prefetch, bool(unit.recompute), unit.name == unit.block)
