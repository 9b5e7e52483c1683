"""Every preset on a few clusters: the plan, the best baseline, their ratio, the gap of the proof, and the seconds.

    python benchmarks/bench_plans.py [--models llama3-8b,t5-11b] [--clusters 8xA100-80GB] [--seconds 10] [--json]

Rows are added to a file (`--rows`), and those that it has are not planned again: a run that was cut off goes on where
it was. `--for-seconds` begins no row after so many seconds; `--table` plans nothing and prints what the file has. A row
whose ratio is below 1.000 is a fault; the search itself refuses to return one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from time import perf_counter

from captured import captured
from common import Row, deliver, parser

from osdp.api import resolve
from osdp.cluster import Cluster
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit, UsageError
from osdp.model.graph import ModelGraph
from osdp.model.source import presets
from osdp.planning import plan_graph

CLUSTERS = ("8xA100-80GB", "8xH100-80GB", "8x8xH100-80GB", "128x8xH100-80GB", "4xL4", "8xRTX-TITAN")
GLOBAL_BATCH = 1024
LEAST = 1 - 1e-6  # a ratio below it is a fault
Key = tuple[str, str, int | str]  # model, cluster, global batch or "free"


def row(graph: ModelGraph, cluster: Cluster, global_batch: int | None, seconds: float) -> Row:
    found: Row = {"model": graph.name, "cluster": cluster.word, "global batch": global_batch or "free"}
    began = perf_counter()
    try:
        plan = plan_graph(graph, cluster, Training.of(), Rules(), global_batch=global_batch, search_seconds=seconds)
    except (DoesNotFit, UsageError) as error:
        reason = "does not fit" if isinstance(error, DoesNotFit) else "does not divide"
        return {**found, "samples/s": reason, "seconds": perf_counter() - began}
    best = max((b for b in plan.baselines if b.feasible), key=lambda b: b.samples_per_second, default=None)
    name = None if best is None else f"{best.name}{' with recompute' if best.recompute else ''}"
    return {
        **found,
        "samples/s": plan.predicted.samples_per_second,
        "batch": f"{plan.batch_size}×{plan.accumulation}",
        "MFU %": 100 * plan.predicted.mfu,
        "best baseline": name or "none fits",
        "its samples/s": None if best is None else best.samples_per_second,
        "ratio": None if best is None else plan.predicted.samples_per_second / best.samples_per_second,
        "gap %": 100 * plan.certificate.gap,
        "search s": plan.certificate.seconds,
        "seconds": perf_counter() - began,
    }


def read(path: Path) -> dict[Key, Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows: list[Row] = [json.loads(line) for line in lines]
    return {(row["model"], row["cluster"], row["global batch"]): row for row in rows}


def planned(path: Path, keys: Sequence[Key], seconds: float, until: float) -> None:
    """Adds the rows that the file does not have yet, model by model."""
    done = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for model, missing in groupby((key for key in keys if key not in done), key=lambda key: key[0]):
        if perf_counter() >= until:
            return
        graph = captured(model, Training.of())
        for _, word, samples in missing:
            if perf_counter() >= until:
                return
            found = row(graph, resolve(word, None), samples if isinstance(samples, int) else None, seconds)
            with path.open("a") as file:
                print(json.dumps({**found, "model": model, "cluster": word}), file=file)
            print(json.dumps(found), file=sys.stderr, flush=True)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--models", type=lambda text: text.split(","), default=list(presets()))
    arguments.add_argument("--clusters", type=lambda text: text.split(","), default=list(CLUSTERS))
    arguments.add_argument("--seconds", type=float, default=10.0, help="of each search at most (default: 10)")
    arguments.add_argument("--rows", type=Path, default=Path("build/plans.jsonl"), help="default: %(default)s")
    arguments.add_argument("--for-seconds", type=float, default=float("inf"), help="then no further row is begun")
    arguments.add_argument("--table", action="store_true", help="print the file's rows and plan nothing")
    wanted = arguments.parse_args()
    keys = list(product(wanted.models, wanted.clusters, ("free", GLOBAL_BATCH)))
    if not wanted.table:
        planned(wanted.rows, keys, wanted.seconds, perf_counter() + wanted.for_seconds)
    found = read(wanted.rows)
    rows = [found[key] for key in keys if key in found]
    shown = (
        rows if wanted.json else [{**row, "ratio": f"{row['ratio']:.3f}"} if row.get("ratio") else row for row in rows]
    )
    deliver({"plans beside the best baseline": shown}, as_json=wanted.json)
    print(f"{len(rows)} of {len(keys)} rows", file=sys.stderr)
    return 1 if any((row.get("ratio") or 1.0) < LEAST for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
