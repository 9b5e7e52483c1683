"""One rank of a setting: takes the stages that are asked for, and goes on where the log ends.

Rank 0 prints what is found as lines of JSON, as soon as it is found.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from osdp.training.world import started

from .auto import make_layouts
from .bench import Bench, OutOfTime
from .cells import Setting
from .log import Line, Log
from .models import Model
from .planning import RULES, TIMEOUT_SECONDS, Planner, make_plans, measure_profile, plan_candidates
from .rivals import ALONE, AUTO
from .rounds import check_limits, time_in_rounds
from .run import STAGES
from .trials import MOST_BATCH, Trials
from .ways import Ways

PLANS_SHARE, TRIALS_SHARE = 0.35, 0.65  # of a run's seconds, if rounds follow


def main() -> int:
    parser = ArgumentParser()
    arguments(parser)
    return on_ranks(parser.parse_args(), _measure)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--setting", required=True, help="JSON")
    parser.add_argument("--log", type=Path, required=True, help="what was found before")
    parser.add_argument("--stages", required=True, help="separated by commas")
    parser.add_argument("--seconds", type=float, required=True, help="after which this run stops")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--profile-seconds", type=float, required=True)


def on_ranks(args: Namespace, measure: Callable[[Bench, Namespace], None]) -> int:
    """Measures on all ranks of the setting."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with started(timeout_seconds=TIMEOUT_SECONDS) as world:
        log = Log.read(args.log, _print if world.leads else lambda line: None)
        gc.collect()
        gc.freeze()  # modules live on; every attempt collects garbage, and need not look at them again
        bench = Bench(Setting(**json.loads(args.setting)), world, log, seconds=args.seconds)
        try:
            measure(bench, args)
        except OutOfTime:
            log.add("stopped", why=f"{args.seconds:.0f} s are over")
    return 0


def _print(line: Line) -> None:
    print(json.dumps(line), flush=True)


def _measure(bench: Bench, args: Namespace) -> None:
    stages = args.stages.split(",")
    if "profile" in stages:
        _sizes(bench)
        measure_profile(bench, seconds=args.profile_seconds)
    planner = functools.cache(lambda: Planner.of(bench))
    ways = Ways(bench, planner)
    trials = Trials(bench, ways)
    names = [*RULES, AUTO, ALONE, *(rival.name for rival in ways)]
    last = STAGES[-1] in stages
    if "memory" in stages:
        trials.each(trials.memory)
    if "plans" in stages:
        with bench.until(PLANS_SHARE if last else 1.0):
            make_plans(bench, planner(), trials.limits, RULES, MOST_BATCH)
            make_layouts(bench, planner(), trials.limits, MOST_BATCH)
            bench.log.add("stage", name="plans")
    if "trials" in stages:
        with bench.until(TRIALS_SHARE if last else 1.0):
            trials.alone()
            for candidate in plan_candidates(bench):
                trials.trial(candidate)
            trials.each(trials.compete)
            bench.log.add("stage", name="trials")
    if "limits" in stages:
        check_limits(bench, ways, trials, names)
    if "rounds" in stages:
        time_in_rounds(bench, ways, trials, names, args.rounds)


def _sizes(bench: Bench) -> None:
    if bench.log.last("model") is None:
        with torch.device("meta"):
            model = Model(bench.setting.shape)
        sizes = {"parameters": sum(p.numel() for p in model.parameters())}
        sizes["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        bench.log.add("model", **sizes)


if __name__ == "__main__":
    sys.exit(main())
