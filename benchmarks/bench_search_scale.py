"""How the search's time grows: with distinct layers, with options of a layer, and with devices.

Layers and options: one batch size, solved by `solve_exactly`. Each layer is a real block's table (a block of
`gpt-48x2048` as osdp.cost.tables makes it), scaled by sizes drawn with a fixed seed, so that no two layers are alike
and nothing can be grouped. The limit lies between the smallest peak of the uniform choices and the peak of the fastest
choice. Devices: `gpt-48x2048` captured once, planned over all batch sizes. Target: each within a minute.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
from captured import captured
from common import Row, deliver, met, parser, timed

from osdp.api import plan_graph
from osdp.cluster import Cluster
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.model.graph import ModelGraph
from osdp.planfile import FREE, KEEP, MODES, REPLICATE
from osdp.search.problem import (
    Amount,
    Problem,
    Rows,
    Seconds,
    ShapeTable,
    StageChoice,
    StageTable,
    UnitOption,
    evaluate,
)
from osdp.search.solve import solve_exactly

MODEL = "gpt-48x2048"
LAYERS = (12, 48, 96, 250, 500, 1000)
NODES = (1, 2, 8, 32, 128, 512, 2048)
TARGET_SECONDS = 60.0
LIMIT_SHARE = 0.6  # of the way from the smallest peak to the fastest choice's
ALIGNMENT = 512
OPTIONS: dict[str, tuple[str, Rules]] = {
    "replicate, free": ("8xA100-80GB", Rules(modes=(REPLICATE, FREE), split=False, recompute=False)),
    "replicate, free; recompute": ("8xA100-80GB", Rules(modes=(REPLICATE, FREE), split=False)),
    "replicate, keep, free; recompute": ("8xA100-80GB", Rules(modes=(REPLICATE, KEEP, FREE), split=False)),
    "all six modes; recompute": ("4x8xA100-80GB", Rules(modes=MODES, split=False)),
}
DEFAULT = "replicate, keep, free; recompute"


class Scaled:
    """A block's table at another size: what parameters cost by one factor, activations and compute by others."""

    def __init__(self, random: np.random.Generator) -> None:
        width = float(random.uniform(0.6, 1.6))
        self.parameters = width**2 * float(random.uniform(0.9, 1.1))
        self.activations = width * float(random.uniform(0.9, 1.1))
        self.compute = width**2 * float(random.uniform(0.9, 1.1))

    @staticmethod
    def nbytes(value: int, factor: float) -> int:
        return round(value * factor / ALIGNMENT) * ALIGNMENT

    def rows(self, rows: Rows) -> Rows:
        scaled = [self.nbytes(int(value), self.activations) for value in rows.activations]
        return replace(rows, activations=np.array(scaled, dtype=np.int64))

    def option(self, option: UnitOption) -> UnitOption:
        changed: dict[str, object] = {}
        for name in (field.name for field in fields(option)):
            value = getattr(option, name)
            if isinstance(value, Amount):
                changed[name] = Amount(self.nbytes(value.base, self.parameters))
            elif isinstance(value, Seconds):
                changed[name] = Seconds(value.base * self.parameters)
        for name in ("forward", "backward"):
            table = getattr(option, name) * self.parameters / ALIGNMENT
            changed[name] = table.round().astype(np.int64) * ALIGNMENT
        return replace(option, **changed)  # type: ignore[arg-type]

    def shape(self, shape: ShapeTable) -> ShapeTable:
        return replace(
            shape,
            units=tuple(tuple(self.option(option) for option in unit) for unit in shape.units),
            forward=self.rows(shape.forward),
            backward=self.rows(shape.backward),
            saved=self.nbytes(shape.saved, self.activations),
            freed=self.nbytes(shape.freed, self.activations),
            forward_seconds=shape.forward_seconds * self.compute,
            backward_seconds=shape.backward_seconds * self.compute,
        )


def distinct_layers(graph: ModelGraph, layers: int, options: str, *, seed: int = 0) -> Problem:
    """So many layers, no two alike, under a limit that binds."""
    word, rules = OPTIONS[options]
    tables = Tables(graph, Cluster.parse(word), Training.of("bf16", "adamw", None), rules)
    real = tables.problem(4, limit=0)
    block = real.stages[len(real.stages) // 2]
    random = np.random.default_rng(seed)
    stages = []
    for index in range(layers):
        scaled = Scaled(random)
        stages.append(StageTable(tuple(scaled.shape(shape) for shape in block.shapes), index, exposed=index == 0))
    problem = Problem(tuple(stages), real.constant, 0, overlap=True)
    low = min(evaluate(problem, (choice,) * layers).peak for choice in _choices(block))
    high = evaluate(problem, tuple(_fastest(stage) for stage in problem.stages)).peak
    return replace(problem, limit=int(low + LIMIT_SHARE * (high - low)))


def _choices(stage: StageTable) -> list[StageChoice]:
    return [
        StageChoice(number, options)
        for number, shape in enumerate(stage.shapes)
        for options in product(*([(o, 1) for o in range(len(unit))] for unit in shape.units))
    ]


def _fastest(stage: StageTable) -> StageChoice:
    alone = Problem((stage,), 0, 0, overlap=True)
    return min(_choices(stage), key=lambda choice: evaluate(alone, (choice,)).seconds)


def solved(graph: ModelGraph, layers: int, options: str) -> Row:
    problem, making = timed(lambda: distinct_layers(graph, layers, options))
    outcome, seconds = timed(lambda: solve_exactly(problem, seconds=TARGET_SECONDS))
    gap = None
    if outcome.verdict is not None:
        gap = max(0.0, 1 - outcome.bound / outcome.verdict.seconds)
    return {
        "layers": layers,
        "options": options,
        "a layer": len(_choices(problem.stages[0])),
        "tables s": making,
        "search s": seconds,
        "status": outcome.status,
        "gap %": None if gap is None else 100 * gap,
        "nodes": outcome.nodes,
        "at most s": TARGET_SECONDS,
        "target": "missed" if outcome.status == "limit" else met(seconds, TARGET_SECONDS),
    }


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
    arguments.add_argument("--only", choices=("layers", "options", "devices"), help="one of the three")
    given = arguments.parse_args()
    graph = captured(MODEL, Training.of("bf16", "adamw", None))
    tables: dict[str, list[Row]] = {}
    if given.only in (None, "layers"):
        tables["Distinct layers"] = [solved(graph, layers, DEFAULT) for layers in LAYERS]
    if given.only in (None, "options"):
        tables["Options, 96 distinct layers"] = [solved(graph, 96, options) for options in OPTIONS]
    if given.only in (None, "devices"):
        title = f"Devices, {MODEL}, all options, all batch sizes, without the capture"
        tables[title] = [planned(graph, nodes) for nodes in NODES]
    deliver(tables, as_json=given.json)


if __name__ == "__main__":
    main()
