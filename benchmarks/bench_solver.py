"""Whether HiGHS agrees with itself on the programs of real models, with presolve and without; see [Note: Infeasible].

Every problem is relaxed and solved both ways. A disagreement, on whether anything fits or on the bound, is harmless
where `solve` gives the answer that holds: `reached a user` counts those in which it does not.

    python benchmarks/bench_solver.py [--pieces 100] [--models gpt2-xl,bert-large] [--results build/solver.jsonl]

A piece is one model on one cluster with some modes, at 20 batch sizes and limits; each is drawn by its number. Pieces
are added to a file, and those that it has are not solved again; `--for-seconds` begins no piece after so many seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter

import highspy
from captured import captured

from osdp.api import resolve
from osdp.cost.tables import Rules, Tables
from osdp.cost.training import Training
from osdp.cost.units import modes_for
from osdp.model.graph import ModelGraph
from osdp.recompute import EVERY_RECOMPUTE, Recompute
from osdp.search import highs
from osdp.search.milp import ColumnsOfStages, Model
from osdp.search.problem import Problem
from osdp.search.solve import _scale, coarse_groups, first_groups

MODELS = ("gpt-48x1536", "gpt-pyramid", "bert-large", "llama3-8b")
CLUSTERS = ("8xA100-80GB", "8xH100-80GB", "2x8xA100-40GB", "4xL4")
PROBLEMS = 20  # of a piece
SAME = 1e-6  # relative: bounds that differ by less are the same
INFEASIBLE, UNDECIDED = float("inf"), float("nan")


@cache
def graph_of(model: str) -> ModelGraph:
    return captured(model, Training.of())


def piece(number: int, models: list[str]) -> Counter[str]:
    """What came out of the problems of one piece."""
    draw = random.Random(number)
    model = models[number % len(models)]
    cluster = resolve(draw.choice(CLUSTERS), None)
    known = modes_for(cluster)
    modes = draw.choice([known, *((mode,) for mode in known), *itertools.combinations(known, 2)])
    recompute = EVERY_RECOMPUTE if draw.random() < 0.7 else (Recompute.NONE,)
    rules = Rules(modes=modes, split=draw.random() < 0.5, recompute=recompute)
    accumulation = draw.choice((1, 1, 1, 4))
    tables = Tables(graph_of(model), cluster, replace(Training.of(), accumulation=accumulation), rules)
    found: Counter[str] = Counter()
    for _ in range(PROBLEMS):
        limit = int(cluster.limit_bytes * 2 ** draw.uniform(-4, 3))
        batch = draw.choice((1, 2, 4, 6, 16))
        recomputed = draw.choice(tables.recompute_cases)
        problem = tables.problem(batch, limit=limit, accumulation=accumulation, recomputed=recomputed)
        on, off, said = bounds(problem)
        found["problems"] += 1
        found["feasible"] += said < INFEASIBLE
        if differ(on, off):
            found["disagreements"] += 1
            found["reached a user"] += differ(said, min(on, off))
            print(f"{model}, batch {batch}, limit {limit}: {on} with presolve, {off} without; solve says {said}")
    return found


def bounds(problem: Problem) -> tuple[float, float, float]:
    """The least seconds that HiGHS finds with presolve and without, and what `solve` says."""
    groups = (first_groups if len(problem.stages) < 40 else coarse_groups)(problem)
    program = Model(problem, groups, kinds=ColumnsOfStages(problem, _scale(problem))).program
    model = highs.as_highs(program, True, None)
    found = [highs._run(model, 60.0, highs.INFINITY, *options) for options in ((), (("presolve", "off"),))]
    on, off = (_bound(solver) for solver in found)
    return on, off, highs.solve(program, relaxed=True, seconds=60.0).bound


def _bound(solver: highspy.Highs) -> float:
    status = solver.getModelStatus()
    if status in highs._INFEASIBLE:
        return INFEASIBLE
    optimal = status == highspy.HighsModelStatus.kOptimal
    return float(solver.getInfo().objective_function_value) if optimal else UNDECIDED


def differ(left: float, right: float) -> bool:
    """Whether two answers contradict each other; one that was not decided contradicts none."""
    return left != right and abs(left - right) > SAME * min(abs(left), abs(right))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", type=int, default=100)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--results", type=Path, default=Path("build/solver.jsonl"), help="default: %(default)s")
    parser.add_argument("--for-seconds", type=float, default=float("inf"), help="then no further piece is begun")
    arguments = parser.parse_args()
    path, until = arguments.results, perf_counter() + arguments.for_seconds
    lines = path.read_text().splitlines() if path.exists() else []
    done = {row["piece"]: Counter(row["found"]) for row in map(json.loads, lines)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in (number for number in range(arguments.pieces) if number not in done):
        if perf_counter() >= until:
            break
        done[number] = piece(number, arguments.models)
        with path.open("a") as file:
            print(json.dumps({"piece": number, "found": done[number]}), file=file)
    total = sum(done.values(), Counter[str]())
    figures = ", ".join(f"{total[name]} {name}" for name in ("problems", "feasible", "disagreements", "reached a user"))
    print(f"{len(done)} of {arguments.pieces} pieces: {figures}")
    return 1 if total["reached a user"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
