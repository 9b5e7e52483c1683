"""Predicted against published throughput, and weak scaling: points and lines that were computed before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]


def agreement(points: Mapping[str, Points], file: Path) -> None:
    """One dot a run: published across, predicted up; on the line they agree."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    every = [value for mine in points.values() for point in mine for value in point]
    low, high = 0.8 * min(every), 1.25 * max(every)
    figure, axes = plt.subplots(figsize=(5.5, 5.0), layout="constrained")
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], color="0.9", label="± 20 %")
    for (name, mine), marker in zip(points.items(), "osD^v", strict=False):
        axes.scatter(*zip(*mine, strict=True), s=18, marker=marker, label=name, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel="published tokens per second and device", ylabel="predicted")
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def scaling(predicted: Mapping[str, Points], published: Mapping[str, Points], file: Path) -> None:
    """Throughput of a device by the number of devices, relative to the prediction for the first."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4.0), layout="constrained")
    for index, (name, line) in enumerate(predicted.items()):
        first = line[0][1]
        color = f"C{index}"
        axes.plot([x for x, _ in line], [y / first for _, y in line], color=color, label=f"{name}, predicted")
        mine = published.get(name, ())
        axes.scatter([x for x, _ in mine], [y / first for _, y in mine], s=20, color=color, marker="o")
    axes.set(xscale="log", xlabel="devices", ylabel="throughput of a device")
    axes.set_xticks([x for x, _ in next(iter(predicted.values()))])
    axes.get_xaxis().set_major_formatter(plt.ScalarFormatter())
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
