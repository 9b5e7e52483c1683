"""Rows of the tables, computed from the files that a run wrote; nothing is printed here.

[Note: Physical limit]
No way computes more samples a second than the ranks do without any communication, each at its best batch. And whoever
averages the gradients of all ranks sends, from each host, 2 · trained bytes · (hosts − 1) / hosts a step: with a
step of b samples no more than b over the seconds of that. A row's limit is the lower of the two at its own batch; ways
that move activations instead of gradients (TP, PP) have the first alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cells import LIMITS, Cell, alike
from .models import TITLES
from .rivals import ALONE, DDP, ENGINE, FSDP2, OSDP, PLANNED

FP32_BYTES = 4


@dataclass(frozen=True)
class Row:
    """One rival in one cell; figures are None where it did not train, and `why` says why."""

    rival: str
    rate: float | None = None  # samples a second, of the median round
    spread: float | None = None  # half the range of rounds, as a part of the median
    batch: int | None = None
    recompute: str = ""
    peak_bytes: int | None = None
    of_osdp: float | None = None
    of_limit: float | None = None
    why: str = ""


@dataclass(frozen=True)
class CellRows:
    cell: Cell
    limit_bytes: int
    about: dict[str, Any]
    alike: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        cell = self.cell
        link = f"{cell.across} between hosts" if cell.hosts > 1 else "one host"
        return (
            f"{TITLES[cell.model]}, {cell.hosts} × {cell.ranks_per_host} ranks, {link}, "
            f"{self.limit_bytes / 2**20:.1f} MiB ({round(100 * cell.share)} % of DDP: {LIMITS[cell.share]})"
        )

    def rate(self, rival: str) -> float | None:
        return next((row.rate for row in self.rows if row.rival == rival), None)

    @property
    def best_rival(self) -> Row | None:
        """The fastest that is not on our engine."""
        others = [row for row in self.rows if row.rival not in (*PLANNED, ALONE) and row.rate is not None]
        return max(others, key=lambda row: row.rate or 0.0, default=None)


def read(folder: Path, names: Iterable[str] | None = None, *, what: str = "throughput") -> list[CellRows]:
    """All cells that have results, in the order of the names, or by file."""
    files = sorted(folder.glob(f"{what}-*.json")) if names is None else [folder / f"{what}-{n}.json" for n in names]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    return [rows_of(data) for data in found if "limit_bytes" in data]


def rows_of(data: dict[str, Any]) -> CellRows:
    cell, rivals = Cell(**data["cell"]), data["rivals"]
    compute = _rate(rivals.get(ALONE, {}))
    own = _rate(rivals.get(OSDP, {}))
    bytes_moved = 2 * FP32_BYTES * data["trained"] * (cell.hosts - 1) / cell.hosts
    rows = []
    for name, figures in rivals.items():
        rate = _rate(figures)
        if rate is None:
            rows.append(Row(name, peak_bytes=figures.get("peak_bytes"), why=figures.get("why", "")))
            continue
        rounds = figures.get("rounds", [figures["seconds"]])
        limit = compute or math.inf
        if figures.get("gradients", True) and name != ALONE and bytes_moved:
            limit = min(limit, figures["samples"] * cell.link_bytes_per_second / bytes_moved)
        rows.append(
            Row(
                rival=name,
                rate=rate,
                spread=(max(rounds) - min(rounds)) / 2 / statistics.median(rounds),
                batch=figures["batch"],
                recompute=figures["recompute"],
                peak_bytes=figures["peak_bytes"],
                of_osdp=None if not own else rate / own,
                of_limit=None if math.isinf(limit) else rate / limit,
            )
        )
    flops = 6 * data["parameters"] * cell.sample_tokens * (compute or math.nan) / cell.ranks
    batch = next((row.batch for row in rows if row.rival == OSDP and row.batch), 1)
    about = {key: data[key] for key in ("date", "versions", "machine", "done")}
    text = alike(cell, flops, batch * cell.sample_tokens)
    return CellRows(cell, data["limit_bytes"], about, text, tuple(rows))


def _rate(figures: dict[str, Any]) -> float | None:
    if "samples" not in figures:
        return None
    return figures["samples"] / statistics.median(figures.get("rounds", [figures["seconds"]]))


@dataclass(frozen=True)
class Claim:
    """One of the benchmark's claims: the figure, its target, over how many cells."""

    what: str
    value: float
    target: float
    cells: int

    @property
    def met(self) -> bool:
        return self.value >= self.target


def claims(cells: Sequence[CellRows]) -> list[Claim]:
    """osdp against what users would pick instead; ratios are geometric means over the cells that have both."""

    def ratios(rival: str) -> list[float]:
        pairs = [(cell.rate(OSDP), cell.rate(rival)) for cell in cells]
        return [own / other for own, other in pairs if own and other]

    best = [
        (own / other.rate, cell.cell.share < 1)
        for cell in cells
        if (own := cell.rate(OSDP)) and (other := cell.best_rival) and other.rate
    ]
    close = [row.of_limit for cell in cells for row in cell.rows if row.rival == OSDP and row.of_limit]
    found = [
        ("worst cell against the best rival", [min((ratio for ratio, _ in best), default=math.nan)], 1.0, len(best)),
        ("against the best rival where DDP does not fit", [ratio for ratio, tight in best if tight], 1.3, None),
        ("against FSDP2 as it ships", ratios(FSDP2), 1.8, None),
        ("against FSDP2's plan on our engine", ratios(ENGINE), 1.25, None),
        ("against DDP where it fits", ratios(DDP), 1.0, None),
        ("of the physical limit", close, 0.85, None),
    ]
    return [
        Claim(what, math.exp(statistics.fmean(map(math.log, values))), target, count or len(values))
        for what, values, target, count in found
        if values and not math.isnan(values[0])
    ]
