"""osdp's search against the paper's released way of searching, on the same cost tables and the same choices.

The released way is a table over whole megabytes in Python (see `table_search`). It needs one time and one number of
megabytes for each option of each layer. Both come from osdp's tables: the layer's seconds with communication added
(overlap is off for both), and always held + held between the passes + saved activations. What a layer needs beyond
that while it runs is taken off the limit once, at the largest of any layer. Both search one batch size; whatever the
table chooses is judged by osdp's `evaluate`, which walks through all rows of the step.

Training is in fp32, as on these devices: there replicating a layer saves a third of its traffic and costs memory. (In
bf16 with gradients reduced in fp32 both send the same, sharding is never slower, and there would be nothing to choose.)
Options: 2 are replicate and free, 4 are both with and without recompute. Columns: the batch size `of` all that may fit;
`repl.` stages with something replicated in osdp's choice; `all sizes s` osdp's seconds for all batch sizes together.
Target: at least 500 times faster than the released way, at an equal or better objective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
from captured import captured
from common import Row, deliver, met, parser, timed
from table_search import Item, by_option, lean

from osdp.batching import LARGEST_MICRO_BATCH
from osdp.cluster import Cluster
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.cost.units import WHOLE
from osdp.model.graph import ModelGraph
from osdp.recompute import Recompute
from osdp.search.batches import Candidate, largest_batch, search_batches
from osdp.search.evaluate import TakenStage, evaluate
from osdp.search.problem import ALONE, Problem, StageChoice, StageTable, UnitOption
from osdp.search.solve import Outcome, solve_exactly
from osdp.sharding import FREE, REPLICATE

MIB = 1 << 20
NOTHING = UnitOption(None, np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64))
TARGET = 500.0
MODELS = ("gpt-48x2048", "gpt-96x1024")
RULES = {
    "2": Rules(modes=(REPLICATE, FREE), split=False, recompute=(Recompute.NONE,), granularities=(WHOLE,)),
    "4": Rules(modes=(REPLICATE, FREE), split=False, granularities=(WHOLE,)),
}
SEARCHES = {"as released": by_option, "lean": lean}


def choices_of(stage: StageTable) -> list[StageChoice]:
    return [
        StageChoice(number, options)
        for number, variant in enumerate(stage.variants)
        for options in product(*([(o, 1) for o in range(len(unit))] for unit in variant.units))
    ]


def taken(stage: StageTable, choice: StageChoice) -> list[UnitOption]:
    return [unit[o] for unit, (o, _) in zip(stage.variants[choice.variant].units, choice.options, strict=True)]


def seconds_of(stage: StageTable, choice: StageChoice) -> float:
    """All that a layer and its units take, one after the other; what it does with another layer's units is left out."""
    own = TakenStage(stage, choice)
    return own.serial_seconds(ALONE, defaultdict(lambda: (NOTHING, 1)), (False, True)) + own.step_seconds


def bytes_of(stage: StageTable, choice: StageChoice) -> int:
    held = sum(option.always.at(1) + option.between.at(1) for option in taken(stage, choice))
    return held + stage.variants[choice.variant].saved


def working_set(stage: StageTable, choice: StageChoice) -> int:
    """The most that a layer needs in backward beyond what it holds anyway, its own buffers included."""
    variant, options = stage.variants[choice.variant], taken(stage, choice)
    rows = variant.backward.activations + np.sum([option.backward @ np.array([1, 1]) for option in options], axis=0)
    return int(rows.max())


def stage_replicates(stage: StageTable, choice: StageChoice) -> bool:
    """Whether a unit of the stage is replicated in this choice."""
    keys = [key for option in taken(stage, choice) if isinstance(option.key, tuple) for key in option.key]
    return any(key.mode == REPLICATE for key in keys)


def as_items(problem: Problem) -> tuple[list[Item], int]:
    """The layers of a problem as the table search knows them, and the megabytes for them."""
    items: list[Item] = []
    largest = 0
    for stage in problem.stages:
        choices = choices_of(stage)
        items.append([(seconds_of(stage, c), -(-bytes_of(stage, c) // MIB)) for c in choices])
        largest = max(largest, *(working_set(stage, c) for c in choices))
    return items, (problem.limit - problem.constant - largest) // MIB


def table_choice(
    problem: Problem, search: Callable[[list[Item], int], list[int] | None]
) -> tuple[StageChoice, ...] | None:
    items, megabytes = as_items(problem)
    chosen = search(items, megabytes) if megabytes >= 0 else None
    if chosen is None:
        return None
    return tuple(choices_of(stage)[option] for stage, option in zip(problem.stages, chosen, strict=True))


def rows_of(graph: ModelGraph, cluster: Cluster, options: str) -> list[Row]:
    """At the best batch size of this space; beside it, what osdp takes for all batch sizes together."""
    tables = Tables(graph, cluster, Training.of("fp32", "adamw", None), RULES[options])

    def make(batch: int, time_batch: int) -> Problem:
        return tables.problem(batch, limit=cluster.limit_bytes, time_batch=time_batch)

    largest, bounding = timed(lambda: largest_batch(make, most=LARGEST_MICRO_BATCH))
    found, searching = timed(lambda: search_batches([Candidate(WHOLE, make, 1, 1, largest)], seconds=60.0))
    if found is None:
        raise SystemExit(f"{graph.name} does not fit {cluster.label}")
    problem = make(found.batch, found.batch)
    outcome, exact = timed(lambda: solve_exactly(problem), times=3)
    shared = {"model": graph.name, "options": options, "batch": found.batch, "of": largest}
    return [
        {**shared, **compared(problem, outcome, exact, name), "all sizes s": bounding + searching} for name in SEARCHES
    ]


def compared(problem: Problem, outcome: Outcome, exact: float, name: str) -> Row:
    choice, seconds = timed(lambda: table_choice(problem, SEARCHES[name]))
    verdict = None if choice is None else evaluate(problem, choice)
    assert outcome.verdict is not None
    return {
        "repl.": sum(stage_replicates(s, c) for s, c in zip(problem.stages, outcome.choice or (), strict=True)),
        "osdp s": exact,
        "table": name,
        "table s": seconds,
        "chooses": "none" if verdict is None else "fits" if verdict.peak <= problem.limit else "exceeds memory",
        "step/osdp's": None if verdict is None else f"{verdict.seconds / outcome.verdict.seconds:.5f}",
        "faster": seconds / exact,
        "target": met(seconds / exact, TARGET, least=True),
    }


def main() -> None:
    given = parser(__doc__).parse_args()
    cluster = replace(Cluster.parse("8xRTX-TITAN"), overlap=False)
    rows: list[Row] = []
    for model in MODELS:
        graph = captured(model, Training.of("fp32", "adamw", None))
        for options in RULES:
            rows += rows_of(graph, cluster, options)
    title = f"One batch size, {cluster.label}, fp32, overlap off; target: {TARGET:.0f} times faster"
    deliver({title: rows}, as_json=given.json)


if __name__ == "__main__":
    main()
