"""One rank of one world: profiles the machines with each model in turn, and runs the plans made from that."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from osdp.profiling.run import Wanted, profile_in
from osdp.profiling.trial import try_plans
from osdp.training.world import World, started

from .models import source_of
from .plans import Case, cases

TIMEOUT_SECONDS = 120.0
BATCHES = (1, 2, 4)  # at which stages are timed
STEPS, TRIES = 2, 6  # of every plan, in turn with the model's other plans


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--work", required=True, help="JSON: [[model, ways, batches], ...]")
    parser.add_argument("--profile-seconds", type=float, default=40.0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with started(timeout_seconds=TIMEOUT_SECONDS) as world:
        for model, ways, batches in json.loads(args.work):
            for case in _measured(world, model, ways, batches, args.profile_seconds):
                if world.leads:
                    print(json.dumps({"case": case}), flush=True)
    return 0


def _measured(
    world: World, model: str, ways: list[str], batches: list[int], profile_seconds: float
) -> Iterator[dict[str, Any]]:
    source = source_of(model)
    graph = source.capture("fp32")
    wanted = Wanted(source, BATCHES, "fp32", profile_seconds, TIMEOUT_SECONDS, None, None, quiet=True)
    cluster = profile_in(world, wanted).cluster
    made = cases(model, graph, cluster, ways=tuple(ways), batches=tuple(batches))
    found = _by_rank_0(made, world)
    trials = try_plans(source, [case.plan for case in found], world, steps=STEPS, tries=TRIES)
    for case, trial in zip(found, trials, strict=True):
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


if __name__ == "__main__":
    sys.exit(main())
