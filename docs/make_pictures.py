"""Draws images/step-*.png, the pictures of a step in concepts.md: the two streams, and the memory over the same time.

python docs/make_pictures.py         # needs matplotlib (the extra `bench`), no accelerator
"""

from __future__ import annotations

from pathlib import Path

from osdp.cluster import Cluster
from osdp.cost.graph import step_graph_of
from osdp.cost.tables import Rules
from osdp.cost.training import Training
from osdp.model.source import load_model
from osdp.planning import plan_graph
from osdp.recompute import Recompute
from osdp.report.step_picture import STACKED, StepPicture, step_picture

FOLDER = Path(__file__).parent / "images"
MODEL, CLUSTER, BATCH = "gpt-small-27m", "8xRTX-3090", 8
WAYS = {
    "replicate": ("replicate", Recompute.NONE),
    "keep": ("keep", Recompute.NONE),
    "free": ("free", Recompute.NONE),
    "free-recompute": ("free", Recompute.FULL),
}
TITLES = {
    "replicate": "replicate: one all-reduce for each unit, and whole states",
    "keep": "keep: gathered in forward, kept for backward",
    "free": "free: gathered in forward, and again in backward",
    "free-recompute": "free, every block recomputed",
}
COLOURS = {"forward": "#4c8dca", "backward": "#2f5f98", "all_gather": "#e0a030", "reduce_scatter": "#b5542d"}
COLOURS |= {"all_reduce": "#8d5fae", "copy": "#9aa7b5", "stall": "#f4c7c3", "optimizer": "#4f9d69"}
GIB, MILLISECONDS = 2**30, 1e3


def main() -> None:
    cluster, training = Cluster.parse(CLUSTER), Training.of("bf16", "adamw")
    graph = load_model(MODEL).capture("bf16", device=cluster.device)
    found: dict[str, StepPicture] = {}
    for name, (mode, recompute) in WAYS.items():
        rules = Rules(modes=(mode,), split=False, recompute=(recompute,), granularities=("whole",), two_levels=False)
        plan = plan_graph(graph, cluster, training, rules, batch=BATCH)
        found[name] = step_picture(name, step_graph_of(plan, graph))
    longest = max(picture.end for picture in found.values())
    highest = max(picture.peak_bytes for picture in found.values())
    for name, picture in found.items():
        _draw(picture, FOLDER / f"step-{name}.png", TITLES[name], longest, highest)
        print(f"{name}: {MILLISECONDS * picture.end:.0f} ms, {picture.peak_bytes / GIB:.2f} GiB at its peak")


def _draw(picture: StepPicture, file: Path, title: str, longest: float, highest: int) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (lanes, memory) = plt.subplots(
        2, 1, figsize=(9, 3.6), sharex=True, height_ratios=(1, 1.6), layout="constrained"
    )
    labels: dict[str, object] = {}
    for span in picture.spans:
        lane = 1 if span.stream == "compute" else 0
        kind = span.phase if span.kind not in COLOURS and span.phase in COLOURS else span.kind
        bar = lanes.barh(
            lane,
            MILLISECONDS * span.seconds,
            left=MILLISECONDS * span.start,
            height=0.8,
            color=COLOURS.get(kind, "#cccccc"),
            edgecolor="white",
            linewidth=0.4,
        )
        labels.setdefault(kind.replace("_", "-"), bar)
    lanes.set_yticks((0, 1), ("communication", "computation"))
    lanes.set_title(title, fontsize=10, loc="left")
    lanes.legend(labels.values(), labels.keys(), fontsize=7, ncols=8, loc="lower left", frameon=False, borderpad=0)
    lanes.set_ylim(-1.1, 1.5)
    curve = picture.memory
    edges = [MILLISECONDS * second for second in curve.seconds]
    floor = [0.0] * (len(edges) - 1)
    for part, row in zip(STACKED, curve.part_bytes, strict=True):
        top = [low + value / GIB for low, value in zip(floor, row, strict=True)]
        memory.stairs(top, edges, baseline=floor, fill=True, label=part)
        floor = top
    memory.set_ylim(0, 1.05 * highest / GIB)
    memory.set_xlim(0, MILLISECONDS * longest)
    memory.set_ylabel("GiB")
    memory.set_xlabel("ms")
    memory.legend(fontsize=7, ncols=4, loc="upper right", frameon=False)
    figure.savefig(file, dpi=100, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
