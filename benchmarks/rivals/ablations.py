"""One rank of a setting: osdp's plan, and plans from which one of its parts is taken away, timed in the same rounds."""

from __future__ import annotations

import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from osdp.cost.tables import Rules
from osdp.cost.units import WHOLE
from osdp.recompute import Recompute
from osdp.sharding import FREE, KEEP, MODES, REPLICATE

from .bench import Bench
from .cells import TIGHT
from .planning import Planner, make_plans, measure_profile, plan_candidates
from .rivals import OSDP, PAPER
from .rounds import time_in_rounds
from .trials import MOST_BATCH, Trials
from .ways import Ways
from .worker import arguments, on_ranks


def without(*modes: str) -> Rules:
    return Rules(modes=tuple(mode for mode in MODES if mode not in modes))


NODE_MODES = tuple(mode for mode in MODES if "node" in mode)
ABLATIONS: Mapping[str, Rules] = {
    OSDP: Rules(),
    "without slices": Rules(split=False),
    "without keep": without(KEEP),
    "without replicas": without(REPLICATE),
    "without recompute": Rules(recompute=(Recompute.NONE,)),
    "without selective recompute": Rules(recompute=(Recompute.NONE, Recompute.FULL)),
    "recompute everywhere": Rules(recompute=(Recompute.FULL,)),
    "without node modes": without(*NODE_MODES),
    "without two levels": Rules(two_levels=False),
    "blocks whole": Rules(granularities=(WHOLE,)),
    "replicate and free only": Rules(modes=(REPLICATE, FREE)),
    PAPER: Rules(modes=(REPLICATE, FREE), split=False, two_levels=False),
}


def main() -> int:
    parser = ArgumentParser()
    arguments(parser)
    return on_ranks(parser.parse_args(), _measure)


def _measure(bench: Bench, args: Namespace) -> None:
    """At the limit at which DDP does not fit."""
    stages = args.stages.split(",")
    if "profile" in stages:
        measure_profile(bench, seconds=args.profile_seconds)
    planner = functools.cache(lambda: Planner.of(bench))
    ways = Ways(bench, planner)
    trials = Trials(bench, ways)
    if "plans" in stages:
        kinds = {name: (rules,) for name, rules in ABLATIONS.items()}
        make_plans(bench, planner(), {TIGHT: trials.limits[TIGHT]}, kinds, MOST_BATCH)
        bench.log.add("stage", name="plans")
    if "trials" in stages:
        for candidate in plan_candidates(bench):
            trials.trial(candidate)
        bench.log.add("stage", name="trials")
    if "rounds" in stages:
        time_in_rounds(bench, ways, trials, list(ABLATIONS), args.rounds)


if __name__ == "__main__":
    sys.exit(main())
