"""Planners that add up a time and a number of megabytes for each layer: the original's, and Galvatron's compiled core.

Both are given each layer's seconds and bytes from osdp's tables, as in `bench_against_table`. What layers need beyond
what they hold, while they run, is no layer's: it is taken off the limit. In good faith that is as little as can be: by
halving, the most megabytes are found at which what is chosen for them fits by osdp's timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bench_against_table import MIB, bytes_of, choices_of, seconds_of
from table_search import Item, vectorised

from osdp.cost.tables import Rules
from osdp.cost.units import WHOLE
from osdp.recompute import Recompute
from osdp.search.evaluate import evaluate
from osdp.search.problem import Problem, StageChoice, StageTable
from osdp.sharding import FREE, KEEP, REPLICATE
from planners.judge import Answer, Case, Space, cpu_seconds, judged, plan_of

HALVINGS = 6  # of the megabytes that layers may hold
ORIGINAL = Rules(modes=(REPLICATE, FREE), split=False, granularities=(WHOLE,), two_levels=False, prefetch=(1,))
GALVATRON = Rules(
    modes=(REPLICATE, KEEP, FREE),
    split=False,
    recompute=(Recompute.NONE, Recompute.FULL),
    granularities=(WHOLE,),
    two_levels=False,
    prefetch=(1,),
)

Search = Callable[[list[Item], int], list[int] | None]
LayerSeconds = Callable[[StageTable, StageChoice], float]


def overlapped_seconds(stage: StageTable, choice: StageChoice) -> float:
    """The longer of a layer's compute and its communication, as if one hid behind the other within the layer."""
    variant = stage.variants[choice.variant]
    compute = variant.forward_pass.seconds + variant.backward_pass.seconds
    return max(compute, seconds_of(stage, choice) - compute)


def layer_items(problem: Problem, seconds: LayerSeconds) -> tuple[list[Item], list[list[StageChoice]]]:
    """Each layer's seconds and megabytes of each of its choices, and the choices."""
    kinds: dict[int, tuple[Item, list[StageChoice]]] = {}
    for stage in problem.stages:
        if id(stage.variants) not in kinds:
            choices = choices_of(stage)
            kinds[id(stage.variants)] = [(seconds(stage, c), -(-bytes_of(stage, c) // MIB)) for c in choices], choices
    made = [kinds[id(stage.variants)] for stage in problem.stages]
    return [item for item, _ in made], [choices for _, choices in made]


def galvatron_core(items: list[Item], megabytes: int) -> list[int] | None:
    """Galvatron's dynamic programming, compiled as its package compiles it; changes of strategy cost nothing here."""
    import galvatron_dp_core  # pyrefly: ignore[missing-import]

    layers, options = len(items), max(len(item) for item in items)
    too_much = megabytes + 1
    needs = np.full((layers, options), too_much, dtype=np.int32)
    costs = np.zeros((layers, options))
    for number, item in enumerate(items):
        needs[number, : len(item)] = [min(need, too_much) for _, need in item]
        costs[number, : len(item)] = [seconds for seconds, _ in item]
    chosen = np.full(layers, -1, dtype=np.int32)
    mark = np.full((layers, megabytes + 1, options), -1, dtype=np.int32)
    best = np.zeros((megabytes + 1, options))
    changes = np.zeros((layers, options, options))
    given: tuple[Any, ...] = (layers, megabytes + 1, options, needs, mark, best, changes, costs)
    total, _ = galvatron_dp_core.dynamic_programming_core(*given, {1: 0}, {1: 0.0}, {1: chosen})
    return chosen.tolist() if np.isfinite(total[1]) else None


def best_choice(
    problem: Problem, search: Search, seconds: Sequence[LayerSeconds]
) -> tuple[float, tuple[StageChoice, ...]] | None:
    """The fastest by osdp's measure of what the search chooses with each way of adding up; None where nothing fits."""
    best: tuple[float, tuple[StageChoice, ...]] | None = None
    for way in seconds:
        items, choices = layer_items(problem, way)
        low, high = sum(min(need for _, need in item) for item in items), (problem.limit - problem.constant) // MIB
        for tried in range(HALVINGS):
            megabytes = (low, high)[tried] if tried < 2 else (low + high) // 2
            numbers = search(items, megabytes) if megabytes >= 0 else None
            if numbers is None:
                break
            choice = tuple(each[number] for each, number in zip(choices, numbers, strict=True))
            verdict = evaluate(problem, choice)
            fits = verdict.peak <= problem.limit
            if fits and (best is None or verdict.seconds < best[0]):
                best = verdict.seconds, choice
            if (tried == 0 and not fits) or (tried == 1 and fits):
                break
            low, high = (megabytes, high) if fits else (low, megabytes)
    return best


def by_layer_table(
    planner: str, case: Case, rules: Rules, search: Search, seconds: Sequence[LayerSeconds], *, dry: bool
) -> Answer | None:
    """The planner's best over all batch sizes, and all cases of recompute."""
    began = cpu_seconds()
    best: tuple[float, Space, int, tuple[StageChoice, ...]] | None = None
    for recomputed in (False, True):
        space = Space(case, rules, recomputed=recomputed)
        for batch in space.sizes():
            found = best_choice(space.problem(batch), search, seconds)
            if found is not None and (best is None or found[0] / batch < best[0]):
                best = found[0] / batch, space, batch, found[1]
        if space.recomputed is None:
            break
    if best is None:
        return None
    used = cpu_seconds() - began
    _, space, batch, choice = best
    return judged(planner, case, plan_of(case, space.step(batch, choice)), seconds=used, dry=dry)


def original(case: Case, *, dry: bool) -> Answer | None:
    return by_layer_table("OSDP's table", case, ORIGINAL, vectorised, [seconds_of], dry=dry)


def galvatron(case: Case, *, dry: bool) -> Answer | None:
    ways = [seconds_of, overlapped_seconds]
    return by_layer_table("Galvatron's core", case, GALVATRON, galvatron_core, ways, dry=dry)
