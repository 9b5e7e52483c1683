"""Every preset on a few clusters: the plan, the best usual way, their ratio, the gap of the proof, and the seconds.

    python benchmarks/bench_plans.py [--models llama3-8b,t5-11b] [--clusters 8xA100-80GB] [--seconds 20] [--json]

A row whose ratio is below 1.000 is a fault; the search itself refuses to return one. `–` is where nothing fits.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

from captured import captured
from common import Row, deliver, parser

from osdp.api import plan_graph, resolve
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit, UsageError
from osdp.model.graph import ModelGraph
from osdp.model.source import presets

CLUSTERS = ("8xA100-80GB", "8xH100-80GB", "8x8xH100-80GB", "128x8xH100-80GB", "4xL4", "8xRTX-TITAN")
GLOBAL_BATCH = 1024


def row(graph: ModelGraph, cluster: Cluster, global_batch: int | None, seconds: float) -> Row:
    found: Row = {"model": graph.name, "cluster": cluster.word, "global batch": global_batch or "free"}
    began = perf_counter()
    try:
        plan = plan_graph(graph, cluster, Training.of(), Rules(), global_batch=global_batch, search_seconds=seconds)
    except (DoesNotFit, UsageError) as error:
        reason = "does not fit" if isinstance(error, DoesNotFit) else "does not divide"
        return {**found, "samples/s": reason, "seconds": perf_counter() - began}
    best = max((b for b in plan.baselines if b.feasible), key=lambda b: b.samples_per_second, default=None)
    usual = None if best is None else f"{best.name}{' with recompute' if best.recompute else ''}"
    return {
        **found,
        "samples/s": plan.predicted.samples_per_second,
        "batch": f"{plan.batch_size}×{plan.accumulation}",
        "MFU %": 100 * plan.predicted.mfu,
        "best usual way": usual or "none fits",
        "its samples/s": None if best is None else best.samples_per_second,
        "ratio": None if best is None else plan.predicted.samples_per_second / best.samples_per_second,
        "gap %": 100 * plan.certificate.gap,
        "search s": plan.certificate.seconds,
        "seconds": perf_counter() - began,
    }


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--models", type=lambda text: text.split(","), default=list(presets()))
    arguments.add_argument("--clusters", type=lambda text: text.split(","), default=list(CLUSTERS))
    arguments.add_argument("--seconds", type=float, default=20.0, help="of each search at most (default: 20)")
    wanted = arguments.parse_args()
    rows: list[Row] = []
    for model in wanted.models:
        graph = captured(model, Training.of())
        for word in wanted.clusters:
            for global_batch in (None, GLOBAL_BATCH):
                rows.append(row(graph, resolve(word, None), global_batch, wanted.seconds))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    deliver({"plans beside the best usual way": rows}, as_json=wanted.json)
    ratios = [each["ratio"] for each in rows if each.get("ratio")]
    print(
        f"lowest ratio {min(ratios):.4f}, highest gap {max(e.get('gap %', 0.0) for e in rows):.3f} %", file=sys.stderr
    )
    return 1 if min(ratios) < 1 else 0


if __name__ == "__main__":
    raise SystemExit(main())
