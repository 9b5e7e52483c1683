"""Rows of the tables, computed from the files that a run wrote; nothing is printed here.

[Note: Physical limit]
No way computes more samples a second than the ranks do without any communication, each at its best batch. And whoever
averages the gradients of all ranks sends, from each host, 2 · trained bytes · (hosts − 1) / hosts a step: with a
step of b samples no more than b over the seconds of that. A row's limit is the lower of the two at its own batch; ways
that move activations instead of gradients (TP, PP) have the first alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cells import LIMITS, SHARES, Setting, alike
from .log import Line, Log
from .models import TITLES
from .rivals import ALONE, AUTO, DDP, ENGINE, FSDP2, MOVE_ACTIVATIONS, OSDP, PLANNED, TUNED

FP32_BYTES = 4


@dataclass(frozen=True)
class Row:
    """One rival in one cell; figures are None where it did not train, and `why` says why."""

    rival: str
    rate: float | None = None  # samples a second, of the median round
    spread: float | None = None  # half the range of rounds, as a part of the median
    batch: int | None = None
    recompute: str = ""
    switches: Mapping[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    rounds: int = 0
    of_osdp: float | None = None
    of_limit: float | None = None
    predicted: float | None = None  # samples a second, by the plan
    why: str = ""


@dataclass(frozen=True)
class CellRows:
    """A cell: a setting under one memory limit, which is a share of DDP's peak."""

    setting: Setting
    share: float
    limit_bytes: int
    about: dict[str, Any]
    alike: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        setting = self.setting
        link = f"{setting.across} between hosts" if setting.hosts > 1 else "one host"
        return (
            f"{TITLES[setting.model]}, {setting.hosts} × {setting.ranks_per_host} ranks, {link}, "
            f"{self.limit_bytes / 2**20:.1f} MiB ({round(100 * self.share)} % of DDP: {LIMITS[self.share]})"
        )

    def rate(self, rival: str) -> float | None:
        return next((row.rate for row in self.rows if row.rival == rival), None)

    @property
    def best_rival(self) -> Row | None:
        """The fastest that is not on our engine."""
        others = [row for row in self.rows if row.rival not in (*PLANNED, ALONE) and row.rate is not None]
        return max(others, key=lambda row: row.rate or 0.0, default=None)


def logs(folder: Path, names: Iterable[str], what: str) -> dict[str, Log]:
    """Of the settings that have one, by name, in order."""
    files = {name: folder / f"{what}-{name}.jsonl" for name in names}
    return {name: Log.read(file) for name, file in files.items() if file.exists()}


def read(folder: Path, names: Iterable[str], what: str = "throughput") -> list[CellRows]:
    """All cells in which something was timed, in the order of the names."""
    found = logs(folder, names, what).values()
    return [rows_of(log, share) for log in found for share in SHARES if log.last("trial") and _has_limit(log, share)]


def _has_limit(log: Log, share: float) -> bool:
    return any(line.get("share") == share for line in log.all("plan"))


def rows_of(log: Log, share: float) -> CellRows:
    about, sizes, limits = log.all("about")[-1], log.all("model")[-1], log.all("limits")[-1]
    setting = Setting(**about["setting"])
    limit_bytes = limits["bytes"][SHARES.index(share)]
    figures = {way: _figures(log, way, share, limit_bytes) for way in _ways(log)}
    if TUNED in figures:  # it ran these too, and takes what was fastest when it was tried
        figures[TUNED] = max(*(figures.get(way, {}) for way in (TUNED, OSDP, AUTO)), key=_trial_rate)
    compute, own = (_rate(figures.get(way, {})) for way in (ALONE, OSDP))
    bytes_moved = 2 * FP32_BYTES * sizes["trained"] * (setting.hosts - 1) / setting.hosts
    rows = []
    for way, found in figures.items():
        rate = _rate(found)
        if rate is None:
            rows.append(Row(way, peak_bytes=found.get("peak_bytes"), why=found.get("why", "")))
            continue
        rounds = found["rounds"]
        limit = compute or math.inf
        if way not in MOVE_ACTIVATIONS and way != ALONE and not found.get("stages") and bytes_moved:
            limit = min(limit, found["samples"] * setting.link_bytes_per_second / bytes_moved)
        rows.append(
            Row(
                rival=way,
                rate=rate,
                spread=(max(rounds) - min(rounds)) / 2 / statistics.median(rounds),
                batch=found["batch"],
                recompute=found["recompute"],
                switches=found["switches"],
                peak_bytes=found["peak_bytes"],
                rounds=len(rounds) if found["timed"] else 0,
                of_osdp=None if not own else rate / own,
                of_limit=None if math.isinf(limit) else rate / limit,
                predicted=found.get("predicted"),
            )
        )
    flops = 6 * sizes["parameters"] * setting.sample_tokens * (compute or math.nan) / setting.ranks
    batch = next((row.batch for row in rows if row.rival == OSDP and row.batch), 1)
    text = alike(setting, flops, batch * setting.sample_tokens)
    return CellRows(setting, share, limit_bytes, {**about, "done": bool(log.last("done"))}, text, tuple(rows))


def _ways(log: Log) -> list[str]:
    return list(dict.fromkeys(line["way"] for line in log.lines if line["what"] in ("trial", "plan", "none", "peak")))


def _figures(log: Log, way: str, share: float, limit_bytes: int) -> Line:
    """The trial that was fastest within the limit, with its rounds; else why there is none."""
    chosen = log.last("plan", way=way, share=share)
    if chosen and "like" in chosen:
        return _figures(log, chosen["like"], share, limit_bytes)
    found: list[Line] = []
    for trial in log.all("trial", way=way):
        key = {name: trial[name] for name in ("way", "batch", "recompute", "switches", "plan")}
        plan = log.last("plan", plan=trial["plan"], share=share)
        if (way == ALONE or trial["peak_bytes"] <= limit_bytes) and (plan or not trial["plan"]):
            rounds = [line["seconds"] for line in log.all("round", **key)]
            found.append({**trial, "timed": bool(rounds), "rounds": rounds or [trial["seconds"]], **_told(plan)})
    timed = [each for each in found if each["timed"]] or found
    if timed:
        return max(timed, key=lambda each: each["samples"] / each["seconds"])
    return log.last("none", way=way, share=share) or log.last("none", way=way, share=None) or {}


def _trial_rate(figures: Line) -> float:
    return figures["samples"] / figures["seconds"] if "rounds" in figures else 0.0


def _told(plan: Line | None) -> Line:
    if plan is None:
        return {}
    return {"predicted": plan["predicted"], "gap": plan["gap"], "stages": len(plan.get("stages", ()))}


def _rate(figures: Line) -> float | None:
    if "rounds" not in figures:
        return None
    return figures["samples"] / statistics.median(figures["rounds"])


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

    def over_best(way: str) -> list[tuple[float, bool]]:
        """Of each cell in which another trains, with whether DDP does not fit."""
        pairs = [(cell.rate(way), cell.best_rival, cell.share < 1) for cell in cells]
        return [(own / other.rate, tight) for own, other, tight in pairs if own and other and other.rate]

    best, auto, tuned = over_best(OSDP), over_best(AUTO), over_best(TUNED)
    close = [row.of_limit for cell in cells for row in cell.rows if row.rival == OSDP and row.of_limit]
    found = [
        ("worst cell against the best rival", [min((ratio for ratio, _ in best), default=math.nan)], 1.0, len(best)),
        ("worst cell, layout auto", [min((ratio for ratio, _ in auto), default=math.nan)], 1.0, len(auto)),
        ("worst cell, tuned", [min((ratio for ratio, _ in tuned), default=math.nan)], 1.0, len(tuned)),
        ("against the best rival where DDP does not fit", [ratio for ratio, tight in best if tight], 1.3, None),
        ("the same, layout auto", [ratio for ratio, tight in auto if tight], 1.3, None),
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
