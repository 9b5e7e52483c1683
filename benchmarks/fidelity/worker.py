"""One rank of one world: measures the machines, then each model's stages, then runs the plans made from that."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from osdp.cluster import Cluster
from osdp.profiling.bench import Bench
from osdp.profiling.run import Wanted, profile_in
from osdp.profiling.stages import time_stages
from osdp.profiling.trial import try_plan
from osdp.training.errand import Errand
from osdp.training.world import World, started

from .models import source_of
from .plans import Case, cases

TIMEOUT_SECONDS = 120.0
BATCHES = (1, 2, 4)  # at which stages are timed


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--work", required=True, help="JSON: [[model, ways, batches], ...]")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--stage-seconds", type=float, default=10.0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with started(timeout_seconds=TIMEOUT_SECONDS) as world:
        wanted = Wanted(None, BATCHES, "fp32", args.profile_seconds, TIMEOUT_SECONDS, None, None, quiet=True)
        found = profile_in(world, wanted)
        _tell(world, "profile", {**found.to_dict(), "toml": found.cluster.to_toml()})
        for model, ways, batches in json.loads(args.work):
            for result in _measured(world, found.cluster, model, ways, batches, args.stage_seconds):
                _tell(world, "case", result)
    return 0


def _measured(
    world: World, machine: Cluster, model: str, ways: list[str], batches: list[int], seconds: float
) -> Iterator[dict[str, Any]]:
    source = source_of(model)
    graph = source.capture("fp32")
    with Errand(world, timeout_seconds=TIMEOUT_SECONDS, quiet=True).under_way() as errand:
        bench = Bench(errand, budget_seconds=seconds)
        timed = time_stages(bench, source, graph, batches=BATCHES, memory_bytes=1 << 32, within=seconds)
    cluster = replace(machine, stages=timed.stages)
    made = cases(model, graph, cluster, ways=tuple(ways), batches=tuple(batches))
    for case in _by_rank_0(made, world):
        trial = try_plan(source, case.plan, world)
        yield {
            "model": model,
            "way": case.way,
            "ranks": world.size,
            "nodes": cluster.nodes,
            "batch": case.plan.batch_size,
            "step_seconds": trial.step_seconds,
            "tries": trial.tries,
            "peak_bytes": trial.peak_bytes,
            "plan": case.plan.to_dict(),
        }


def _by_rank_0(made: Iterator[Case], world: World) -> list[Case]:
    """Rank 0 plans, all run the same."""
    import torch.distributed as dist

    found = [list(made) if world.leads else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _tell(world: World, kind: str, value: dict[str, Any]) -> None:
    if world.leads:
        print(json.dumps({kind: value}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
