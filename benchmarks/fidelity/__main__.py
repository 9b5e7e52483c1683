"""Runs plans of ten models on simulated clusters and prints the error of every prediction (root needed).

python -m benchmarks.fidelity                     # all of it, about 70 minutes on an idle machine
python -m benchmarks.fidelity --quick             # a few cases, to see that it works
python -m benchmarks.fidelity --read FILE ...     # tables and plots of results that were saved
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.cluster import SimulatedCluster, first_failure
from benchmarks.cluster.ranks import Start

from .models import NAMES
from .plans import PLANNED, TIGHT

WORLDS = {"2": (2, 1), "3": (3, 1), "2x2": (2, 2), "4": (1, 4)}  # hosts, ranks of each: the last has no slow link
RANKED = ("gpt-deep", "t5")  # of these, every way is run, to see whether the planner's is the fastest
IN_NODES = ("kept in the node", "freed in the node", "freed to the node")
EVERY_WAY = ("replicate", "keep", "free", "free, recomputed", *IN_NODES, PLANNED, TIGHT)
_IN_TURN = (("replicate", PLANNED), ("keep", TIGHT), ("free", PLANNED), ("free, recomputed", "keep"))


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(WORLDS), help="default: %(default)s")
    parser.add_argument("--models", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--across", default="1gbit", help="each host's link (default %(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="before the plans are made (default 60)")
    parser.add_argument("--ways", help="run these plans of every model, such as 'free,planned' (default: see the code)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path, help="write every figure as JSON")
    parser.add_argument("--read", type=Path, nargs="+", help="do not run, read what was saved; several are joined")
    parser.add_argument("--dry-later", action="store_true", help="only measure and save; --read makes the dry runs")
    parser.add_argument("--plots", type=Path, help="folder for the plots (SVG)")
    args = parser.parse_args()
    if args.read is not None:
        results = [json.loads(file.read_text()) for file in args.read]
        result = {**results[0], "cases": [case for each in results for case in each["cases"]]}
    else:
        result = measured(args)
        if args.save is not None:  # at once: what follows could fail
            args.save.write_text(json.dumps(result, indent=1) + "\n")
        if args.dry_later:
            return 0
    if not all("dry_peak_bytes" in case for case in result["cases"]):
        from .dry import with_dry_runs

        result["cases"] = with_dry_runs(result["cases"])
        if args.save is not None:
            args.save.write_text(json.dumps(result, indent=1) + "\n")
    from .tables import show

    if args.plots is not None:
        from .plots import draw

        draw(result["cases"], args.plots)
    return show(result)


def work_of(world: str, models: list[str], ways: list[str], *, quick: bool) -> list[list[Any]]:
    """What one world runs: [model, ways, batches]; two ways of each model in turn, all of a few."""
    if ways:
        return [[model, ways, [1]] for model in models]
    if quick:
        return [[model, ["free", PLANNED], [1]] for model in models[:2]]
    work: list[list[Any]] = []
    for number, model in enumerate(models):
        if world == "2x2" and model in RANKED:
            work.append([model, list(EVERY_WAY), [2]])
        else:
            turn = number + list(WORLDS).index(world)
            ways = list(_IN_TURN[turn % len(_IN_TURN)])
            if world == "2x2":
                ways[0] = IN_NODES[number % len(IN_NODES)]
            work.append([model, ways, [1 + turn % 2]])
    return work


def measured(args: Any) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    began = perf_counter()
    for world in args.worlds.split(","):
        hosts, each = WORLDS[world]
        seen: list[dict[str, Any]] = []

        def on_line(
            start: Start, stream: str, line: str, world: str = world, seen: list[dict[str, Any]] = seen
        ) -> None:
            if start.rank or stream != "stdout" or not line.startswith("{"):
                return
            told = json.loads(line)
            seen.append(told)
            if case := told.get("case"):
                print(
                    f"{perf_counter() - began:5.0f} s  {world:>3}  {case['model']:12} {case['way']:18} batch "
                    f"{case['batch']}: {case['step_seconds']:.3f} s, predicted "
                    f"{case['plan']['predicted']['step_seconds']:.3f}",
                    file=sys.stderr,
                    flush=True,
                )

        work = work_of(world, args.models.split(","), args.ways.split(",") if args.ways else [], quick=args.quick)
        command = [sys.executable, "-m", "benchmarks.fidelity.worker", "--work", json.dumps(work)]
        command += ["--profile-seconds", str(args.profile_seconds)]
        with SimulatedCluster(hosts=hosts, ranks_per_host=each, across=args.across) as cluster:
            results = cluster.run(command, timeout=3600, on_line=on_line)
        failed = first_failure(results)
        if failed is not None:
            raise SystemExit(f"rank {failed.rank} of world {world} failed:\n{failed.stderr[-4000:]}")
        cases += [{"world": world, **told["case"]} for told in seen if "case" in told]
    import torch

    about = {"date": date.today().isoformat(), "torch": torch.__version__, "across": args.across}
    return {**about, "seconds": perf_counter() - began, "cases": cases}


if __name__ == "__main__":
    sys.exit(main())
