"""One rank of one world: profiles the machines with each model in turn, and runs the plans made from that."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from osdp.profiling.run import Wanted, profile_in
from osdp.profiling.trial import Trials
from osdp.runtime.consistency import by_rank_0
from osdp.training.rank_job import RankJob
from osdp.training.world import World, started

from .models import remembered, source_of
from .plans import cases

TIMEOUT_SECONDS = 120.0
STEPS, TRIES = 2, 8  # of every plan, in turn with the model's other plans
MANY_PLANS = 6  # of one model: their order is judged, which takes twice as many tries


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--work", required=True, help="JSON: [[model, ways, batches], ...]")
    parser.add_argument("--profile-seconds", type=float, required=True)
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
    """A profile, plans by that, then steps of the plans in turn."""
    source = remembered(source_of(model))
    graph = source.capture("fp32")
    wanted = Wanted(source, tuple(batches), "fp32", profile_seconds, TIMEOUT_SECONDS, None, None, quiet=True)
    profile = profile_in(world, wanted)
    with RankJob(world, timeout_seconds=TIMEOUT_SECONDS, quiet=True).under_way() as rank_job:
        rank_job.watch("planning")
        made = cases(model, graph, profile.cluster, ways=tuple(ways), batches=tuple(batches))
        found = by_rank_0(lambda: list(made))
        rank_job.watch("the first steps")
        trials = Trials(source, [case.plan for case in found], world)
        for _ in range(TRIES if len(found) < MANY_PLANS else 2 * TRIES):
            rank_job.watch("steps")
            trials.take(STEPS)
    for case, trial in zip(found, trials.found(), strict=True):
        yield {
            "model": model,
            "way": case.way,
            "ranks": world.size,
            "nodes": profile.cluster.nodes,
            "batch": case.plan.batch_size,
            "step_seconds": trial.step_seconds,
            "tries": trial.tries,
            "peak_bytes": trial.peak_bytes,
            "rounds": profile.rounds,
            "plan": case.plan.to_dict(),
        }


if __name__ == "__main__":
    sys.exit(main())
