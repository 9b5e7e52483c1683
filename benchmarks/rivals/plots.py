"""The page's plots: of each cell the rate of every way, and how close each comes to the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .models import TITLES
from .results import CellRows
from .rivals import ALONE, OSDP


def draw(cells: Sequence[CellRows], folder: Path) -> dict[str, str]:
    """Writes the plots; gives their files and what they show."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "osdp"
    folder.mkdir(parents=True, exist_ok=True)
    _rates(cells, folder / "rivals-rates.svg")
    return {"rivals-rates.svg": "samples a second of every way to train, as a part of osdp's, in every cell"}


def _rates(cells: Sequence[CellRows], file: Path) -> None:
    """Bars of rates relative to osdp's; a cross where a way does not train."""
    import matplotlib.pyplot as plt

    ways = list(dict.fromkeys(row.rival for cell in cells for row in cell.rows if row.rival != ALONE))
    columns = 3
    lines = -(-len(cells) // columns)
    size = (4.2 * columns, 0.22 * len(ways) * lines + 0.9 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for place, cell in zip(axes.flat, cells, strict=False):
        found = {row.rival: row.of_osdp for row in cell.rows}
        for number, way in enumerate(ways):
            value = found.get(way)
            if value is None:
                place.plot(0.02, number, marker="x", color="0.5", markersize=4)
            else:
                place.barh(number, value, color="C1" if way == OSDP else "C0", height=0.7)
        place.axvline(1.0, color="black", linewidth=0.6)
        shape = f"{cell.setting.hosts} × {cell.setting.ranks_per_host}, {cell.setting.across}"
        place.set_title(f"{TITLES[cell.setting.model]}\n{shape}, {cell.share:.0%} of DDP's memory", fontsize=8)
        place.set_yticks(range(len(ways)), ways, fontsize=7)
        place.tick_params(axis="x", labelsize=7)
        place.invert_yaxis()
    for place in list(axes.flat)[len(cells) :]:
        place.axis("off")
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
