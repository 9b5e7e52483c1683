"""How the search's time grows: with distinct layers, with options of a layer, and with devices.

Layers and options: one batch size, by `solve_exactly`. Each layer is a real block's table (a block of `gpt-48x2048` as
osdp.cost.tables makes it), scaled by sizes drawn with a fixed seed, so that no two layers are alike and nothing can be
grouped. The limit lies between the smallest peak of the uniform choices and the peak of the fastest choice. Planning
also looks for the best batch size: that is a table of its own. Devices: `gpt-48x2048` captured once, planned over all
batch sizes. Target: each within a minute.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product
from time import perf_counter

import numpy as np
from captured import captured
from common import Row, deliver, met, parser, timed

from osdp.batching import LARGEST_MICRO_BATCH
from osdp.cluster import Cluster
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.model.graph import ModelGraph
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.search.batches import Candidate, largest_batch, search_batches
from osdp.search.evaluate import evaluate
from osdp.search.problem import Amount, Problem, Rows, Seconds, StageChoice, StageTable, UnitOption, VariantTable
from osdp.search.solve import solve_exactly
from osdp.sharding import FREE, KEEP, MODES, REPLICATE

MODEL = "gpt-48x2048"
LAYERS = (12, 48, 96, 250, 500, 1000)
LAYERS_ALL_BATCHES = (48, 250, 1000)
NODES = (1, 2, 8, 32, 128, 512, 2048)
TARGET_SECONDS = 60.0
GIVE_UP_SECONDS = 150
BATCH = 4
LIMIT_SHARE = 0.6  # of the way from the smallest peak to the fastest choice's
ALIGNMENT = 512
OPTIONS: dict[str, tuple[str, Rules]] = {
    "replicate, free": ("8xA100-80GB", Rules(modes=(REPLICATE, FREE), split=False, recompute=(Recompute.NONE,))),
    "replicate, free; recompute": ("8xA100-80GB", Rules(modes=(REPLICATE, FREE), split=False)),
    "replicate, keep, free; recompute": ("8xA100-80GB", Rules(modes=(REPLICATE, KEEP, FREE), split=False)),
    "all six modes; recompute": ("4x8xA100-80GB", Rules(modes=MODES, split=False)),
}
THREE, SIX = list(OPTIONS)[2:]


class Scaled:
    """A block's table at another size: what parameters cost by one factor, activations and compute by others."""

    def __init__(self, random: np.random.Generator) -> None:
        width = float(random.uniform(0.6, 1.6))
        self.parameters = width**2 * float(random.uniform(0.9, 1.1))
        self.activations = width * float(random.uniform(0.9, 1.1))
        self.compute = width**2 * float(random.uniform(0.9, 1.1))
        self.known: dict[object, UnitOption] = {}  # options but for their rows, which alone depend on the batch size

    @staticmethod
    def nbytes(value: int, factor: float) -> int:
        return round(value * factor / ALIGNMENT) * ALIGNMENT

    def rows(self, rows: Rows) -> Rows:
        scaled = (rows.activations * self.activations / ALIGNMENT).round().astype(np.int64) * ALIGNMENT
        return replace(rows, activations=scaled)

    def option(self, option: UnitOption, key: object) -> UnitOption:
        if key not in self.known:
            changed: dict[str, object] = {}
            for name in (field.name for field in fields(option)):
                value = getattr(option, name)
                if isinstance(value, Amount):
                    changed[name] = Amount(self.nbytes(value.base, self.parameters))
                elif isinstance(value, Seconds):
                    changed[name] = Seconds(value.base * self.parameters)
            self.known[key] = replace(option, **changed)  # type: ignore[arg-type]
        tables = [getattr(option, name) * self.parameters / ALIGNMENT for name in ("forward", "backward")]
        forward, backward = (table.round().astype(np.int64) * ALIGNMENT for table in tables)
        return replace(self.known[key], forward=forward, backward=backward)

    def variant(self, variant: VariantTable) -> VariantTable:
        return replace(
            variant,
            units=tuple(
                tuple(self.option(option, (variant.key, option.key)) for option in unit) for unit in variant.units
            ),
            forward=self.rows(variant.forward),
            backward=self.rows(variant.backward),
            saved=self.nbytes(variant.saved, self.activations),
            freed=self.nbytes(variant.freed, self.activations),
            forward_seconds=variant.forward_seconds * self.compute,
            backward_seconds=variant.backward_seconds * self.compute,
        )


class DistinctLayers:
    """So many layers, no two alike, at every batch size, under one limit that binds at BATCH."""

    def __init__(self, graph: ModelGraph, layers: int, options: str) -> None:
        word, rules = OPTIONS[options]
        self.tables = Tables(graph, Cluster.parse(word), Training.of("bf16", "adamw", None), rules)
        random = np.random.default_rng(0)
        self.sizes = [Scaled(random) for _ in range(layers)]
        self.limit, self.made_seconds = 0, 0.0
        problem = self.problem(BATCH, BATCH)
        block = problem.stages[0]
        low = min(evaluate(problem, (choice,) * layers).peak for choice in _choices(block))
        high = evaluate(problem, tuple(_fastest(stage) for stage in problem.stages)).peak
        self.limit = int(low + LIMIT_SHARE * (high - low))

    def problem(self, batch: int, time_batch: int) -> Problem:
        began = perf_counter()
        real = self.tables.problem(batch, limit=self.limit, time_batch=time_batch)
        block = real.stages[len(real.stages) // 2]
        stages = [
            StageTable(tuple(size.variant(variant) for variant in block.variants), index, exposed=index == 0)
            for index, size in enumerate(self.sizes)
        ]
        self.made_seconds += perf_counter() - began
        return Problem(tuple(stages), real.constant, self.limit, overlap=True)


def _choices(stage: StageTable) -> list[StageChoice]:
    return [
        StageChoice(number, options)
        for number, variant in enumerate(stage.variants)
        for options in product(*([(o, 1) for o in range(len(unit))] for unit in variant.units))
    ]


def _fastest(stage: StageTable) -> StageChoice:
    alone = Problem((stage,), 0, 0, overlap=True)
    return min(_choices(stage), key=lambda choice: evaluate(alone, (choice,)).seconds)


def solved(graph: ModelGraph, layers: int, options: str) -> Row:
    problem = DistinctLayers(graph, layers, options).problem(BATCH, BATCH)
    outcome, seconds = timed(lambda: solve_exactly(problem, seconds=TARGET_SECONDS))
    gap = None
    if outcome.verdict is not None:
        gap = max(0.0, 1 - outcome.bound / outcome.verdict.seconds)
    return {
        "layers": layers,
        "options": options,
        "a layer": len(_choices(problem.stages[0])),
        "search s": seconds,
        "status": outcome.status,
        "gap %": None if gap is None else 100 * gap,
        "nodes": outcome.nodes,
        "at most s": TARGET_SECONDS,
        "target": "missed" if outcome.status == "limit" else met(seconds, TARGET_SECONDS),
    }


def solved_for_all_batches(graph: ModelGraph, layers: int, options: str) -> Row:
    """As planning does: the largest batch size, then branch and bound over them. Making the tables is not counted."""
    made = DistinctLayers(graph, layers, options)
    made.made_seconds = 0.0
    row: Row = {"layers": layers, "options": options, "largest batch": None, "to find it s": None, "search s": None}
    began = perf_counter()
    try:
        with given_up_after(GIVE_UP_SECONDS):
            row["largest batch"] = largest_batch(made.problem, most=LARGEST_MICRO_BATCH)
            row["to find it s"] = bounding = perf_counter() - began - made.made_seconds
            candidate = Candidate(options, made.problem, 1, 1, row["largest batch"])
            found = search_batches([candidate], seconds=TARGET_SECONDS)
            row["search s"] = perf_counter() - began - made.made_seconds - bounding
            row["status"] = "infeasible" if found is None else found.status
            row["gap %"] = None if found is None else 100 * max(0.0, 1 - found.bound / found.seconds_per_sample)
    except TimeoutError:
        row["status"] = f"given up after {GIVE_UP_SECONDS} s"
    row["at most s"] = TARGET_SECONDS
    row["target"] = met(perf_counter() - began - made.made_seconds, TARGET_SECONDS)
    return row


@contextmanager
def given_up_after(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds, as soon as the solver returns."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def planned(graph: ModelGraph, nodes: int) -> Row:
    cluster = Cluster.parse(f"{nodes}x8xA100-80GB")
    training = Training.of("bf16", "adamw", None)
    plan, seconds = timed(lambda: plan_graph(graph, cluster, training, Rules()))
    return {
        "devices": cluster.world_size,
        "plan s": seconds,
        "search s": plan.certificate.seconds,
        "status": plan.certificate.status,
        "gap %": 100 * plan.certificate.gap,
        "batch sizes solved": plan.certificate.batches_searched,
        "options": plan.certificate.options,
        "samples/s": plan.predicted.samples_per_second,
        "at most s": TARGET_SECONDS,
        "target": met(seconds, TARGET_SECONDS),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=("layers", "batches", "options", "devices"), help="one of these")
    given = arguments.parse_args()
    graph = captured(MODEL, Training.of("bf16", "adamw", None))
    tables: dict[str, list[Row]] = {}
    if given.only in (None, "layers"):
        tables[f"Distinct layers, one batch size of {BATCH}"] = [
            solved(graph, layers, options) for options in (THREE, SIX) for layers in LAYERS
        ]
    if given.only in (None, "batches"):
        title = "Distinct layers, all batch sizes"
        tables[title] = [solved_for_all_batches(graph, layers, THREE) for layers in LAYERS_ALL_BATCHES]
    if given.only in (None, "options"):
        tables["Options, 96 distinct layers"] = [solved(graph, 96, options) for options in OPTIONS]
    if given.only in (None, "devices"):
        title = f"Devices, {MODEL}, all options, all batch sizes, without the capture"
        tables[title] = [planned(graph, nodes) for nodes in NODES]
    deliver(tables, as_json=given.json)


if __name__ == "__main__":
    main()
