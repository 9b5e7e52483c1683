"""The layouts that `osdp plan --layout auto` tried, side by side: their values, then the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from osdp.cluster.sizes import format_bytes
from osdp.layouts import Tried
from osdp.planfile import OuterLayout
from osdp.report.numbers import format_rate
from osdp.report.printing import print_heading, print_line


@dataclass(frozen=True)
class LayoutRow:
    """One layout; `ratio` is the best rate ÷ its own, None where nothing fits, for the `reason`."""

    tensor: int
    pipeline: int
    data: int | None
    micro_batch: int
    samples_per_second: float
    mfu: float
    peak_bytes: int
    ratio: float | None
    reason: str
    expert: int = 1

    @property
    def name(self) -> str:
        return str(OuterLayout(self.tensor, self.pipeline, expert=self.expert))


@dataclass(frozen=True)
class LayoutRows:
    rows: tuple[LayoutRow, ...]
    verdict: str


def layout_rows(tried: Sequence[Tried]) -> LayoutRows:
    """All layouts, the fastest first, and a sentence about data parallelism alone."""
    best = max(map(_rate, tried))
    ordered = sorted(tried, key=lambda each: (-_rate(each), each.degrees))
    rows = tuple(_row(each, best) for each in ordered)
    alone = next(row for row in rows if row.tensor == row.pipeline == row.expert == 1)
    first = rows[0]
    if alone.ratio is None:
        verdict = f"data parallelism alone does not fit: it {alone.reason}"
    elif first is alone:
        other = next((row for row in rows[1:] if row.ratio is not None), None)
        verdict = "data parallelism alone is the fastest" + (
            f", {other.ratio:.2f} times the next, {other.name}" if other else ""
        )
    else:
        verdict = f"{first.name} is {alone.ratio:.2f} times data parallelism alone"
    return LayoutRows(rows, verdict)


def _rate(tried: Tried) -> float:
    return tried.plan.predicted.samples_per_second if tried.plan else 0.0


def _row(tried: Tried, best: float) -> LayoutRow:
    plan = tried.plan
    if plan is None:
        return LayoutRow(tried.tensor, tried.pipeline, None, 0, 0.0, 0.0, 0, None, tried.reason, tried.expert)
    step, rate = plan.predicted, _rate(tried)
    data = plan.cluster.world_size
    return LayoutRow(
        *(tried.tensor, tried.pipeline, data, plan.batch_size, rate, step.mfu, step.peak_bytes, best / rate, ""),
        expert=tried.expert,
    )


def print_layouts(page: LayoutRows, out: Console) -> None:
    out.print()
    print_heading(out, "Layouts, each with its best plan")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (
        "  tensor",
        "pipeline",
        "experts over",
        "data",
        "micro-batch",
        "samples/s",
        "MFU",
        "peak",
        "slower by",
    ):
        table.add_column(name, justify="right")
    for row in page.rows:
        if row.ratio is None:
            table.add_row(str(row.tensor), str(row.pipeline), str(row.expert), "–", "–", "no plan", "–", "–", "–")
            continue
        table.add_row(
            str(row.tensor),
            str(row.pipeline),
            str(row.expert),
            str(row.data),
            str(row.micro_batch),
            format_rate(row.samples_per_second),
            f"{100 * row.mfu:.1f} %",
            format_bytes(row.peak_bytes),
            f"{row.ratio:.2f}×",
        )
    out.print(table)
    print_line(out, page.verdict)
    reasons = dict.fromkeys(row.reason for row in page.rows if row.reason)
    for reason in reasons:
        which = [row.name for row in page.rows if row.reason == reason]
        print_line(out, f"no plan for {', '.join(which)}: {reason}")
