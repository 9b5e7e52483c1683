"""The paper's table as a page with plots, from the figures that `bench_paper_table` has kept. It imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Row

BASELINES = ("DDP", "ZeRO-2", "FSDP", "HSDP")
LAYOUTS = ("tensor", "pipeline")
OTHERS = ("paper's modes", *BASELINES, *LAYOUTS)


@dataclass(frozen=True)
class Setting:
    """A model on a cluster, with the samples of a step over all devices if they are given."""

    model: str
    cluster: str
    memory: str | None
    precision: str
    global_batch: int | None = None

    @property
    def devices(self) -> int:
        return math.prod(int(number) for number in self.cluster.split("x")[:-1])


@dataclass(frozen=True)
class Figure:
    """One way at its best: `rate` is samples a second of all devices, `samples` are those of a device in a step."""

    way: str
    rate: float | None
    batch: int | None = None
    samples: int | None = None
    step_seconds: float | None = None
    peak_bytes: int | None = None
    recompute: str = ""
    reason: str = ""


Found = Mapping[tuple[Setting, str], Sequence[Figure]]


def rates(found: Found, setting: Setting) -> dict[str, float | None]:
    """Of all ways that are known in a setting."""
    return {each.way: each.rate for part in ("data", "layouts") for each in found.get((setting, part), ())}


def settings(found: Found) -> list[Setting]:
    """Model by model, in the order in which models were first looked at."""
    models = list(dict.fromkeys(setting.model for setting, _ in found))
    return sorted(dict.fromkeys(setting for setting, _ in found), key=lambda setting: models.index(setting.model))


def rows(found: Found) -> list[Row]:
    table = []
    for setting in settings(found):
        if setting.global_batch is not None:
            continue
        known = rates(found, setting)
        best = max((rate for way in BASELINES if (rate := known.get(way))), default=None)
        own = known.get("osdp")
        row: Row = {"model": setting.model, "cluster": setting.cluster, "memory": setting.memory or ""}
        for way in ("osdp", *OTHERS):
            row[way] = (known[way] or "–") if way in known else ""
        table.append({**row, "osdp / best": own / best if own and best else None})
    return table


PAGE = """# The paper's table, predicted

Samples per second of all devices by the calibrated catalogue's cost model, osdp's and the baselines' alike: **nothing
here was run on an accelerator**. Each way has its best batch and recompute; `–` does not fit; an empty cell was not
computed. The settings are the paper's: GPTs that are narrow and deep, wide and shallow, and inconsistent and
consecutive, of 1,024 tokens, in fp32 with AdamW, on 8 RTX TITAN limited to 8 and 16 GiB and on 2 hosts of 8 A100
limited to 16 GiB. "paper's modes" is osdp with replicate and free only, with splitting, as in the paper. Larger models
are in bf16, on 8 to 1,024 H100. "tensor" and "pipeline" are the best of 2, 4 and 8 ranks to an operator, or stages,
with the best plan of whole blocks inside; a pipeline has 8 micro-batches for each stage, of 1 to 4 samples. Searches
stop after a few seconds.

Computed by `python benchmarks/bench_paper_table.py`, with `--scale` and with `--layouts`; the figures are in
`benchmarks/results/paper-table.jsonl`. Missing ones are added by the same commands, then `--page`.
"""

# OSDP's README: 8 GPUs, a GPT of 48 layers of 1,536 in fp32, 8,192 MB, 96 samples a step
AUTHORS = (("all sharded", 5657, 3.645), ("their plan", 8057, 2.996))
AUTHORS_GAIN = 1.216
CAUTION = """Their sequence length is not stated; ours is 1,024 tokens, at which FSDP has to recompute and accumulate.
So the seconds are not comparable, only the gains, and these with care: longer sequences have more compute to hide
communication behind.
"""


def table(found: Sequence[Row]) -> str:
    keys = list(found[0])
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    for row in found:
        cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell or "") for cell in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(found: Sequence[Row]) -> str:
    gains = [row["osdp / best"] for row in found if row["osdp / best"]]
    alone = sum(row["osdp"] not in ("–", "") and row["osdp / best"] is None for row in found)
    said = []
    if gains:
        mean = math.exp(statistics.fmean(math.log(gain) for gain in gains))
        said.append(f"osdp over the best of {', '.join(BASELINES)}: geometric mean of {len(gains)} rows {mean:.3f}")
        said[-1] += f", least {min(gains):.3f}, most {max(gains):.3f}."
    if alone:
        said.append(f"In {alone} rows osdp trains and none of these does.")
    both = [row for row in found if isinstance(row.get("paper's modes"), float) and isinstance(row["osdp"], float)]
    if missed := [row for row in both if row["paper's modes"] > row["osdp"]]:
        worst = max(row["paper's modes"] / row["osdp"] for row in missed)
        said.append(
            f"In {len(missed)} of {len(both)} rows the search found a faster plan of the paper's modes alone, by up to"
            f" {100 * (worst - 1):.2f} %: it stopped too early in the larger space, which has that plan too."
        )
    for way in LAYOUTS:
        priced = [row for row in found if row[way] != "" and row["osdp"] not in ("", "–")]
        faster = [row for row in priced if row[way] != "–" and row[way] > row["osdp"]]
        if priced:
            said.append(f"{way.capitalize()} parallelism is faster than osdp's plan in {len(faster)} of {len(priced)}.")
    return " ".join(said)


def beside_the_authors(found: Found, setting: Setting) -> str:
    figures = {each.way: each for each in found.get((setting, "data"), ())}
    lines = ["| | peak, MB | step, s |", "|---|---|---|"]
    lines += [f"| authors, {what} | {peak:,} | {step} |" for what, peak, step in AUTHORS]
    for way in ("FSDP", "paper's modes", "osdp"):
        each = figures.get(way)
        if each is not None and each.rate is not None:
            assert each.peak_bytes is not None
            lines.append(f"| predicted, {way} | {each.peak_bytes / 1e6:,.0f} | {each.step_seconds:.2f} |")
    gain = ""
    own, usual = (figures[way].rate if way in figures else None for way in ("osdp", "FSDP"))
    if own and usual:
        gain = f"Predicted gain over FSDP: {own / usual:.3f}; theirs over all sharded: {AUTHORS_GAIN}. "
    return (
        f"{setting.model} on {setting.cluster} with {setting.memory}, {setting.global_batch} samples a step, beside the"
        f" figures of the authors' README.\n\n{chr(10).join(lines)}\n\n{gain}{CAUTION}"
    )


def page(found: Found, published: Setting) -> str:
    """All that is known as a page of the documentation."""
    every = rows(found)
    papers = [row for row in every if "H100" not in row["cluster"]]
    scale = [{key: row[key] for key in row if key != "paper's modes"} for row in every if "H100" in row["cluster"]]
    parts = [PAGE]
    if papers:
        parts += ["## The paper's settings\n", table(papers), "\n" + verdict(papers) + "\n"]
    if (published, "data") in found:
        parts += ["## Beside the authors' figures\n", beside_the_authors(found, published)]
    if scale:
        plots = "\n\n".join(f"![throughput against {axis}](paper-table-{axis}.svg)" for axis in ("devices", "memory"))
        parts += ["## 8 to 1,024 H100\n", plots + "\n", table(scale), "\n" + verdict(scale) + "\n"]
    return "\n".join(parts)


def draw(found: Found, folder: Path) -> None:
    """Throughput against devices, and against memory, one plot for each of the larger models."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "osdp"
    import matplotlib.pyplot as plt

    large = [setting for setting in settings(found) if "H100" in setting.cluster]
    models = list(dict.fromkeys(setting.model for setting in large))
    if not models:
        return
    for axis, title in (("devices", "devices (H100)"), ("memory", "GiB of a device, 8 hosts of 8")):
        figure, axes = plt.subplots(1, len(models), figsize=(4 * len(models), 3.4), layout="constrained", squeeze=False)
        for place, model in zip(axes.flat, models, strict=True):
            mine = [each for each in large if each.model == model and (each.memory is None) == (axis == "devices")]
            for way in ("osdp", *BASELINES, *LAYOUTS):
                line = sorted((across(each, axis), rate) for each in mine if (rate := rates(found, each).get(way)))
                if line:
                    place.plot(*zip(*line, strict=True), marker="o", markersize=3, label=way)
            place.set(title=model, xlabel=title, ylabel="samples/s (predicted)")
            if axis == "devices":
                place.set(xscale="log", yscale="log")
            if place.lines:
                place.legend(frameon=False, fontsize=7)
        figure.savefig(folder / f"paper-table-{axis}.svg", metadata={"Date": None})
        plt.close(figure)


def across(setting: Setting, axis: str) -> float:
    """A setting's place on an axis: its devices, or a device's GiB."""
    if axis == "devices":
        return float(setting.devices)
    assert setting.memory is not None
    return float(setting.memory.removesuffix("GiB"))
