"""One rank of a setting: the largest model that trains within a limit, measured by training it.

Depth grows for the deep model, width for the wide one, one step at a time: a size counts when it is built and takes two
steps at batch 1 and the meter finds no more than the limit. No clock is needed, and no profile: memory does not depend
on it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit
from osdp.profiling.machine import look_around
from osdp.runtime.consistency import by_rank_0

from .bench import Bench
from .cells import ROOMY
from .data_parallel import ddp, fsdp2
from .job import FULL, NONE, Job, Trainer
from .models import Shape, source_of
from .planned import OPTIMIZER, planned
from .planning import Planner
from .trials import limits
from .worker import arguments, on_ranks

Make = Callable[[Shape], Callable[[], Trainer]]
MOST_STEPS = 256


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
    setting = bench.setting
    job = partial(Job, hosts=setting.hosts, ranks_per_host=setting.ranks_per_host, batch=1)
    shape, limit = setting.shape, limits(bench)[ROOMY]
    cluster = look_around(bench.world, nodes=setting.hosts, devices_per_node=setting.ranks_per_host).cluster
    ways: dict[str, Make] = {
        "osdp": by_plan(bench, cluster, Rules(), limit),
        "osdp without slices": by_plan(bench, cluster, Rules(split=False), limit),
        "FSDP2": lambda shape: lambda: fsdp2(job(shape, recompute=NONE)),
        "FSDP2, every block recomputed": lambda shape: lambda: fsdp2(job(shape, recompute=FULL)),
        "DDP, every block recomputed": lambda shape: lambda: ddp(job(shape, recompute=FULL)),
    }
    for name, make in ways.items():
        if bench.log.last("size", way=name):
            continue
        bench.log.add("begin", way=name)
        begin = shape.layers[0] if shape.layers[0] > 4 else shape.widths[0] // shape.head_width
        steps = largest(lambda steps, make=make: _trains(bench, make, grown(shape, steps), limit), begin)
        found = grown(shape, max(1, steps))
        size = sum(p.numel() for p in source_of("grown", found).build_on_meta().parameters()) if steps else 0
        what, value = ("blocks", found.layers[0]) if shape.layers[0] > 4 else ("width", found.widths[0])
        bench.log.add("size", way=name, limit_bytes=limit, parameters=size, **{what: value if steps else 0})
    bench.log.add("done")


def by_plan(bench: Bench, cluster: Cluster, rules: Rules, limit: int) -> Make:
    def build(shape: Shape) -> Callable[[], Trainer]:
        graph = by_rank_0(lambda: source_of("grown", shape).capture("fp32"))
        plan = Planner(graph, cluster, Training.of("fp32", OPTIMIZER)).best(rules, limit, batch=1)
        job = Job(shape, bench.setting.hosts, bench.setting.ranks_per_host, 1)
        return lambda: planned(job, plan)

    return build


def _trains(bench: Bench, make: Make, shape: Shape, limit: int) -> bool:
    tried = {"layers": shape.layers, "widths": shape.widths}
    try:
        peak = bench.peak(1, make(shape)).peak_bytes
    except DoesNotFit as error:
        bench.log.add("tried", **tried, why=str(error).splitlines()[0])
        return False
    bench.log.add("tried", **tried, peak_bytes=peak)
    return peak <= limit


def largest(trains: Callable[[int], bool], begin: int) -> int:
    """The most steps that train: from where one begins it is grown by a half or halved, then bisected."""
    low, high = (begin, None) if trains(begin) else (0, begin)
    while high is None:
        above = low + max(1, low // 2)
        if above > MOST_STEPS:
            return low
        low, high = (above, None) if trains(above) else (low, above)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trains(middle) else (low, middle)
    return low


if __name__ == "__main__":
    sys.exit(main())
