"""One rank of one cell: osdp's plan, and plans from which one of its parts is taken away, timed in the same rounds."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from osdp.cost.tables import Rules
from osdp.cost.units import WHOLE
from osdp.errors import DoesNotFit
from osdp.recompute import Recompute
from osdp.sharding import FREE, KEEP, MODES, REPLICATE

from .data_parallel import ddp
from .job import Job
from .planned import planned
from .planning import Planner
from .worker import Bench, Build, arguments, on_ranks, tell_best, time_in_rounds


def without(*modes: str) -> Rules:
    return Rules(modes=tuple(mode for mode in MODES if mode not in modes))


NODE_MODES = tuple(mode for mode in MODES if "node" in mode)
ABLATIONS: Mapping[str, Rules] = {
    "osdp": Rules(),
    "without slices": Rules(split=False),
    "without keep": without(KEEP),
    "without replicas": without(REPLICATE),
    "without recompute": Rules(recompute=(Recompute.NONE,)),
    "recompute everywhere": Rules(recompute=(Recompute.FULL,)),
    "without node modes": without(*NODE_MODES),
    "without two levels": Rules(two_levels=False),
    "blocks whole": Rules(granularities=(WHOLE,)),
    "replicate and free only": Rules(modes=(REPLICATE, FREE)),
    "paper's space": Rules(modes=(REPLICATE, FREE), split=False, two_levels=False),
}


def main() -> int:
    parser = ArgumentParser()
    arguments(parser)
    return on_ranks(parser.parse_args(), _measure)


def _measure(bench: Bench, args: Namespace) -> None:
    cell = bench.cell
    job = partial(Job, cell.shape, cell.hosts, cell.ranks_per_host)
    reference = bench.attempt(1, lambda: ddp(job(1)))
    limit = int(cell.share * reference.peak_bytes)
    bench.tell("cell", limit_bytes=limit, ddp_bytes=reference.peak_bytes)
    planner = Planner.measured(cell, bench.world, seconds=args.profile_seconds)
    chosen: dict[str, Build] = {}
    for name, rules in ABLATIONS.items():
        bench.tell("begin", rival=name)
        try:
            plan = planner.best(replace(rules), limit)
        except DoesNotFit:
            bench.tell("none", rival=name, why="does not fit")
            continue
        chosen[name] = partial(planned, job(plan.batch_size), plan)
        attempt = bench.attempt(plan.batch_size, chosen[name])
        figures = {"predicted": plan.predicted.samples_per_second, "gap": plan.certificate.gap}
        tell_best(bench, name, attempt, "by the plan", {}, **figures)
    time_in_rounds(bench, chosen, args.rounds)


if __name__ == "__main__":
    sys.exit(main())
