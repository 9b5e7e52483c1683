"""Draws the report: one HTML file with its styles, its script and its data inside, which needs no network.

The script draws SVG from the data at the width of the screen. A plotting library would add megabytes to every report;
the script has 20 kB.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

import osdp
from osdp.cluster import format_bytes
from osdp.cost.timeline import stage_label
from osdp.planfile import Plan
from osdp.report.numbers import format_count, format_rate, format_seconds, format_share
from osdp.report.page import (
    BaselineRow,
    gain_sentence,
    host_sentence,
    plan_page,
    settings_sentence,
    speeds_sentence,
    unused_sentence,
    way_name,
)
from osdp.report.report_page import RateCurve, ReportPage, StageBox
from osdp.report.step_picture import STACKED, StepPicture
from osdp.report.unit_notes import unit_notes

LEVELS = 1 << 19  # into which the highest bar of a memory curve is divided: finer than any screen
MODES = (
    ("replicate", "whole on every rank"),
    ("keep", "sharded over all ranks, kept from forward to backward"),
    ("free", "sharded over all ranks, freed between forward and backward"),
    ("free_to_node", "as free, with one copy in each node in between"),
    ("keep_in_node", "as keep, sharded in each node"),
    ("free_in_node", "as free, sharded in each node"),
)


COLOURS = ("#2a9d72", "#3d6fd1", "#e08a1e", "#7aa6ef", "#8a63d2", "#d45a8c", "#e6bf3c", "#98a0ad")


def plan_html(plan: Plan) -> str:
    """A plan as a notebook shows it: a card without scripts."""
    page = plan_page(plan)
    words = {"settings": settings_sentence(page), "notes": unit_notes(page)}
    return _template("plan.html.j2").render(page=page, gain=gain_sentence(page), colours=COLOURS, **words)


def report_html(page: ReportPage) -> str:
    return _template("report.html.j2").render(
        page=page,
        data=report_data(page),
        css=Markup(_text("report.css")),
        js=Markup(_text("report.js")),
        gain=gain_sentence(page.plan),
        basis=speeds_sentence(page.plan),
        settings=settings_sentence(page.plan),
        notes=unit_notes(page.plan),
        unused=unused_sentence(page.plan),
        host="" if page.plan.host is None else host_sentence(page.plan.host),
        version=osdp.__version__,
    )


def _template(name: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        bytes=format_bytes,
        count=format_count,
        rate=format_rate,
        seconds=format_seconds,
        share=format_share,
        amount=_amount,
        way=_way_name,
    )
    return environment.from_string(_text(name))


def _amount(value: float, what: str) -> str:
    return format_seconds(value) if what == "step" else format_bytes(value)


def _way_name(row: BaselineRow) -> str:
    return way_name(row.name, row.recompute)


def _text(name: str) -> str:
    return (files("osdp.report") / "templates" / name).read_text(encoding="utf-8")


def report_data(page: ReportPage) -> dict[str, Any]:
    """What the script draws, short: it is in every report."""
    highest = max(page.limit_bytes, *(way.peak_bytes for way in page.ways))
    unit = max(1, highest // LEVELS)
    return {
        "limit": page.limit_bytes,
        "unit": unit,
        "bound": page.plan.certificate.bound,
        "bound_batch": bound_batch(page),
        "parts": STACKED,
        "modes": MODES,
        "ways": [_way(way, unit) for way in page.ways],
        "rates": [_rates(curve) for curve in page.rates],
        "stages": [_stage(stage) for stage in page.stages],
    }


def bound_batch(page: ReportPage) -> int | None:
    """The micro-batch that the proof speaks of, where another one that fits is faster; None where it speaks of all."""
    rates = [point.samples_per_second for curve in page.rates for point in curve.points if point.fits]
    if page.plan.buckets:  # beyond what the proof speaks of
        return None
    beaten = bool(rates) and max(rates) > page.plan.certificate.bound * (1 + 1e-6)
    return page.ways[0].batch_size if beaten else None


def _way(way: StepPicture, unit: int) -> dict[str, Any]:
    names: dict[str, int] = {}
    spans = [
        (
            int(span.stream == "communication"),
            span.kind,
            names.setdefault(span.name, len(names)),
            _short(span.start),
            _short(span.end),
            span.nbytes,
        )
        for span in way.spans
    ]
    return {
        "name": way.name,
        "batch": way.batch_size,
        "accumulation": way.accumulation,
        "peak": way.peak_bytes,
        "peak_at": way.memory.peak,
        "forward_end": way.forward_end,
        "backward_end": way.backward_end,
        "end": way.end,
        "slowdown": way.slowdown,
        "sliced": way.sliced_seconds,
        "seconds": [_short(second) for second in way.memory.seconds],
        "bytes": [[round(value / unit) for value in row] for row in way.memory.part_bytes],
        "places": way.memory.places,
        "names": list(names),
        "spans": spans,
    }


def _rates(curve: RateCurve) -> dict[str, Any]:
    points = [(p.batch_size, _short(p.samples_per_second), p.peak_bytes, p.fits) for p in curve.points]
    return {"name": curve.name, "largest": curve.largest, "points": points}


def _stage(stage: StageBox) -> dict[str, Any]:
    return {
        "name": stage_label(stage.name),
        "is_block": stage.is_block,
        "recompute": stage.recompute.value if stage.recompute and stage.is_block else "",
        "saved": stage.saved_bytes,
        "forward": _short(stage.forward_seconds),
        "backward": _short(stage.backward_seconds),
        "units": [
            {
                "name": box.unit.name,
                "mode": box.unit.mode,
                "splits": box.unit.splits,
                "sharded": box.unit.sharded_splits,
                "two_levels": box.unit.two_levels,
                "reduce_once": box.unit.reduce_once,
                "all_reduce_once": box.unit.all_reduce_once,
                "gather_once": box.unit.gather_once,
                "prefetch": box.unit.prefetch,
                "offload": box.unit.offload,
                "reduced_with": box.unit.reduced_with,
                "parameters": box.unit.parameters,
                "held": box.held_bytes,
                "own_peak": box.own_peak_bytes,
                "compute": _short(box.compute_seconds),
                "gather": _short(box.gather_seconds),
                "reduce": _short(box.reduce_seconds),
                "stall": _short(box.stall_seconds),
            }
            for box in stage.units
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
