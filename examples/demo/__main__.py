"""The whole job on this machine: measure, plan, train with plain FSDP2 and with the plan, compare.

    python -m examples.demo          # what `make demo` runs, about four minutes on two cores
    python -m examples.demo --reuse  # with the profile of the last time

Plain replication (DDP) does not fit the memory that is allowed: 45 % of what it needs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from osdp.baselines import baselines
from osdp.batching import Batching
from osdp.cluster import Cluster, format_bytes
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.cost.units import WHOLE
from osdp.errors import OsdpError
from osdp.files import write_text
from osdp.model.graph import ModelGraph
from osdp.model.source import load_model
from osdp.planfile import Baseline, Plan
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.report.html import report_html
from osdp.report.measurements import Measurement
from osdp.report.page import plan_page
from osdp.report.printing import console
from osdp.report.report_page import report_page
from osdp.report.terminal import print_plan
from osdp.sharding import FREE

from .model import GLOBAL_BATCH, LENGTH
from .page import Page, page_of, print_page
from .ranks import ROOT, RanksFailed, run_ranks
from .worker import PLAN

RANKS = 4
MODEL = "examples.demo.model:build"
MEMORY_SHARE = 0.45  # of what DDP needs at least
MIB = 1 << 20
FOLDER = ROOT / "build" / "demo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reuse", action="store_true", help="plan with the profile of the last time")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, ranks first
    try:
        demonstrate(FOLDER, reuse=args.reuse)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    except (RanksFailed, OsdpError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    return 0


def demonstrate(folder: Path, *, reuse: bool) -> None:
    began, out = perf_counter(), console(sys.stdout)
    folder.mkdir(parents=True, exist_ok=True)
    profile, result = folder / "profile.toml", folder / "result.json"

    def say(what: str) -> None:
        print(f"[{perf_counter() - began:3.0f} s] {what}", file=sys.stderr, flush=True)

    if not reuse or not profile.exists():
        say(f"measuring this machine with {RANKS} ranks at once")
        how = ("--model", MODEL, "--batches", "1,2", "--precision", "fp32", "--seconds", "40")
        run_ranks(RANKS, "osdp", "profile", *how, "-o", str(profile), log=folder / "profile.log")
    say("planning")
    graph = load_model(MODEL).capture("fp32", name=MODEL)
    plan, fsdp = planned(graph, Cluster.parse(str(profile)), out)
    plan.save(folder / "plan.json")
    fsdp.save(folder / "fsdp.json")
    print_plan(plan_page(plan), out)
    say("training with plain FSDP2 and with the plan, in turn")
    files = ("--fsdp", str(folder / "fsdp.json"), "--plan", str(folder / "plan.json"), "--output", str(result))
    run_ranks(RANKS, "examples.demo.worker", "--model", MODEL, *files, log=folder / "train.log")
    measured: dict[str, Any] = json.loads(result.read_text())
    page = page_of(plan, fsdp, measured, sample_tokens=LENGTH)
    result.write_text(json.dumps({"page": page.to_dict(), "measured": measured}, indent=1) + "\n")
    print_page(page, out)
    report = folder / "report.html"
    write_text(report_html(report_page(plan, graph, [measurement(page)])), report)
    out.print(f"\nThe plan in pictures: open {report.relative_to(ROOT)} in a browser.")
    say(f"done; {folder.relative_to(ROOT)} has the profile, the plan and the result")


def measurement(page: Page) -> Measurement:
    """What was measured of the plan, for its report."""
    row = next(row for row in page.rows if row.way == PLAN)
    return Measurement(
        f"this demonstration, {page.steps} steps on {page.ranks} ranks", row.step_seconds, row.peak_bytes
    )


def planned(graph: ModelGraph, cluster: Cluster, out: Console) -> tuple[Plan, Plan]:
    """The best plan within the memory, and the best one that does as FSDP does: every block whole, and freed."""
    training = Training.of("fp32")
    ddp, fsdp = (smallest_peak(graph, cluster, training, way) for way in ("DDP", "FSDP"))
    limit = int(MEMORY_SHARE * ddp) // MIB * MIB
    out.print(f"\nEach rank may use {format_bytes(limit)}. DDP does not fit: it needs {format_bytes(ddp)} at least.")
    out.print(f"FSDP needs {format_bytes(fsdp)} at least.")
    within = replace(cluster, memory_bytes=limit, reserve_fraction=0.0)
    plan = plan_graph(graph, within, training, Rules(), global_batch=GLOBAL_BATCH)
    again = best_fsdp(plan).recompute
    rules = Rules(modes=(FREE,), split=False, recompute=(again,), granularities=(WHOLE,))
    return plan, plan_graph(graph, within, training, rules, global_batch=GLOBAL_BATCH)


def smallest_peak(graph: ModelGraph, cluster: Cluster, training: Training, way: str) -> int:
    """What a way needs at least: one sample at a time."""
    ways = (each.baseline for each in baselines(graph, cluster, training, Batching(batch=1)))
    return min(each.peak_bytes for each in ways if each.name == way)


def best_fsdp(plan: Plan) -> Baseline:
    """With recompute only where it does not fit without."""
    fitting = [each for each in plan.baselines if each.name == "FSDP" and each.feasible]
    if not fitting:
        raise OsdpError(f"FSDP does not fit {format_bytes(plan.predicted.limit_bytes)}; raise MEMORY_SHARE")
    return min(fitting, key=lambda each: list(Recompute).index(each.recompute))


if __name__ == "__main__":
    sys.exit(main())
