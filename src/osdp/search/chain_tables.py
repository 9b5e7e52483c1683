"""The whole choices of a stage as arrays: what going through the stages one by one needs; see [Note: Labels]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from osdp.search.evaluate import TakenStage, rows_of_other_stages, units_of_other_stages
from osdp.search.problem import FloatArray, IntArray, Problem, StageChoice, StageTable, UnitOption
from osdp.search.streams import CLOCKS, COMPUTE, NEVER

Unit = tuple[int, int]  # of which stage, and its number there
Fixed = Mapping[Unit, tuple[int, int]]  # the units that act in several stages: option and sharded slices
Parts = dict[tuple[int, int], FloatArray]  # the entries of many matrices that are ever more than NEVER: [choice]
Seen = tuple[int, ...]  # what a stage holds in its neighbours' passes


def stage_choices(stage: StageTable) -> Iterator[StageChoice]:
    """Every choice of a stage there is."""
    for index, variant in enumerate(stage.variants):
        units = [[(o, k) for o, option in enumerate(options) for k in option.counts] for options in variant.units]
        for options in product(*units):
            yield StageChoice(index, tuple(options))


def count_choices(stage: StageTable) -> int:
    return sum(prod(sum(len(o.counts) for o in options) for options in variant.units) for variant in stage.variants)


def spanning_units(problem: Problem) -> list[Unit]:
    """The units that hold bytes or act in other stages than their own."""
    found: set[Unit] = set()
    for number, stage in enumerate(problem.stages):
        for variant in stage.variants:
            found |= {unit for each in variant.passes for unit in units_of_other_stages(each)}
            found |= {(other.stage, other.unit) for other in variant.cross_stage_units}
            found |= {(number, u) for u, options in enumerate(variant.units) if any(o.far is not None for o in options)}
    return sorted(found)


def all_fixed(problem: Problem) -> list[Fixed]:
    """Every choice of the units that act in several stages; a list of nothing where there are none."""
    units = spanning_units(problem)
    options = [problem.stages[stage].variants[0].units[unit] for stage, unit in units]
    each = [[(o, k) for o, option in enumerate(of) for k in option.counts] for of in options]
    return [dict(zip(units, taken, strict=True)) for taken in product(*each)]


def depends(stage: StageTable, number: int, fixed: Fixed) -> bool:
    """Whether what a stage costs depends on the units that act in several."""
    return any(home == number for home, _ in fixed) or any(
        variant.cross_stage_units or any(units_of_other_stages(each) for each in variant.passes)
        for variant in stage.variants
    )


class StageItems:
    """All choices of a stage: seconds as matrices, scaled by how often they count; bytes as whole numbers."""

    def __init__(self, problem: Problem, number: int, fixed: Fixed, scale: float) -> None:
        table = problem.stages[number]
        here = [(unit, taken) for (home, unit), taken in fixed.items() if home == number]
        self.choices = [c for c in stage_choices(table) if all(c.options[unit] == taken for unit, taken in here)]
        self._taken = taken = [TakenStage(table, choice) for choice in self.choices]
        self._others = [rows_of_other_stages(each.variant, fixed) for each in taken]
        given = {
            unit: (problem.stages[unit[0]].variants[0].units[unit[1]][option], sharded)
            for unit, (option, sharded) in fixed.items()
        }
        self.always = _each(taken, "always")
        self.stepping = _each(taken, "stepping")
        saved = np.array([each.variant.saved for each in taken], np.int64)
        self.held = self.always + _each(taken, "between") + saved  # in the rows of all stages behind it
        self.behind = _each(taken, "after") + saved + np.array([each.variant.freed for each in taken], np.int64)
        self._saved = saved
        self.rights, self.right_of = _classes(taken, ("ahead", "cast", "reducing"))
        self.lefts, self.left_of = _classes(taken, ("ahead_backward", "cast_backward"))
        self._seconds(problem, taken, given, scale)

    def _seconds(
        self,
        problem: Problem,
        taken: Sequence[TakenStage],
        given: dict[Unit, tuple[UnitOption, int]],
        scale: float,
    ) -> None:
        kinds = [(micro, times * scale) for micro, times in problem.micro_batches]
        overlap = problem.overlap
        forward = [[each.matrix(False, micro, given) * times * overlap for micro, times in kinds] for each in taken]
        backward = [[each.matrix(True, micro, given) * times * overlap for micro, times in kinds] for each in taken]
        self.forward, self.backward = np.array(forward), np.array(backward)  # [choice, micro-batches, from, to]
        self.forward_parts, self.backward_parts = _parts(self.forward), _parts(self.backward)
        serial = [each.step_seconds * scale for each in taken]
        if overlap < 1:
            passes = (False, True)
            serial = [
                seconds + (1 - overlap) * sum(t * each.serial_seconds(micro, given, passes) for micro, t in kinds)
                for seconds, each in zip(serial, taken, strict=True)
            ]
        self.serial = np.array(serial)
        computing = (slice(None), slice(None), COMPUTE, COMPUTE)
        self.computing: FloatArray = (self.forward[computing] + self.backward[computing]).sum(1) + self.serial

    def __len__(self) -> int:
        return len(self.choices)

    def rows(self, lefts: Sequence[Seen], rights: Sequence[Seen]) -> tuple[IntArray, IntArray]:
        """The highest rows of both passes, by what the neighbours hold: [choice, right], [choice, right, left]."""
        forward = [(ahead, cast, 0) for ahead, cast, _ in rights]
        backward = [(ahead, cast, right[2]) for right in rights for ahead, cast in lefts]
        pairs = list(zip(self._taken, self._others, strict=True))
        first = np.stack([taken.highest_each(False, forward, others[0]) for taken, others in pairs])
        second = np.stack([taken.highest_each(True, backward, others[1]) for taken, others in pairs])
        second = second.reshape(len(pairs), len(rights), len(lefts))
        return first, second + self._saved[:, None, None]


def _each(taken: Sequence[TakenStage], name: str) -> IntArray:
    return np.array([each.totals[name] for each in taken], np.int64)


def _classes(taken: Sequence[TakenStage], names: Sequence[str]) -> tuple[list[Seen], IntArray]:
    """What differs in what neighbours see, and which of these each choice is."""
    found = [tuple(each.totals[name] for name in names) for each in taken]
    kinds = sorted(set(found))
    return kinds, np.array([kinds.index(each) for each in found])


def _parts(matrices: FloatArray) -> list[Parts]:
    """By the kind of micro-batch, of [choice, micro-batches, from, to]."""
    return [
        {(int(a), int(b)): each[:, a, b].copy() for a, b in np.argwhere(np.isfinite(each).any(axis=0))}
        for each in matrices.swapaxes(0, 1)
    ]


def passed_through(forward: Parts, choice: IntArray, inner: FloatArray, backward: Parts) -> FloatArray:
    """Matrices [from, to, pair] of what lies inside, with a choice's passes around each of them."""
    between = _product({ends: part[choice] for ends, part in forward.items()}, _finite(inner))
    made = _product(between, {ends: part[choice] for ends, part in backward.items()})
    found = np.full((CLOCKS, CLOCKS, len(choice)), NEVER)
    for (a, b), seconds in made.items():
        found[a, b] = seconds
    return found


def _finite(matrices: FloatArray) -> Parts:
    return {(int(a), int(b)): matrices[a, b] for a, b in np.argwhere(np.isfinite(matrices).any(axis=2))}


def _product(left: Parts, right: Parts) -> Parts:
    """One pass after another."""
    found: Parts = {}
    for (a, b), first in left.items():
        for (c, d), second in right.items():
            if b == c:
                whole = first + second
                found[a, d] = np.maximum(found[a, d], whole, out=whole) if (a, d) in found else whole
    return found
