"""Parts of a problem's space that are searched first.

[Note: Narrower]
What a search returns when time ends it early may be less than the best of a small part of its space, which would have
been found in a fraction of that time. So two parts come first, each at most with its share of the time, and what they
find is to be beaten from then on: blocks gathered whole with units that are replicas or sharded over all ranks and in
nothing else (the space of the paper that this library grew out of), then blocks gathered whole with every option.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

from osdp.search.chain_tables import count_choices, spanning_units
from osdp.search.problem import Problem, StageChoice, StageTable

_Kept = list[tuple[int, list[list[int]]]]  # the numbers of variants, and of each one's units' options


class Part(Enum):
    """Parts of a space, the smallest first."""

    PLAIN = "whole blocks, plain options"
    WHOLE = "whole blocks"


def _kept(problem: Problem, part: Part) -> dict[int, _Kept]:
    """What a part has of each kind of stage; all options of a unit or variants of a stage if it has none of them."""
    several = {(id(problem.stages[home].variants), unit) for home, unit in spanning_units(problem)}
    found: dict[int, _Kept] = {}
    for stage in problem.stages:
        kind = id(stage.variants)
        if kind in found:
            continue
        variants = [n for n, each in enumerate(stage.variants) if each.is_whole] or list(range(len(stage.variants)))
        found[kind] = []
        for number in variants:
            units = stage.variants[number].units
            every = [list(range(len(unit))) for unit in units]
            if part is Part.PLAIN:
                plain = [[o for o, option in enumerate(unit) if option.is_plain] for unit in units]
                every = [
                    few if few and (kind, u) not in several else all_
                    for u, (few, all_) in enumerate(zip(plain, every, strict=True))
                ]
            found[kind].append((number, every))
    return found


def narrowed(problem: Problem, part: Part) -> Problem:
    """A part of a problem's space, as a problem."""
    kept, made = _kept(problem, part), {}
    stages: list[StageTable] = []
    for stage in problem.stages:
        kind = id(stage.variants)
        if kind not in made:
            made[kind] = tuple(
                replace(
                    stage.variants[number],
                    units=tuple(
                        tuple(unit[o] for o in options)
                        for unit, options in zip(stage.variants[number].units, units, strict=True)
                    ),
                )
                for number, units in kept[kind]
            )
        stages.append(replace(stage, variants=made[kind]))
    return replace(problem, stages=tuple(stages), known={})


def widened(problem: Problem, part: Part, choice: tuple[StageChoice, ...]) -> tuple[StageChoice, ...]:
    """A choice of that part as one of the whole problem."""
    kept = _kept(problem, part)

    def widen(stage: StageTable, taken: StageChoice) -> StageChoice:
        number, units = kept[id(stage.variants)][taken.variant]
        options = zip(units, taken.options, strict=True)
        return StageChoice(number, tuple((numbers[o], sharded) for numbers, (o, sharded) in options))

    return tuple(map(widen, problem.stages, choice))


def parts_of(problem: Problem) -> Iterator[Part]:
    """The parts that are smaller than those after them, and than the problem."""

    def size(of: Problem) -> list[int]:
        return [count_choices(stage) for stage in of.stages]

    sizes = [*(size(narrowed(problem, part)) for part in Part), size(problem)]
    for number, part in enumerate(Part):
        if sizes[number] != sizes[number + 1]:
            yield part
