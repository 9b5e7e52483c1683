"""Runs plans of eleven models on simulated clusters and prints the error of every prediction (root needed).

python -m benchmarks.fidelity --save FILE                    # all of it, about 80 minutes on an idle machine
python -m benchmarks.fidelity --save FILE --for-minutes 45   # as much as begins in that time; again: goes on behind it
python -m benchmarks.fidelity --quick                        # a few cases, to see that it works
python -m benchmarks.fidelity --read FILE ...                # tables and plots of results that were saved
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.cluster import ClusterTimeout, SimulatedCluster, first_failure
from benchmarks.cluster.ranks import Start

from .models import NAMES
from .plans import PLANNED, TIGHT
from .saved import Done, Work, append, read, write

WORLDS = {"2": (2, 1), "3": (3, 1), "2x2": (2, 2), "4": (1, 4)}  # hosts, ranks of each: the last has no slow link
# The most telling come first: every world has each model before the next one, and the worst predicted lead.
FIRST_WORLDS, FIRST_MODELS = ("4", "2x2", "2", "3"), ("gpt-deep", "t5", "gpt-wide", "llama", "gpt-pyramid", "bert")
RANKED = ("gpt-deep", "t5")  # of these, every way is run, to see whether the planner's is the fastest
IN_NODES = ("kept in the node", "freed in the node", "freed to the node")
EVERY_WAY = ("replicate", "keep", "free", "free, recomputed", *IN_NODES, PLANNED, TIGHT)
_IN_TURN = (("replicate", PLANNED), ("keep", TIGHT), ("free", PLANNED), ("free, recomputed", "keep"))
TIMEOUT_SECONDS = 1200.0  # of one model in one world


def main() -> int:
    args = build_parser().parse_args()
    if args.read is not None:
        found = [done for file in args.read for done in with_dry_runs(read(file), file)]
        failed = False
    else:
        work = work_of(args)
        found, failed = measured(work, args)
        if args.dry_later:
            return int(failed)
        found = with_dry_runs(found, args.save)
    if not found:
        print("nothing was measured", file=sys.stderr)
        return 1
    show(found, args.plots)
    return int(failed)


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(WORLDS), help="default: %(default)s")
    parser.add_argument("--models", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--across", default="1gbit", help="each host's link (default %(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="before the plans are made (default 60)")
    parser.add_argument("--ways", help="run these plans of every model, such as 'free,planned' (default: see the code)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path, help="write each model's figures as they are there; go on behind them")
    parser.add_argument("--for-minutes", type=float, help="begin no model in a world after so many minutes")
    parser.add_argument("--read", type=Path, nargs="+", help="do not run, read what was saved; several are joined")
    parser.add_argument("--dry-later", action="store_true", help="only measure and save; --read makes the dry runs")
    parser.add_argument("--plots", type=Path, help="folder for the plots (SVG)")
    return parser


def work_of(args: Namespace) -> list[Work]:
    """All that is to be run, the most telling first."""
    worlds = _leading(args.worlds.split(","), FIRST_WORLDS)
    models = _leading(args.models.split(","), FIRST_MODELS)
    pairs = [(world, model) for model in (models[:2] if args.quick else models) for world in worlds]
    return [Work(world, args.across, model, *_ways(world, model, args)) for world, model in pairs]


def _leading(names: Sequence[str], first: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: first.index(name) if name in first else len(first))


def _ways(world: str, model: str, args: Namespace) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Ways and batch sizes: two ways of each model in turn, all of a few."""
    if args.ways:
        return tuple(args.ways.split(",")), (1,)
    if args.quick:
        return ("free", PLANNED), (1,)
    if world == "2x2" and model in RANKED:
        return EVERY_WAY, (2,)
    number = NAMES.index(model)
    turn = number + list(WORLDS).index(world)
    first, second = _IN_TURN[turn % len(_IN_TURN)]
    return (IN_NODES[number % len(IN_NODES)] if world == "2x2" else first, second), (1 + turn % 2,)


def measured(work: Sequence[Work], args: Namespace) -> tuple[list[Done], bool]:
    """What was saved of the work before, and what there was time for now; and whether something failed."""
    began, failed = perf_counter(), False
    before = {done.work: done for done in read(args.save)} if args.save is not None else {}
    found = [before[each] for each in work if each in before]
    for each in work:
        passed = perf_counter() - began
        if each in before:
            continue
        if args.for_minutes is not None and passed > 60 * args.for_minutes:
            left = len(work) - len(found)
            print(f"{passed:5.0f} s  time is up; {left} left for the next run with the same --save", file=sys.stderr)
            break
        done = run(each, args.profile_seconds, began)
        if done is None:
            failed = True
            continue
        found.append(done)
        if args.save is not None:
            append(args.save, done)
    return found, failed


def run(work: Work, profile_seconds: float, began: float) -> Done | None:
    """One model in one world; None where a rank failed, which is said."""
    import torch

    own, seen = perf_counter(), []

    def on_line(start: Start, stream: str, line: str) -> None:
        if start.rank == 0 and stream == "stdout" and line.startswith("{"):
            case = json.loads(line)["case"]
            seen.append({"world": work.world, **case})
            print(
                f"{perf_counter() - began:5.0f} s  {work.world:>3}  {case['model']:12} {case['way']:18} batch "
                f"{case['batch']}: {case['step_seconds']:.3f} s, predicted "
                f"{case['plan']['predicted']['step_seconds']:.3f}",
                file=sys.stderr,
                flush=True,
            )

    hosts, each = WORLDS[work.world]
    command = [sys.executable, "-m", "benchmarks.fidelity.worker", "--profile-seconds", str(profile_seconds)]
    command += ["--work", json.dumps([[work.model, work.ways, work.batches]])]
    try:
        with SimulatedCluster(hosts=hosts, ranks_per_host=each, across=work.across, devices=True) as cluster:
            failed = first_failure(cluster.run(command, timeout=TIMEOUT_SECONDS, on_line=on_line))
    except ClusterTimeout as error:
        print(f"{work.model} in world {work.world}: {error}", file=sys.stderr)
        return None
    if failed is not None:
        print(f"rank {failed.rank} of world {work.world} failed:\n{failed.stderr[-4000:]}", file=sys.stderr)
        return None
    return Done(work, date.today().isoformat(), torch.__version__, perf_counter() - own, tuple(seen))


def with_dry_runs(found: list[Done], file: Path | None) -> list[Done]:
    """The same with the dry runs that are missing; the file that has them keeps them."""
    if all(done.has_dry_runs for done in found):
        return found
    from .dry import dry_runs

    made = [done if done.has_dry_runs else done.with_cases(dry_runs(done.cases)) for done in found]
    if file is not None:
        known = {done.work: done for done in made}
        write(file, [known.get(done.work, done) for done in read(file)])
    return made


def show(found: Sequence[Done], plots: Path | None) -> None:
    from .tables import show as show_tables

    cases: list[dict[str, Any]] = [
        case for world in WORLDS for done in found if done.work.world == world for case in done.cases
    ]
    if plots is not None:
        from .plots import draw

        draw(cases, plots)
    show_tables(cases, across=found[0].work.across, date=max(done.date for done in found), torch=found[0].torch)


if __name__ == "__main__":
    sys.exit(main())
