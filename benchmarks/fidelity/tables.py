"""The tables: every case with its errors, what the targets say of them, and whether the ranking holds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import Row, deliver, met

MIB = 1 << 20


def errors(cases: Sequence[dict[str, Any]], predicted: str, measured: str) -> list[float]:
    """Of every case, how far the prediction is above what was measured, as a part of that."""
    return [(_value(case, predicted) - case[measured]) / case[measured] for case in cases if measured in case]


def _value(case: dict[str, Any], name: str) -> float:
    return case[name] if name in case else case["plan"]["predicted"][name.removeprefix("predicted ")]


def show(cases: Sequence[dict[str, Any]], *, across: str, date: str, torch: str) -> None:
    title = f"{len(cases)} cases, {across} between hosts, {date}, torch {torch}"
    deliver({title: rows(cases), "Targets": targets(cases), "The ranking": ranking(cases)}, as_json=False)


def rows(cases: Sequence[dict[str, Any]]) -> list[Row]:
    found = []
    for case in cases:
        plan = case["plan"]["predicted"]
        found.append(
            {
                "world": case["world"],
                "model": case["model"],
                "plan": case["way"],
                "batch": case["batch"],
                "peak MiB": round(case["peak_bytes"] / MIB, 2),
                "predicted": round(plan["peak_bytes"] / MIB, 2),
                "error %": _percent(plan["peak_bytes"], case["peak_bytes"]),
                "dry run %": _percent(case["dry_peak_bytes"], case["peak_bytes"]) if "dry_peak_bytes" in case else "",
                "step ms": round(case["step_seconds"] * 1e3, 1),
                "predicted ms": round(plan["step_seconds"] * 1e3, 1),
                "off %": _percent(plan["step_seconds"], case["step_seconds"]),
                "tries ±%": _half_range(case["tries"]),
                "rounds ±%": _half_range(case["rounds"]),
            }
        )
    return found


def _percent(predicted: float, measured: float) -> str:
    return f"{100 * (predicted - measured) / measured:+.2f}"


def _half_range(seconds: Sequence[float]) -> float:
    return round(50 * (max(seconds) - min(seconds)) / statistics.median(seconds), 1)


def _median(values: Sequence[float]) -> float:
    return statistics.median(map(abs, values))


def _worst(values: Sequence[float]) -> float:
    return max(map(abs, values))


def _below(values: Sequence[float]) -> float:
    return max(0.0, -min(values))


BARS: tuple[tuple[str, str, str, Callable[[Sequence[float]], float], float], ...] = (
    ("dry run's peak, worst error", "dry_peak_bytes", "peak_bytes", _worst, 0.001),
    ("timeline's peak, median error", "predicted peak_bytes", "peak_bytes", _median, 0.01),
    ("timeline's peak, worst error", "predicted peak_bytes", "peak_bytes", _worst, 0.03),
    ("timeline's peak, most below the truth", "predicted peak_bytes", "peak_bytes", _below, 0.01),
    ("step, median error", "predicted step_seconds", "step_seconds", _median, 0.04),
    ("step, worst error", "predicted step_seconds", "step_seconds", _worst, 0.12),
)


def targets(cases: Sequence[dict[str, Any]]) -> list[Row]:
    worlds = list(dict.fromkeys(case["world"] for case in cases))
    parts = {world: [case for case in cases if case["world"] == world] for world in worlds}
    found: list[Row] = []
    for what, predicted, measured, judged, target in BARS:
        values = {name: judged(errors(part, predicted, measured)) for name, part in (*parts.items(), ("all", cases))}
        row: Row = {"what": what, **{name: f"{100 * value:.2f} %" for name, value in values.items()}}
        found.append({**row, "target": f"{100 * target:g} %", "": met(values["all"], target)})
    return [*found, _collectives(cases)]


def _collectives(cases: Sequence[dict[str, Any]]) -> Row:
    equal = sum(case["collectives_match"] for case in cases)
    what = "plans whose dry run issues the planned collectives"
    return {"what": what, "all": str(equal), "target": str(len(cases)), "": met(equal, len(cases), least=True)}


def ranking(cases: Sequence[dict[str, Any]]) -> list[Row]:
    """Of all plans of one model in one world that fit a limit: how much slower the one is that the planner prefers.

    Judged by the medians of all tries, wherever there is a choice.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        groups[case["world"], case["model"]].append(case)
    found = []
    for (world, model), members in groups.items():
        for limit in sorted({case["plan"]["predicted"]["limit_bytes"] for case in members}):
            fit = [case for case in members if case["plan"]["predicted"]["peak_bytes"] <= limit]
            if len(fit) < 2:
                continue
            rate = {id(case): case["batch"] / case["step_seconds"] for case in fit}
            chosen = max(fit, key=lambda case: case["plan"]["predicted"]["samples_per_second"])
            fastest = max(fit, key=lambda case: rate[id(case)])
            slower = rate[id(fastest)] / rate[id(chosen)] - 1
            found.append(
                {
                    "world": world,
                    "model": model,
                    "limit MiB": round(limit / MIB, 1),
                    "plans": len(fit),
                    "preferred": chosen["way"],
                    "fastest": fastest["way"],
                    "slower by": f"{100 * slower:.1f} %",
                    "": met(slower, 0.03),
                }
            )
    return found
