"""Whether HiGHS agrees with itself on the programs of real models, with presolve and without; see [Note: Infeasible].

Every problem is relaxed and solved both ways. A disagreement is harmless where `solve` gives the answer that holds:
`reached a user` counts those in which it does not.

    python benchmarks/bench_solver.py [--problems 2000] [--models gpt2-xl,bert-large] [--seed 0]
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from captured import captured

from osdp.api import resolve
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.cost.units import modes_for
from osdp.recompute import EVERY_RECOMPUTE, Recompute
from osdp.search import highs
from osdp.search.milp import ColumnsOfStages, Model
from osdp.search.problem import Problem
from osdp.search.solve import _scale, coarse_groups, first_groups

MODELS = ("gpt-48x1536", "gpt-pyramid", "bert-large", "llama3-8b")
CLUSTERS = ("8xA100-80GB", "8xH100-80GB", "2x8xA100-40GB", "4xL4")
FEASIBLE = "feasible"


def problems(models: list[str], seed: int) -> Iterator[tuple[str, Tables, int, int]]:
    """Random problems: a model, a cluster, modes, a batch size and a limit."""
    draw = random.Random(seed)
    graphs = {model: captured(model, Training.of()) for model in models}
    while True:
        model = draw.choice(models)
        cluster = resolve(draw.choice(CLUSTERS), None)
        known = modes_for(cluster)
        modes = draw.choice([known, *((mode,) for mode in known), *itertools.combinations(known, 2)])
        rules = Rules(
            modes=modes,
            split=draw.random() < 0.5,
            recompute=EVERY_RECOMPUTE if draw.random() < 0.7 else (Recompute.NONE,),
        )
        accumulation = draw.choice((1, 1, 1, 4))
        tables = Tables(graphs[model], cluster, replace(Training.of(), accumulation=accumulation), rules)
        for _ in range(20):
            limit = int(cluster.limit_bytes * 2 ** draw.uniform(-4, 3))
            yield model, tables, draw.choice((1, 2, 4, 6, 16)), limit


def answers(problem: Problem) -> tuple[str, str, str]:
    """What HiGHS says with presolve and without, and what `solve` makes of it."""
    groups = (first_groups if len(problem.stages) < 40 else coarse_groups)(problem)
    program = Model(problem, groups, kinds=ColumnsOfStages(problem, _scale(problem))).program
    model = highs._model(program, True, None)
    found = [highs._run(model, 60.0, highs.INFINITY, *options) for options in ((), (("presolve", "off"),))]
    ways = ["infeasible" if each.getModelStatus() in highs._INFEASIBLE else FEASIBLE for each in found]
    answer = highs.solve(program, relaxed=True, seconds=60.0)
    return ways[0], ways[1], "infeasible" if answer.status == "infeasible" else FEASIBLE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began, feasible, disagreed, reached = time.monotonic(), 0, 0, 0
    stream = itertools.islice(problems(arguments.models, arguments.seed), arguments.problems)
    for number, (model, tables, batch, limit) in enumerate(stream, start=1):
        for recomputed in tables.variants:
            problem = tables.problem(
                batch, limit=limit, accumulation=tables.training.accumulation, recomputed=recomputed
            )
            on, off, said = answers(problem)
            feasible += said == FEASIBLE
            if on != off:
                disagreed += 1
                truth = FEASIBLE if FEASIBLE in (on, off) else "infeasible"
                reached += said != truth
                print(f"{model}, batch {batch}, limit {limit}: {on} with presolve, {off} without; solve says {said}")
        if number % 100 == 0:
            print(f"{number} problems, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(
        f"{arguments.problems} problems, {feasible} relaxations feasible, {disagreed} disagreements, "
        f"{reached} reached a user, {time.monotonic() - began:.0f} s"
    )
    return 1 if reached else 0


if __name__ == "__main__":
    raise SystemExit(main())
