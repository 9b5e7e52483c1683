"""Predicted against measured, one dot for each case: on the line they agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20


def draw(cases: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes memory.svg and time.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    peaks = [(c["world"], c["peak_bytes"] / MIB, c["plan"]["predicted"]["peak_bytes"] / MIB) for c in cases]
    times = [(c["world"], c["step_seconds"] * 1e3, c["plan"]["predicted"]["step_seconds"] * 1e3) for c in cases]
    _scatter(peaks, "peak memory, MiB", 0.03, folder / "fidelity-memory.svg")
    _scatter(times, "step time, ms", 0.20, folder / "fidelity-time.svg")


def _scatter(points: Sequence[tuple[str, float, float]], what: str, band: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 5.0), layout="constrained")
    low = 0.8 * min(min(x, y) for _, x, y in points)
    high = 1.25 * max(max(x, y) for _, x, y in points)
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between(
        [low, high],
        [low * (1 - band), high * (1 - band)],
        [low * (1 + band), high * (1 + band)],
        color="0.9",
        label=f"± {band:.0%}",
    )
    for world, marker in zip(dict.fromkeys(w for w, _, _ in points), "osD^v", strict=False):
        mine = [(x, y) for w, x, y in points if w == world]
        axes.scatter(*zip(*mine, strict=True), s=18, marker=marker, label=f"{world} ranks", alpha=0.8)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel=f"measured {what}", ylabel=f"predicted {what}", aspect="equal")
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
