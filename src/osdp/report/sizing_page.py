"""Prints and draws many plans of one model: tables, and one chart as SVG or HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console

from osdp.cluster import format_bytes
from osdp.report.numbers import format_rate, format_share
from osdp.report.printing import EMPTY, indented, make_table, print_heading, print_line
from osdp.sizing import Case, Sized, Target

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 78, 48, 190, 52
COLOURS = ("#2f6fdb", "#d0562b", "#1b8a6b", "#8a4fc7", "#b3861a", "#c2407a", "#3a93a8", "#6b7280")


def print_cases(title: str, found: Sequence[Case], out: Console) -> None:
    """What all cases share is said once; what differs has a column."""
    print_heading(out, title)
    asked = {
        "devices": [str(case.devices) for case in found],
        "memory": [format_bytes(case.memory_bytes) for case in found],
        "length": [str(case.seq_len or EMPTY) for case in found],
    }
    shared = [f"{name} {values[0]}" for name, values in asked.items() if len(set(values)) == 1]
    differ = {name: values for name, values in asked.items() if len(set(values)) > 1}
    if shared:
        print_line(out, ", ".join(shared))
    figures = ("batch", "samples/s", "tokens/s", "MFU", "gain")
    table = make_table(*((name, "right") for name in (*differ, *figures)), wraps=-1)
    for row, case in enumerate(found):
        table.add_row(*(values[row] for values in differ.values()), *_figures(case))
    out.print(indented(table))
    print_line(out, "gain: over the best baseline that fits")


def _figures(case: Case) -> tuple[str, str, str, str, str]:
    if not case.fits:
        return EMPTY, "does not fit", EMPTY, EMPTY, EMPTY
    micro = f"{case.batch_size}" + (f"×{case.accumulation}" if (case.accumulation or 1) > 1 else "")
    tokens = EMPTY if case.tokens_per_second is None else format_rate(case.tokens_per_second)
    gain = "none fits" if case.gain is None else f"{case.gain:.2f}×"
    return micro, format_rate(case.samples_per_second or 0), tokens, format_share(case.mfu or 0), gain


def print_sizes(title: str, found: Sequence[Sized], target: Target, out: Console) -> None:
    print_heading(out, title)
    wanted = f"{format_rate(target.per_second)} {target.unit}"
    asked = f": {target.tokens:.3g} tokens in {target.days:g} days" if target.tokens else ""
    print_line(out, f"at least {wanted}{asked}")
    columns: dict[str, list[str]] = {
        "cluster": [each.cluster for each in found],
        target.unit: [format_rate(each.rate) for each in found],
        "MFU": [format_share(each.case.mfu or 0) for each in found],
        "days": ["" if each.days is None else f"{each.days:.1f}" for each in found],
        "$ an hour": ["" if each.price_per_hour is None else f"{each.price_per_hour:,.2f}" for each in found],
        "$": ["" if each.cost is None else f"{each.cost:,.0f}" for each in found],
        "": ["" if each.reached else "not fast enough" for each in found],
    }
    shown = {name: values for name, values in columns.items() if any(values)}
    table = make_table(*((name, "left" if name in ("cluster", "") else "right") for name in shown), wraps=-1)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    out.print(indented(table))


MEMORY = "memory of each device"


@dataclass(frozen=True)
class Series:
    """One line of a chart: its name, and its points; a point that does not fit has no height."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class Chart:
    title: str
    x_name: str
    y_name: str
    series: tuple[Series, ...]


def chart_of(title: str, found: Sequence[Case]) -> Chart:
    """Throughput over what has most values; a line for each combination of the rest."""
    names = ("devices", "memory_bytes", "seq_len")
    words = {"devices": "devices", "memory_bytes": MEMORY, "seq_len": "tokens a sample"}
    across = max(names, key=lambda name: len({getattr(case, name) for case in found}))
    rest = [name for name in names if name != across and len({getattr(case, name) for case in found}) > 1]
    in_tokens = all(case.seq_len for case in found)
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for case in found:
        label = ", ".join(_label(name, getattr(case, name)) for name in rest) or "the best plan"
        x = getattr(case, across) or 0
        lines.setdefault(label, []).append((x, case.tokens_per_second if in_tokens else case.samples_per_second))
    series = tuple(Series(name, tuple(sorted(points))) for name, points in lines.items())
    return Chart(title, words[across], "tokens/s" if in_tokens else "samples/s", series)


def _label(name: str, value: int) -> str:
    return {"devices": f"{value} devices", "memory_bytes": format_bytes(value)}.get(name, f"{value} tokens")


def _at(chart: Chart, x: float) -> str:
    """A place on the horizontal axis, as people write it."""
    return format_bytes(x).replace(".0 ", " ") if chart.x_name == MEMORY else f"{x:g}"


def chart_svg(chart: Chart) -> str:
    """The chart as SVG that follows the reader's light or dark theme; axes are logarithmic where values double."""
    xs = sorted({x for each in chart.series for x, _ in each.points})
    ys = [y for each in chart.series for _, y in each.points if y]
    low, high = math.log2(xs[0] or 1), math.log2(xs[-1] or 1)
    top = 1.1 * max(ys, default=1.0)

    def px(x: float) -> float:
        share = 0.5 if high == low else (math.log2(x or 1) - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP)

    parts = [_STYLE, f'<text class="title" x="{LEFT}" y="24">{escape(chart.title)}</text>']
    for y in round_ticks(top):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{format_rate(y)}</text>')
    for x in xs:
        parts.append(f'<text x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{_at(chart, x)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_name)}</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end">{escape(chart.y_name)}</text>')
    for number, each in enumerate(chart.series):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in each.points if y)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for x, y in each.points:
            what = f"{format_rate(y)} {chart.y_name}" if y else "does not fit"
            note = escape(f"{each.name}, {chart.x_name} {_at(chart, x)}: {what}")
            shape = f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="4" fill="{colour}">' if y else ""
            cross = f'<text x="{px(x):.1f}" y="{py(0) - 4:.1f}" text-anchor="middle" style="fill:{colour}">×'
            parts.append(f"{shape}<title>{note}</title></circle>" if y else f"{cross}<title>{note}</title></text>")
        at = TOP + 14 + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 18}" y="{at - 9}" width="12" height="12" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 36}" y="{at + 2}">{escape(each.name)}</text>')
    label = escape(f"{chart.title}: {chart.y_name} over {chart.x_name}")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


def round_ticks(top: float) -> list[float]:
    """At most six round numbers from 0 up to `top`: steps of 1, 2, 2.5 or 5 times a power of ten."""
    rough = top / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * count for count in range(int(top / step * (1 + 1e-9)) + 1)]


_STYLE = (
    "<style>svg{font:13px system-ui,sans-serif;background:#fff}text{fill:#4b5563}.title{fill:#111827;font-weight:600;"
    "font-size:16px}.grid{stroke:#e5e7eb}@media(prefers-color-scheme:dark){svg{background:#14181d}text{fill:#a3adbb}"
    ".title{fill:#e9ecf1}.grid{stroke:#2b313b}}</style>"
)


def chart_html(chart: Chart) -> str:
    title = f"<title>{escape(chart.title)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}'
    body = f'<body style="margin:0">{chart_svg(chart)}</body>'
    return f'<!doctype html><html lang="en"><head>{head}</head>{body}</html>\n'
