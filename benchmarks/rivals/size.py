"""One rank of one cell: the largest model that trains within a limit, measured by training it.

Depth grows for the deep model, width for the wide one, one step at a time: a size counts when it is built and takes a
few steps at batch 1 and the meter finds no more than the limit.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit

from .data_parallel import ddp, fsdp2
from .job import FULL, NONE, Job, Trainer
from .models import Shape, source_of
from .planned import OPTIMIZER, planned
from .planning import Planner
from .worker import Bench, arguments, on_ranks

Make = Callable[[Shape], Callable[[], Trainer]]
MOST_STEPS = 64


def grown(shape: Shape, steps: int) -> Shape:
    """Deeper by a block, or wider by a head, for each step."""
    if shape.layers[0] > 4:
        return replace(shape, layers=(steps,))
    return replace(shape, widths=(steps * shape.head_width,))


def main() -> int:
    parser = ArgumentParser()
    arguments(parser)
    return on_ranks(parser.parse_args(), _measure)


def _measure(bench: Bench, args: Namespace) -> None:
    cell = bench.cell
    job = partial(Job, hosts=cell.hosts, ranks_per_host=cell.ranks_per_host, batch=1)
    limit = int(cell.share * bench.attempt(1, lambda: ddp(job(cell.shape))).peak_bytes)
    bench.tell("cell", limit_bytes=limit)
    cluster = Planner.measured(cell, bench.world, seconds=args.profile_seconds).cluster

    def by_plan(rules: Rules) -> Make:
        def build(shape: Shape) -> Callable[[], Trainer]:
            graph = source_of(cell.model, shape).capture("fp32")
            plan = Planner(graph, cluster, Training.of("fp32", OPTIMIZER)).best(rules, limit, batch=1)
            return lambda: planned(job(shape), plan)

        return build

    ways: dict[str, Make] = {
        "osdp": by_plan(Rules()),
        "osdp without slices": by_plan(Rules(split=False)),
        "FSDP2": lambda shape: lambda: fsdp2(job(shape, recompute=NONE)),
        "FSDP2, every block recomputed": lambda shape: lambda: fsdp2(job(shape, recompute=FULL)),
        "DDP": lambda shape: lambda: ddp(job(shape, recompute=FULL)),
    }
    for name, make in ways.items():
        bench.tell("begin", rival=name)
        steps = _largest(lambda steps, make=make: _trains(bench, make, grown(cell.shape, steps), limit))
        shape = grown(cell.shape, max(1, steps))
        size = sum(p.numel() for p in source_of(cell.model, shape).build_on_meta().parameters()) if steps else 0
        what = "blocks" if shape.layers[0] > 4 else "width"
        value = shape.layers[0] if what == "blocks" else shape.widths[0]
        bench.tell("best", rival=name, **{what: value if steps else 0, "parameters": size})
    bench.tell("done")


def _trains(bench: Bench, make: Make, shape: Shape, limit: int) -> bool:
    try:
        return bench.attempt(1, make(shape)).peak_bytes <= limit
    except DoesNotFit:
        return False


def _largest(trains: Callable[[int], bool]) -> int:
    """The most steps that train: doubled, then bisected."""
    low, high = 0, 4
    while high <= MOST_STEPS and trains(high):
        low, high = high, 2 * high
    high = min(high, MOST_STEPS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trains(middle) else (low, middle)
    return low


if __name__ == "__main__":
    sys.exit(main())
