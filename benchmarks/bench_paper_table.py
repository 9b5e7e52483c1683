"""The paper's table at its own settings, and larger models on 8 to 1,024 H100: predictions of the calibrated catalogue.

    python benchmarks/bench_paper_table.py                 # the paper's settings
    python benchmarks/bench_paper_table.py --scale         # llama3-8b, llama3-70b and mixtral-8x7b against devices
    python benchmarks/bench_paper_table.py --plots docs/benchmarks
    python benchmarks/bench_paper_table.py --page docs/benchmarks/paper-table.md

Nothing here was run on an accelerator: every figure is the cost model's, osdp's and the baselines' alike. The paper's
settings are GPTs that are narrow and deep, wide and shallow, and inconsistent and consecutive, on 8 RTX TITAN with 8
and 16 GiB and on 2 hosts of 8 A100. Tensor and pipeline parallelism are not in the cost model, and not in the table.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from captured import captured
from common import Row, deliver, parser

from osdp.api import resolve
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.errors import DoesNotFit
from osdp.model.graph import ModelGraph
from osdp.planning import plan_graph
from osdp.sharding import FREE, REPLICATE

WAYS = ("DDP", "ZeRO-2", "FSDP", "HSDP")
PAPERS_MODELS = ("gpt-48x1536", "gpt-96x1024", "gpt-48x2048", "gpt-4x8192", "gpt-2x12288", "gpt-pyramid")
PAPERS_SETTINGS = (("8xRTX-TITAN", "8GiB"), ("8xRTX-TITAN", "16GiB"), ("2x8xA100-40GB", "16GiB"))
LARGE_MODELS = ("llama3-8b", "llama3-70b", "mixtral-8x7b")
HOSTS = (1, 2, 4, 8, 16, 32, 64, 128)
LIMITS = ("24GiB", "32GiB", "40GiB", "48GiB", "64GiB", "80GB")  # against memory, on 8 hosts
PAPERS_RULES = Rules(modes=(REPLICATE, FREE))


@dataclass(frozen=True)
class Point:
    """One model on one cluster: samples a second of each way at its best batch; None where it does not fit."""

    model: str
    cluster: str
    memory: str | None
    devices: int
    batch: int | None
    rates: dict[str, float | None]


def point(graph: ModelGraph, cluster: str, memory: str | None, *, seconds: float, papers: bool) -> Point:
    devices, training = resolve(cluster, memory), Training.of()
    rates: dict[str, float | None] = dict.fromkeys(WAYS)
    batch = None
    try:
        plan = plan_graph(graph, devices, training, Rules(), search_seconds=seconds)
    except DoesNotFit:
        rates["osdp"] = None
    else:
        for way in plan.baselines:
            if way.feasible:
                rates[way.name] = max(rates[way.name] or 0.0, way.samples_per_second)
        rates["osdp"], batch = plan.predicted.samples_per_second, plan.batch_size
    if papers:
        try:
            rates["paper's modes"] = plan_graph(
                graph, devices, training, PAPERS_RULES, search_seconds=seconds
            ).predicted.samples_per_second
        except DoesNotFit:
            rates["paper's modes"] = None
    return Point(graph.name, cluster, memory, devices.world_size, batch, rates)


def rows(points: Sequence[Point]) -> list[Row]:
    found = []
    for each in points:
        best = max((rate for way in WAYS if (rate := each.rates[way])), default=None)
        own = each.rates["osdp"]
        found.append(
            {
                "model": each.model,
                "cluster": each.cluster,
                "memory": each.memory or "",
                **{way: rate or "–" for way, rate in each.rates.items()},
                "batch": each.batch,
                "osdp / best": own / best if own and best else None,
            }
        )
    return found


PAGE = """# The paper's table, predicted

Samples per second by the calibrated catalogue's cost model, osdp's and the baselines' alike: **nothing here was run on
an accelerator**. Each way has its best batch and recompute; `–` does not fit. The settings are the paper's: GPTs that
are narrow and deep, wide and shallow, and inconsistent and consecutive, on 8 RTX TITAN limited to 8 and 16 GiB and on 2
hosts of 8 A100. "paper's modes" is osdp with replicate and free only, with splitting, as in the paper. Searches had
{seconds:g} s each at most. Tensor and pipeline parallelism are measured in [rivals](rivals.md), not predicted here.

Computed {date} by `python benchmarks/bench_paper_table.py --seconds {seconds:g} --page docs/benchmarks/paper-table.md`.

"""


def page(points: Sequence[Point], *, seconds: float) -> str:
    """The table as a page of the documentation."""
    found = rows(points)
    keys = list(found[0])
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    for row in found:
        cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell or "") for cell in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    gains = [row["osdp / best"] for row in found if row["osdp / best"]]
    mean = math.exp(statistics.fmean(math.log(gain) for gain in gains))
    alone = sum(row["osdp"] != "–" and row["osdp / best"] is None for row in found)
    said = f"osdp over the best baseline, geometric mean of {len(gains)} rows: {mean:.2f}; least {min(gains):.2f}. "
    said += f"In {alone} rows osdp trains and no baseline does."
    head = PAGE.format(seconds=seconds, date=f"{datetime.now(UTC):%Y-%m-%d}")
    return head + "\n".join(lines) + f"\n\n{said}\n"


def draw(points: Sequence[Point], folder: Path) -> None:
    """Throughput against devices, and against memory, one plot for each model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "osdp"
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(each.model for each in points))
    for axis, title in (("devices", "devices (H100)"), ("memory", "memory of a device, 8 hosts")):
        figure, axes = plt.subplots(1, len(models), figsize=(4 * len(models), 3.4), layout="constrained", squeeze=False)
        for place, model in zip(axes.flat, models, strict=True):
            mine = [e for e in points if e.model == model and (e.memory is None) == (axis == "devices")]
            for way in ("osdp", *WAYS):
                found = [(getattr(e, axis), rate) for e in mine if (rate := e.rates[way])]
                if found:
                    place.plot(*zip(*found, strict=True), marker="o", markersize=3, label=way)
            place.set(title=model, xlabel=title, ylabel="samples/s (predicted)")
            if axis == "devices":
                place.set(xscale="log", yscale="log")
            place.legend(frameon=False, fontsize=7)
        figure.savefig(folder / f"scale-{axis}.svg", metadata={"Date": None})
        plt.close(figure)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--scale", action="store_true", help="the larger models on 8 to 1,024 H100")
    arguments.add_argument("--models", type=lambda text: text.split(","), help="default: all of them")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of each search at most (default: 10)")
    arguments.add_argument("--save", type=Path, help="write every figure as JSON")
    arguments.add_argument("--plots", type=Path, help="folder for the plots of --scale (SVG)")
    arguments.add_argument("--page", type=Path, help="write the table as a page of the documentation")
    wanted = arguments.parse_args()
    settings: list[tuple[str, str | None]] = list(PAPERS_SETTINGS)
    if wanted.scale or wanted.plots:
        settings = [(f"{hosts}x8xH100-80GB", None) for hosts in HOSTS]
        settings += [("8x8xH100-80GB", memory) for memory in LIMITS]
    scale = bool(wanted.scale or wanted.plots)
    points = []
    for model in wanted.models or (LARGE_MODELS if scale else PAPERS_MODELS):
        graph = captured(model, Training.of())
        for cluster, memory in settings:
            print(f"{model} on {cluster} {memory or ''}", file=sys.stderr, flush=True)
            points.append(point(graph, cluster, memory, seconds=wanted.seconds, papers=not scale))
    if wanted.save is not None:
        about: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "points": [asdict(each) for each in points]}
        wanted.save.write_text(json.dumps(about, indent=1) + "\n")
    if wanted.plots is not None:
        draw(points, wanted.plots)
    if wanted.page is not None:
        wanted.page.write_text(page(points, seconds=wanted.seconds))
    title = "Predicted samples/s, each way at its best batch and recompute"
    deliver({title: rows(points)}, as_json=wanted.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
